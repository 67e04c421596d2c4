"""Shapes of matrix tiles on CUDA, as tables by their width."""

from __future__ import annotations

from .cuda_tile_kinds import SortedTile, Tile

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
# The same for WideTile, of more than 64 channels.
WIDE_TILES = {
    80: Tile(3, 128, 80, 5, 1),
    96: Tile(3, 128, 96, 5, 1),
    112: Tile(3, 128, 112, 5, 1),
    128: Tile(3, 128, 128, 5, 1),
    160: Tile(3, 128, 160, 4, 1),
    192: Tile(2, 128, 192, 4, 1),
    224: Tile(2, 128, 224, 4, 1),
    256: Tile(2, 128, 256, 4, 1),
}
WIDTHS = {*SORTED_TILES, *WIDE_TILES}
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
        160: Tile(2, 128, 160, 4, 1),
        192: Tile(2, 128, 192, 4, 1),
        224: Tile(2, 128, 224, 4, 1),
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
# Tiles of int8 features, of either kernel, of many edges and of few. Timed on an H200:
# the surface scenes, and 10 000 to 400 000 rows of a surface.
INT8_TILES = {
    32: SortedTile(2, 3, 2, 32, 4, 1),
    48: SortedTile(2, 2, 2, 48, 5, 1),
    64: SortedTile(2, 3, 2, 64, 4, 1),
    96: SortedTile(2, 2, 2, 96, 4, 1),
    112: WIDE_TILES[112],
    128: SortedTile(2, 2, 2, 128, 4, 1),
    160: WIDE_TILES[160],
    192: WIDE_TILES[192],
    224: WIDE_TILES[224],
    256: WIDE_TILES[256],
}
INT8_FEW_EDGES_TILES = FEW_EDGES_TILES | {
    112: Tile(1, 128, 112, 4, 2),
    160: Tile(1, 128, 160, 3, 2),
    224: FEW_EDGES_TILES[256],
}
ANY = 1 << 62
# EdgeTile of grouped_gemm, by the width of the wider side, timed in the same way.
GRAD_TILES = {
    32: Tile(1, 128, 32, 4, 4),
    64: Tile(1, 128, 64, 4, 3),
    80: Tile(2, 64, 80, 3, 2),
    96: Tile(2, 64, 96, 3, 2),
    112: Tile(2, 64, 112, 3, 2),
    128: Tile(2, 64, 128, 3, 2),
    160: Tile(3, 128, 160, 4, 1),
    192: Tile(3, 128, 192, 4, 1),
    224: Tile(2, 128, 224, 4, 1),
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
