"""Weight gradients on Metal: a planner for each route.

dW[k] is a sum over the edges of an offset. They are cut into splits, which depend on
sizes only and are added in order: the bits are the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from ... import devices
from ...checks import DTYPES
from ...devices import METAL, Device
from ...problem import PROOF_SPLITS, Dispatch, Plan, Problem, Proof
from ..gpu import kernel as gpu_kernel
from ..gpu.contraction import WEIGHT_GRAD, edges_to_weight_grad
from ..gpu.kernel import (
    METAL_CUTS,
    GpuKernel,
    Value,
    ceil_div,
    cuts,
    dispatch_limit,
    fitting_threadgroup,
)
from .geometry import LANES
from .tiles import (
    CACHED_FEATURES,
    EIGHTS,
    FAR_ELEMENTS,
    GRAD_FILLING,
    LONGEST_RANGE,
    PARTIAL_BYTES,
    PROOF_TAIL,
    SPLIT_EDGES,
    TENSOR,
    TENSOR_HEIGHTS,
    TENSOR_WIDTH,
    THREADS,
    TILE_PLACE,
    adding,
    edge_multiply_adds,
    kernel,
    matrix_dtype,
    products,
)

GRAD_HEIGHTS, GRAD_WIDTHS = (16, 32, 64, 128), (16, 32, 64)


def grad_tile(c_in: int, c_out: int) -> tuple[int, int]:
    """Return the smallest tile of dW[k] that holds the channels, or the largest."""
    high = next(t for t in GRAD_HEIGHTS if t >= min(c_in, GRAD_HEIGHTS[-1]))
    return high, next(t for t in GRAD_WIDTHS if t >= min(c_out, GRAD_WIDTHS[-1]))


def tensor_grad_tile(c_in: int, c_out: int) -> tuple[int, int, int]:
    """Return the tile of dW[k] through TensorOps, and the rows of a simdgroup of it."""
    tiles = ceil_div(c_in, 2 * TENSOR_HEIGHTS[0])
    down = 1 if c_in <= TENSOR_HEIGHTS[0] else 2
    tall = 16 * ceil_div(c_in, 16 * tiles * down)
    return tall * down, TENSOR_WIDTH * min(2, ceil_div(c_out, TENSOR_WIDTH)), tall


def grad_splits(
    edges: int,
    longest: int,
    features: int,
    shape: tuple[int, ...],
    tile: tuple[int, int],
    item: int,
    device: Device,
) -> int:
    """Return into how many ranges of output rows the edges are cut."""
    volume, c_in, c_out = shape
    tiles = ceil_div(c_in, tile[0]) * ceil_div(c_out, tile[1])
    cached = devices.entry(CACHED_FEATURES, device)
    gathered, partial = edges * (c_in + c_out) * item, volume * c_in * c_out * 8
    # One offset's tiles pass the side with fewer channels first, which has to stay in
    # cache, at an edge a row.
    staying = features * min(c_in, c_out) // (c_in + c_out)
    together, apart = ceil_div(features, cached), ceil_div(staying, cached)
    if gathered + apart * partial < features + together * partial:
        together = apart
    filling = devices.entry(GRAD_FILLING, device) * device.cores
    # Offsets have up to three times the edges of the mean one. No range of an offset
    # may take more than its share of the work of a threadgroup's place on the GPU.
    share = devices.entry(LONGEST_RANGE, device)
    even = ceil_div(filling * longest, max(1, int(share * edges * tiles)))
    filling = max(filling // (volume * tiles), even)
    # Edges that make a split worth its partial sums, which stay within 8 times the
    # features.
    worth = ceil_div(edges, volume * devices.entry(SPLIT_EDGES, device))
    most = min(worth, 16 * features // partial)
    return max(1, min(max(filling, together), most))


GROUPED = "matrix_tiles", "grouped_gemm"
TENSOR_FILES = (
    "matrix_tiles",
    "activations",
    "epilogue",
    "tile_moments",
    "grouped_gemm",
    "tensor_ops",
    "tensor_ops_weight_grad",
)


def _rounds(
    rounds: Iterable[tuple[int, int]],
    units: int,
    work: Callable[[int], int],
    limit: int,
    grid: Callable[[int], tuple[int, ...]],
    line: Callable[[int], int],
    add: tuple[int, ...],
    most: int | None = None,
) -> tuple[Dispatch, ...]:
    """Return the dispatches of a weight gradient."""
    dispatches = []
    for split, count in rounds:
        for first, n in cuts(count * units, work(count), limit, most):
            first += split * units
            top = line(first)
            dispatches.append(Dispatch(top, line(first + n) - top, grid(n)))
        dispatches[-1] = dispatches[-1]._replace(add=add)
    return tuple(dispatches)


def _plan(
    p: Problem, name: str, gpu: GpuKernel, splits: int, dispatches, **facts
) -> Plan:
    """Return the plan of a kernel over the edges of each offset."""
    c_in, c_out = p.c_in // p.groups, p.c_out // p.groups
    sizes = {"splits": splits, "n_out": p.n_out, "volume": p.volume}
    sizes |= {"groups": p.groups, "c_in": c_in, "c_out": c_out}
    rounds = sum(bool(d.add) for d in dispatches)
    # What is added to in a later round is not rounded before.
    add = adding(DTYPES[p.dtype] if rounds == 1 else mx.float32) if rounds else None
    held = ceil_div(splits, max(1, rounds)) if splits > 1 else 0
    plan = {
        "read": lambda relation: tuple(relation.kernel_csr),
        "splits": splits,
        "partials": (splits, p.volume, c_in, p.c_out) if splits > 1 else (),
        "scratch": 4 * held * p.volume * c_in * p.c_out,
        "sizes": tuple(sizes.items()),
        "gpu": gpu,
        "add": add,
        "threadgroup": dispatches and fitting_threadgroup((*dispatches[0].grid, 1)),
        "dispatches": dispatches,
        **facts,
    }
    return Plan(p, METAL, name, "kernel_csr", edges_to_weight_grad, **plan)


def _by_threads(
    p: Problem,
    device: Device,
    name: str,
    files: tuple[str, ...],
    high: int,
    groups: int,
    bound: str,
) -> Plan:
    """Return the plan of a kernel whose threads walk the edges of a split."""
    c_in, dtype, edges = p.c_in // p.groups, DTYPES[p.dtype], p.edges_at_most
    blocks, elements = ceil_div(c_in, high), p.volume * c_in * p.c_out
    splits = _edge_splits(p, device, edges, elements)
    across = groups * ceil_div(p.c_out // groups, 4)
    held = devices.entry(PARTIAL_BYTES, device)
    rounds = list(cuts(splits, 4 * splits * elements, held))
    dispatches = _rounds(
        rounds,
        p.volume * blocks,
        lambda count: edges * c_in * p.c_out,
        dispatch_limit(bound),
        lambda units: (across, units),
        lambda unit: unit // blocks * c_in + unit % blocks * high,
        (ceil_div(p.c_out, 4), p.volume * c_in) if splits > 1 else (),
        most=_most_edges(p, edges, splits) * high * p.c_out,
    )
    template = {"T": dtype, "OUT": dtype if splits == 1 else mx.float32}
    gpu = kernel(f"{name}_weight_grad", files, WEIGHT_GRAD, **template)
    return _plan(p, name, gpu, splits, dispatches)


def _most_edges(p: Problem, edges: int, splits: int) -> int:
    """Return the most edges that one split of one offset may have."""
    # With a table, an offset has at most one edge to each output row.
    return ceil_div(min(edges, p.n_out) if p.table else edges, splits)


def _edge_splits(p: Problem, device: Device, edges: int, elements: int) -> int:
    """Return into how many splits the edges of each offset are cut."""
    worth = devices.entry(SPLIT_EDGES, device)
    wanted = ceil_div(edges, max(1, p.volume) * worth)
    fitting = devices.entry(PARTIAL_BYTES, device) // (4 * elements)
    needed = ceil_div(_most_edges(p, edges, 1), METAL_CUTS["thread_edges"])
    return max(1, needed, min(wanted, METAL_CUTS["splits"], fitting))


def relation_traversal(p: Problem, device: Device) -> Plan:
    """Plan relation_traversal's: a thread has 4 x 4 of dW[k] for a split."""
    name = "relation_traversal"
    return _by_threads(p, device, name, (name,), 4, p.groups, "multiply_adds")


