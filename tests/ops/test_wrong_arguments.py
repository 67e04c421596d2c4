"""What is no tensor, array or relation is refused in a sentence, by every function."""

import inspect

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import nn, ops

FUNCTIONS = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]


def called(function, first) -> None:
    """Call with ``first``, and arrays for whatever else has no default."""
    asked = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    function(first, *(mx.ones((8, 3, 3, 3, 4)) for _ in asked[1:]))


def kind(value) -> str:
    """An id that is the same in every process."""
    return type(value).__name__


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("first", (None, "rows", 3.5, object()), ids=kind)
def test_functions(name, first):
    with pytest.raises((TypeError, ValueError)) as caught:
        called(getattr(ops, name), first)
    message = str(caught.value)
    assert "incompatible function" not in message, message
    assert "unsupported operand" not in message, message
    assert "has no " not in message and "not subscriptable" not in message, message


LAYERS = (
    nn.Conv3d(4, 8, 3),
    nn.SubmConv3d(4, 8, 3),
    nn.ConvTranspose3d(4, 8),
    nn.GenerativeConvTranspose3d(4, 8),
    nn.MaxPool3d(2),
    nn.GroupNorm(2, 4),
)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_layers_want_a_tensor(layer):
    with pytest.raises(TypeError, match="x must be a SparseTensor; got array"):
        layer(mx.ones((5, 4)))


@pytest.mark.parametrize("name", ("Linear", "LayerNorm", "BatchNorm", "ReLU"))
def test_layers_of_rows_want_features(name):
    layer = {"Linear": (4, 8), "ReLU": ()}.get(name, (4,))
    with pytest.raises(TypeError, match="expected a SparseTensor or an mx.array"):
        getattr(nn, name)(*layer)([[1.0, 2.0, 3.0, 4.0]])


def test_contractions_want_a_relation():
    x, w = mx.ones((5, 4)), mx.ones((27, 4, 8))
    with pytest.raises(TypeError, match="relation must be a Relation"):
        ml.conv(x, w, mx.zeros((5, 27), dtype=mx.int32))
    with pytest.raises(TypeError, match="relation must be a Relation"):
        ml.weight_grad(x, x, None)
    with pytest.raises(TypeError, match="relation must be a Relation"):
        ops.sparse_pool(x, None)
