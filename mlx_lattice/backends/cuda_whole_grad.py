"""Weight gradients of few edges on Hopper: one launch writes dW, no partial sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

import mlx.core as mx

from ..devices import CUDA, Device
from ..problem import DTYPES, MLX_LAYOUT, Problem
from ..relation import Relation
from ..routes import thresholds
from ..routes.plan import Dispatch, Plan, Proof
from . import cuda_counts, cuda_tiles
from .cuda_views import pairs
from .gpu_kernel import GpuKernel
from .runners import edges_to_weight_grad
from .signatures import WEIGHT_GRAD, kept

STAGE = 64  # edges
OF_OFFSETS = replace(
    WEIGHT_GRAD,
    inputs=("x", "dy", "pairs", "spans"),
    sizes=tuple({**dict(WEIGHT_GRAD.sizes), "volume": "spans_shape[0]"}.items()),
)


def pays(p: Problem, device: Device) -> bool:
    """Whether offsets have so few edges that blocks pass all of those of one."""
    if not cuda_tiles.has_wgmma(p, device):
        return False
    table = thresholds.WHOLE_GRAD
    most = STAGE * table["cluster"]  # edges of a stage of every block of a cluster
    longest = min(p.n_in, p.n_out, p.edges_at_most)
    mean = p.edges_at_most / p.volume
    return mean <= table["stages"] * most and longest <= table["longest"] * most


def grouped_gemm_whole(p: Problem, device: Device) -> Plan:
    """Plan tiles of dW over all edges of an offset each."""
    tile = _tile(p, device)
    most = device.cores * tile.per_multiprocessor // (p.volume * _tiles(p, tile))
    cluster = 1 << max(0, min(most, thresholds.WHOLE_GRAD["cluster"]).bit_length() - 1)
    again = partial(_planned, tile=tile, cluster=cluster)
    more = 2 * cuda_tiles.multiple(DTYPES[p.dtype]) - 3
    tried = tile.rows + more, tile.width + more
    return replace(again(p), proof=Proof(tried, again))


def _tile(p: Problem, device: Device) -> thresholds.Tile:
    """Return the tile whose longest block, and the GPU, read the fewest bytes."""
    c_in, c_out = cuda_tiles.whole_channels(p)
    longest = min(-(-min(p.n_in, p.n_out) // STAGE), p.edges_at_most)
    stages = p.edges_at_most // STAGE + p.volume

    def cost(tile: thresholds.Tile) -> float:
        each = min(tile.rows, c_in) + min(tile.width, c_out)
        return each * (longest + stages * _tiles(p, tile) / device.cores)

    return min(thresholds.WHOLE_TILES, key=cost)


def _tiles(p: Problem, tile: thresholds.Tile) -> int:
    """Return how many tiles the gradient of an offset has."""
    c_in, c_out = cuda_tiles.whole_channels(p)
    return -(-c_in // tile.rows) * -(-c_out // tile.width)


def _planned(p: Problem, tile: thresholds.Tile, cluster: int) -> Plan:
    """Plan tiles of a shape, of so many blocks each."""
    blocks = cluster * p.volume * _tiles(p, tile)
    dtype, transposes = DTYPES[p.dtype], p.layout == MLX_LAYOUT
    template = (
        ("T", dtype),
        ("CONSUMERS", tile.consumers),
        ("WIDTH", tile.width),
        ("STAGES", tile.stages),
        ("CLUSTER", cluster),
        ("TRANSPOSED", transposes),
    )
    kernel = GpuKernel(
        CUDA,
        "grouped_gemm_whole",
        (*cuda_tiles.HOPPER, "grouped_gemm_whole.cu"),
        OF_OFFSETS,
        template,
        threads=tile.threads,
        blocks_per_multiprocessor=tile.per_multiprocessor,
        shared_bytes=thresholds.shared_bytes(tile),
        cluster=cluster,
    )
    return Plan(
        p,
        CUDA,
        "grouped_gemm",
        "edges",
        edges_to_weight_grad,
        read=_read_pairs,
        gpu=kept(kernel),
        reads_stored=transposes,
        variant="whole",
        tile=(tile.rows, tile.width),
        multiple=cuda_tiles.multiple(dtype),
        threadgroup=(kernel.threads,),
        dispatches=(Dispatch(0, prod((p.volume, p.c_in)), (blocks * kernel.threads,)),),
        count=cuda_counts.edges_to_weight_grad,
    )


def _read_pairs(relation: Relation) -> tuple[mx.array, ...]:
    return tuple(pairs(relation))
