// y[o] = sum over the edges of o of x[i] @ W[k], channel counts of 16, 32 or 64 fixed
// when the kernel is compiled: rows in their own order, so nothing has to be sorted
// first.
//
//   threadgroup: 64 rows x all channels; simdgroup: 16 rows, 2 x C_out / 8 8x8 sums
//     for k: W[k] [C_in, C_out] (float: halves of 64 channels) | gathered rows ->
//     threadgroup memory, while the next ones travel to registers
//     eight rows without an edge of k are not multiplied
//
// Half, bfloat and float; float sums in order of k: the same bits on every run. Traffic
// per output row: edges x C_in features, and K x C_in x C_out weights for 64 rows, from
// cache; the table once, y once. Rows in lexicographic order do 1.6 (a solid shape) to
// 2.2 times (a surface) the useful arithmetic, which sorted_implicit_gemm mostly saves.
// It wins where a relation is used too few times to pay for sorting it. cout16 is the
// same with one column tile.

// EIGHTS: eights of rows of a simdgroup. C_X: channels of x, or 0 where known when it
// runs.
template <typename T, int COLUMNS, int EIGHTS, int C_X, bool TRANSPOSED>
struct TableTile {
  static constant constexpr int MOST = (C_X > 0 ? 128 : 64) / int(sizeof(T));
  static constant constexpr int DEPTH = C_X > 0 && C_X < MOST ? C_X : MOST;
  static constant constexpr int PAD = 16 / int(sizeof(T));
  static constant constexpr int ROWS = 8 * EIGHTS;
  static constant constexpr int A_LINE = DEPTH + PAD;
  static constant constexpr int LENGTH = TRANSPOSED ? DEPTH : COLUMNS;
  static constant constexpr int B_LINE = LENGTH + PAD;
  static constant constexpr int A_SIZE = SIMDGROUPS * ROWS * A_LINE;
  static constant constexpr int B_SIZE = (TRANSPOSED ? COLUMNS : DEPTH) * B_LINE;
  static constant constexpr int A_FOURS = ROWS * DEPTH / 4 / LANES;
  static constant constexpr int B_ALL = DEPTH * COLUMNS;
  static constant constexpr int B_FOURS = (B_ALL / 4 + THREADS - 1) / THREADS;
  static constant constexpr int STAGED = (A_SIZE + B_SIZE) * int(sizeof(T)) / 4;
  static constant constexpr int SUMS = SIMDGROUPS * ROWS * COLUMNS;
  static constant constexpr int FLOATS = STAGED > SUMS ? STAGED : SUMS;
};

// A thread's share of a step, on its way to threadgroup memory.
template <typename T, int COLUMNS, int EIGHTS, int C_X, bool TRANSPOSED>
struct TableStage {
  using Tile = TableTile<T, COLUMNS, EIGHTS, C_X, TRANSPOSED>;
  Four<T> a[Tile::A_FOURS], b[Tile::B_FOURS];

  // `from` of lane r is the input row of row r, or -1.
  METAL_FUNC void fetch_rows(
      const device T* x, int from, int c, int c_x, int lane) thread {
    UNROLL for (int j = 0; j < Tile::A_FOURS; ++j) {
      const int f = j * LANES + lane, at = c + f % (Tile::DEPTH / 4) * 4;
      const int row = simd_shuffle(from, ushort(f / (Tile::DEPTH / 4)));
      const bool inside = row >= 0 && at < c_x;
      fetch(a[j], x + (inside ? size_t(row) * c_x + at : size_t(0)),
            inside ? c_x - at : 0);
    }
  }

  // `w` is W[k]: rows along the columns, or along C_x where transposed.
  METAL_FUNC void fetch_weights(
      const device T* w, int row_stride, int c, int c_x, int thread_index) thread {
    UNROLL for (int j = 0; j < Tile::B_FOURS; ++j) {
      const int e = 4 * (j * THREADS + thread_index);
      const int line = e / Tile::LENGTH, along = e % Tile::LENGTH;
      const int at = TRANSPOSED ? c + along : c + line;
      const bool inside = e < Tile::B_ALL && at < c_x;
      const size_t place =
          size_t(TRANSPOSED ? line : at) * row_stride + (TRANSPOSED ? at : along);
      fetch(b[j], w + (inside ? place : size_t(0)),
            inside ? (TRANSPOSED ? c_x - at : 4) : 0);
    }
  }

  METAL_FUNC void put_rows(threadgroup T* rows, int lane) const thread {
    UNROLL for (int j = 0; j < Tile::A_FOURS; ++j) {
      const int f = j * LANES + lane;
      const int row = f / (Tile::DEPTH / 4), c = f % (Tile::DEPTH / 4) * 4;
      put(rows + row * Tile::A_LINE + c, a[j]);
    }
  }

  METAL_FUNC void put_weights(threadgroup T* weights, int thread_index) const thread {
    UNROLL for (int j = 0; j < Tile::B_FOURS; ++j) {
      const int e = 4 * (j * THREADS + thread_index);
      if (e < Tile::B_ALL)
        put(weights + e / Tile::LENGTH * Tile::B_LINE + e % Tile::LENGTH, b[j]);
    }
  }
};

