"""Every CUDA kernel family once, small, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python tests/sanitize/cuda_kernels.py [PART ...]

It fails too if a sum is wrong and, unless parts are named (see ``PARTS``), if a source
in ``cuda/`` was not run.
"""

import argparse
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")  # a launch is a launch
# Sources are seen where MLX compiles them, a second or more each in every process. Set
# to 1 with named parts, kernels that are cached on disk are not compiled again.
os.environ.setdefault("MLX_LATTICE_CUDA_CACHE", "0")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import cases  # noqa: E402
import contractions as points  # noqa: E402
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import reference as ref  # noqa: E402
from cases import Case  # noqa: E402
from conftest import KINDS, assert_same, build, pair  # noqa: E402
from contractions import Point, moved, work  # noqa: E402
from epilogues import epilogue, oracle  # noqa: E402
from head_checks import Given as Heads  # noqa: E402
from norm_checks import (  # noqa: E402
    GROUPS,
    Given,
    array,
    check_groups,
    joined,
    moments,
)
from places import Place  # noqa: E402
from reduction_checks import Checks  # noqa: E402

import mlx_lattice as ml  # noqa: E402
from mlx_lattice import (  # noqa: E402
    devices,  # noqa: E402
    ops,
    registry,
)
from mlx_lattice.backends.cuda import thresholds as cuda_thresholds  # noqa: E402
from mlx_lattice.backends.cuda import tiles as cuda_tiles  # noqa: E402
from mlx_lattice.backends.gpu import kernel as gpu_kernel  # noqa: E402
from mlx_lattice.backends.gpu import norms as gpu_norms  # noqa: E402
from mlx_lattice.backends.gpu.optimizers import SGD  # noqa: E402
from mlx_lattice.checks import DTYPES  # noqa: E402
from mlx_lattice.problem import FORWARD, INPUT_GRAD, Problem  # noqa: E402
from mlx_lattice.registry import RowSegments  # noqa: E402
from mlx_lattice.routes import (  # noqa: E402
    TABLE,
    named,
)

used: set[str] = set()
cuda_kernel = mx.fast.cuda_kernel


def recorded(*args, header="", **more):
    """Note which sources a kernel is made of."""
    used.update(re.findall(r'#include "[^"]*/([^/"]+)"', header))
    return cuda_kernel(*args, header=header, **more)


mx.fast.cuda_kernel = recorded
points.SCENES["tiles"] = KINDS[0], "surface", 300
# All that CUDA kernels run.
ROWS = [(r, p) for r in TABLE for p in r.passes if r.planner(devices.CUDA, p)]
POINT = Point("tiles", (64, 64, 1), "float16")
MOVED = "x w dy bias 1"
# Few rows take the tiles of many then.
NO_SMALL_TILES = dict.fromkeys(cuda_tiles.SMALL_TILES, {})


def geometry() -> None:
    """Relations of every kind, their transposes, edges, orders and tiles."""
    tiles = named("sorted_implicit_gemm")
    for case in (*KINDS, Case("submanifold", 3, 7)):  # the last has many offsets
        relation, expected = pair(case, "surface", 300)
        assert_same(relation, expected)
        np.testing.assert_array_equal(np.array(relation.in_out), expected.in_out)
        problem = Problem.of(FORWARD, relation, 16, 16, mx.float16)
        mx.eval(*tiles.plan(problem, devices.current()).read(relation))
    rows = np.arange(4000, dtype=np.int32).reshape(1000, 4)
    rows[900] = rows[30]
    try:
        build(KINDS[0], rows)
    except ValueError as error:
        assert "30 and 900" in str(error), error
    else:
        raise AssertionError("a row that comes twice was not seen")
    rows = cases.geometry("surface", 3, 9000).astype(np.int32)  # of several tiles
    mask = np.arange(len(rows)) % 3 == 0
    x = ml.SparseTensor(mx.array(rows), mx.ones((len(rows), 4)))
    kept = ops.prune(x, mx.array(mask)).coords
    np.testing.assert_array_equal(np.array(kept), rows[mask])
    for dtype in (mx.float32, mx.float16):  # keys of two words and of one
        scores = mx.array(np.arange(len(rows)) % 7).astype(dtype)
        best = ops.top_k(x, scores, 100)
        assert len(best) == 100 * len(np.unique(rows[:, 0]))


