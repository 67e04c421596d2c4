// y[o] = sum over the edges of o of x[i] @ W[k]: matrix tiles over mask-sorted rows,
// for the forward pass and, with W[k] read the other way, the input gradient.
//
//   threadgroup: 64 sorted rows x 128 (64, 32, 16) channels
//   simdgroup: 64 (32, 16) rows x 32 (16) channels: all four skip the same rows
//     for k used by the tile, for 32 (64) bytes of channels:
//       gathered rows [64, depth] | W[k] [depth, channels] -> threadgroup memory, twice
//       blocks of eight rows that use k are multiplied; the others not even read
//
// Any K, channels, half, bfloat and float; float sums, in order of k: the same bits on
// every run. Traffic per output row and 128 channels: edges x C_in features, and C_in x
// 128 weights of each offset of the tile for 64 rows; rows by sorted place, so y is
// written once. Few rows are cut along (k, channels), wide ones along channels, into
// splits that add_splits adds in order. Wins over the gathering routes from about a
// thousand rows on, at any channel count of 8 or more. Reads matrix_tiles.metal and
// epilogue.metal too.

// WIDTH: columns of a simdgroup.
template <typename T, int COLUMNS, bool TRANSPOSED, int WIDTH>
struct GemmTile {
  static constant constexpr int ROWS = 16 * (COLUMNS / WIDTH);
  static constant constexpr int DEPTH = (COLUMNS > 64 ? 32 : 64) / int(sizeof(T));
  static constant constexpr int PAD = 16 / int(sizeof(T));
  static constant constexpr int A_LINE = DEPTH + PAD;
  static constant constexpr int B_LINE = (TRANSPOSED ? DEPTH : COLUMNS) + PAD;
  static constant constexpr int A_SIZE = TILE_ROWS * A_LINE;
  static constant constexpr int B_SIZE = (TRANSPOSED ? COLUMNS : DEPTH) * B_LINE;
  static constant constexpr int BUFFER = A_SIZE + B_SIZE;
  static constant constexpr int A_FOURS = DEPTH / 8;
  static constant constexpr int B_ALL = DEPTH * COLUMNS;
  static constant constexpr int B_FOURS = (B_ALL / 4 + THREADS - 1) / THREADS;
  // 16 rows of a simdgroup's sums pass through the same memory at the end.
  static constant constexpr int STAGED = 2 * BUFFER * int(sizeof(T)) / 4;
  static constant constexpr int SUMS = SIMDGROUPS * 16 * WIDTH;
  static constant constexpr int FLOATS = STAGED > SUMS ? STAGED : SUMS;

  METAL_FUNC static int first_row(int simdgroup) {
    return ROWS * (simdgroup * WIDTH / COLUMNS);
  }

  METAL_FUNC static int first_column(int simdgroup) {
    return WIDTH * (simdgroup % (COLUMNS / WIDTH));
  }
};

// Weights as they stand: each offset has lines of `length` elements. A type that reads
// weights stored another way has the same names.
template <typename T>
struct FloatWeights {
  using Part = Four<T>;
  const device T* w;
  int offset_stride, line_stride;

  // Reads four elements of a line of offset k; those from its length on are zero.
  METAL_FUNC void fetch_part(
      thread Part& to, int k, int line, int, int at, int length) const thread {
    fetch(to, w + size_t(k) * offset_stride + size_t(line) * line_stride + at,
          length - at);
  }

  METAL_FUNC static void unpack(thread Four<T>& to, const thread Part& part) {
    to = part;
  }
};

// A thread's share of a step, between device and threadgroup memory.
template <typename T, typename TILE, int COLUMNS, bool TRANSPOSED, typename WEIGHTS>
struct GemmStage {
  Four<T> a[TILE::A_FOURS];
  typename WEIGHTS::Part b[TILE::B_FOURS];

  METAL_FUNC void fetch_rows(
      const device T* x, int from, int c, int c_x, int lane) thread {
    UNROLL for (int j = 0; j < TILE::A_FOURS; ++j) {
      const int at = c + 4 * (2 * j + lane % 2);
      fetch(a[j], x + (from < 0 ? size_t(0) : size_t(from) * c_x + at),
            from < 0 ? 0 : c_x - at);
    }
  }

  // Lines of W[k] run along C_y, or along C_x where transposed.
  METAL_FUNC void fetch_weights(
      const thread WEIGHTS& w, int k, int c, int column, int c_x, int c_y,
      int thread_index) thread {
    UNROLL for (int j = 0; j < TILE::B_FOURS; ++j) {
      const int e = 4 * (j * THREADS + thread_index);
      const int line = TRANSPOSED ? column + e / TILE::DEPTH : c + e / COLUMNS;
      const int at = TRANSPOSED ? c + e % TILE::DEPTH : column + e % COLUMNS;
      const int lines = TRANSPOSED ? c_y : c_x, length = TRANSPOSED ? c_x : c_y;
      const bool inside = e < TILE::B_ALL && line < lines && at < length;
      w.fetch_part(
          b[j], inside ? k : 0, inside ? line : 0, lines, inside ? at : length, length);
    }
  }

