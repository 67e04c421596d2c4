"""No Metal dispatch does more than its share of the watchdog's time; bits stay.

Of geometry, views and reductions; of contractions see test_metal_cuts.py.
"""

import itertools
import re
from importlib import import_module
from pathlib import Path

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import KINDS, bits, pair
from metal_checks import bounded, host

from mlx_lattice import availability, devices, registry
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.backends.metal import geometry as metal_geometry
from mlx_lattice.geometry import curves, keys, output_rows
from mlx_lattice.geometry.output_rows import Rule
from mlx_lattice.geometry.protocol import BoxedRows

host.require()

geometry, reductions = registry.GEOMETRY["metal"], registry.REDUCTIONS["metal"]
points = registry.POINTS["metal"]

OFFSETS = [tuple(offset) for offset in np.ndindex(3, 3, 3)]
CENTRED = [tuple(v - 1 for v in offset) for offset in OFFSETS]


def rows(n=300, d=3):
    return mx.array(cases.geometry("scattered", d, n).astype(np.int32))


def repeated():
    given = rows()
    return mx.concatenate([given, given[::2], given[:7]])[::-1]


def table():
    return pair(KINDS[0], "block", 200)[0].out_in


def made(rule, offsets, stride=(2, 2, 2)):
    """The rows that a rule makes."""
    given = rows()
    box = output_rows.box_of(rule, keys.bounds_of(given), offsets, stride)
    return geometry.made_rows(rule, given, offsets, stride, box, False)


def found(out, offsets, stride, mirrored):
    """A neighbour table over rows."""
    out = BoxedRows(out, None)
    return geometry.index(rows()).table(out, offsets, stride, mirrored=mirrored)


def along(curve, bits=None):
    """The order of rows along a curve: row numbers stand in the keys, or do not."""
    at = rows() - rows().min(axis=0)
    return geometry.curve_order(at, curves.curve_of(curve, keys.bounds_of(at), bits))


def kept():
    """Every third row, counted."""
    given = rows()
    started = geometry.start_kept(mx.arange(len(given)) % 3 == 1, given)
    return started.kept(started.count.item())


def cells():
    return points.cells(rows().astype(mx.float32) + 0.25, None, None, None)


def weights():
    """Of the cells around points, of which every second is there."""
    at, table = rows().astype(mx.float32) + 0.25, mx.arange(8 * len(rows()))
    table = (table % 2 - 1).reshape(-1, 8).astype(mx.int32)
    return points.corner_weights(at, None, rows(), table, True)


def features(n, dtype="float32"):
    return mx.array(cases.features(n, 6, 0)).astype(getattr(mx, dtype))


def pooled(call):
    """A reduction over a table, of float16 features."""
    at = table()
    n = at.shape[0]
    x, y = features(n, "float16"), features(n, "float16")
    won = reductions.gather_max(x, at)[1] if call == "max_pool_backward" else None
    back = geometry.transpose_table(at, n)
    return {
        "gather_sum": lambda: reductions.gather_sum(x, at),
        "gather_max": lambda: reductions.gather_max(x, at),
        "max_pool_backward": lambda: reductions.max_pool_backward(y, won, back),
        "row_products": lambda: reductions.row_products(x, y, at),
        "scatter_sum": lambda: reductions.scatter_sum(y, at, n),
        "scatter_max": lambda: reductions.scatter_max(y, at[:, :1], n),
    }[call]


# Every kernel of geometry, views and reductions: what launches it,
# the work that bounds it, and a limit some times below what the call does.
CALLS = {
    "insert": (lambda: lambda: geometry.index(rows()).find(rows()), "probes", 90),
    "insert and collect": (
        lambda: lambda: made(Rule.EXPAND, OFFSETS),
        "probes",
        900,
    ),
    "reached": (
        lambda: lambda: made(Rule.REACH, CENTRED),
        "probes",
        900,
    ),
    "neighbour_table": (
        lambda: lambda: found(rows()[::2], OFFSETS, (2, 1, 1), mirrored=False),
        "probes",
        700,
    ),
    "submanifold_table by offsets": (
        lambda: lambda: found(rows(), CENTRED, (1, 1, 1), mirrored=True),
        "probes",
        1000,
    ),
    "submanifold_table by rows": (
        lambda: lambda: found(rows(), CENTRED, (1, 1, 1), mirrored=True),
        "probes",
        290,
    ),
    "unique_rows": (lambda: lambda: geometry.unique_rows(repeated()), "elements", 900),
    "kept_rows": (lambda: kept, "elements", 900),
    "transpose_table": (
        lambda: lambda: geometry.transpose_table(table(), len(table())),
        "elements",
        900,
    ),
    "edges": (lambda: lambda: geometry.edges(table()), "elements", 5000),
    "ordered_table": (
        lambda: (
            lambda: metal_geometry.ordered_table(
                table(), geometry.gray_order(table()), 4
            )
        ),
        "elements",
        900,
    ),
    "gray_keys": (lambda: lambda: geometry.gray_order(table()), "elements", 900),
    "curve_keys": (lambda: lambda: along("hilbert"), "elements", 900),
    "curve_keys of given bits": (lambda: lambda: along("z-trans", 20), "elements", 900),
    **{
        name: (lambda name=name: pooled(name), "elements", 1500)
        for name in ("gather_sum", "gather_max", "max_pool_backward", "row_products")
    },
    "sum_segments": (lambda: pooled("scatter_sum"), "elements", 1500),
    "cells_of_points": (lambda: cells, "elements", 900),
    "corner_weights": (lambda: weights, "elements", 900),
    "max_segments": (lambda: pooled("scatter_max"), "elements", 300),
}