def depthwise(p: Problem, device: Device) -> Plan:
    """Plan depthwise's: a thread has four outputs, whatever their groups."""
    files = "relation_traversal", "depthwise"
    return _by_threads(p, device, "depthwise", files, 1, 1, "elements")


def _by_tiles(p: Problem, device: Device, name: str) -> Plan:
    """Plan matrix tiles over ranges of rows, as small as channels allow."""
    tall = 0
    if name == "tensor_ops":
        high, wide, tall = tensor_grad_tile(p.c_in, p.c_out)
    else:
        high, wide = grad_tile(p.c_in, p.c_out)
    features = (p.n_in * p.c_in + p.n_out * p.c_out) * p.itemsize
    shape = p.volume, p.c_in, p.c_out
    edges = p.edges_at_most, _most_edges(p, p.edges_at_most, 1)
    splits = grad_splits(*edges, features, shape, (high, wide), p.itemsize, device)
    own = {"TALL": tall}
    if not tall:
        own = {"M": DTYPES[matrix_dtype(p.dtype, device)]}
    last = {**own, "FAR": _is_far(p, splits)}
    again = partial(
        _as_cut,
        device=device,
        name=name,
        tile=(high, wide),
        last=last,
        splits=min(splits, PROOF_SPLITS),
    )
    tried = high + PROOF_TAIL, wide + PROOF_TAIL
    return replace(again(p, splits=splits), proof=Proof(tried, again))