def contraction(point: Point, device: devices.Device | None = None) -> None:
    """A point, in every pass, by all rows of the table that have a CUDA kernel.

    Args:
        point: what is computed.
        device: what it is planned for; by default the one that MLX runs on.
    """
    device = device or devices.current()
    relation = points.scene(point.scene)[0]
    c_in, c_out, groups = point.shape
    bits, group_size = point.packing or (None, None)
    for route, pass_ in ROWS:
        problem = Problem.of(
            pass_,
            relation,
            c_in,
            c_out,
            DTYPES[point.dtype],
            groups,
            table=relation.has_table,
            bits=bits,
            group_size=group_size,
        )
        gradient = bits and pass_ != FORWARD  # of packed weights there are none
        if gradient or route.refusal(problem, device, forced=True):
            continue
        given = work(replace(point, bias=point.bias and pass_ == FORWARD), pass_)
        plan = route.plan(problem, device)
        if pass_ == FORWARD:
            y = plan(relation, given.x, given.w, given.bias)
        elif pass_ == INPUT_GRAD:
            y = plan(relation.T, given.dy, given.w)
        else:
            y = plan(relation, given.x, given.dy)
        ref.assert_close(y, given.wanted, point.dtype, f"{route} {pass_} {plan}")


def finished(point: Point, activation: str, device: devices.Device | None = None):
    """A point with what follows its sums, by every route whose kernels compute it."""
    device, before = device or devices.current(), int(bool(point.moved))
    given = work(point, FORWARD)
    relation, (_, c_out, _) = given.relation, point.shape
    after = epilogue(relation.n_out, c_out, point.dtype, activation, before=before)
    bits, group_size = point.packing or (None, None)
    problem = Problem.of(
        FORWARD,
        relation,
        *point.shape[:2],
        DTYPES[point.dtype],
        point.shape[2],
        table=relation.has_table,
        bits=bits,
        group_size=group_size,
        epilogue=after.facts,
    )
    wanted = oracle(given.wanted, after)
    for route, pass_ in ROWS:
        if pass_ == FORWARD and not route.refusal(problem, device, forced=True):
            plan = route.plan(problem, device)
            assert plan.then is None, f"{route} has no epilogue in its kernels"
            y = plan(relation, given.x, given.w, *after.as_kernels_take(after.facts))
            ref.assert_close(y, wanted, point.dtype, f"{route} {plan}")


def epilogues() -> None:
    """What follows the sums: in every kind of tile, where splits are added, by rows."""
    one = replace(devices.current(), cores=1)  # no splits
    for shape in ((64, 64, 1), (64, 128, 1), (40, 136, 1), (16, 16, 16), (12, 6, 6)):
        finished(replace(POINT, shape=shape), "relu", one)
    finished(replace(POINT, shape=(64, 64, 1), moved=MOVED), "gelu", one)
    finished(replace(POINT, dtype="float32"), "silu", one)
    finished(replace(POINT, shape=(40, 40, 40), moved=MOVED), "gelu")
    finished(POINT, "elu(0.5)")
    finished(replace(POINT, shape=(72, 40, 1), packing=(4, 32)), "relu", one)
    finished(POINT, "relu", replace(devices.profile("a100"), cores=1))
    with patch.object(cuda_tiles, "SMALL_TILES", NO_SMALL_TILES):
        finished(replace(POINT, shape=(40, 136, 1)), "relu", one)


def statistics() -> None:
    """Statistics of rows: by tiles, one of a block and several, and by splits."""
    one, own = replace(devices.current(), cores=1), devices.current()
    route = named("sorted_implicit_gemm")
    for device, dtype in ((one, "float16"), (own, "float16"), (own, "float32")):
        for shape in ((64, 64, 1), (96, 96, 1), (40, 136, 1), (16, 32, 1)):
            given = work(replace(POINT, shape=shape, dtype=dtype, bias=True), FORWARD)
            facts = given.relation, *shape[:2], DTYPES[dtype]
            problem = Problem.of(FORWARD, *facts, moments=True)
            with patch.object(gpu_norms, "ONE_LAUNCH_NORM", 0):
                plan = route.plan(problem, device)
            assert plan.moments or (plan.variant, plan.splits) == ("mma", 1)
            if plan.moments:
                y, lines = plan(given.relation, given.x, given.w, given.bias)
                for got, wanted in zip(joined(lines), moments(y), strict=True):
                    np.testing.assert_allclose(got, wanted, 1e-3, 1e-4)