  METAL_FUNC void put_rows(threadgroup T* rows, int row, int lane) const thread {
    threadgroup T* to = rows + row * TILE::A_LINE;
    UNROLL for (int j = 0; j < TILE::A_FOURS; ++j)
      put(to + 4 * (2 * j + lane % 2), a[j]);
  }

  METAL_FUNC void put_weights(threadgroup T* weights, int thread_index) const thread {
    constexpr int length = TRANSPOSED ? TILE::DEPTH : COLUMNS;
    UNROLL for (int j = 0; j < TILE::B_FOURS; ++j) {
      const int e = 4 * (j * THREADS + thread_index);
      if (e >= TILE::B_ALL) continue;
      Four<T> line;
      WEIGHTS::unpack(line, b[j]);
      put(weights + e / length * TILE::B_LINE + e % length, line);
    }
  }
};

// The ROWS x WIDTH sums of a simdgroup.
template <typename T, int COLUMNS, bool TRANSPOSED>
struct GemmSums {
  static constant constexpr int WIDTH = COLUMNS > 64 ? 32 : 16;
  // Rows that are staged and multiplied together.
  static constant constexpr int SKIPPED = BLOCK_ROWS;
  using Tile = GemmTile<T, COLUMNS, TRANSPOSED, WIDTH>;
  simdgroup_matrix<float, 8, 8> sums[Tile::ROWS / 8][WIDTH / 8];

  METAL_FUNC GemmSums() thread {}

