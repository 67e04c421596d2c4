"""Functions with their own rules for MLX's transformations."""

import threading
from functools import partial

import mlx.core as mx
import pytest
from contractions import scene

import mlx_lattice as ml
from mlx_lattice import devices, nn, registry, transformations
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


@needs_extension
def test_rules_serve_in_a_transformation_alone():
    """Both ways, and in the vjp of a vjp."""
    called = []

    def doubled(x):
        called.append("forward")
        return 2 * x

    def vjp(x, dy, _):
        called.append("vjp")
        return 5 * dy * x

    function = transformations.Function(doubled, vjp=vjp)
    x = mx.array(3.0)
    assert function(x).item() == 6 and called == ["forward"]
    assert mx.grad(function)(x).item() == 15
    assert mx.grad(mx.grad(function))(x).item() == 5
    assert function(x).item() == 6 and called[-1] == "forward"


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


def moments() -> transformations.Function:
    """A function of two results by kernels, whose rules are those of sums."""
    norms = registry.norms()

    def forward(x):
        mean, var, *_ = norms.moments(x)
        return mean.reshape(-1), var.reshape(-1)

    def composed(x):
        mean = x.mean(axis=0)
        return mean, (x - mean).square().mean(axis=0)

    return transformations.Function(
        forward,
        vjp=lambda x, dy, _: mx.vjp(composed, [x], list(dy))[1][0],
        jvp=lambda x, dx: tuple(mx.jvp(composed, [x], [dx])[1]),
        vmap=lambda x, axis: (mx.vmap(composed, (axis,))(x), (0, 0)),
    )


@needs_extension
def test_every_transformation_of_launches():
    function, x = moments(), mx.random.normal((40, 8))
    mean, var = x.mean(axis=0), x.var(axis=0)

    def score(x):
        mean, var = function(x)
        return (mean * var).sum()

    slope = (var + 2 * (x - mean) * mean) / 40
    close = partial(mx.allclose, rtol=1e-4, atol=1e-5)
    assert close(mx.grad(score)(x), slope)
    assert close(mx.compile(mx.grad(score))(x), slope)
    (found,) = mx.jvp(score, [x], [slope])[1]
    assert close(found, slope.square().sum())
    if devices.current().backend == devices.CPU:  # MLX maps no GPU kernels
        mapped = mx.vmap(function)(mx.stack([x, 2 * x]))
        assert close(mapped[0][1], 2 * mean) and close(mapped[1][1], 4 * var)
        (found,) = mx.vmap(function, in_axes=1)(mx.stack([x, 2 * x], axis=1))[:1]
        assert close(found[1], 2 * mean)
    along = mx.ones_like(x)
    (of_slope,) = mx.jvp(mx.grad(score), [x], [along])[1]
    step = 1e-2
    apart = mx.grad(score)(x + step * along) - mx.grad(score)(x - step * along)
    assert mx.allclose(of_slope, apart / (2 * step), atol=1e-3)
    again = mx.compile(lambda x: function(x))
    for scale in (1, 3):  # one graph, other arrays
        assert close(again(scale * x)[1], scale**2 * var)
