// y[o] = sum over the edges of o of x[i] @ W[k]: matrix tiles over mask-sorted rows,
// for the forward pass and, with W[k] read the other way, the input gradient.
//
//   threadgroup: 64 sorted rows x 128 (64, 32, 16) channels, four simdgroups
//   simdgroup: 64 (32, 16) rows x 32 (16) channels; of fewer than 64 rows, every second
//     or fourth block of eight, which spreads what is skipped
//     for k used by the tile, for 64 (32) bytes of channels:
//       gathered rows [64, depth] | W[k] [depth, channels] -> registers -> threadgroup
//       memory; the next ones travel while these are multiplied
//       blocks of eight rows that use k are multiplied; the others not even read
//
// Any K, channels, half, bfloat and float; float sums, in order of k: the same bits on
// every run, and by every shape (``tile_shape`` of backends/metal/tiles.py). Traffic per
// output row and 128 channels: edges x C_in features, and C_in x 128 weights of each
// offset of the tile for 64 rows; rows by sorted place, so y is written once. Few rows
// are cut along (k, channels) into splits that add_splits adds in order. Wins over the
// gathering routes from some hundred rows on, at any channel count of 8 or more. Reads
// matrix_tiles.metal, epilogue.metal and tile_moments.metal too.

// SIDE: columns of a simdgroup; BYTES: of a row in a step.
// Simdgroups with the same columns have blocks of eight rows in turn.
template <
    typename T, int COLUMNS, bool TRANSPOSED, int SIDE, int BYTES>
struct GemmTile {
  static constant constexpr int WIDTH = SIDE, ALL = LANES * SIMDGROUPS;
  static constant constexpr int ROWS = TILE_ROWS * COLUMNS / (SIMDGROUPS * WIDTH);
  static constant constexpr int APART = TILE_ROWS / ROWS;
  static constant constexpr int DEPTH = BYTES / int(sizeof(T));
  static constant constexpr int PAD = 16 / int(sizeof(T));
  static constant constexpr int A_LINE = DEPTH + PAD;
  static constant constexpr int LENGTH = TRANSPOSED ? DEPTH : COLUMNS;
  static constant constexpr int B_LINE = LENGTH + PAD;
  static constant constexpr int A_SIZE = TILE_ROWS * A_LINE;
  static constant constexpr int B_SIZE = (TRANSPOSED ? COLUMNS : DEPTH) * B_LINE;
  static constant constexpr int A_PARTS = TILE_ROWS * BYTES / 16 / ALL;
  static constant constexpr int B_ALL = DEPTH * COLUMNS;
  static constant constexpr int B_PARTS = (COLUMNS * BYTES / 16 + ALL - 1) / ALL;
  // 16 rows of a simdgroup's sums pass through the same memory at the end.
  static constant constexpr int STAGED = (A_SIZE + B_SIZE) * int(sizeof(T)) / 4;
  static constant constexpr int SUMS = SIMDGROUPS * 16 * WIDTH;
  static constant constexpr int FLOATS = STAGED > SUMS ? STAGED : SUMS;

  METAL_FUNC static int first_row(int simdgroup) {
    return BLOCK_ROWS * (simdgroup * WIDTH / COLUMNS);
  }

  METAL_FUNC static int first_column(int simdgroup) {
    return WIDTH * (simdgroup % (COLUMNS / WIDTH));
  }

  // Where a simdgroup's row stands, from its first one on.
  METAL_FUNC static int row(int own) {
    return own / BLOCK_ROWS * BLOCK_ROWS * APART + own % BLOCK_ROWS;
  }
};

// Weights as they stand, of type W: each offset has lines of `length` elements. A type
// that reads weights stored another way has the same names.
template <typename T, bool FAR = true, typename W = T>
struct FloatWeights {
  using Index = typename IndexOf<FAR>::Type;
  using Part = Wide<T>;
  const device W* w;
  int offset_stride, line_stride;
  bool wide;

  // Where element `at` of a line of offset k stands.
  METAL_FUNC Index place(int k, int line, int, int at, int) const thread {
    return Index(k) * Index(offset_stride) + Index(line) * Index(line_stride)
        + Index(at);
  }

  // Reads a part from there, `more` lines on; elements from `left` on are zero.
  METAL_FUNC void fetch_part(
      thread Part& to, Index first, int more, int left) const thread {
    fetch(to, w + (first + Index(more) * Index(line_stride)), left, wide);
  }

  METAL_FUNC static void unpack(thread Wide<T>& to, const thread Part& part) {
    to = part;
  }
};

template <bool FAR, typename T, typename W>
METAL_FUNC FloatWeights<T, FAR, W> float_weights(
    const device W* w, int offset_stride, int line_stride) {
  const bool whole = (offset_stride | line_stride) % Wide<T>::COUNT == 0;
  return {w, offset_stride, line_stride, whole && begins_wide(w)};
}