def contractions() -> None:
    """Every float route: whole tiles and cut ones, and blocks that take several."""
    for dtype in ("float16", "float32"):
        for shape in ((64, 64, 1), (40, 136, 1), (64, 64, 64), (40, 40, 40)):
            contraction(replace(POINT, shape=shape, dtype=dtype))
    for scene in ("tiles", "forward"):  # many offsets, and few; tails, and none
        for shape in ((96, 96, 1), (64, 64, 1), (80, 112, 1), (160, 224, 1)):
            contraction(replace(POINT, scene=scene, shape=shape))
    for scene in ("inverse_65", "strided_65", "pointwise_65"):  # rows of one edge
        for shape in ((64, 64, 1), (40, 88, 1)):
            contraction(replace(POINT, scene=scene, shape=shape, bias=True))
    split = dict.fromkeys(cuda_thresholds.WHOLE_GRAD, ((0, 0),))
    with patch.object(cuda_thresholds, "WHOLE_GRAD", split):  # dW by partial sums
        for shape in ((64, 64, 1), (96, 96, 1), (40, 136, 1)):
            contraction(replace(POINT, shape=shape))
    with patch.object(cuda_tiles, "SMALL_TILES", NO_SMALL_TILES):
        for width in (128, 192, 256):  # where warps that multiply copy the first stage
            contraction(replace(POINT, shape=(width, width, 1)))
    contraction(Point("edges", (5, 7, 1)))
    contraction(POINT, replace(devices.current(), cores=1))


def views() -> None:
    """Arrays that begin in the middle of a word, by every route."""
    for shape in ((16, 16, 1), (64, 128, 1)):
        contraction(replace(POINT, shape=shape, moved=MOVED, bias=True))
    contraction(replace(POINT, shape=(64, 128, 1)))


def packed(device: devices.Device | None = None) -> None:
    """Both routes of packed weights: unpacked in tiles, and once."""
    point = replace(POINT, shape=(72, 40, 1))
    for bits, dtype in ((4, "float16"), (8, "float16"), (4, "float32")):
        contraction(replace(point, dtype=dtype, packing=(bits, 32)), device)
    few_rows = {
        key: dict.fromkeys(row, 0) for key, row in cuda_thresholds.UNPACK_ROWS.items()
    }
    with patch.object(cuda_thresholds, "UNPACK_ROWS", few_rows):
        for channels in (64, 256):
            shape = channels, channels, 1
            contraction(replace(point, shape=shape, packing=(4, 32)), device)


def before_hopper() -> None:
    """The tiles of GPUs without wgmma."""
    device = devices.profile("a100")
    contraction(replace(POINT, shape=(40, 72, 1)), device)
    packed(device)


def reductions() -> None:
    """Sums and maxima by tables and by segments, whole and in pieces."""
    checks = Checks(registry.reductions())
    of = np.random.default_rng(0).integers(0, 7, 60)
    for channels in (3, 16):
        checks.tables("float16", (25, 8, 9), True, channels)
        checks.max(pair(KINDS[2], "batches"), channels, "float16")
        checks.segments(of, 8, channels)
    gpu_kernel.SEGMENT_CUTS.update(piece=2, longest=4)
    checks.segments(of, 8, 3)


