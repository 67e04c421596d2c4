"""A module's weight is read where it stands: no copy, no cast, on every backend.

MLX copies an input of a kernel that is not contiguous by rows without a word in the
graph, so what kernels are handed is looked at, too. CUDA's are recorded, not run, where
there is no such GPU.
"""

import contextlib
from dataclasses import replace
from itertools import product

import mlx.core as mx
import pytest
from conftest import problem_of
from contractions import scene
from cuda_recorder import recording
from places import HERE

import mlx_lattice as ml
from mlx_lattice import devices, nn, routes
from mlx_lattice.backends.gpu.kernel import GpuKernel
from mlx_lattice.problem import FORWARD, INPUT_GRAD, MLX_LAYOUT
from mlx_lattice.routes import selection

FLOOR = f"{FORWARD}=relation_traversal,{INPUT_GRAD}=relation_traversal"


def layer_and_tensor(channels, dtype=mx.float16, groups=1, kernel_size=3):
    """A module and what it takes, computed."""
    layer = nn.SubmConv3d(channels, channels, kernel_size, groups=groups, bias=False)
    layer.set_dtype(dtype)
    coords = scene("surface")[0].in_coords
    x = ml.SparseTensor(coords, mx.random.normal((len(coords), channels)).astype(dtype))
    mx.eval(layer.parameters(), x.feats)
    return layer, x


def passes(layer, x):
    """The forward pass and both gradients."""

    def run(feats, weight):
        tensor = ml.SparseTensor.of(x.manager, x.key, feats)
        size, groups = layer.kernel_size, layer.groups
        return ml.ops.subm_conv3d(tensor, weight, kernel_size=size, groups=groups).feats

    y, gradients = mx.vjp(run, [x.feats, layer.weight], [x.feats])
    return *y, *gradients


@pytest.fixture
def handed(monkeypatch):
    """(name, array) of all that kernels of a GPU are handed."""
    seen, launcher = [], GpuKernel.launcher

    def noted(self, given, *settled, **more):
        launch = launcher(self, given, *settled, **more)
        inputs = self.interface.inputs
        names = [name for name, is_there in zip(inputs, given, strict=True) if is_there]

        def call(arrays):
            seen.extend(zip(names, arrays, strict=True))
            return launch(arrays)

        return call

    monkeypatch.setattr(GpuKernel, "launcher", noted)
    return seen


def copied(handed) -> set[str]:
    """The names of inputs of which MLX makes a contiguous copy."""
    mx.eval([array for _, array in handed])
    return {name for name, array in handed if not memoryview(array).c_contiguous}


def check(handed):
    """What a layer is given by itself, then every row of the table that takes it."""
    device = devices.current()
    for channels, dtype in product((16, 20, 64), (mx.float16, mx.float32)):
        layer, x = layer_and_tensor(channels, dtype)
        handed.clear()
        passes(layer, x)
        assert "w" in {name for name, _ in handed} and not copied(handed)
    for groups in (1, 16):
        layer, x = layer_and_tensor(16, mx.float32, groups)
        relation = x.manager.submanifold_kernel_relation(x.key)
        for pass_ in (FORWARD, INPUT_GRAD):
            problem = problem_of(pass_, relation, 16, 16, "float32", groups)
            problem = replace(problem, layout=MLX_LAYOUT)
            for route in selection.candidates(problem, device):
                handed.clear()
                plan = route.plan(problem, device)
                forced = routes.only(f"{pass_}={route}")
                with routes.only(FLOOR), forced, ml.waive_determinism():
                    passes(layer, x)
                says = {"w"} if plan.weights == "kernel-major copy" else set()
                assert copied(handed) == says, (route.name, pass_)


@pytest.mark.parametrize(
    "place", [p for p in HERE if p.name in ("metal", "cuda")], ids=lambda p: p.name
)
def test_kernels_are_handed_what_is_stored(place, handed):
    with place.inside():
        check(handed)


@pytest.mark.skipif(
    not devices.has_extension(),
    reason="the CPU's extension builds the relations",
)
@pytest.mark.parametrize("chip", ("h200", "a100"))
def test_on_cuda(chip, handed):
    with contextlib.ExitStack() as stack:
        stack.enter_context(recording(chip))
        check(handed)