// A thread's share of a step, between device and threadgroup memory.
template <typename T, typename TILE, int COLUMNS, bool TRANSPOSED, typename WEIGHTS>
struct GemmStage {
  static constant constexpr int COUNT = Wide<T>::COUNT, ALL = TILE::ALL;
  // Lanes that bring a row, side by side; lines that a part of all lanes covers.
  static constant constexpr int BESIDE = ALL / TILE_ROWS;
  static constant constexpr int LENGTH = TRANSPOSED ? TILE::DEPTH : COLUMNS;
  static constant constexpr int LINES = COUNT * ALL / LENGTH;
  Wide<T> a[TILE::A_PARTS];
  typename WEIGHTS::Part b[TILE::B_PARTS];

  // Reads channels of the row that begins at `row`, or zeros where none is there.
  template <typename X, typename INDEX>
  METAL_FUNC void fetch_rows(
      const device X* x, INDEX row, bool there, int c, int c_x, bool wide,
      int lane) thread {
    UNROLL for (int j = 0; j < TILE::A_PARTS; ++j) {
      const int at = c + COUNT * (BESIDE * j + lane % BESIDE);
      fetch(a[j], x + (row + INDEX(at)), there ? c_x - at : 0, wide);
    }
  }

  // Lines of W[k] run along C_y, or along C_x where transposed.
  METAL_FUNC void fetch_weights(
      const thread WEIGHTS& w, int k, int c, int column, int c_x, int c_y,
      int thread_index) thread {
    const int e = COUNT * thread_index;
    const int line = (TRANSPOSED ? column : c) + e / LENGTH;
    const int at = (TRANSPOSED ? c : column) + e % LENGTH;
    const int lines = TRANSPOSED ? c_y : c_x, length = TRANSPOSED ? c_x : c_y;
    const auto first = w.place(k, line, lines, at, length);
    UNROLL for (int j = 0; j < TILE::B_PARTS; ++j) {
      const bool inside = e + j * COUNT * ALL < TILE::B_ALL && line + j * LINES < lines;
      w.fetch_part(b[j], first, j * LINES, inside ? length - at : 0);
    }
  }

  METAL_FUNC void put_rows(threadgroup T* rows, int row, int lane) const thread {
    threadgroup T* to = rows + row * TILE::A_LINE;
    UNROLL for (int j = 0; j < TILE::A_PARTS; ++j)
      put(to + COUNT * (BESIDE * j + lane % BESIDE), a[j]);
  }

  METAL_FUNC void put_weights(threadgroup T* weights, int thread_index) const thread {
    UNROLL for (int j = 0; j < TILE::B_PARTS; ++j) {
      const int e = COUNT * (j * ALL + thread_index);
      if (e >= TILE::B_ALL) continue;
      Wide<T> line;
      WEIGHTS::unpack(line, b[j]);
      put(weights + e / LENGTH * TILE::B_LINE + e % LENGTH, line);
    }
  }
};

// The ROWS x SIDE sums of a simdgroup, of matrices of type M.
template <
    typename T, typename M, int COLUMNS, bool TRANSPOSED, int SIDE, int BYTES>
struct GemmSums {
  using Tile = GemmTile<T, COLUMNS, TRANSPOSED, SIDE, BYTES>;
  using Load = Matrices<T, M>;
  // Rows that are staged and multiplied together.
  static constant constexpr int WIDTH = SIDE, SKIPPED = BLOCK_ROWS;
  static constant constexpr int OWN = Tile::ROWS / BLOCK_ROWS, APART = Tile::APART;
  simdgroup_matrix<float, 8, 8> sums[OWN][WIDTH / 8];

  METAL_FUNC GemmSums() thread {}

