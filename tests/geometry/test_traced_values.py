"""What MLX traces has no values: coordinates, points and masks say so in a sentence."""

import cases
import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import nn, ops

COORDS = mx.array(cases.geometry("surface", 3, 60, 0))
FEATS = mx.array(cases.features(len(COORDS), 4, 0))
X = ml.SparseTensor(COORDS + 0, FEATS)
VALUES = "values .of coordinates, points, masks, scores or edges. that are not known"
NET = nn.Sequential(nn.SubmConv3d(4, 8, 3), nn.Conv3d(8, 8, 2, 2))

OF_COORDINATES = {
    "layers": lambda c: NET(ml.SparseTensor(c, FEATS)).feats,
    "strided": lambda c: nn.Conv3d(4, 8, 2, 2)(ml.SparseTensor(c, FEATS)).feats,
    "from_arrays": lambda c: (
        NET(ml.SparseTensor.from_arrays({"coords": c, "feats": FEATS})).feats
    ),
    "batch size": lambda c: mx.array(ml.SparseTensor(c, FEATS).batch_size),
    "dense": lambda c: ml.SparseTensor(c, FEATS).to_dense(),
    "manager": lambda c: ml.CoordinateManager().submanifold_kernel_relation(c).out_in,
    "target": lambda c: nn.Conv3d(4, 8, 3)(X, c).feats,
    "align": lambda c: (ml.SparseTensor(c, FEATS) + X).feats,
    "cat": lambda c: ops.cat([ml.SparseTensor(c, FEATS), X]).feats,
    "global pool": lambda c: ops.global_avg_pool(ml.SparseTensor(c, FEATS)),
}
OF_OTHERS = {
    "points": lambda c: (
        ml.SparseTensor.from_points(
            c[:, 1:].astype(mx.float32), FEATS, voxel_size=2.0
        ).feats
    ),
    "dense array": lambda c: (
        ml.SparseTensor.from_dense(c.reshape(1, -1, 1, 2, 2).astype(mx.float32)).feats
    ),
    "mask": lambda c: ops.prune(X, c[:, 1] > 0).feats,
    "neighbours": lambda c: ops.knn(c, 2).rows,
    "edges": lambda c: (
        ml.Relation.from_edges(c[:, 0] * 0, c[:, 0] * 0, c[:, 0] * 0, 1, 1, 1).edges
    ),
}


@pytest.mark.parametrize("name", OF_COORDINATES)
def test_traced_coordinates(name):
    function = OF_COORDINATES[name]
    with pytest.raises(ValueError, match=VALUES) as error:
        mx.compile(function)(COORDS)
    for text in ("x.replace.feats. takes them", "ml.compile takes the tensor itself"):
        assert error.match(text)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_traced_points_masks_and_edges(name):
    function = OF_OTHERS[name]
    mx.eval(function(COORDS))
    with pytest.raises(ValueError, match=VALUES):
        mx.compile(function)(COORDS)


def test_a_compiled_function_says_its_name():
    def scores(coords):
        return NET(ml.SparseTensor(coords, FEATS)).feats

    fast = ml.compile(scores)
    with pytest.raises(ValueError, match="^scores reads values .* not its coordinates"):
        fast(COORDS)


def test_what_the_sentence_proposes_works():
    wanted = np.array(NET(X).feats)
    of_feats = mx.compile(lambda feats: NET(X.replace(feats)).feats)
    assert np.allclose(of_feats(FEATS), wanted, atol=1e-5)
    fast = ml.compile(lambda x: NET(x).feats)
    for _ in range(2):
        assert np.allclose(fast(X), wanted, atol=1e-5)


def test_other_errors_of_the_block_stay():
    with pytest.raises(ValueError, match="batch indices .column 0. must be 0 or more"):
        mx.compile(lambda feats: NET(ml.SparseTensor(COORDS - 1, feats)).feats)(FEATS)
