// The forward pass of sorted_implicit_gemm in variants, for the doctor's experiments:
// what a Mac alone can say is which one is fastest there. No route launches it.
//
//   threadgroup: 64 sorted rows x 128 or 64 channels, four simdgroups of 32 or 16
//   BUFFERS: 2, the next step is put away while one is multiplied; 1, after it
//   DEPTH: channels of a step
//   SKIPS: whether blocks of eight rows without an edge of an offset are passed over
//   IN_FLOAT: whether matrices are float, converted as they are loaded
//
// Channels are whole tiles and steps; weights are (K, C_x, C_y); float sums in order of
// the offsets; rows are written to their places. Traffic is that of the route. Reads
// matrix_tiles, epilogue and sorted_implicit_gemm too, whose staging it has.

template <typename T, int COLUMNS, int STEP, int BUFFERS>
struct ExperimentTile {
  static constant constexpr int WIDTH = COLUMNS / SIMDGROUPS, ALL = THREADS;
  static constant constexpr int DEPTH = STEP, BYTES = STEP * int(sizeof(T));
  static constant constexpr int PAD = 16 / int(sizeof(T));
  static constant constexpr int A_LINE = DEPTH + PAD;
  static constant constexpr int B_LINE = COLUMNS + PAD;
  static constant constexpr int A_SIZE = TILE_ROWS * A_LINE;
  static constant constexpr int BUFFER = A_SIZE + DEPTH * B_LINE;
  static constant constexpr int A_PARTS = TILE_ROWS * BYTES / 16 / ALL;
  static constant constexpr int B_ALL = DEPTH * COLUMNS;
  static constant constexpr int B_PARTS = (COLUMNS * BYTES / 16 + ALL - 1) / ALL;
  static constant constexpr int STEPS = BUFFERS * BUFFER * int(sizeof(T)) / 4;
  static constant constexpr int SUMS = SIMDGROUPS * 16 * WIDTH;
  static constant constexpr int FLOATS = STEPS > SUMS ? STEPS : SUMS;
};

template <typename T, typename M, int COLUMNS, int STEP, int BUFFERS, bool SKIPS>
METAL_FUNC void experiment_tiles(
    const device T* x,
    const device T* w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const thread ExperimentTilesSizes& sizes,
    device T* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  using Tile = ExperimentTile<T, COLUMNS, STEP, BUFFERS>;
  using Load = Matrices<T, M>;
  constexpr int WIDTH = Tile::WIDTH, ACROSS = WIDTH / 8;
  const int n = sizes.rows, volume = sizes.volume, c_x = sizes.c_x, c_y = sizes.c_y;
  const int across = c_y / COLUMNS, thread_index = LANES * simdgroup + lane;
  const int tile = int(group.x) / across, column = int(group.x) % across * COLUMNS;
  const int left = n - tile * TILE_ROWS, words = (volume + 31) / 32;
  const int blocks = min(BLOCKS, (left + BLOCK_ROWS - 1) / BLOCK_ROWS);
  TileOffsets<> offsets(masks + size_t(tile) * BLOCKS * words, blocks, volume);
  const auto weights = float_weights<false, T>(w, c_x * c_y, c_y);
  const bool wide = c_x % Wide<T>::COUNT == 0 && begins_wide(x);

  const int row = thread_index / 2, place = tile * TILE_ROWS + row;
  const device int* neighbours = table + size_t(min(place, n - 1)) * volume;
  const int side = WIDTH * simdgroup;
  threadgroup T* staged = (threadgroup T*)memory;
  GemmStage<T, Tile, COLUMNS, false, FloatWeights<T, false>> stage;
  simdgroup_matrix<float, 8, 8> sums[BLOCKS][ACROSS];
  UNROLL for (int i = 0; i < BLOCKS; ++i)
    UNROLL for (int j = 0; j < ACROSS; ++j)
      sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  // Without skipping, all offsets and blocks are multiplied: absent rows are zeros.
  int k = SKIPS ? offsets.next(0) : 0, chunk = 0;
  uint live = SKIPS ? offsets.live(k) : ~0u;
  const uint own = 1u << (row / BLOCK_ROWS);
  bool used = (live & own) != 0, more = k < volume;
  int from = more && used && place < n ? neighbours[k] : -1;
  if (more) {
    stage.fetch_weights(weights, k, 0, column, c_x, c_y, thread_index);
    stage.put_weights(staged + Tile::A_SIZE, thread_index);
    stage.fetch_rows(x, uint(max(from, 0)) * uint(c_x), from >= 0, 0, c_x, wide, lane);
    stage.put_rows(staged, row, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int buffer = 0; more; buffer = BUFFERS == 2 ? buffer ^ 1 : 0) {
    const uint multiplied = live;
    chunk += 1;
    if (chunk * STEP >= c_x) {
      chunk = 0;
      k = SKIPS ? offsets.next(k + 1) : k + 1;
      live = SKIPS ? offsets.live(k) : ~0u;
      used = (live & own) != 0;
      from = k < volume && used && place < n ? neighbours[k] : -1;
    }
    more = k < volume;
    if (more) {
      stage.fetch_weights(weights, k, chunk * STEP, column, c_x, c_y, thread_index);
      stage.fetch_rows(
          x, uint(max(from, 0)) * uint(c_x), from >= 0, chunk * STEP, c_x, wide, lane);
    }
    const threadgroup T* now = staged + buffer * Tile::BUFFER;
    UNROLL for (int c = 0; c < STEP; c += 8) {
      simdgroup_matrix<M, 8, 8> a, b[ACROSS];
      UNROLL for (int j = 0; j < ACROSS; ++j)
        Load::template load<false>(
            b[j], now + Tile::A_SIZE + c * Tile::B_LINE + side + 8 * j, Tile::B_LINE);
      UNROLL for (int i = 0; i < BLOCKS; ++i) {
        if (SKIPS && (multiplied >> i & 1u) == 0) continue;
        Load::template load<false>(a, now + 8 * i * Tile::A_LINE + c, Tile::A_LINE);
        UNROLL for (int j = 0; j < ACROSS; ++j)
          simdgroup_multiply_accumulate(sums[i][j], a, b[j], sums[i][j]);
      }
    }
    if (BUFFERS == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (more) {
      threadgroup T* next = staged + (BUFFERS == 2 ? buffer ^ 1 : 0) * Tile::BUFFER;
      stage.put_weights(next + Tile::A_SIZE, thread_index);
      stage.put_rows(next, row, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  threadgroup float* sorted = memory + 16 * WIDTH * simdgroup;
  UNROLL for (int part = 0; part < BLOCKS / 2; ++part) {
    UNROLL for (int i = 0; i < 2; ++i)
      UNROLL for (int j = 0; j < ACROSS; ++j)
        simdgroup_store(
            sums[2 * part + i][j], sorted + 8 * i * WIDTH + 8 * j, WIDTH);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane; e < 4 * WIDTH; e += LANES) {
      const int r = e / (WIDTH / 4), c = e % (WIDTH / 4) * 4;
      const int start = tile * TILE_ROWS + 16 * part + r;
      if (start >= n) continue;
      float4 line;
      for (int j = 0; j < 4; ++j) line[j] = sorted[r * WIDTH + c + j];
      write_sums(y + size_t(rows[start]) * c_y + column + side + c, line, 4);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}