def test_a_dispatch_holds_no_chip_for_long():
    chips = [d for d in devices.PROFILES.values() if d.backend == devices.METAL]
    for work, takes in gpu_kernel.DISPATCH.items():
        done = gpu_kernel.dispatch_limit(work) / takes["share"]
        for chip in chips:
            seconds = (
                done * takes.get("operations", 0) / (1e12 * chip.tflops),
                done * takes.get("bytes", 0) / (1e9 * chip.bandwidth),
            )
            assert 0 < max(seconds) <= gpu_kernel.DISPATCH_SECONDS, (
                work,
                chip.name,
            )


@pytest.mark.parametrize("count, work, limit, most", ((7, 70, 20, None), (7, 9, 4, 3)))
def test_no_slice_is_above_the_limit(count, work, limit, most):
    slices = list(gpu_kernel.cuts(count, work, limit, most))
    assert [i for a, n in slices for i in range(a, a + n)] == list(range(count))
    assert all(n * (most or work / count) <= limit for _, n in slices)
    assert list(gpu_kernel.cuts(count, limit, limit, limit)) == [(0, count)]


@pytest.mark.parametrize("shape, grid", (((0, 3), (3, 1)), ((2, 3), (3, 0))))
def test_nothing_is_launched_for_nothing(shape, grid):
    face = gpu_kernel.Interface("Copy", ("x",), ("y",), (("first", "0"),))
    kernel = gpu_kernel.GpuKernel(devices.METAL, "k", ("vec4",), face)
    with pytest.raises(ValueError, match="k was launched for nothing"):
        kernel([mx.zeros((8,))], [(shape, mx.float32)], grid, first=0)
    with pytest.raises(TypeError, match="k takes the sizes first; got rows"):
        kernel([mx.zeros((8,))], [((1,), mx.float32)], (1,), rows=1)


def kernels_of(module) -> set[str]:
    """The functions of Metal's files that a module names."""
    named, files = (
        Path(module.__file__).read_text(),
        availability.source_folder("metal"),
    )
    texts = (path.read_text() for path in files.glob("*.metal"))
    functions = (re.findall(r"METAL_FUNC void (\w+)\(", text) for text in texts)
    return {name for name in itertools.chain(*functions) if f'"{name}"' in named}


def launched(make):
    """The bits of what a call returns, and the threads of each kernel's launches."""
    with host.recording(checked=True) as record:
        result = make()()
        found = [
            bits(a) for a in (result if type(result) is not mx.array else [result])
        ]
    assert record.report.faults == ()
    threads = {}
    for launch in record.report.launches:
        # Those that read a whole table, and those of some offsets, go by one name.
        kernel = re.sub(r"__[01]_", "_", launch.kernel)
        threads.setdefault(kernel, []).append(launch.counts.threads)
    return found, threads


@pytest.mark.parametrize("name", CALLS)
def test_work_above_the_limit_is_split_and_gives_the_same_bits(name, monkeypatch):
    make, work, limit = CALLS[name]
    whole, before = launched(make)
    bounded(monkeypatch, work, limit)
    split, after = launched(make)
    assert split == whole
    assert before.keys() == after.keys() or "by rows" in name
    grown = {k for k in after if len(after[k]) > len(before.get(k, ()))}
    assert grown, f"nothing was split: {after}"


# What divides, in 32 bits: candidates by 27 offsets, places of a table by its columns.
DIVIDES = {
    "insert and collect": "candidates",
    "reached": "candidates",
    "sum_segments": "sum_segments_no_weights",
}


@pytest.mark.parametrize("name", CALLS)
def test_only_what_has_no_shift_divides(name):
    """Strides of two shift, a volume of one divides nothing, and 64 bits nowhere."""
    make, _, _ = CALLS[name]
    with host.recording(counted=True) as record:
        found = make()()
        mx.eval(found)
    assert record.report.faults == ()
    for launch in record.report.launches:
        assert launch.counts.divisions64 == 0, launch.kernel
        divides = name in DIVIDES and DIVIDES[name] in launch.kernel
        assert (launch.counts.divisions32 > 0) == divides, launch.kernel


def test_every_kernel_of_these_families_is_split_somewhere(monkeypatch):
    names = "metal.geometry", "gpu.reductions"
    modules = [import_module(f"mlx_lattice.backends.{name}") for name in names]
    wanted = set().union(*map(kernels_of, modules))
    wanted -= {"score_keys", "mark_best"}  # MLX operations serve more rows
    seen = set()
    for make, work, limit in CALLS.values():
        _, before = launched(make)
        with monkeypatch.context() as patch:
            bounded(patch, work, limit)
            _, after = launched(make)
        seen |= {
            k for k, threads in after.items() if len(threads) > len(before.get(k, ()))
        }
    missed = {n for n in wanted if not any(f"lattice_{n}" in k for k in seen)}
    assert not missed
