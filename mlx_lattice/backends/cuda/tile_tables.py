"""Shapes of Hopper's matrix tiles, and which shape serves which problem, as tables.

The tables were chosen by timings on an H200 (``benchmarks/tiles.py``; results in
benchmarks/results/gpu-tiles.jsonl, gpu-surfaces.jsonl, gpu-small.jsonl and
gpu-itself.jsonl). tests/routes/test_cuda_timings.py compares each choice with the
fastest tile that was timed.
"""

from __future__ import annotations

from typing import NamedTuple


class PersistentTile(NamedTuple):
    """Shape of PersistentTile of sorted_implicit_gemm.

    Attributes:
        consumers: warpgroups that multiply.
        blocks: blocks of 64 rows of each.
        producers: warpgroups that copy.
        width: output channels.
        stages: buffers of 64 summed channels, in shared memory.
        per_multiprocessor: thread blocks that a multiprocessor holds at once.
    """

    consumers: int
    blocks: int
    producers: int
    width: int
    stages: int
    per_multiprocessor: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.consumers * self.blocks

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.consumers + self.producers)


class WideTile(NamedTuple):
    """Shape of WideTile and EdgeTile: a consumer warpgroup has 64 rows of the tile.

    A block has ``splits`` of the sums side by side, each with such warps and stages.
    """

    consumers: int
    producer_threads: int
    width: int
    stages: int
    per_multiprocessor: int
    splits: int = 1

    @property
    def rows(self) -> int:
        """Rows (of the output, or of dW) of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.splits * (128 * self.consumers + self.producer_threads)


Shape = PersistentTile | WideTile


def shared_bytes(tile: Shape, weights: int = 1) -> int:
    """Return the dynamic shared memory of a block.

    ``weights`` are the parts of a weight in a stage. Weights that run across the sums
    come in whole atoms of 64 lines.
    """
    width, splits = tile.width, getattr(tile, "splits", 1)
    lines = width if width <= 32 else -(-width // 64) * 64
    return splits * tile.stages * 128 * (tile.rows + weights * lines) + 1024


# PersistentTile by its width in output channels. Tiles are bound by reads from the L2
# cache, about 30 bytes a cycle and multiprocessor, and by how fast warps issue copies.
SORTED_TILES = {
    32: PersistentTile(2, 2, 2, 32, 6, 1),
    48: PersistentTile(2, 2, 2, 48, 5, 1),
    64: PersistentTile(2, 2, 2, 64, 5, 1),
    96: PersistentTile(2, 2, 2, 96, 4, 1),
    128: PersistentTile(2, 2, 1, 128, 4, 1),
    192: PersistentTile(2, 1, 1, 192, 4, 1),
    256: PersistentTile(2, 1, 1, 256, 4, 1),
}
# WideTile, of more than 64 channels.
WIDE_TILES = {
    80: WideTile(3, 128, 80, 5, 1),
    96: WideTile(3, 128, 96, 5, 1),
    112: WideTile(3, 128, 112, 5, 1),
    128: WideTile(3, 128, 128, 5, 1),
    160: WideTile(3, 128, 160, 4, 1),
    192: WideTile(2, 128, 192, 4, 1),
    224: WideTile(2, 128, 224, 4, 1),
    256: WideTile(2, 128, 256, 4, 1),
}
WIDTHS = {*SORTED_TILES, *WIDE_TILES}
# If rows have few edges, a tile has little work: lower tiles.
FEW_EDGES_TILES = {
    32: PersistentTile(1, 1, 1, 32, 4, 4),
    48: PersistentTile(1, 1, 1, 48, 3, 4),
    64: PersistentTile(1, 1, 1, 64, 3, 4),
    96: PersistentTile(1, 1, 1, 96, 4, 2),
    128: PersistentTile(1, 1, 1, 128, 4, 2),
    192: PersistentTile(2, 1, 1, 192, 4, 1),
    256: PersistentTile(2, 1, 1, 256, 4, 1),
}
# float32 as one product of TF32, and as three (FLOAT_TILES): then the rows and parts of
# the sums take registers, and a stage has the weights twice.
TF32_TILES = {
    "many": {
        32: PersistentTile(2, 2, 2, 32, 6, 1),
        64: PersistentTile(2, 2, 2, 64, 5, 1),
        96: PersistentTile(2, 2, 2, 96, 4, 1),
        128: PersistentTile(2, 2, 1, 128, 4, 1),
    },
    "few": {
        32: PersistentTile(1, 1, 1, 32, 4, 2),
        64: PersistentTile(1, 1, 1, 64, 4, 2),
        96: PersistentTile(1, 1, 1, 96, 4, 2),
        128: PersistentTile(1, 1, 1, 128, 4, 2),
    },
}
# One product of TF32 if each stage has one offset: within 9% of the fastest.
TF32_WHOLE_TILES = {
    "many": {
        32: WideTile(1, 128, 32, 3, 4),
        64: WideTile(2, 128, 64, 4, 2),
        96: WideTile(1, 128, 96, 4, 2),
        128: WideTile(2, 128, 128, 6, 1),
        160: WideTile(2, 128, 160, 4, 1),
        192: WideTile(2, 128, 192, 4, 1),
        224: WideTile(2, 128, 224, 4, 1),
        256: WideTile(2, 128, 256, 4, 1),
    },
    "few": {
        32: WideTile(1, 128, 32, 3, 4),
        64: WideTile(1, 128, 64, 6, 2),
        96: WideTile(1, 128, 96, 4, 2),
        128: WideTile(1, 128, 128, 4, 2),
    },
}
FLOAT_TILES = {
    "many": {
        32: PersistentTile(2, 2, 2, 32, 5, 1),
        64: PersistentTile(2, 2, 2, 64, 4, 1),
        96: PersistentTile(2, 1, 2, 96, 5, 1),
        128: PersistentTile(2, 1, 1, 128, 4, 1),
    },
    "few": {
        32: PersistentTile(1, 1, 1, 32, 4, 2),
        64: PersistentTile(1, 1, 1, 64, 4, 2),
        96: PersistentTile(2, 1, 1, 96, 4, 1),
        128: PersistentTile(2, 1, 1, 128, 4, 1),
    },
}
# int8 features, of many edges and of few.
INT8_TILES = {
    32: PersistentTile(2, 3, 2, 32, 4, 1),
    48: PersistentTile(2, 2, 2, 48, 5, 1),
    64: PersistentTile(2, 3, 2, 64, 4, 1),
    96: PersistentTile(2, 2, 2, 96, 4, 1),
    112: WIDE_TILES[112],
    128: PersistentTile(2, 2, 2, 128, 4, 1),
    160: WIDE_TILES[160],
    192: WIDE_TILES[192],
    224: WIDE_TILES[224],
    256: WIDE_TILES[256],
}
INT8_FEW_EDGES_TILES = FEW_EDGES_TILES | {
    112: WideTile(1, 128, 112, 4, 2),
    160: WideTile(1, 128, 160, 3, 2),
    224: FEW_EDGES_TILES[256],
}
ANY = 1 << 62
# EdgeTile of grouped_gemm, by the width of the wider side.
GRAD_TILES = {
    32: WideTile(1, 128, 32, 4, 4),
    64: WideTile(1, 128, 64, 4, 3),
    80: WideTile(2, 64, 80, 3, 2),
    96: WideTile(2, 64, 96, 3, 2),
    112: WideTile(2, 64, 112, 3, 2),
    128: WideTile(2, 64, 128, 3, 2),
    160: WideTile(3, 128, 160, 4, 1),
    192: WideTile(3, 128, 192, 4, 1),
    224: WideTile(2, 128, 224, 4, 1),
    256: WideTile(2, 128, 256, 4, 1),
}
# EdgeTile of few edges.
FEW_EDGES_GRAD_TILES = {
    96: WideTile(2, 128, 96, 4, 1),
    128: WideTile(1, 128, 128, 4, 2),
}
# dW in one launch: a block for each tile of an offset, by width. The least that has all
# output channels, or a wider one that fits twice into both sides.
WHOLE_TILES = {
    32: WideTile(1, 128, 32, 6, 3),
    48: WideTile(1, 128, 48, 4, 3),
    64: WideTile(1, 128, 64, 4, 3),
    128: WideTile(2, 128, 128, 6, 1),
    256: WideTile(2, 128, 256, 4, 1),
}
# Several splits in a block. If edges are many and blocks are fewer than
# multiprocessors, the first such; for few offsets, a tile that fits twice into both
# sides comes before.
SPLIT_WHOLE_TILES = WideTile(1, 128, 32, 6, 1, 2), WideTile(1, 128, 64, 4, 1, 2)
EVEN_WHOLE_TILE = WideTile(2, 128, 96, 3, 1, 2)


# Tiles of few rows: for each width, or the very channels, (most elements of the output,
# shape) pairs, of which the first that has room serves. First lower and narrower ones.
_NARROW, _HALF_80, _HALF_96, _HALF_112, _HALF, _HALF_160 = (
    WideTile(1, 128, *rest)
    for rest in (
        (64, 6, 2),
        (80, 4, 2),
        (96, 4, 2),
        (112, 4, 2),
        (128, 4, 2),
        (160, 3, 2),
    )
)
# More and narrower ones, and more side by side.
_NARROW_32, _NARROW_3 = WideTile(1, 128, 32, 6, 2), WideTile(1, 128, 64, 4, 3)
_THREE_32, _THREE_48 = WideTile(1, 128, 32, 6, 3), WideTile(1, 128, 48, 4, 3)
_LOW, _LOW_96, _LOW_128 = (FEW_EDGES_TILES[width] for width in (64, 96, 128))
# Of 128 rows, and of 192.
_QUICK_64 = WideTile(2, 128, 64, 4, 2)
_WIDE_96, _WIDE_128, _WIDE_160 = (
    WideTile(2, 128, width, 5, 1) for width in (96, 128, 160)
)
_HIGH_48 = WideTile(3, 128, 48, 6, 1)
# The channels of an offset do not fill a stage, and those of several come together.
_SLICED_32 = (1 << 23, PersistentTile(1, 2, 1, 32, 5, 2))
_SLICED = {
    32: (
        (1 << 17, FEW_EDGES_TILES[32]),
        (3 << 16, PersistentTile(2, 1, 2, 32, 6, 1)),
        _SLICED_32,
    ),
    48: ((1 << 18, _LOW),),
    **dict.fromkeys((64, 96, 128, 192, 256), ((1 << 19, _LOW),)),
}
_SLICED_FEW_OFFSETS = _SLICED | {96: ((1 << 19, _LOW), (1 << 20, _LOW_96))}
_SLICED_ONE_EDGE = _SLICED | {
    96: ((1 << 19, _LOW), (1 << 21, PersistentTile(2, 1, 2, 96, 4, 1)))
}
# They fill whole stages.
_WHOLE = {
    32: ((1 << 22, _THREE_32),),
    48: ((1 << 23, _THREE_48),),
    64: (
        (1 << 20, _NARROW_3),
        (5 << 20, WideTile(1, 128, 64, 3, 4)),
        (10 << 20, _QUICK_64),
    ),
    80: ((1 << 18, _HALF_80),),
    96: ((3 << 15, _NARROW), (1 << 20, _HALF)),
    112: ((1 << 18, _HALF_112),),
    128: ((1 << 17, _NARROW), (1 << 19, _HALF)),
    160: ((1 << 18, _HALF_80), (7 << 18, _WIDE_160)),
    192: ((1 << 16, _NARROW), (1 << 18, _HALF_96), (1 << 19, _WIDE_96)),
    224: ((1 << 18, _HALF_112),),
    256: (
        (1 << 16, _NARROW),
        (1 << 18, _HALF),
        (1 << 19, _WIDE_128),
        (1 << 21, WIDE_TILES[128]),
        (33 << 17, WIDE_TILES[256]),
        (3 << 21, _WIDE_128),
    ),
    384: ((3 << 15, _NARROW), (3 << 20, WIDE_TILES[192]), (1 << 22, _WIDE_128)),
    512: ((1 << 16, _NARROW), (1 << 18, _HALF), (1 << 19, _WIDE_128)),
}
_FEW_EDGES = {
    32: _SLICED[32],
    48: _SLICED[48],
    64: ((3 << 20, _NARROW),),
    80: ((1 << 20, _NARROW), (3 << 22, _HALF_80)),
    112: ((3 << 19, _NARROW), (3 << 23, _HALF_112)),
    160: ((1 << 21, _HALF_80), (ANY, _HALF_160)),
    224: ((ANY, _HALF_112),),
    128: ((3 << 19, _NARROW), (3 << 21, _HALF)),
    **dict.fromkeys((96, 192, 256), ((1 << 18, _NARROW), (3 << 21, _HALF))),
}
_FEW_OFFSETS = {
    32: _SLICED[32],
    48: _SLICED[48],
    64: ((1 << 19, _NARROW_32), (6 << 20, _NARROW_3)),
    80: ((1 << 18, _NARROW), (1 << 20, _HALF_80)),
    96: _WHOLE[96],
    112: ((5 << 16, _NARROW), (1 << 21, _HALF_112)),
    128: ((1 << 21, _NARROW), (1 << 22, _HALF)),
    160: ((1 << 21, _HALF_80),),
    192: ((3 << 19, _NARROW), (1 << 22, _WIDE_96)),
    224: ((1 << 22, _HALF_112),),
    256: ((1 << 20, _NARROW), (1 << 22, _HALF)),
    384: ((3 << 15, _NARROW), (1 << 22, _HALF)),
    512: ((1 << 18, _NARROW), (1 << 22, _HALF)),
}
_ONE_EDGE = {
    32: _SLICED[32],
    48: _SLICED[48],
    64: (
        (1 << 18, _NARROW_32),
        (33 << 16, WideTile(1, 128, 64, 3, 4)),
        (3 << 20, _LOW),
        (1 << 25, PersistentTile(2, 1, 1, 64, 3, 2)),
    ),
    96: ((1 << 18, _NARROW), (1 << 21, _HALF), (1 << 23, _LOW_128)),
    128: (
        (1 << 18, _NARROW),
        (1 << 21, _HALF),
        (99 << 15, WIDE_TILES[128]),
        (5 << 21, _LOW_128),
    ),
    192: (
        (1 << 20, _NARROW),
        (9 << 18, WIDE_TILES[192]),
        (9 << 20, PersistentTile(2, 1, 1, 96, 3, 2)),
    ),
    256: (
        (1 << 19, _NARROW),
        (3 << 19, _HALF),
        (1 << 22, WIDE_TILES[128]),
        (3 << 22, PersistentTile(2, 1, 2, 128, 4, 1)),
    ),
}
# They fill a stage and part of the next, or more: WideTile multiplies no zeros there.
_DEEP = _WHOLE | {
    32: ((ANY, _THREE_32),),
    48: ((ANY, _HIGH_48),),
    64: ((1 << 18, _NARROW_3), (ANY, _QUICK_64)),
    96: ((1 << 19, _HALF_96),),
    256: ((1 << 16, _NARROW), (1 << 18, _HALF), (3 << 20, WIDE_TILES[128])),
}
_DEEP_FEW_EDGES = _FEW_EDGES | {
    64: ((1 << 23, _NARROW),),
    96: ((1 << 20, _NARROW), (3 << 22, _HALF_96)),
    128: ((3 << 19, _NARROW), (ANY, _HALF)),
    192: ((1 << 18, _NARROW), (ANY, _HALF_96)),
    256: ((1 << 18, _NARROW), (3 << 23, _HALF), (ANY, WIDE_TILES[256])),
}
_DEEP_ONE_EDGE = _ONE_EDGE | {
    80: ((1 << 20, _HALF_80), (ANY, SORTED_TILES[96])),
    96: ((1 << 19, _NARROW_32), (3 << 19, _HALF_96), (ANY, WIDE_TILES[96])),
    112: ((1 << 21, _HALF_112), (1 << 23, WIDE_TILES[112]), (ANY, SORTED_TILES[128])),
    128: ((1 << 21, _HALF), (1 << 23, WIDE_TILES[128]), (ANY, SORTED_TILES[128])),
    160: ((1 << 21, _WIDE_160), (ANY, WIDE_TILES[160])),
    192: ((1 << 20, _NARROW), (ANY, WIDE_TILES[192])),
    224: ((5 << 19, WIDE_TILES[112]), (ANY, WIDE_TILES[224])),
    256: ((1 << 19, _NARROW), (3 << 19, _HALF), (ANY, WIDE_TILES[256])),
}
# Narrow outputs of sums whose last stage is half full, or more.
_PART_32 = ((1 << 16, _THREE_32), *_SLICED[32])
_PART_48 = ((3 << 17, _THREE_48), (5 << 17, SORTED_TILES[48]), (1 << 20, _NARROW_3))
_PART_FEW_OFFSETS = {
    32: ((1 << 19, _THREE_32), _SLICED_32),
    48: ((1 << 20, _THREE_48), (1 << 22, _NARROW_3)),
}
_PART_ONE_EDGE = {32: ((1 << 19, _THREE_32), _SLICED_32), 48: ((1 << 21, _THREE_48),)}
# Of many rows beyond, PersistentTile.
_MANY_80 = ((1 << 24, WIDE_TILES[80]), (ANY, SORTED_TILES[96]))
# How the summed channels of an offset fill stages of 64: less than half of one, half of
# one or more, one and a tail, more and a tail, whole ones. For each, the tables of many
# offsets with many edges a row, and with few; then of few offsets, with many and few.
_BY_FILLING = {
    "sliced": (_SLICED, _SLICED, _SLICED_FEW_OFFSETS, _SLICED_ONE_EDGE),
    "half": (
        _DEEP
        | {
            32: _PART_32,
            48: (*_PART_48, (5 << 19, _HIGH_48)),
            64: ((1 << 18, _NARROW_3),),
            96: ((1 << 20, _HALF_96),),
            112: ((3 << 19, _HALF_112),),
            128: ((3 << 19, _HALF),),
            160: ((1 << 21, _WIDE_160),),
        },
        _DEEP_FEW_EDGES | {64: _SLICED[64], 96: _SLICED[96]},
        _FEW_OFFSETS
        | _PART_FEW_OFFSETS
        | {64: _SLICED[64], 96: _SLICED_FEW_OFFSETS[96]},
        _DEEP_ONE_EDGE
        | _PART_ONE_EDGE
        | {64: _SLICED_ONE_EDGE[64], 96: _SLICED_ONE_EDGE[96]},
    ),
    "tail": (
        _DEEP
        | {
            32: _PART_32,
            48: (*_PART_48, (1 << 23, _HIGH_48)),
            64: ((1 << 18, _NARROW_3), (1 << 24, _QUICK_64)),
            80: ((1 << 18, _HALF_80), *_MANY_80),
            96: (
                (1 << 19, _HALF_96),
                (5 << 18, WIDE_TILES[96]),
                (3 << 19, _WIDE_96),
                (1 << 25, WIDE_TILES[96]),
                (ANY, SORTED_TILES[96]),
            ),
        },
        _DEEP_FEW_EDGES,
        _FEW_OFFSETS
        | _PART_FEW_OFFSETS
        | {
            80: (*_FEW_OFFSETS[80], *_MANY_80),
            96: (
                (1 << 19, _NARROW_32),
                (1 << 21, _HALF_96),
                (1 << 24, WIDE_TILES[96]),
                (ANY, SORTED_TILES[96]),
            ),
        },
        _DEEP_ONE_EDGE
        | _PART_ONE_EDGE
        | {
            64: _SLICED[64],
            96: (
                (1 << 19, _NARROW_32),
                (3 << 19, _HALF_96),
                (1 << 21, WIDE_TILES[96]),
                (ANY, SORTED_TILES[96]),
            ),
        },
    ),
    "deep": (_DEEP, _DEEP_FEW_EDGES, _FEW_OFFSETS, _DEEP_ONE_EDGE),
    "whole": (_WHOLE, _FEW_EDGES, _FEW_OFFSETS, _ONE_EDGE),
}
# By (filling, whether offsets are few, whether edges are few).
SMALL_TILES = {
    (filling, bool(at // 2), bool(at % 2)): by_width
    for filling, found in _BY_FILLING.items()
    for at, by_width in enumerate(found)
}
# Before SMALL_TILES if each row's only neighbour is itself: WideTile reads no table.
_NARROW_4, _HALF_96_3 = WideTile(1, 128, 64, 3, 4), WideTile(2, 128, 96, 3, 2)
ITSELF_TILES = {
    32: ((1 << 19, _THREE_32),),
    48: ((1 << 21, _THREE_48),),
    64: ((1 << 18, _NARROW_3), (1 << 20, _QUICK_64), (1 << 22, _NARROW_4)),
    96: ((1 << 18, _NARROW_4), (1 << 22, _HALF_96_3)),
    128: ((3 << 17, _NARROW_4), (1 << 21, _WIDE_128), (3 << 21, WIDE_TILES[128])),
    160: ((1 << 19, _NARROW_4), (1 << 21, _WIDE_160)),
    192: ((5 << 19, _NARROW_4),),
    256: ((1 << 19, _NARROW), (3 << 22, WIDE_TILES[128])),
    384: ((1 << 20, _HALF), (1 << 21, _WIDE_128)),
    512: ((1 << 20, _HALF), (3 << 21, WIDE_TILES[128]), (ANY, WIDE_TILES[256])),
    1024: ((1 << 21, _HALF),),
}
# Before TF32_WHOLE_TILES.
TF32_SMALL_TILES = {
    32: (),
    64: ((1 << 18, _NARROW_32),),
    96: (),
    128: ((3 << 17, _NARROW), (3 << 20, _HALF)),
    160: ((3 << 17, _NARROW),),
    192: ((3 << 17, _NARROW), (3 << 20, TF32_WHOLE_TILES["many"][96])),
    224: ((3 << 17, _NARROW),),
    256: ((1 << 20, _NARROW), (1 << 22, TF32_WHOLE_TILES["many"][128])),
}
# Before INT8_TILES.
INT8_FEW_EDGES_SMALL_TILES = {
    32: ((1 << 18, FEW_EDGES_TILES[32]), (1 << 20, SORTED_TILES[32])),
    64: ((1 << 18, _NARROW), (1 << 20, _LOW), (1 << 21, SORTED_TILES[64])),
    112: ((3 << 19, _NARROW),),
    128: ((3 << 15, _NARROW), (3 << 21, _HALF)),
    160: ((1 << 21, _NARROW),),
    224: ((5 << 19, _NARROW),),
    256: ((1 << 16, _NARROW), (3 << 20, _HALF)),
}
INT8_SMALL_TILES = INT8_FEW_EDGES_SMALL_TILES | {
    96: ((1 << 20, _HALF_96), (1 << 23, WIDE_TILES[96])),
    112: ((3 << 19, _HALF_112),),
    160: ((1 << 21, _WIDE_160),),
    224: ((5 << 19, WIDE_TILES[112]),),
}
INT8_DEEP_SMALL_TILES = INT8_SMALL_TILES | {128: ((3 << 15, _NARROW), (1 << 20, _HALF))}
# Before those if a kernel has few offsets: more and narrower tiles start sooner.
INT8_FEW_OFFSETS_TILES = ((3 << 18, _NARROW),)
