"""Fixtures, and builders and comparisons of relations and contractions."""

import gc
import os
import random
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path

# Each worker of pytest-xdist uses one of several NVIDIA GPUs.
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
if GPUS > 1 and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(worker[2:]) % GPUS))
# Without this, MLX multiplies float32 matrices in TF32 on CUDA.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# MLX raises after 800 different CUDA graphs; the suite makes more.
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
# Kernels are compared with the oracle here; only tests of the proof turn it on.
os.environ.setdefault("MLX_LATTICE_PROOF", "0")

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from cuda_emulation import Emulator, emulating, kept_folder
from hypothesis import HealthCheck, settings

import mlx_lattice as ml
from mlx_lattice import backends, devices

# On the GPU of a virtual machine, such as a hosted runner, MLX's matrix kernels may
# fail and ours are refused: only the doctor uses it.
if not devices.current().matrices:
    mx.set_default_device(mx.cpu)

settings.register_profile(
    "lattice",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("lattice")


@pytest.fixture(scope="module")
def freed():
    """Free the garbage of earlier tests."""
    gc.collect()
    mx.synchronize()


@pytest.fixture(autouse=True)
def _seeded(request):
    """Seed every test by its name."""
    seed = zlib.crc32(request.node.nodeid.encode())
    for library in (random, np.random, mx.random):
        library.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


@pytest.fixture
def unforced(monkeypatch):
    """Ignore routes and tuning that the environment asks for."""
    for name in ("MLX_LATTICE_ROUTE", "MLX_LATTICE_TUNE"):
        monkeypatch.setitem(ml.settings.environment, name, None)


METHODS = {
    "forward": "kernel_relation",
    "target": "target_kernel_relation",
    "submanifold": "submanifold_kernel_relation",
    "transposed": "transposed_kernel_relation",
    "generative": "generative_relation",
    "general": "relation",
}

# One case of each kind, for tests of the kind and not of the kernel.
KINDS = (
    cases.Case("submanifold", 3, 3),
    cases.Case("submanifold", 3, 2),
    cases.Case("forward", 3, 2, 2),
    cases.Case("forward", 3, 3, 2, support="reach"),
    cases.Case("target", 3, 3, 2, padding=1),
    cases.Case("transposed", 3, 3, 2),
    cases.Case("generative", 3, 3, 2),
    cases.Case("general", 3, offsets=((0, 0, 0), (5, -2, 1), (-1, 0, 1)), stride=2),
)


def as_array(coords) -> mx.array:
    """Copy a NumPy array; managers know sets by the identity of an MLX array."""
    return coords if isinstance(coords, mx.array) else mx.array(coords)


def build(case, coords, target=None, manager=None) -> ml.Relation:
    """The library's relation of a case, by the manager's method for its kind."""
    manager = ml.CoordinateManager() if manager is None else manager
    key = manager.insert(as_array(coords), spatial_shape=case.spatial_shape)
    sets = [key] if target is None else [key, as_array(target)]
    return getattr(manager, METHODS[case.kind])(*sets, **case.arguments)


def pair(case, geometry="negative", n=40, seed=0):
    """The library's and the oracle's relation of a case over a named geometry."""
    coords = cases.for_case(case, geometry, n, seed)
    target = case.target(coords, seed) if case.needs_target else None
    return build(case, coords, target), case.reference(coords, target)


def drawn(
    name="negative", d=3, n=40, channels=3, dtype="float32", seed=0, **facts
) -> ml.SparseTensor:
    """A tensor of normal features on a named geometry."""
    coords = mx.array(cases.geometry(name, d, n, seed))
    feats = mx.array(cases.features(len(coords), channels, seed))
    return ml.SparseTensor(coords, feats.astype(getattr(mx, dtype)), **facts)


def multi_edges(seed=0, n_in=9, n_out=7, volume=5, n_edges=60):
    """A relation from random edges, some (o, k) several times, in both libraries."""
    rng = np.random.default_rng(seed)
    edges = {
        tuple(int(rng.integers(0, n)) for n in (n_in, n_out, volume))
        for _ in range(n_edges)
    }
    edges = rng.permutation(sorted(edges)) if edges else np.zeros((0, 3), np.int64)
    relation = ml.Relation.from_edges(
        *(mx.array(column) for column in edges.T.astype(np.int32)), n_in, n_out, volume
    )
    expected = ref.Relation(
        "general",
        np.zeros((n_in, 2)),
        np.zeros((n_out, 2)),
        np.zeros((volume, 1)),
        np.array(sorted(edges.tolist(), key=lambda e: e[::-1])).reshape(-1, 3),
    )
    return relation, expected


def assert_same(relation: ml.Relation, expected: ref.Relation) -> None:
    """Rows, their order, edges and table are the oracle's."""
    np.testing.assert_array_equal(np.array(relation.in_coords), expected.in_coords)
    np.testing.assert_array_equal(np.array(relation.out_coords), expected.out_coords)
    assert relation.out_coords.dtype == mx.int32
    assert relation.kind == expected.kind
    assert relation.volume == len(expected.offsets)
    assert (relation.n_in, relation.n_out) == (
        len(expected.in_coords),
        len(expected.out_coords),
    )
    assert relation.out_in.dtype == mx.int32
    np.testing.assert_array_equal(np.array(relation.out_in), expected.out_in)
    np.testing.assert_array_equal(np.array(relation.edges), expected.edges)
    assert relation.counted in (None, len(expected.edges))


def bits(array: mx.array) -> bytes:
    """The bytes of an array: equal only where every bit is."""
    mx.eval(array)
    return bytes(memoryview(array.view(mx.uint8)))


def mappable():
    """A block in which ``mx.vmap`` works: MLX has no such rule for GPU kernels."""
    on_cpu = devices.current().backend == devices.CPU
    return nullcontext() if on_cpu else backends.portable_only()


def problem_of(pass_, relation, c_in, c_out, dtype, groups=1, **packing):
    """A pass over a relation that may sum in any order."""
    return ml.Problem.of(
        pass_,
        relation,
        c_in,
        c_out,
        getattr(mx, dtype),
        groups,
        table=relation.has_table,
        deterministic=False,
        **packing,
    )


class Numbers:
    """Features, weight and cotangent of a relation, and the same in float64."""

    def __init__(self, relation, c_in, c_out, groups=1, dtype="float32", seed=0):
        kind = getattr(mx, dtype)
        arrays = (
            cases.features(relation.n_in, c_in, seed),
            cases.weights(relation.volume, c_in // groups, c_out, seed),
            cases.features(relation.n_out, c_out, seed + 1),
        )
        self.x, self.w, self.dy = (mx.array(a).astype(kind) for a in arrays)
        # The oracle gets the rounded values.
        self.exact = [
            ref.to_numpy(a).astype(np.float64) for a in (self.x, self.w, self.dy)
        ]


@pytest.fixture
def portable_only():
    """Run the routes of MLX operations instead of compiled kernels."""
    with backends.portable_only():
        yield


@pytest.fixture(scope="session")
def cuda_programs():
    """The folder of CUDA kernels that are compiled for the CPU, shared by all tests."""
    return kept_folder()


@pytest.fixture(params=(False, True), ids=("aligned", "views"))
def emulator(request, cuda_programs):
    """Emulate CUDA's kernels, with inputs at 16 bytes or one element behind."""
    made = Emulator(cuda_programs, request.param)
    with emulating(made):
        yield made


@pytest.fixture(autouse=True)
def settled():
    """Settle MLX's tasks: it miscounts failed ones, and waits forever after many."""
    yield
    if devices.extension is not None:
        devices.extension.settle()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """On a GPU, skip a test that forces a route which does not run there."""
    try:
        return (yield)
    except ml.RouteError as error:
        backend = devices.current().backend
        absent = (
            f", not on {backend}",
            f" pass on {backend}",
            f"its {backend} kernels: compiled kernels are left out here",
        )
        if backend != "cpu" and any(reason in str(error) for reason in absent):
            pytest.skip(str(error))
        raise
