"""Look-ups and reductions hold no GPU for long: Metal's dispatches are cut, bits stay.

Of contractions see test_metal_cuts.py.
"""

import re

import cases
import mlx.core as mx
import numpy as np
import pytest
from conftest import KINDS, bits, pair
from metal_checks import bounded, host

from mlx_lattice import devices, registry
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.geometry import lattice
from mlx_lattice.geometry.lattice import Rule
from mlx_lattice.geometry.tables import BoxedRows

host.require()

geometry, reductions = registry.GEOMETRY["metal"], registry.REDUCTIONS["metal"]
points = registry.POINTS["metal"]

OFFSETS = [tuple(offset) for offset in np.ndindex(3, 3, 3)]
CENTRED = [tuple(v - 1 for v in offset) for offset in OFFSETS]


def rows(n=300, d=3):
    return mx.array(cases.geometry("scattered", d, n).astype(np.int32))


def table():
    return pair(KINDS[0], "block", 200)[0].out_in


def made(rule, offsets, stride=(2, 2, 2)):
    """The rows that a rule makes."""
    given = rows()
    box = lattice.box_of(rule, lattice.bounds_of(given), offsets, stride)
    return geometry.rule_rows(rule, given, offsets, stride, box)


def found(out, offsets, stride, mirrored):
    """A neighbour table over rows."""
    out = BoxedRows(out, None)
    return geometry.index(rows()).table(out, offsets, stride, mirrored=mirrored)


def weights():
    """Of the cells around points, of which every second is there."""
    at, table = rows().astype(mx.float32) + 0.25, mx.arange(8 * len(rows()))
    table = (table % 2 - 1).reshape(-1, 8).astype(mx.int32)
    return points.corner_weights(at, None, rows(), table, True)


def pooled(call):
    """A reduction over a table, of float16 features."""
    at = table()
    n = at.shape[0]
    x, y = (mx.array(cases.features(n, 6, 0)).astype(mx.float16) for _ in range(2))
    won = reductions.gather_max(x, at)[1] if call == "max_pool_backward" else None
    back = geometry.transpose_table(at, n)
    return {
        "gather_sum": lambda: reductions.gather_sum(x, at),
        "gather_max": lambda: reductions.gather_max(x, at),
        "max_pool_backward": lambda: reductions.max_pool_backward(y, won, back),
        "sum_segments": lambda: reductions.scatter_sum(y, at, n),
        "max_segments": lambda: reductions.scatter_max(y, at[:, :1], n),
    }[call]


# What launches each kernel of look-ups and reductions, the work that bounds it, and a
# limit some times below what the call does.
CALLS = {
    "insert": (lambda: lambda: geometry.index(rows()).find(rows()), "probes", 90),
    "expanded": (lambda: lambda: made(Rule.EXPAND, OFFSETS), "probes", 900),
    "reached": (lambda: lambda: made(Rule.REACH, CENTRED), "probes", 900),
    "neighbour_table": (
        lambda: lambda: found(rows()[::2], OFFSETS, (2, 1, 1), mirrored=False),
        "probes",
        700,
    ),
    "submanifold_table": (
        lambda: lambda: found(rows(), CENTRED, (1, 1, 1), mirrored=True),
        "probes",
        1000,
    ),
    **{
        name: (lambda name=name: pooled(name), "elements", 300)
        for name in (
            *("gather_sum", "gather_max", "max_pool_backward"),
            *("sum_segments", "max_segments"),
        )
    },
    "corner_weights": (lambda: weights, "elements", 900),
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
            assert 0 < max(seconds) <= gpu_kernel.DISPATCH_SECONDS, (work, chip.name)


@pytest.mark.parametrize("count, work, limit, most", ((7, 70, 20, None), (7, 9, 4, 3)))
def test_no_slice_is_above_the_limit(count, work, limit, most):
    slices = list(gpu_kernel.cuts(count, work, limit, most))
    assert [i for a, n in slices for i in range(a, a + n)] == list(range(count))
    assert all(n * (most or work / count) <= limit for _, n in slices)
    assert list(gpu_kernel.cuts(count, limit, limit, limit)) == [(0, count)]


def launched(make):
    """The bits of what a call returns, and the threads of each kernel's launches."""
    with host.recording(checked=True) as record:
        result = make()()
        arrays = result if type(result) is not mx.array else [result]
        found = [bits(a) for a in arrays]
    assert record.report.faults == ()
    threads = {}
    for launch in record.report.launches:
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
    # A mirrored table that one dispatch may not make is searched in full.
    assert before.keys() == after.keys() or name == "submanifold_table"
    grown = {k for k in after if len(after[k]) > len(before.get(k, ()))}
    assert grown, f"nothing was split: {after}"