  METAL_FUNC void start(int) thread {
    UNROLL for (int i = 0; i < OWN; ++i)
      UNROLL for (int n = 0; n < WIDTH / 8; ++n)
        sums[i][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  // Multiplies `depth` channels of live blocks into the `width` first columns.
  METAL_FUNC void multiply(
      const threadgroup T* rows, const threadgroup T* weights, int depth, int width,
      uint live) thread {
    constexpr int line = Tile::B_LINE;
    uint own = 0;
    UNROLL for (int i = 0; i < OWN; ++i) own |= live & 1u << i * APART;
    if (own == 0) return;
    UNROLL for (int c = 0; c < Tile::DEPTH; c += 8) {
      if (c >= depth) break;
      simdgroup_matrix<M, 8, 8> a, b[WIDTH / 8];
      UNROLL for (int n = 0; n < WIDTH / 8; ++n) {
        const int at = TRANSPOSED ? 8 * n * line : 8 * n;
        if (8 * n < width) Load::template load<TRANSPOSED>(b[n], weights + at, line);
      }
      UNROLL for (int i = 0; i < OWN; ++i) {
        if ((own >> i * APART & 1u) == 0) continue;
        Load::template load<false>(
            a, rows + 8 * i * APART * Tile::A_LINE, Tile::A_LINE);
        UNROLL for (int n = 0; n < WIDTH / 8; ++n) {
          if (8 * n >= width) break;
          simdgroup_multiply_accumulate(sums[i][n], a, b[n], sums[i][n]);
        }
      }
      rows += 8;
      weights += TRANSPOSED ? 8 : 8 * line;
    }
  }

  // Stores 16 rows of sums, in lines of WIDTH.
  METAL_FUNC void store(threadgroup float* to, int part) thread {
    UNROLL for (int i = 0; i < OWN; ++i) {
      if (i / 2 != part) continue;
      UNROLL for (int n = 0; n < WIDTH / 8; ++n)
        simdgroup_store(sums[i][n], to + 8 * (i % 2) * WIDTH + 8 * n, WIDTH);
    }
  }
};

// Threadgroups (column and tile, 1, split). PLACED: rows are written to their places in
// y, which starts with the lowest row of the first tile's region; else y has the sorted
// rows from the first tile on, a copy for each split. FAR: 32 bits do not hold the place
// of every element of every array. X: how rows are stored; they are multiplied as T.
// MOMENTS: gets what is written.
template <
    typename T,
    typename OUT,
    int COLUMNS,
    bool TRANSPOSED,
    bool PLACED,
    typename WEIGHTS,
    typename AFTER,
    typename SUMS,
    bool FAR = true,
    typename X,
    typename MOMENTS>
METAL_FUNC void sorted_tiles(
    const device X* x,
    const thread WEIGHTS& w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const thread AFTER& after,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    threadgroup float* memory,
    thread MOMENTS& moments,
    uint3 group,
    int simdgroup,
    int lane) {
  using Tile = typename SUMS::Tile;
  using Index = typename IndexOf<FAR>::Type;
  constexpr int WIDTH = SUMS::WIDTH;
  const int first_tile = sizes.first, n = sizes.rows, volume = sizes.volume;
  const int c_x = sizes.c_x, c_y = sizes.c_y, splits = sizes.splits;
  const int thread_index = LANES * simdgroup + lane;
  const int across = (c_y + COLUMNS - 1) / COLUMNS;
  const int tile = first_tile + int(group.x) / across;
  const int column = COLUMNS * (int(group.x) % across);
  const int left = n - tile * TILE_ROWS;
  const int blocks = min(BLOCKS, (left + BLOCK_ROWS - 1) / BLOCK_ROWS);
  const int words = (volume + 31) / 32;
  TileOffsets<> offsets(masks + Index(tile) * Index(BLOCKS * words), blocks, volume);

  // The steps of this split: (offset, channels), channels the faster.
  const int chunks = (c_x + Tile::DEPTH - 1) / Tile::DEPTH, split = int(group.z);
  int steps = volume * chunks, k = offsets.next(0), chunk = 0;
  if (splits > 1) {
    const int total = offsets.count() * chunks;
    const int from = split_start(total, split, splits);
    steps = split_start(total, split + 1, splits) - from;
    k = offsets.next(0);
    for (int skipped = from / chunks; skipped > 0; --skipped) k = offsets.next(k + 1);
    chunk = from % chunks;
  }

  // Lanes side by side bring a row, whether or not this simdgroup multiplies it.
  const int row = thread_index / (Tile::ALL / TILE_ROWS);
  const int place = tile * TILE_ROWS + row;
  const uint own = ((1u << SUMS::SKIPPED / BLOCK_ROWS) - 1u)
      << (row / SUMS::SKIPPED * (SUMS::SKIPPED / BLOCK_ROWS));
  const device int* neighbours = table + Index(min(place, n - 1)) * Index(volume);
  const int top = Tile::first_row(simdgroup), side = Tile::first_column(simdgroup);
  const int width = min(WIDTH, c_y - column - side);
  const bool wide = c_x % Wide<T>::COUNT == 0 && begins_wide(x);
  threadgroup T* staged = (threadgroup T*)memory;
  GemmStage<T, Tile, COLUMNS, TRANSPOSED, WEIGHTS> stage;
  SUMS sums;
  sums.start(lane);

  uint live = offsets.live(k);
  bool more = steps > 0 && k < volume, used = (live & own) != 0;
  int from = more && used && place < n ? neighbours[k] : -1;
  Index begins = from < 0 ? Index(0) : Index(from) * Index(c_x);
  if (more) {
    stage.fetch_weights(w, k, chunk * Tile::DEPTH, column, c_x, c_y, thread_index);
    if (used)
      stage.fetch_rows(x, begins, from >= 0, chunk * Tile::DEPTH, c_x, wide, lane);
  }
  while (more) {
    // All have multiplied what stands there.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage.put_weights(staged + Tile::A_SIZE, thread_index);
    if (used) stage.put_rows(staged, row, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int depth = c_x - chunk * Tile::DEPTH;
    const uint multiplied = live >> (top / BLOCK_ROWS);
    if (++chunk == chunks) {
      chunk = 0;
      k = offsets.next(k + 1);
      live = offsets.live(k);
      used = (live & own) != 0;
      from = used && place < n ? neighbours[k] : -1;
      begins = from < 0 ? Index(0) : Index(from) * Index(c_x);
    }
    more = --steps > 0 && k < volume;
    // The next step travels while this one is multiplied.
    if (more) {
      stage.fetch_weights(w, k, chunk * Tile::DEPTH, column, c_x, c_y, thread_index);
      if (used)
        stage.fetch_rows(x, begins, from >= 0, chunk * Tile::DEPTH, c_x, wide, lane);
    }
    const threadgroup T* weights =
        staged + (Tile::A_SIZE + (TRANSPOSED ? side * Tile::B_LINE : side));
    sums.multiply(staged + top * Tile::A_LINE, weights, depth, width, multiplied);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  threadgroup float* sorted = memory + 16 * WIDTH * simdgroup;
  const int kept = n - first_tile * TILE_ROWS;
  for (int part = 0; part < Tile::ROWS / 16; ++part) {
    sums.store(sorted, part);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane; e < 4 * WIDTH; e += LANES) {
      const int r = e / (WIDTH / 4), c = e % (WIDTH / 4) * 4;
      const int at = tile * TILE_ROWS + top + Tile::row(16 * part + r);
      if (at >= n || c >= width) continue;
      float4 line;
      for (int j = 0; j < 4; ++j) line[j] = sorted[r * WIDTH + c + j];
      const int own_row = PLACED || after.residual ? rows[at] : 0;
      const int placed = PLACED ? own_row : at;
      after.finish(line, Index(own_row), c_y, column + side + c, width - c);
      const Index to =
          Index(group.z) * Index(kept) + Index(placed - first_tile * TILE_ROWS);
      write_sums(y + (to * Index(c_y) + Index(column + side + c)), line, width - c);
      moments.add(0, line);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  moments.template write<COLUMNS, WIDTH, Tile::ALL / LANES>(
      memory, tile - first_tile, column, c_y, simdgroup, lane);
}

template <
    typename T, typename OUT, int COLUMNS, typename M, int SIDE, int BYTES,
    bool FAR, bool TRANSPOSED, bool PLACED, int ACTIVATION = BIAS_ALONE,
    typename P = T, int EPS = 0>
METAL_FUNC void sorted_implicit_gemm(
    const device T* x,
    const device T* w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const device Given<P>* bias,
    const device Given<P>* scale,
    const device float* mean,
    const device float* var,
    const device T* residual,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  const auto weights =
      float_weights<FAR, T>(w, sizes.w_offset_stride, sizes.w_row_stride);
  const Epilogue<T, ACTIVATION, P, EPS> after = {bias, scale, mean, var, residual};
  NoMoments none;
  sorted_tiles<
      T, OUT, COLUMNS, TRANSPOSED, PLACED, FloatWeights<T, FAR>,
      Epilogue<T, ACTIVATION, P, EPS>,
      GemmSums<T, M, COLUMNS, TRANSPOSED, SIDE, BYTES>, FAR>(
      x, weights, table, rows, masks, after, sizes, y, memory, none, group, simdgroup,
      lane);
}

// The same with statistics of the rows of y, a line of 3 x C_y for each tile.
template <
    typename T, typename OUT, int COLUMNS, typename M, int SIDE, int BYTES,
    bool FAR, bool TRANSPOSED, bool PLACED>
METAL_FUNC void sorted_implicit_gemm(
    const device T* x,
    const device T* w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const device Given<T>* bias,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    device float* lines,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  const auto weights =
      float_weights<FAR, T>(w, sizes.w_offset_stride, sizes.w_row_stride);
  const Epilogue<T, BIAS_ALONE, T, 0> after = {bias, nullptr, nullptr, nullptr, nullptr};
  RowMoments<OUT, 1> moments(lines);
  sorted_tiles<
      T, OUT, COLUMNS, TRANSPOSED, PLACED, FloatWeights<T, FAR>,
      Epilogue<T, BIAS_ALONE, T, 0>,
      GemmSums<T, M, COLUMNS, TRANSPOSED, SIDE, BYTES>, FAR>(
      x, weights, table, rows, masks, after, sizes, y, memory, moments, group,
      simdgroup, lane);
}
