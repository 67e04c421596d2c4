"""Labels of voxels by vote, integer features, batches of scans, processes, threads."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models, nn, ops


def scan(seed, points=200, ignore=-1, **arguments):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, points)
    labels[rng.random(points) < 0.3] = ignore
    return labels, ml.SparseTensor.from_points(
        rng.random((points, 3), np.float32),
        rng.random((points, 2), np.float32),
        voxel_size=0.3,
        labels=labels,
        ignore_label=ignore,
        **arguments,
    )


@pytest.mark.parametrize("ties", (False, True))
@pytest.mark.parametrize("ignore", (-1, 0, 255))
def test_voxels_get_the_most_frequent_label(ignore, ties):
    given, (x, labels, inverse, first) = scan(0, ignore=ignore, ignore_ties=ties)
    inverse = np.array(inverse)
    for voxel in range(len(x)):
        inside = np.flatnonzero(inverse == voxel)
        votes = [label for label in given[inside] if label != ignore]
        values, counts = np.unique(votes, return_counts=True)
        best = values[counts == counts.max(initial=1)]
        wanted = best[0] if len(best) and not (ties and len(best) > 1) else ignore
        assert labels[voxel].item() == wanted
        assert first[voxel].item() == inside[0]
    assert {a.dtype for a in (labels, *map(mx.array, (inverse, first)))} == {mx.int32}


def test_inverse_without_labels_and_no_points():
    points = mx.array([[0.5], [1.5], [0.7]])
    found = ml.SparseTensor.from_points(points, voxel_size=1.0, return_inverse=True)
    assert found.labels.tolist() == [-1, -1] and found.inverse.tolist() == [0, 1, 0]
    assert found.eval() is found and found.first.tolist() == [0, 1]
    empty = ml.SparseTensor.from_points(
        points[:0], voxel_size=1.0, labels=mx.zeros((0,), mx.int32)
    )
    assert [each.shape for each in empty[1:]] == [(0,)] * 3
    labels = ops.majority([4, 4, 2], [1, 1, -1], 3, ignore_label=9)
    assert labels.tolist() == [9, 4, 9]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    (
        (np.zeros(3), r"labels must be \(3,\) integers, one for each point; .*float"),
        (np.zeros((3, 1), int), r"got \(3, 1\) of int64"),
        (np.full(3, 2**40), "labels must fit int32; got 1099511627776"),
    ),
)
def test_labels_that_are_not_taken(labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        ml.SparseTensor.from_points(mx.zeros((3, 3)), voxel_size=1.0, labels=labels)


def test_integer_features_move_with_their_rows():
    _, (x, labels, inverse, _) = scan(1)
    y, known = x.replace(labels[:, None]), np.array(labels)
    chosen = ops.prune(y, labels > 0)
    assert chosen.feats[:, 0].tolist() == known[known > 0].tolist()
    both = ops.cat([y, y]).feats
    assert both.dtype == mx.int32 and both[:, 1].tolist() == known.tolist()
    assert ops.batch([y, y]).feats[:, 0].tolist() == [*known, *known]
    assert ops.devoxelize(y, inverse)[:, 0].tolist() == known[inverse].tolist()
    back = ml.SparseTensor.from_dense(y.replace(y.feats + 5).to_dense())
    assert back.feats[:, 0].tolist() == (known + 5).tolist()
    copy = pickle.loads(pickle.dumps(y))
    assert copy.feats.dtype == mx.int32 and mx.array_equal(copy.feats, y.feats)
    for layer in (nn.SubmConv3d(1, 2, 3), nn.MaxPool3d(2, 2)):
        with pytest.raises(TypeError, match="x must have floating features; got int32"):
            layer(y)
    with pytest.raises(TypeError, match="int32 features have no mean.*labels="):
        ml.SparseTensor.from_points(mx.zeros((len(y), 3)), y.feats, voxel_size=1.0)


def test_collate_joins_scans_in_order():
    a, b = scan(2)[1], scan(3)[1]
    empty = ml.SparseTensor.from_points(
        np.zeros((0, 3), np.float32), mx.zeros((0, 2)), voxel_size=0.3, labels=[]
    )
    scans = [empty, a, empty, b]
    joined = ops.collate(scans)
    assert type(joined) is ml.VoxelizedPoints and joined.tensor.batch_size == 4
    parts = ops.unbatch(joined.tensor)
    for part, each in zip(parts, scans, strict=True):
        assert mx.array_equal(part.feats, each.tensor.feats)
    assert joined.labels.tolist() == [*a.labels.tolist(), *b.labels.tolist()]
    cells = joined.tensor.coords[joined.inverse]
    wanted = [each.tensor.coords[each.inverse][:, 1:] for each in (a, b)]
    assert mx.array_equal(cells[:, 1:], mx.concatenate(wanted))
    assert joined.inverse[joined.first].tolist() == list(range(len(joined.tensor)))
    x, labels = ops.collate([a[:2], b[:2]])
    assert len(x) == len(labels) and ops.collate([a.tensor]).batch_size == 1
    pairs = [models.Voxels(a.tensor, [-1, 0]), models.Voxels(b.tensor, [0])]
    x, rows = ops.collate(pairs)
    assert len(x) == len(labels) and rows.tolist() == [-1, 0, len(a.tensor)]
    x, labels, inverse = ops.collate([tuple(each[:3]) for each in (a, b)])
    assert mx.array_equal(inverse, joined.inverse)


@pytest.mark.parametrize(
    ("scans", "error", "sentence"),
    (
        (lambda a: [], TypeError, "all of one kind; got none"),
        (lambda a: a.tensor, TypeError, "takes a list of scans; got SparseTensor"),
        (lambda a: [a.tensor, a], TypeError, "SparseTensor and VoxelizedPoints"),
        (lambda a: [np.ones(3)], TypeError, "got ndarray"),
        (
            lambda a: [(a.tensor, a.inverse)],
            ValueError,
            r"labels must be \(\d+,\) integers, one for each row of its tensor; got",
        ),
    ),
)
def test_what_collate_does_not_take(scans, error, sentence):
    with pytest.raises(error, match=sentence):
        ops.collate(scans(scan(4)[1]))


needs_threads = pytest.mark.skipif(
    mx.cuda.is_available(), reason="MLX aborts if several threads use an NVIDIA GPU"
)


@needs_threads
def test_arrays_of_another_thread_that_it_did_not_compute():
    with ThreadPoolExecutor(1) as pool:
        late, done = pool.submit(
            lambda: (scan(5)[1].tensor * 2, ops.collate([scan(5)[1]]))
        ).result()
    assert done.tensor.feats.sum().item() > 0
    for use in (late.eval, lambda: pickle.dumps(late)):
        with pytest.raises(RuntimeError, match=r"another thread .* Call x.eval\(\)"):
            use()


FORKED = """
import os, mlx.core as mx, mlx_lattice as ml
from mlx_lattice import sync
sync.PROBE_SECONDS = 1
def in_child():
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        ml.SparseTensor.from_points(mx.zeros((2, 3)), voxel_size=1.0).eval()
    except RuntimeError as error:
        os._exit(3 if "forked" in str(error) else 4)
    os._exit(0)
early = in_child()
mx.eval(mx.ones(3) + 1)
print(early, in_child())
"""


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="fork is Linux's default alone")
def test_a_forked_process_says_that_mlx_hangs():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["0", "3"], done.stderr


def test_what_a_process_returns_is_pickled():
    found = scan(6)[1]
    copy = pickle.loads(pickle.dumps(found))
    assert type(copy) is ml.VoxelizedPoints
    assert mx.array_equal(copy.tensor.coords, found.tensor.coords)
    for one, other in zip(copy[1:], found[1:], strict=True):
        assert mx.array_equal(one, other)
