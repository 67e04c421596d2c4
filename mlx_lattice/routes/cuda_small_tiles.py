"""Lower and narrower matrix tiles on CUDA, of which few rows have more: as tables.

Each has, by the width that many rows take or by the very channels, (most elements of
the output, tile): the first that has room serves. Timed on an H200 over 1 to 40 000
rows of 32 to 512 channels, of 1 to 10 edges a row (benchmarks/results/gpu-small.jsonl),
and over 1 000 to 1 000 000 rows of surfaces, of submanifold, strided and inverse
kernels (gpu-surfaces.jsonl beside it, by which tests/routes/test_cuda_timings.py holds
them to the fastest).
"""

from __future__ import annotations

from .cuda_shapes import (
    ANY,
    FEW_EDGES_TILES,
    SORTED_TILES,
    TF32_WHOLE_TILES,
    WIDE_TILES,
)
from .cuda_tile_kinds import SortedTile, Tile

_NARROW, _HALF_80, _HALF_96, _HALF_112, _HALF, _HALF_160 = (
    Tile(1, 128, *rest)
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
_NARROW_32, _NARROW_3 = Tile(1, 128, 32, 6, 2), Tile(1, 128, 64, 4, 3)
_THREE_32, _THREE_48 = Tile(1, 128, 32, 6, 3), Tile(1, 128, 48, 4, 3)
_LOW, _LOW_96, _LOW_128 = (FEW_EDGES_TILES[width] for width in (64, 96, 128))
# Of 128 rows, and of 192.
_QUICK_64 = Tile(2, 128, 64, 4, 2)
_WIDE_96, _WIDE_128, _WIDE_160 = (Tile(2, 128, width, 5, 1) for width in (96, 128, 160))
_HIGH_48 = Tile(3, 128, 48, 6, 1)
# The channels of an offset do not fill a stage, and those of several come together.
_SLICED_32 = (1 << 23, SortedTile(1, 2, 1, 32, 5, 2))
_SLICED = {
    32: (
        (1 << 17, FEW_EDGES_TILES[32]),
        (3 << 16, SortedTile(2, 1, 2, 32, 6, 1)),
        _SLICED_32,
    ),
    48: ((1 << 18, _LOW),),
    **dict.fromkeys((64, 96, 128, 192, 256), ((1 << 19, _LOW),)),
}
_SLICED_FEW_OFFSETS = _SLICED | {96: ((1 << 19, _LOW), (1 << 20, _LOW_96))}
_SLICED_ONE_EDGE = _SLICED | {
    96: ((1 << 19, _LOW), (1 << 21, SortedTile(2, 1, 2, 96, 4, 1))),
}
# They fill whole stages.
_WHOLE = {
    32: ((1 << 22, _THREE_32),),
    48: ((1 << 23, _THREE_48),),
    64: (
        (1 << 20, _NARROW_3),
        (5 << 20, Tile(1, 128, 64, 3, 4)),
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
        (33 << 16, Tile(1, 128, 64, 3, 4)),
        (3 << 20, _LOW),
        (1 << 25, SortedTile(2, 1, 1, 64, 3, 2)),
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
        (9 << 20, SortedTile(2, 1, 1, 96, 3, 2)),
    ),
    256: (
        (1 << 19, _NARROW),
        (3 << 19, _HALF),
        (1 << 22, WIDE_TILES[128]),
        (3 << 22, SortedTile(2, 1, 2, 128, 4, 1)),
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
    112: (
        (1 << 21, _HALF_112),
        (1 << 23, WIDE_TILES[112]),
        (ANY, SORTED_TILES[128]),
    ),
    128: ((1 << 21, _HALF), (1 << 23, WIDE_TILES[128]), (ANY, SORTED_TILES[128])),
    160: (
        (1 << 21, _WIDE_160),
        (ANY, WIDE_TILES[160]),
    ),
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
_PART_ONE_EDGE = {
    32: ((1 << 19, _THREE_32), _SLICED_32),
    48: ((1 << 21, _THREE_48),),
}
# Of many rows beyond, PersistentTile.
_MANY_80 = ((1 << 24, WIDE_TILES[80]), (ANY, SORTED_TILES[96]))
# How the summed channels of an offset fill stages of 64: less than half of one, half of
# one or more, one and a tail, more and a tail, whole ones.
SMALL_TILES = {
    "sliced": _SLICED,
    "sliced, few edges": _SLICED,
    "sliced, few offsets": _SLICED_FEW_OFFSETS,
    "sliced, few offsets, few edges": _SLICED_ONE_EDGE,
    "half": _DEEP
    | {
        32: _PART_32,
        48: (*_PART_48, (5 << 19, _HIGH_48)),
        64: ((1 << 18, _NARROW_3),),
        96: ((1 << 20, _HALF_96),),
        112: ((3 << 19, _HALF_112),),
        128: ((3 << 19, _HALF),),
        160: ((1 << 21, _WIDE_160),),
    },
    "half, few edges": _DEEP_FEW_EDGES | {64: _SLICED[64], 96: _SLICED[96]},
    "half, few offsets": _FEW_OFFSETS
    | _PART_FEW_OFFSETS
    | {64: _SLICED[64], 96: _SLICED_FEW_OFFSETS[96]},
    "half, few offsets, few edges": _DEEP_ONE_EDGE
    | _PART_ONE_EDGE
    | {64: _SLICED_ONE_EDGE[64], 96: _SLICED_ONE_EDGE[96]},
    "tail": _DEEP
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
    "tail, few edges": _DEEP_FEW_EDGES,
    "tail, few offsets": _FEW_OFFSETS
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
    "tail, few offsets, few edges": _DEEP_ONE_EDGE
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
    "deep": _DEEP,
    "deep, few edges": _DEEP_FEW_EDGES,
    "deep, few offsets": _FEW_OFFSETS,
    "deep, few offsets, few edges": _DEEP_ONE_EDGE,
    "whole": _WHOLE,
    "whole, few edges": _FEW_EDGES,
    "whole, few offsets": _FEW_OFFSETS,
    "whole, few offsets, few edges": _ONE_EDGE,
}
# The same before them where rows feed themselves alone, and WideTile reads no table.
# Timed on an H200: 2 000 to 400 000 rows, 32 to 1024 channels, either pass
# (benchmarks/results/gpu-itself.jsonl).
_NARROW_4, _HALF_96_3 = Tile(1, 128, 64, 3, 4), Tile(2, 128, 96, 3, 2)
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
# The same before TF32_WHOLE_TILES, by their widths.
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
# The same of int8 features; timed over 500 to 30 000 rows of a surface too.
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
# Before them where a kernel has few offsets: there is little to fill a tile's stages
# with, and more and narrower ones start sooner.
INT8_FEW_OFFSETS_TILES = ((3 << 18, _NARROW),)
