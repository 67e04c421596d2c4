"""How often the host waits for the device: once for each new coordinate set."""

import cases
import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import backends, registry, sync


@pytest.fixture
def reads(monkeypatch):
    """The reads so far: each the shapes that the host waited for."""
    real, seen = sync.read, []

    def read(*arrays):
        seen.append([a.shape for a in arrays])
        return real(*arrays)

    monkeypatch.setattr(sync, "read", read)
    return seen


@pytest.fixture(params=("compiled", "portable"))
def builders(request):
    """The compiled builders of the device, and the portable ones."""
    if request.param == "compiled":
        yield
        return
    with backends.portable_only():
        yield


def coords(name="surface", n=300):
    """Rows in no order, with negative coordinates."""
    rows = cases.geometry(name, 3, n)
    return mx.array(np.random.default_rng(0).permutation(rows))


def assert_reads(reads, count):
    """That many, or fewer where the CPU's extension returns what it found."""
    if registry.serving() == "cpu":
        assert len(reads) <= count
    else:
        assert len(reads) == count


@pytest.mark.usefixtures("builders")
class TestOneReadForEachSet:
    def test_submanifold(self, reads):
        manager = ml.CoordinateManager()
        key = manager.insert(coords())
        assert not reads, "nothing is read before a relation is built"
        first = manager.submanifold_kernel_relation(key)
        assert_reads(reads, 1)
        second = manager.submanifold_kernel_relation(key, kernel_size=5)
        mx.eval(first.out_in, first.in_out, second.out_in)
        assert manager[key].batch_size == 1 + int(coords()[:, 0].max().item())
        # Tables, transposes and bounds need no more.
        assert_reads(reads, 1)

    def test_a_strided_chain(self, reads):
        manager = ml.CoordinateManager()
        key = manager.insert(coords())
        for level in range(3):
            down = manager.kernel_relation(key, kernel_size=2, stride=2)
            same = manager.submanifold_kernel_relation(down.keys[1])
            mx.eval(down.out_in, down.in_out, same.out_in)
            assert_reads(reads, 2 + level)  # the first set's check, and each size
            key = down.keys[1]

    def test_a_chain_whose_strides_are_said(self, reads):
        """Its sizes are read at once where a backend makes the levels at once."""
        manager = ml.CoordinateManager()
        key = manager.insert(coords())
        same = manager.submanifold_kernel_relation(key)
        chain = manager.cells(key, (2, (1, 2, 2), 3))
        at_once = registry.serving() in ("cuda", "metal")
        assert_reads(reads, 2 if at_once else 4)
        before = len(reads)
        for stride, level in zip((2, (1, 2, 2), 3), chain, strict=True):
            down = manager.kernel_relation(key, kernel_size=2, stride=stride)
            up = manager.transposed_kernel_relation(level, kernel_size=2, stride=stride)
            assert down.keys == (key, level) and up.keys == (level, key)
            mx.eval(down.out_in, up.out_in, same.out_in)
            key = level
        assert len(reads) == before


@pytest.mark.usefixtures("builders")
@pytest.mark.parametrize("call", ("submanifold", "strided", "target", "chain"))
def test_what_is_wrong_is_said_at_the_first_use(call):
    rows = np.array([(0, 1, 2, 3), (0, 4, 4, 4), (1, 5, 5, 5), (0, 4, 4, 4)], np.int32)
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(rows))
    good = mx.array(rows[:2])
    uses = {
        "submanifold": lambda: manager.submanifold_kernel_relation(key),
        "strided": lambda: manager.kernel_relation(key, kernel_size=2, stride=2),
        "target": lambda: manager.target_kernel_relation(good, key),
        "chain": lambda: manager.cells(key, (2, 2)),
    }
    assert manager[key].batch_size == 2  # which may be asked before
    for _ in range(2):  # what failed once is not kept
        with pytest.raises(ValueError, match=r"rows 1 and 3 are both \(0, 4, 4, 4\)"):
            uses[call]()
