"""Functions with their own rules for MLX's transformations."""

import threading
from functools import partial

import mlx.core as mx
import pytest
from contractions import scene

import mlx_lattice as ml
from mlx_lattice import devices, nn, transformations
from mlx_lattice.nn.fused import convolved

needs_extension = pytest.mark.skipif(
    devices.extension is None, reason="asks MLX by the extension"
)


def squares(x):
    return (x * x).sum()


WITHIN = {
    "grad": lambda f, x: mx.grad(f)(x),
    "value_and_grad": lambda f, x: mx.value_and_grad(f)(x),
    "vjp": lambda f, x: mx.vjp(f, [x], [mx.array(1.0)]),
    "jvp": lambda f, x: mx.jvp(f, [x], [x]),
    "vmap": lambda f, x: mx.vmap(f)(x[None]),
    "compile": lambda f, x: mx.compile(f)(x),
    "grad of checkpoint": lambda f, x: mx.grad(mx.checkpoint(f))(x),
    "export": lambda f, x: mx.export_function(lambda *_: None, f, x),
}


@needs_extension
@pytest.mark.parametrize("name", WITHIN)
def test_transformations_are_noticed(name):
    """In the function, not after it, and not in another thread."""
    seen = []

    def spy(x):
        seen.append(transformations.is_transforming())
        thread = threading.Thread(
            target=lambda: seen.append(transformations.is_transforming())
        )
        thread.start()
        thread.join()
        return squares(x)

    assert not transformations.is_transforming()
    WITHIN[name](spy, mx.ones((3,)))
    assert seen[:2] == [True, False]
    assert not transformations.is_transforming()


CALLS = {
    "conv": lambda: nn.SubmConv3d(32, 32, 3),
    "fused": lambda: partial(
        convolved,
        nn.SubmConv3d(32, 32, 3),
        nn.BatchNorm(32).eval(),
        activation=ml.ops.relu,
    ),
    "packed": lambda: nn.SubmConv3d(32, 32, 3).to_quantized(bits=8, group_size=32),
    "pool": lambda: nn.MaxPool3d(2),
    "norm": lambda: nn.BatchNorm(32).eval(),
    "layer norm": lambda: nn.LayerNorm(32),
    "gelu": lambda: ml.ops.gelu,
}


@pytest.fixture
def features() -> ml.SparseTensor:
    coords = scene("surface")[0].in_coords
    return ml.SparseTensor(coords, mx.random.normal((len(coords), 32)))


@needs_extension
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_within_a_transformation(name, features, monkeypatch):
    """As without the extension to ask: rules are always in the graph."""
    call = CALLS[name]()
    found = call(features).feats
    monkeypatch.setattr(transformations, "is_transforming", lambda: True)
    assert mx.array_equal(found, call(features).feats)