// Threadgroups (1, tile). Multiplies matrices of M. Reads matrix_tiles.metal too.
template <
    typename T, typename M, int COLUMNS, int EIGHTS, int C_X, bool TRANSPOSED>
METAL_FUNC void table_gemm(
    const device T* x,
    const device T* w,
    const device int* table,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device T* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  using Tile = TableTile<T, COLUMNS, EIGHTS, C_X, TRANSPOSED>;
  using Load = Matrices<T, M>;
  const int rows = sizes.rows, volume = sizes.volume, c_x = C_X > 0 ? C_X : sizes.c_x;
  const int thread_index = LANES * simdgroup + lane;
  const int start = (int(group.y) * SIMDGROUPS + simdgroup) * Tile::ROWS;
  const bool owns = lane < Tile::ROWS && start + lane < rows;
  const device int* neighbours =
      table + (size_t(sizes.first) + (owns ? start + lane : 0)) * volume;
  threadgroup T* staged = (threadgroup T*)memory;
  threadgroup T* own_rows = staged + simdgroup * Tile::ROWS * Tile::A_LINE;
  threadgroup T* weights = staged + Tile::A_SIZE;

  simdgroup_matrix<float, 8, 8> sums[EIGHTS][COLUMNS / 8];
  UNROLL for (int i = 0; i < EIGHTS; ++i)
    UNROLL for (int n = 0; n < COLUMNS / 8; ++n)
      sums[i][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  TableStage<T, COLUMNS, EIGHTS, C_X, TRANSPOSED> stage;
  int from = owns ? neighbours[0] : -1;
  bool any = simd_any(from >= 0);
  stage.fetch_weights(w, sizes.w_row_stride, 0, c_x, thread_index);
  if (any) stage.fetch_rows(x, from, 0, c_x, lane);
  for (int k = 0, c = 0; k < volume;) {
    const int depth = c_x - c, now = from;
    const bool multiplies = any;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage.put_weights(weights, thread_index);
    if (any) stage.put_rows(own_rows, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    c += Tile::DEPTH;
    if (c >= c_x) {
      c = 0;
      if (++k < volume) {
        from = owns ? neighbours[k] : -1;
        any = simd_any(from >= 0);
      }
    }
    // The next step travels while this one is multiplied.
    if (k < volume) {
      stage.fetch_weights(
          w + size_t(k) * sizes.w_offset_stride, sizes.w_row_stride, c, c_x,
          thread_index);
      if (any) stage.fetch_rows(x, from, c, c_x, lane);
    }
    if (!multiplies) continue;
    bool live[EIGHTS];
    UNROLL for (int i = 0; i < EIGHTS; ++i)
      live[i] = simd_any(now >= 0 && lane / 8 == i);
    UNROLL for (int d = 0; d < Tile::DEPTH; d += 8) {
      if (d >= depth) break;
      simdgroup_matrix<M, 8, 8> a[EIGHTS], b;
      UNROLL for (int i = 0; i < EIGHTS; ++i)
        Load::template load<false>(
            a[i], own_rows + 8 * i * Tile::A_LINE + d, Tile::A_LINE);
      UNROLL for (int n = 0; n < COLUMNS / 8; ++n) {
        const int at = TRANSPOSED ? 8 * n * Tile::B_LINE + d : d * Tile::B_LINE + 8 * n;
        Load::template load<TRANSPOSED>(b, weights + at, Tile::B_LINE);
        UNROLL for (int i = 0; i < EIGHTS; ++i)
          if (live[i]) simdgroup_multiply_accumulate(sums[i][n], a[i], b, sums[i][n]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  threadgroup float* written = memory + simdgroup * Tile::ROWS * COLUMNS;
  UNROLL for (int i = 0; i < EIGHTS; ++i)
    UNROLL for (int n = 0; n < COLUMNS / 8; ++n)
      simdgroup_store(sums[i][n], written + 8 * i * COLUMNS + 8 * n, COLUMNS);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = 4 * lane; e < Tile::ROWS * COLUMNS; e += 4 * LANES) {
    if (start + e / COLUMNS >= rows) continue;
    float4 line;
    for (int j = 0; j < 4; ++j) {
      line[j] = written[e + j];
      if (bias) line[j] += float(bias[e % COLUMNS + j]);
    }
    write_sums(y + size_t(start) * COLUMNS + e, line, 4);
  }
}

template <typename T, typename M, int C_X, int C_Y, bool TRANSPOSED>
METAL_FUNC void dense_channel(
    const device T* x,
    const device T* w,
    const device int* table,
    const device T* bias,
    const thread PerRowSizes& sizes,
    device T* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  table_gemm<T, M, C_Y, 2, C_X, TRANSPOSED>(
      x, w, table, bias, sizes, y, memory, group, simdgroup, lane);
}
