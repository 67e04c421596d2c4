"""Functions with rules of their own: launches, or nodes in transformations."""

import sys
import threading
from functools import partial

import mlx.core as mx
import pytest
from contractions import scene

import mlx_lattice as ml
from mlx_lattice import nn, ops, transformations
from mlx_lattice.backends import cpu_extension, registry
from mlx_lattice.nn.fused import convolved

MARKS = {"CustomTransforms", "StopGradient"}
needs_extension = pytest.mark.skipif(
    cpu_extension.extension is None, reason="asks MLX by the extension"
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
def test_a_transformation_that_raises_has_ended():
    def fails(_):
        raise KeyError("here")

    for transformed in (mx.grad(fails), mx.vmap(fails), mx.compile(fails)):
        with pytest.raises(KeyError):
            transformed(mx.ones((3,)))
        assert not transformations.is_transforming()


@needs_extension
def test_rules_serve_in_a_transformation_alone():
    """Both ways, and in the vjp of a vjp."""
    called = []

    def doubled(x):
        called.append("forward")
        return 2 * x

    function = transformations.Function(doubled)

    @function.vjp
    def vjp(x, dy, _):
        called.append("vjp")
        return 5 * dy * x

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
def test_calls_add_nothing_to_the_graph_but_what_computes(name, features):
    graph = cpu_extension.extension.Graph()
    graph.add([CALLS[name]()(features).feats])
    primitives = {graph.node(at).primitive for at in range(len(graph))}
    assert len(primitives) > 1 and not MARKS & primitives


@needs_extension
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_within_a_transformation(name, features, monkeypatch):
    """As without the extension to ask: rules are always in the graph."""
    call = CALLS[name]()
    found = call(features).feats
    monkeypatch.setattr(transformations, "is_transforming", lambda: True)
    assert mx.array_equal(found, call(features).feats)
    monkeypatch.setattr(transformations, "_NODES", None)
    assert mx.array_equal(found, call(features).feats)


def nodes(*arrays: mx.array) -> list:
    """What MLX's graph has for arrays, and what its nodes compute themselves."""
    graph = cpu_extension.extension.Graph()
    graph.add(list(arrays))
    found = (graph.node(at) for at in range(len(graph)))
    return [node for node in found if node.primitive]


# What passes through some layers within a transformation, besides their kernels.
# Statistics of a norm that waits are no part of what transformations follow.
PASSING = {
    "Broadcast",
    "Copy",
    "Contiguous",
    "Full",
    "Reshape",
    "Slice",
    "StopGradient",
}
PASSING |= {"StopGradient", "Transpose"}


@needs_extension
@pytest.mark.parametrize("name", ("conv", "pool", "norm of rows"))
def test_a_call_in_a_transformation_is_one_node(name, features):
    """Launches and all, with no mark of what transformations must not follow."""
    call = nn.BatchNorm(32) if name == "norm of rows" else CALLS[name]()
    feats, like = features.feats, call(features).feats
    mx.eval(feats, like)
    (y,), _ = mx.vjp(lambda x: call(features.replace(x)).feats, [feats], [like])
    seen = [node.primitive for node in nodes(y)]
    # Its results: which rows won, and statistics, are some too.
    assert seen.count("CustomFunction") == {"conv": 1, "pool": 2}.get(name, 5)
    launches = set(seen) - PASSING - {"CustomFunction"}
    assert launches and all(is_kernel(name) for name in launches)


def is_kernel(primitive: str) -> bool:
    """Of the CPU's extension, or one that MLX launches."""
    return primitive[0].islower() or primitive.endswith("Kernel")


@needs_extension
def test_operations_of_mlx_stay_nodes():
    """There may be many, of which MLX frees the memory as it goes."""

    def forward(x):
        return mx.exp(x), mx.log(x)

    function = transformations.Function(forward)
    function.vjp(lambda x, dy, y: dy[0] * y[0] + dy[1] / x)
    x = mx.array([1.0, 2.0])
    (first, _), _ = mx.vjp(function, [x], [x, x])
    seen = [node.primitive for node in nodes(first)]
    assert seen.count("Exp") == 1 and seen.count("CustomFunction") == 2
    assert all(node.known == len(node.inputs) for node in nodes(first))
    slope = mx.grad(lambda x: sum(y.sum() for y in function(x)))(x)
    assert mx.allclose(slope, mx.exp(x) + 1 / x)


def moments() -> transformations.Function:
    """A function of two results by kernels, whose rules are those of sums."""
    norms = registry.norms()

    def forward(x):
        mean, var, *_ = norms.moments(x)
        return mean.reshape(-1), var.reshape(-1)

    def composed(x):
        mean = x.mean(axis=0)
        return mean, (x - mean).square().mean(axis=0)

    function = transformations.Function(forward)
    function.vjp(lambda x, dy, _: mx.vjp(composed, [x], list(dy))[1][0])
    function.jvp(lambda x, dx: tuple(mx.jvp(composed, [x], [dx])[1]))
    function.vmap(lambda x, axis: (mx.vmap(composed, (axis,))(x), (0, 0)))
    return function


@needs_extension
@pytest.mark.parametrize("has_nodes", (True, False))
def test_every_transformation_of_launches(has_nodes, monkeypatch):
    """By the rules, with the extension's nodes and with MLX's own function."""
    if not has_nodes:
        monkeypatch.setattr(transformations, "_NODES", None)
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
    if has_nodes:  # MLX maps the launches of its own function too
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


@needs_extension
def test_a_node_can_be_computed_before_its_gradient():
    """And is then no different, though it holds more."""
    function, x = moments(), mx.random.normal((40, 8))

    def score(x, early):
        mean, var = function(x)
        if early:
            mx.eval(mean, var)
        return (mean * var).sum()

    late, early = (mx.grad(score)(x, is_early) for is_early in (False, True))
    assert mx.array_equal(late, early)


@needs_extension
def test_rules_that_are_wrong_say_so():
    function = transformations.Function(lambda x, y: (x, y))
    one = mx.ones((2,))
    with pytest.raises(ValueError, match="no rule for vjp"):
        mx.vjp(function, [one, one], [one, one])
    function.vjp(lambda primals, dy, _: dy[0])
    with pytest.raises(ValueError, match="must return 2 arrays; it returned 1"):
        mx.vjp(function, [one, one], [one, one])

    @function.vjp
    def vjp(primals, dy, _):
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        mx.vjp(function, [one, one], [one, one])


@needs_extension
def test_a_node_holds_arrays_as_inputs_alone():
    """A compiled graph keeps primitives, which must not keep its trace's arrays."""
    kernels = registry.reductions()

    def forward(x):
        made_here = mx.arange(39, -1, -1, dtype=mx.int32)[:, None]
        return kernels.gather_sum(x, made_here)

    function, x = transformations.Function(forward), mx.ones((40, 8))
    function.vjp(lambda x, dy, _: dy[::-1])
    mx.eval(x)
    y = mx.vjp(function, [x], [x])[0]
    graph = cpu_extension.extension.Graph()
    (root,) = graph.add(y)
    held = graph.holders().arrays
    lazy = [at for at in range(len(graph)) if graph.node(at).primitive]
    assert graph.node(root).primitive == "CustomFunction" and len(lazy) > 2
    assert not [graph.node(at).primitive for at in lazy if at != root and held[at]]


@needs_extension
def test_a_node_lets_go_of_its_rules():
    """When it is computed, or when nobody holds it."""
    function, x = moments(), mx.random.normal((40, 8))
    rules = function._rules
    before = sys.getrefcount(rules)
    y = mx.vjp(lambda x: function(x)[0], [x], [x[0]])[0]
    assert sys.getrefcount(rules) > before
    mx.eval(y)
    assert sys.getrefcount(rules) == before
    y = mx.vjp(lambda x: function(x)[0], [x], [x[0]])
    del y
    assert sys.getrefcount(rules) == before


FEATS = mx.arange(8, dtype=mx.float32).reshape(4, 2) - 3
PLACES = mx.array([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 2, 1], [1, 0, 0, 0]])


def on_places(feats) -> ml.SparseTensor:
    return ml.SparseTensor(PLACES, feats)


@pytest.mark.parametrize(
    "transform", (mx.compile, lambda f: lambda a: mx.vmap(f)(a[None]))
)
@pytest.mark.parametrize(
    ("function", "array"),
    (
        (lambda f: ops.prune(on_places(f), f[:, 0] > 0).feats, FEATS),
        (lambda p: ml.SparseTensor.from_points(p, voxel_size=1.0).feats, FEATS),
        (lambda p: ops.knn(p, 2).rows, FEATS),
        (lambda p: ops.interpolate(on_places(FEATS), p), PLACES * 1.0),
        (lambda c: ops.max_pool3d(ml.SparseTensor(c, FEATS)).feats, PLACES),
        (lambda a: ml.SparseTensor.from_dense(a).feats, mx.ones((1, 2, 2, 2, 1))),
    ),
)
def test_rows_by_traced_values(function, array, transform):
    """By a sentence of ours: MLX's own words are of an evaluation."""
    mx.eval(array)
    sentence = "mx.compile, ml.compile or mx.vmap traces them. .* give it features"
    with pytest.raises(ValueError, match=sentence):
        transform(function)(array)
    mx.eval(function(array))
