"""Every backend's geometry and reductions have every member, with one signature."""

import inspect

import mlx.core as mx
import pytest

from mlx_lattice import registry
from mlx_lattice.backends import cpu
from mlx_lattice.backends.cuda import geometry as cuda_geometry
from mlx_lattice.backends.metal import geometry as metal_geometry
from mlx_lattice.geometry.protocol import Geometry, RowIndex
from mlx_lattice.geometry.tables import SortedIndex
from mlx_lattice.registry import Reductions

COORDS = mx.array([[0, 1, 2], [0, 3, 4]], dtype=mx.int32)


def members(protocol) -> dict[str, list]:
    """The parameters of each function that a protocol names: name, kind, default."""
    functions = inspect.getmembers(protocol, inspect.isfunction)
    return {
        name: parameters(function)[1:]
        for name, function in functions
        if not name.startswith("_")
    }


def parameters(function) -> list:
    listed = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in listed]


def fulfils(it, protocol) -> None:
    assert isinstance(it, protocol)
    wanted = members(protocol)
    assert wanted
    for name, listed in wanted.items():
        assert parameters(getattr(it, name)) == listed, name


@pytest.mark.parametrize("backend", registry.GEOMETRY)
def test_a_geometry_is_whole(backend):
    fulfils(registry.GEOMETRY[backend], Geometry)


@pytest.mark.parametrize("backend", registry.REDUCTIONS)
def test_reductions_are_whole(backend):
    fulfils(registry.REDUCTIONS[backend], Reductions)


INDICES = (
    SortedIndex,
    metal_geometry.RowTable,
    cuda_geometry.RowTable,
    cpu.CpuIndex,
)


@pytest.mark.parametrize("index", INDICES, ids=lambda each: each.__module__)
def test_a_row_index_is_whole(index):
    for name, listed in members(RowIndex).items():
        assert parameters(getattr(index, name))[1:] == listed, name