def norms() -> None:
    """Norms of all rows and of batch elements, forward and back, whole and by views."""
    of = np.repeat([0, 2], [70, 30])
    segments = RowSegments((0, 70, 70, 100), mx.array(of.astype(np.int32)))
    ordered = replace(segments, order=mx.arange(100, dtype=mx.int32))
    place = Place()
    place.name = devices.CUDA
    for dtype in ("float16", "float32"):
        for channels in (3, 16, 264):
            for act in ("relu", "gelu", "silu", "gelu_tanh", "elu"):
                Given((100, channels), dtype, act).check(place, dtype)
            Given((1, channels), dtype, affine=False, added=False).check(place, dtype)
            given = Given((100, channels), dtype, "relu", of=of)
            given.check(place, dtype, segments)
            given.x, given.dy = moved(given.x), moved(given.dy)
            given.check(place, dtype, ordered)
    with pytest.MonkeyPatch.context() as patched:
        for given in GROUPS:
            check_groups(place, patched, *given)


def row_norms() -> None:
    """Layer norms by a thread, parts of a warp and a warp, whole and by views."""
    for dtype in DTYPES.values():
        for channels in (8, 48, 256, 512):
            x = mx.array(np.random.default_rng(0).random((333, channels)), dtype)
            line = mx.ones((channels,))
            for given in ((x, line, line), tuple(map(moved, (x, line, line)))):
                wide = given[0].astype(mx.float32)
                with mx.stream(mx.cpu):
                    wanted = np.array(mx.fast.layer_norm(wide, None, None, 1e-5) + 1)
                ref.assert_close(ops.layer_norm(*given), wanted, str(dtype)[9:])
                for some in (given, given[:1]):
                    mx.eval(mx.vjp(ops.layer_norm, list(some), [given[0]])[1])
                added = partial(ops.layer_norm, residual=given[0], activation="silu")
                mx.eval(*mx.vjp(added, list(given), [given[0]]))


def before_attention() -> None:
    """Heads of part of a warp and of a whole one, and sums of columns, by views too."""
    place = Place()
    place.name = devices.CUDA
    for dtype in ("float16", "float32"):
        for shape in ((300, 3, 64), (70, 2, 96), (9, 12, 128)):
            heads = Heads(shape, dtype)
            heads.check(place, dtype)
            heads.x, heads.dy = moved(heads.x), moved(heads.dy)
            heads.check(place, dtype)
        for shape in ((300, 33), (2048, 16), (5000, 96)):
            x, values = array(shape, dtype)
            for given in (x, moved(x)):
                y = registry.NORMS[devices.CUDA].column_sums(given, mx.float32)
                ref.assert_close(y, values.sum(axis=0), dtype)


def updates() -> None:
    """Optimizers' steps of parameters with odd ends, whole and by views."""
    rate = mx.array([0.5, *[0.0] * 7])
    for dtype in DTYPES.values():
        arrays = [mx.ones((size,), dtype) for size in (1, 24, 9001)]
        for given in (arrays, list(map(moved, arrays))):
            made = registry.UPDATES[devices.CUDA].step(
                SGD, rate, [(a, a) for a in given]
            )
            assert all(mx.all(new[0] == 0.5) for new in made)


def joins() -> None:
    """Rows side by side and apart, in words of 16 bytes and of less."""
    kernels = registry.JOINS[devices.CUDA]
    for dtype in DTYPES.values():
        for c_a, c_b in ((16, 32), (12, 20), (3, 5)):
            parts = [mx.full((301, c), c, dtype) for c in (c_a, c_b)]
            y = kernels.join(*map(moved, parts))
            found = *kernels.split(y, c_a), *kernels.split(moved(y), c_a)
            assert all(map(mx.array_equal, found, 2 * parts))


PARTS = (
    geometry, contractions, epilogues, statistics, views, packed, before_hopper,
    reductions, norms, row_norms, before_attention, updates, joins,
)  # fmt: skip


def main() -> None:
    parts = {part.__name__: part for part in PARTS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    asked = parser.parse_args().parts
    if unknown := set(asked) - set(parts):
        parser.error(f"no part is named {', '.join(unknown)}; see --help")
    for name in asked or parts:
        parts[name]()
        print(f"{name} done", flush=True)
    left = {path.name for path in (ROOT / "cuda").glob("*.cu*")} - used
    assert asked or not left, f"nothing ran {', '.join(sorted(left))}"
    print(f"ran kernels of {', '.join(sorted(used))}")


if __name__ == "__main__":
    main()