  METAL_FUNC void start(int) thread {
    UNROLL for (int i = 0; i < Tile::ROWS / 8; ++i)
      UNROLL for (int n = 0; n < WIDTH / 8; ++n)
        sums[i][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  // Multiplies `depth` staged channels of live blocks into the `width` first columns.
  METAL_FUNC void multiply(
      const threadgroup T* rows, const threadgroup T* weights, int depth, int width,
      uint live) thread {
    UNROLL for (int c = 0; c < Tile::DEPTH; c += 8) {
      if (c >= depth) break;
      simdgroup_matrix<T, 8, 8> a, b[WIDTH / 8];
      UNROLL for (int n = 0; n < WIDTH / 8; ++n) {
        if (8 * n >= width) break;
        if (TRANSPOSED)
          simdgroup_load(
              b[n], weights + 8 * n * Tile::B_LINE + c, Tile::B_LINE, ulong2(0, 0),
              true);
        else
          simdgroup_load(b[n], weights + c * Tile::B_LINE + 8 * n, Tile::B_LINE);
      }
      UNROLL for (int i = 0; i < Tile::ROWS / 8; ++i) {
        if ((live >> i & 1u) == 0) continue;
        simdgroup_load(a, rows + 8 * i * Tile::A_LINE + c, Tile::A_LINE);
        UNROLL for (int n = 0; n < WIDTH / 8; ++n) {
          if (8 * n >= width) break;
          simdgroup_multiply_accumulate(sums[i][n], a, b[n], sums[i][n]);
        }
      }
    }
  }

  // Stores 16 rows of sums, in lines of WIDTH.
  METAL_FUNC void store(threadgroup float* to, int part) thread {
    UNROLL for (int i = 0; i < Tile::ROWS / 8; ++i) {
      if (i / 2 != part) continue;
      UNROLL for (int n = 0; n < WIDTH / 8; ++n)
        simdgroup_store(sums[i][n], to + 8 * (i % 2) * WIDTH + 8 * n, WIDTH);
    }
  }
};

// Threadgroups (column and tile, 1, split). PLACED: rows are written to their places in
// y, which starts with the lowest row of the first tile's region; else y has the sorted
// rows from the first tile on, a copy for each split. SLICED: splits are slices of the
// channels.
template <
    typename T,
    typename OUT,
    int COLUMNS,
    bool TRANSPOSED,
    bool PLACED,
    bool SLICED,
    typename WEIGHTS,
    typename AFTER,
    typename SUMS = GemmSums<T, COLUMNS, TRANSPOSED>>
METAL_FUNC void sorted_tiles(
    const device T* x,
    const thread WEIGHTS& w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const thread AFTER& after,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  using Tile = typename SUMS::Tile;
  constexpr int WIDTH = SUMS::WIDTH;
  const int first_tile = sizes.first, n = sizes.rows, volume = sizes.volume;
  const int c_x = sizes.c_x, c_y = sizes.c_y, splits = sizes.splits;
  const int thread_index = LANES * simdgroup + lane;
  const TilePlace at(
      group.x, sizes.together, (c_y + COLUMNS - 1) / COLUMNS,
      (n + TILE_ROWS - 1) / TILE_ROWS - first_tile);
  const int tile = first_tile + at.tile, column = COLUMNS * at.column;
  const int left = n - tile * TILE_ROWS;
  const int blocks = min(BLOCKS, (left + BLOCK_ROWS - 1) / BLOCK_ROWS);
  const int words = (volume + 31) / 32;
  TileOffsets<> offsets(masks + size_t(tile) * BLOCKS * words, blocks, volume);

  // The steps of this split: (offset, channels), channels the faster.
  const int chunks = (c_x + Tile::DEPTH - 1) / Tile::DEPTH, split = int(group.z);
  int begin = 0, end = chunks, steps = volume * chunks, k = offsets.next(0);
  int chunk = 0;
  if (SLICED) {
    chunk = begin = chunks * split / splits;
    end = chunks * (split + 1) / splits;
  } else if (splits > 1) {
    const int total = offsets.count() * chunks;
    const int from = piece_start(total, split, splits);
    steps = piece_start(total, split + 1, splits) - from;
    k = offsets.next(0);
    for (int skipped = from / chunks; skipped > 0; --skipped) k = offsets.next(k + 1);
    chunk = from % chunks;
  }

  // Two lanes bring a row, whether or not this simdgroup multiplies it.
  const int row = thread_index / 2, place = tile * TILE_ROWS + row;
  const uint own = ((1u << SUMS::SKIPPED / BLOCK_ROWS) - 1u)
      << (row / SUMS::SKIPPED * (SUMS::SKIPPED / BLOCK_ROWS));
  const device int* neighbours = table + size_t(min(place, n - 1)) * volume;
  const int top = Tile::first_row(simdgroup), side = Tile::first_column(simdgroup);
  const int width = min(WIDTH, c_y - column - side);
  threadgroup T* staged = (threadgroup T*)memory;
  GemmStage<T, Tile, COLUMNS, TRANSPOSED, WEIGHTS> stage;
  SUMS sums;
  sums.start(lane);

  uint live = offsets.live(k);
  bool more = steps > 0 && k < volume, used = (live & own) != 0;
  int from = used && place < n ? neighbours[k] : -1;
  if (more) {
    stage.fetch_weights(w, k, chunk * Tile::DEPTH, column, c_x, c_y, thread_index);
    stage.put_weights(staged + Tile::A_SIZE, thread_index);
    if (used) {
      stage.fetch_rows(x, from, chunk * Tile::DEPTH, c_x, lane);
      stage.put_rows(staged, row, lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int buffer = 0; more; buffer ^= 1) {
    const int depth = c_x - chunk * Tile::DEPTH;
    const uint multiplied = live >> (top / BLOCK_ROWS);
    if (++chunk == end) {
      chunk = begin;
      k = offsets.next(k + 1);
      live = offsets.live(k);
      used = (live & own) != 0;
      from = used && place < n ? neighbours[k] : -1;
    }
    more = --steps > 0 && k < volume;
    // The next step travels while this one is multiplied.
    if (more) {
      stage.fetch_weights(w, k, chunk * Tile::DEPTH, column, c_x, c_y, thread_index);
      if (used) stage.fetch_rows(x, from, chunk * Tile::DEPTH, c_x, lane);
    }
    const threadgroup T* now = staged + buffer * Tile::BUFFER;
    sums.multiply(
        now + top * Tile::A_LINE,
        now + Tile::A_SIZE + (TRANSPOSED ? side * Tile::B_LINE : side), depth, width,
        multiplied);
    if (more) {
      threadgroup T* next = staged + (buffer ^ 1) * Tile::BUFFER;
      stage.put_weights(next + Tile::A_SIZE, thread_index);
      if (used) stage.put_rows(next, row, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  threadgroup float* sorted = memory + 16 * WIDTH * simdgroup;
  const int kept = n - first_tile * TILE_ROWS;
  for (int part = 0; part < Tile::ROWS / 16; ++part) {
    const int start = tile * TILE_ROWS + top + 16 * part;
    sums.store(sorted, part);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane; e < 4 * WIDTH; e += LANES) {
      const int r = e / (WIDTH / 4), c = e % (WIDTH / 4) * 4;
      if (start + r >= n || c >= width) continue;
      float4 line;
      for (int j = 0; j < 4; ++j) line[j] = sorted[r * WIDTH + c + j];
      const int own_row = PLACED || after.residual ? rows[start + r] : 0;
      const int placed = PLACED ? own_row : start + r;
      after.finish(line, size_t(own_row), c_y, column + side + c, width - c);
      const size_t to =
          size_t(group.z) * kept + size_t(placed - first_tile * TILE_ROWS);
      write_sums(y + to * c_y + column + side + c, line, width - c);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <
    typename T, typename OUT, int COLUMNS, bool TRANSPOSED, bool PLACED, bool SLICED,
    int ACTIVATION = BIAS_ALONE, typename P = T, int EPS = 0,
    typename S = P>
METAL_FUNC void sorted_implicit_gemm(
    const device T* x,
    const device T* w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const device Given<P>* bias,
    const device Given<P>* scale,
    const device Given<S>* mean,
    const device Given<S>* var,
    const device T* residual,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  const FloatWeights<T> weights = {w, sizes.w_offset_stride, sizes.w_row_stride};
  const Epilogue<T, ACTIVATION, P, EPS, S> after = {bias, scale, mean, var, residual};
  sorted_tiles<T, OUT, COLUMNS, TRANSPOSED, PLACED, SLICED>(
      x, weights, table, rows, masks, after, sizes, y, memory, group, simdgroup, lane);
}