def _as_cut(
    p: Problem,
    device: Device,
    name: str,
    tile: tuple[int, int],
    last: dict[str, Value],
    splits: int,
) -> Plan:
    """Return the plan of such tiles in so many splits."""
    dtype, edges = DTYPES[p.dtype], p.edges_at_most
    limit, (high, wide) = gpu_kernel.matrix_limit(device), tile
    across = ceil_div(p.c_in, high) * ceil_div(p.c_out, wide)
    work = edges * p.c_in * p.c_out
    # Partial sums are added to the sum before, so that few are alive at a time.
    most = devices.entry(PARTIAL_BYTES, device)
    held = ceil_div(splits * p.volume * p.c_in * p.c_out * 4, most)
    dispatches = _rounds(
        cuts(splits, max(held, ceil_div(work, limit)) if splits > 1 else 1, 1),
        p.volume,
        lambda count: work * count // splits,
        limit,
        lambda units: (across * THREADS, units),
        lambda unit: unit * p.c_in,
        (ceil_div(p.c_out, 4), p.volume * p.c_in) if splits > 1 else (),
    )
    memory, place = "GradTile<T, HEIGHT, WIDTH>::FLOATS", TILE_PLACE
    files, product = GROUPED, EIGHTS
    if tall := last.get("TALL"):
        files, product = TENSOR_FILES, TENSOR
        # Threads without a part of their own give their sums to those that have one.
        helping = THREADS - high // tall * LANES * (wide // TENSOR_WIDTH)
        memory = str(16 * helping) if helping else ""
        place = TILE_PLACE if helping else f"nullptr, {TILE_PLACE}"
    gpu = kernel(
        f"{name}_weight_grad",
        files,
        WEIGHT_GRAD,
        memory,
        place,
        T=dtype,
        OUT=dtype if splits == 1 else mx.float32,
        HEIGHT=high,
        WIDTH=wide,
        **last,
    )
    return _plan(
        p,
        name,
        gpu,
        splits,
        dispatches,
        tile=tile,
        products=products(p, last.get("M", DTYPES[p.dtype])),
        threadgroup=(THREADS, 1, 1),
        count=partial(edge_multiply_adds, product=product),
    )


def _is_far(p: Problem, splits: int) -> bool:
    """Whether 32 bits do not hold the place of an element of every array."""
    largest = max(
        p.n_in * p.c_in,
        p.n_out * p.c_out,
        3 * p.edges_at_most,
        splits * p.volume * p.c_in * p.c_out,
    )
    return largest >= FAR_ELEMENTS["*"]


def grouped_gemm(p: Problem, device: Device) -> Plan:
    """Plan grouped_gemm's: matrix tiles over ranges of each offset's edges."""
    return _by_tiles(p, device, "grouped_gemm")


def tensor_ops(p: Problem, device: Device) -> Plan:
    """Plan tensor_ops': the tiles of grouped_gemm through TensorOps."""
    return _by_tiles(p, device, "tensor_ops")
