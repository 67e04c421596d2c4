"""memory_limit: sizes, nesting, the same bits in many blocks, and what it refuses."""

import gc

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import devices, memory
from mlx_lattice.memory import parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    (
        ("8GB", 8 * 10**9),
        ("8 GiB", 8 * 2**30),
        (" 7.5gib ", int(7.5 * 2**30)),
        ("512 MB", 512 * 10**6),
        (".5kB", 500),
        ("4096", 4096),
        (8 * 2**30, 8 * 2**30),
        (1e9, 10**9),
    ),
)
def test_sizes(size, expected):
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", ("", "8 G", "GB", "-1GB", "8,5GB", "0 GB", 0, -3.0))
def test_a_wrong_size_says_what_is_right(size):
    with pytest.raises(ValueError, match="a size of memory must be"):
        parse_bytes(size)
    with pytest.raises(ValueError, match=r"size of memory"), ml.memory_limit(size):
        pass


@pytest.mark.parametrize("size", (None, True, [1], float("nan"), float("inf")))
def test_what_is_no_size_raises(size):
    with pytest.raises((TypeError, ValueError), match="a size of memory must be"):
        parse_bytes(size)


def test_the_smaller_of_nested_limits_holds_and_all_is_restored():
    before = mx.set_memory_limit(10**12)
    mx.set_memory_limit(before)
    assert memory.active() is None
    with ml.memory_limit("1GB") as outer:
        with ml.memory_limit("2GB") as inner:
            assert inner.bytes == outer.bytes == 10**9
        with ml.memory_limit("1MB") as inner:
            assert memory.active() is inner and inner.bytes == 10**6
        assert memory.active() is outer
    assert memory.active() is None
    assert mx.set_memory_limit(before) == before


def scene(rows=2000, channels=1):
    points = mx.random.normal((rows, 3))
    x = ml.SparseTensor.from_points(points, mx.ones((rows, channels)), voxel_size=0.1)
    mx.eval(x.feats)
    return x


def test_a_layer_that_does_not_fit_raises_with_what_it_needs():
    x, conv = scene(), ml.nn.SubmConv3d(1, 64, 3)
    with (
        pytest.raises(ml.MemoryLimitError, match="limit that would do") as error,
        ml.memory_limit(mx.get_active_memory() + 1000),
    ):
        conv(x)
    assert error.value.least > 4 * 64 * len(x)


def test_the_smallest_block_that_does_not_fit_raises_before_it_runs():
    rows = mx.zeros((100_000, 8))
    mx.eval(rows)
    ran = []
    with (
        pytest.raises(ml.MemoryLimitError, match="smallest block") as error,
        ml.memory_limit(mx.get_active_memory() + 1_000_000) as limit,
    ):
        memory.by_rows(lambda x: ran.append(x) or x, rows, row_bytes=10_000)
    least = memory.LEAST_ROWS.get(devices.current().backend, memory.LEAST_ROWS["*"])
    assert error.value.least == limit.held + least * 10_000 and not ran
    with ml.memory_limit(error.value.least + 100_000):  # the Limit's own arrays
        y = memory.by_rows(lambda x: x + 1, rows, row_bytes=10_000)
    assert mx.array_equal(y, mx.ones_like(rows))


@pytest.mark.usefixtures("freed")
@pytest.mark.skipif(devices.metal_on_host(), reason="an emulated GPU uses CPU memory")
def test_a_net_stays_below_its_limit_with_the_same_bits():
    net, x = ml.models.SpUNet(1, 5, 16, (16, 32, 32, 16), (1, 1, 1, 1)), scene(40_000)
    mx.eval(net.eval().parameters())
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    y = net(ml.SparseTensor(x.coords + 0, x.feats)).feats
    mx.eval(y)
    free = mx.get_peak_memory() - held
    gc.collect()  # the relations of that tensor
    size = mx.get_active_memory() + free * 4 // 5
    again = ml.SparseTensor(x.coords + 0, x.feats)
    with ml.memory_limit(size):
        mx.reset_peak_memory()
        z = net(again).feats
        mx.eval(z)
    assert mx.array_equal(y, z) and mx.get_peak_memory() <= size


def test_a_net_can_be_prepared_under_a_limit():
    net, x = ml.models.SpUNet(1, 5, 8, (8, 16, 16, 8), (1, 1, 1, 1)).eval(), scene()
    y = net(x).feats
    mx.eval(y)
    with ml.memory_limit("1GB"):
        assert len(ml.prepare(net, x).relations) > 1
        assert mx.array_equal(net(x).feats, y)
