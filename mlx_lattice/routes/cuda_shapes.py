"""Shapes of matrix tiles on CUDA, as tables by their width."""

from __future__ import annotations

from .cuda_tile_kinds import ResidentTile, ShortTile, SortedTile, Tile

# CUDA, Hopper: tiles by their width in output channels, the best of those timed on the
# surface scenes of benchmarks/gpu.py, on an H200 (benchmarks/results/gpu-tiles.jsonl).
# They are bound by reads from the L2 cache, about 30 bytes a cycle and multiprocessor,
# and by the rate at which warps issue copies.
SORTED_TILES = {
    32: SortedTile(2, 2, 2, 32, 6, 1),
    48: SortedTile(2, 2, 2, 48, 5, 1),
    64: SortedTile(2, 2, 2, 64, 5, 1),
    96: SortedTile(2, 2, 2, 96, 4, 1),
    128: SortedTile(2, 2, 1, 128, 4, 1),
    192: SortedTile(2, 1, 1, 192, 4, 1),
    256: SortedTile(2, 1, 1, 256, 4, 1),
}
# The same for WideTile, at the widths where it is faster.
WIDE_TILES = {
    96: Tile(3, 128, 96, 5, 1),
    128: Tile(3, 128, 128, 5, 1),
    192: Tile(2, 128, 192, 4, 1),
    256: Tile(2, 128, 256, 4, 1),
}
# Where rows have few edges, a tile has little work: lower tiles, timed on the random
# scene.
FEW_EDGES_TILES = {
    32: SortedTile(1, 1, 1, 32, 4, 4),
    48: SortedTile(1, 1, 1, 48, 3, 4),
    64: SortedTile(1, 1, 1, 64, 3, 4),
    96: SortedTile(1, 1, 1, 96, 4, 2),
    128: SortedTile(1, 1, 1, 128, 4, 2),
    192: SortedTile(2, 1, 1, 192, 4, 1),
    256: SortedTile(2, 1, 1, 256, 4, 1),
}
# The same for float32, multiplied as TF32 in one product, and in three: then rows and
# the parts of the sums take registers besides, and a stage has the weights twice. Not
# wider: not enough registers.
TF32_TILES = {
    "many": {
        32: SortedTile(2, 2, 2, 32, 6, 1),
        64: SortedTile(2, 2, 2, 64, 5, 1),
        96: SortedTile(2, 2, 2, 96, 4, 1),
        128: SortedTile(2, 2, 1, 128, 4, 1),
    },
    "few": {
        32: SortedTile(1, 1, 1, 32, 4, 2),
        64: SortedTile(1, 1, 1, 64, 4, 2),
        96: SortedTile(1, 1, 1, 96, 4, 2),
        128: SortedTile(1, 1, 1, 128, 4, 2),
    },
}
# The same for one product where each stage has one offset. Timed on an H200: 2000,
# 10 000, 40 000 and 120 000 rows of 32, 64, 96, 128 and 256 channels, a surface; 192
# follows its neighbours. Within 5% of the fastest, but for 10 000 rows of 128 and 256
# channels (7%, 9%: two splits of more tiles than there are places would gain).
TF32_WHOLE_TILES = {
    "many": {
        32: Tile(1, 128, 32, 3, 4),
        64: Tile(2, 128, 64, 4, 2),
        96: Tile(1, 128, 96, 4, 2),
        128: Tile(2, 128, 128, 6, 1),
        192: Tile(2, 128, 192, 4, 1),
        256: Tile(2, 128, 256, 4, 1),
    },
    "few": {
        32: Tile(1, 128, 32, 3, 4),
        64: Tile(1, 128, 64, 6, 2),
        96: Tile(1, 128, 96, 4, 2),
        128: Tile(1, 128, 128, 4, 2),
    },
}
FLOAT_TILES = {
    "many": {
        32: SortedTile(2, 2, 2, 32, 5, 1),
        64: SortedTile(2, 2, 2, 64, 4, 1),
        96: SortedTile(2, 1, 2, 96, 5, 1),
        128: SortedTile(2, 1, 1, 128, 4, 1),
    },
    "few": {
        32: SortedTile(1, 1, 1, 32, 4, 2),
        64: SortedTile(1, 1, 1, 64, 4, 2),
        96: SortedTile(2, 1, 1, 96, 4, 1),
        128: SortedTile(2, 1, 1, 128, 4, 1),
    },
}
# Tiles of int8 features, of either kernel, of many edges and of few; and lower ones, of
# which few rows have more, as for half below. Timed on an H200: the surface scenes, and
# 500 to 30 000 rows of a surface.
INT8_TILES = {
    32: SortedTile(2, 3, 2, 32, 4, 1),
    48: SortedTile(2, 2, 2, 48, 5, 1),
    64: SortedTile(2, 3, 2, 64, 4, 1),
    96: SortedTile(2, 2, 2, 96, 4, 1),
    128: SortedTile(2, 2, 2, 128, 4, 1),
    192: Tile(2, 128, 192, 4, 1),
    256: Tile(2, 128, 256, 4, 1),
}
INT8_FEW_EDGES_TILES = FEW_EDGES_TILES
INT8_SMALL_TILES = {
    32: ((1 << 18, SortedTile(1, 1, 1, 32, 4, 4)), (1 << 20, SORTED_TILES[32])),
    64: (
        (1 << 18, Tile(1, 128, 64, 6, 2)),
        (1 << 20, SortedTile(1, 1, 1, 64, 3, 4)),
        (1 << 21, SORTED_TILES[64]),
    ),
    128: ((3 << 15, Tile(1, 128, 64, 6, 2)), (3 << 21, Tile(1, 128, 128, 4, 2))),
    256: ((1 << 16, Tile(1, 128, 64, 6, 2)), (3 << 20, Tile(1, 128, 128, 4, 2))),
}
# Before them where a kernel has few offsets: there is little to fill a tile's stages
# with, and more and narrower ones start sooner.
INT8_FEW_OFFSETS_TILES = ((3 << 18, Tile(1, 128, 64, 6, 2)),)
# Lower and narrower tiles, of which few rows have more: by the width that many rows
# take, or by the very channels, (most elements of the output, tile), the first that has
# room. Timed on an H200 over 1 to 40 000 rows of 32 to 512 channels, of 1 to 10 edges a
# row (benchmarks/results/gpu-small.jsonl), and over 1 000 to 1 000 000 rows of
# surfaces, of submanifold, strided and inverse kernels (gpu-surfaces.jsonl beside it,
# by which tests/routes/test_cuda_timings.py holds them to the fastest).
_NARROW, _HALF_96, _HALF = (
    Tile(1, 128, *rest) for rest in ((64, 6, 2), (96, 4, 2), (128, 4, 2))
)
# More and narrower ones, and more side by side.
_NARROW_32, _NARROW_3 = Tile(1, 128, 32, 6, 2), Tile(1, 128, 64, 4, 3)
_THREE_32, _THREE_48 = Tile(1, 128, 32, 6, 3), Tile(1, 128, 48, 4, 3)
_LOW, _LOW_96, _LOW_128 = (FEW_EDGES_TILES[width] for width in (64, 96, 128))
# Of 128 rows.
_WIDE_96, _WIDE_128 = (Tile(2, 128, width, 5, 1) for width in (96, 128))
# Of rows with an edge or two: as many blocks as lie side by side. Where one has too few
# stages for the channels of an offset, what follows it serves.
_SHORT_32, _SHORT_48 = ShortTile(32, 2, 6), ShortTile(48, 2, 5)
_SHORT_96 = (5 << 20, ShortTile(96, 2, 4))
_SHORT_64 = (
    (33 << 16, ShortTile(64, 3, 4)),
    (165 << 14, ShortTile(64, 2, 5)),
    (99 << 15, ShortTile(64, 2, 6)),
    (1 << 22, ShortTile(64, 3, 4)),
)
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
# A last stage that is filled by half or more is as good as whole.
_FEW_OFFSETS_TAIL = {32: ((1 << 19, _THREE_32), _SLICED_32)}
_WHOLE = {
    64: ((1 << 20, _NARROW_3), (5 << 20, Tile(1, 128, 64, 3, 4)),
         (10 << 20, Tile(2, 128, 64, 4, 2))),
    96: ((3 << 15, _NARROW), (1 << 20, _HALF)),
    128: ((1 << 17, _NARROW), (1 << 19, _HALF)),
    192: ((1 << 16, _NARROW), (1 << 18, _HALF_96), (1 << 19, _WIDE_96)),
    256: ((1 << 16, _NARROW), (1 << 18, _HALF), (1 << 19, _WIDE_128),
          (1 << 21, WIDE_TILES[128]), (33 << 17, WIDE_TILES[256]),
          (3 << 21, _WIDE_128)),
    384: ((3 << 15, _NARROW), (3 << 20, WIDE_TILES[192]), (1 << 22, _WIDE_128)),
    512: ((1 << 16, _NARROW), (1 << 18, _HALF), (1 << 19, _WIDE_128)),
}  # fmt: skip
_FEW_EDGES = {
    64: ((3 << 20, _NARROW),),
    **dict.fromkeys((96, 128, 192, 256), ((1 << 18, _NARROW), (3 << 21, _HALF))),
}
# Offsets come in slices where input channels are no multiple of 64. Where they come
# whole, or with a tail that fills half of a stage, WideTile takes part.
SMALL_TILES = {
    "sliced": _SLICED,
    "sliced, few edges": _SLICED,
    "sliced, few offsets": _SLICED | {96: ((1 << 19, _LOW), (1 << 20, _LOW_96))},
    "sliced, few offsets, few edges": _SLICED
    | {16: ((99 << 13, _SHORT_32), *_SLICED[32])}
    | {32: ((5 << 19, _SHORT_32), *_SLICED[32])}
    | {48: ((11 << 19, _SHORT_48), *_SLICED[48]), 64: (*_SHORT_64, *_SLICED[64])}
    | {96: ((1 << 19, _LOW), (1 << 21, SortedTile(2, 1, 2, 96, 4, 1)))},
    "tail": _SLICED
    | {
        32: ((1 << 16, _THREE_32), *_SLICED[32]),
        48: ((3 << 17, _THREE_48), (5 << 17, SORTED_TILES[48]), (1 << 20, _NARROW_3)),
        96: (
            (1 << 19, _HALF_96),
            (5 << 18, WIDE_TILES[96]),
            (3 << 19, _WIDE_96),
            (1 << 24, WIDE_TILES[96]),
        ),
    },
    "tail, few edges": _SLICED,
    "tail, few offsets": _SLICED
    | _FEW_OFFSETS_TAIL
    | {48: ((1 << 20, _THREE_48), (1 << 22, _NARROW_3))}
    | {96: ((1 << 19, _NARROW_32), (1 << 21, _HALF_96), (1 << 24, WIDE_TILES[96]))},
    "tail, few offsets, few edges": _SLICED
    | {
        32: ((99 << 14, _SHORT_32), (1 << 19, _THREE_32), _SLICED_32),
        48: ((11 << 19, _SHORT_48), (1 << 21, _THREE_48)),
        64: (*_SHORT_64, *_SLICED[64]),
        96: (
            (1 << 19, _NARROW_32),
            (3 << 19, _HALF_96),
            _SHORT_96,
            (1 << 21, WIDE_TILES[96]),
        ),
    },
    "whole": _WHOLE,
    "whole, few edges": _FEW_EDGES,
    "whole, few offsets": _WHOLE
    | {
        64: ((1 << 19, _NARROW_32), (6 << 20, _NARROW_3)),
        128: ((1 << 21, _NARROW), (1 << 22, _HALF)),
        192: ((3 << 19, _NARROW), (1 << 22, _WIDE_96)),
        256: ((1 << 20, _NARROW), (1 << 22, _HALF)),
        384: ((3 << 15, _NARROW), (1 << 22, _HALF)),
        512: ((1 << 18, _NARROW), (1 << 22, _HALF)),
    },
    "whole, few offsets, few edges": {
        64: (
            *_SHORT_64,
            (1 << 18, _NARROW_32),
            (33 << 16, Tile(1, 128, 64, 3, 4)),
            (3 << 20, _LOW),
            (1 << 25, SortedTile(2, 1, 1, 64, 3, 2)),
        ),
        96: ((1 << 18, _NARROW), _SHORT_96, (1 << 21, _HALF), (1 << 23, _LOW_128)),
        128: (
            (3 << 19, ShortTile(64, 3, 4)),
            (1 << 18, _NARROW),
            (1 << 21, _HALF),
            (3 << 21, ShortTile(128, 2, 3)),
            (99 << 15, WIDE_TILES[128]),
            (5 << 21, _LOW_128),
        ),
        192: (
            (1 << 20, _NARROW),
            (9 << 18, ShortTile(96, 3, 3)),
            (9 << 18, WIDE_TILES[192]),
            (9 << 20, SortedTile(2, 1, 1, 96, 3, 2)),
        ),
        256: (
            (1 << 19, _NARROW),
            (3 << 19, _HALF),
            (1 << 22, WIDE_TILES[128]),
            (3 << 22, SortedTile(2, 1, 2, 128, 4, 1)),
        ),
    },
}
# The same before them where rows feed themselves alone, and WideTile reads no table.
# Timed on an H200: 2 000 to 400 000 rows, 32 to 1024 channels, either pass
# (benchmarks/results/gpu-itself.jsonl).
_SHORT_HALF, _SHORT = ShortTile(48, 2, 6), ShortTile(64, 2, 6)
_NARROW_4, _QUICK_64 = Tile(1, 128, 64, 3, 4), Tile(2, 128, 64, 4, 2)
ITSELF_TILES = {
    32: ((1 << 19, ShortTile(32, 2, 8)), (1 << 19, _THREE_32)),
    48: ((1 << 18, _SHORT_HALF), (1 << 21, _THREE_48)),
    64: ((165 << 14, _SHORT), (1 << 18, _NARROW_3), (1 << 20, _QUICK_64)),
    96: (
        (1 << 18, _SHORT_HALF),
        (1 << 18, _NARROW_4),
        (3 << 19, Tile(2, 128, 96, 3, 2)),
    ),
    128: ((1 << 21, _SHORT), (3 << 17, _NARROW_4), (1 << 21, _WIDE_128)),
    192: ((15 << 18, _SHORT), (5 << 19, _NARROW_4)),
    256: ((1 << 19, _NARROW), (1 << 21, WIDE_TILES[128])),
    384: ((1 << 20, _HALF), (1 << 21, _WIDE_128)),
    512: ((1 << 20, _HALF), (1 << 21, WIDE_TILES[128])),
    1024: ((1 << 21, _HALF),),
}
# Of more rows, the first whose weights fit; of DEEP_SUM summed channels and more, up to
# DEEP_ELEMENTS of the output, beyond which many channels take the widest WideTile.
RESIDENT_TILES = {
    32: (ResidentTile(1, 32, 6, 4), ResidentTile(2, 32, 6, 1)),
    64: (ResidentTile(2, 64, 4, 2), ResidentTile(3, 64, 4, 1)),
    96: (ResidentTile(3, 96, 4, 1),),
    128: (ResidentTile(3, 128, 4, 1), ResidentTile(2, 128, 4, 1)),
    192: (ResidentTile(2, 192, 4, 1),),
    256: (ResidentTile(3, 128, 4, 1), ResidentTile(2, 128, 4, 1)),
    512: (ResidentTile(2, 256, 4, 1), ResidentTile(2, 128, 4, 1)),
    1024: (ResidentTile(2, 256, 4, 1),),
}
DEEP_SUM, DEEP_ELEMENTS = 384, 3 << 21
ANY = 1 << 62
# The same before TF32_WHOLE_TILES, by their widths.
TF32_SMALL_TILES = {
    32: (),
    64: ((1 << 18, Tile(1, 128, 32, 6, 2)),),
    96: (),
    128: ((3 << 17, _NARROW), (3 << 20, _HALF)),
    192: ((3 << 17, _NARROW), (3 << 20, TF32_WHOLE_TILES["many"][96])),
    256: ((1 << 20, _NARROW), (1 << 22, TF32_WHOLE_TILES["many"][128])),
}
# EdgeTile of grouped_gemm, by the width of the wider side, timed in the same way.
GRAD_TILES = {
    32: Tile(1, 128, 32, 4, 4),
    64: Tile(1, 128, 64, 4, 3),
    96: Tile(2, 64, 96, 3, 2),
    128: Tile(2, 64, 128, 3, 2),
    256: Tile(2, 128, 256, 4, 1),
}
# The same where edges are few.
FEW_EDGES_GRAD_TILES = {96: Tile(2, 128, 96, 4, 1), 128: Tile(1, 128, 128, 4, 2)}
# Of dW in one launch, of a block for each tile of an offset, by width: the least that
# has all output channels, or a wider one that both sides fill twice.
WHOLE_TILES = {
    32: Tile(1, 128, 32, 6, 3),
    48: Tile(1, 128, 48, 4, 3),
    64: Tile(1, 128, 64, 4, 3),
    128: Tile(2, 128, 128, 6, 1),
    256: Tile(2, 128, 256, 4, 1),
}
# Of several splits in a block: where edges are many and these blocks fewer than there
# are multiprocessors, the first such; before them, of few offsets, the one that both
# sides fill twice.
SPLIT_WHOLE_TILES = Tile(1, 128, 32, 6, 1, 2), Tile(1, 128, 64, 4, 1, 2)
EVEN_WHOLE_TILE = Tile(2, 128, 96, 3, 1, 2)
