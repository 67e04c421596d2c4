// y[o] = sum over the edges of o of x[i] @ W[k]: matrix tiles over mask-sorted rows,
// for the forward pass and, with W[k] read across, the input gradient.
//
//   threadgroup: 64 sorted rows x 64 (32) channels; simdgroup: 16 rows, 2 x 8 8x8 sums
//     for k used by the tile, for 64 bytes of channels:
//       gathered rows [64, depth] | W[k] [depth, 64] -> threadgroup memory, two buffers
//       simdgroups whose rows use k multiply; the others skip reading and multiplying
//
// Any K, channels, half, bfloat and float; float sums, in order of k: the same bits on
// every run. Traffic per output row and 64 channels: edges x C_in features, and C_in x
// 64 weights of each offset of the tile for 64 rows; rows by sorted place, so y is
// written once. Few rows are cut along (k, channels) into splits that add_splits adds
// in order. Wins over the gathering routes from about a thousand rows on, at any
// channel count of 8 or more.

template <typename T, int COLUMNS, bool TRANSPOSED>
struct GemmTile {
  static constant constexpr int DEPTH = 64 / int(sizeof(T));
  static constant constexpr int PAD = 16 / int(sizeof(T));
  static constant constexpr int A_LINE = DEPTH + PAD;
  static constant constexpr int B_LINE = (TRANSPOSED ? DEPTH : COLUMNS) + PAD;
  static constant constexpr int A_SIZE = TILE_ROWS * A_LINE;
  static constant constexpr int B_SIZE = (TRANSPOSED ? COLUMNS : DEPTH) * B_LINE;
  static constant constexpr int BUFFER = A_SIZE + B_SIZE;
  static constant constexpr int A_FOURS = DEPTH / 8;
  static constant constexpr int B_FOURS = DEPTH * COLUMNS / 4 / THREADS;
  // The sums pass through the same memory at the end.
  static constant constexpr int STAGED = 2 * BUFFER * int(sizeof(T)) / 4;
  static constant constexpr int FLOATS =
      STAGED > TILE_ROWS * COLUMNS ? STAGED : TILE_ROWS * COLUMNS;
};

// Weights as they stand: lines of `length` elements. A type that reads weights stored
// another way has the same names.
template <typename T>
struct FloatWeights {
  using Part = Four<T>;
  const device T* w;

  // Reads four elements of a line; those from its length on are zero.
  void fetch_part(thread Part& to, size_t line, int at, int length) const thread {
    fetch(to, w + line * length + at, length - at);
  }

  static void unpack(thread Four<T>& to, const thread Part& part) {
    to = part;
  }
};

// A thread's share of a step, between device and threadgroup memory.
template <typename T, int COLUMNS, bool TRANSPOSED, typename WEIGHTS>
struct GemmStage {
  using Tile = GemmTile<T, COLUMNS, TRANSPOSED>;
  Four<T> a[Tile::A_FOURS];
  typename WEIGHTS::Part b[Tile::B_FOURS];

  void fetch_rows(const device T* x, int from, int c, int c_x, int lane) thread {
    UNROLL for (int j = 0; j < Tile::A_FOURS; ++j) {
      const int at = c + 4 * (2 * j + lane % 2);
      fetch(a[j], x + (from < 0 ? size_t(0) : size_t(from) * c_x + at),
            from < 0 ? 0 : c_x - at);
    }
  }

  // W[k] is (C_x, C_y), or (C_y, C_x) where transposed.
  void fetch_weights(
      const thread WEIGHTS& w, int k, int c, int column, int c_x, int c_y,
      int thread_index) thread {
    UNROLL for (int j = 0; j < Tile::B_FOURS; ++j) {
      const int e = 4 * (j * THREADS + thread_index);
      const int line = TRANSPOSED ? column + e / Tile::DEPTH : c + e / COLUMNS;
      const int at = TRANSPOSED ? c + e % Tile::DEPTH : column + e % COLUMNS;
      const int lines = TRANSPOSED ? c_y : c_x, length = TRANSPOSED ? c_x : c_y;
      const bool inside = line < lines && at < length;
      w.fetch_part(
          b[j], inside ? size_t(k) * lines + line : size_t(0), inside ? at : length,
          length);
    }
  }

  void put_rows(threadgroup T* rows, int simdgroup, int lane) const thread {
    threadgroup T* to = rows + (BLOCK_ROWS * simdgroup + lane / 2) * Tile::A_LINE;
    UNROLL for (int j = 0; j < Tile::A_FOURS; ++j)
      put(to + 4 * (2 * j + lane % 2), a[j]);
  }

  void put_weights(threadgroup T* weights, int thread_index) const thread {
    constexpr int length = TRANSPOSED ? Tile::DEPTH : COLUMNS;
    UNROLL for (int j = 0; j < Tile::B_FOURS; ++j) {
      const int e = 4 * (j * THREADS + thread_index);
      Four<T> line;
      WEIGHTS::unpack(line, b[j]);
      put(weights + e / length * Tile::B_LINE + e % length, line);
    }
  }
};

// The 16 x COLUMNS sums of a simdgroup.
template <typename T, int COLUMNS, bool TRANSPOSED>
struct GemmSums {
  using Tile = GemmTile<T, COLUMNS, TRANSPOSED>;
  simdgroup_matrix<float, 8, 8> sums[2][COLUMNS / 8];

  void start(int) thread {
    UNROLL for (int n = 0; n < COLUMNS / 8; ++n)
      UNROLL for (int i = 0; i < 2; ++i)
        sums[i][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  // Multiplies `depth` staged channels into the `width` first columns, by eights.
  void multiply(
      const threadgroup T* rows, const threadgroup T* weights, int depth,
      int width) thread {
    UNROLL for (int c = 0; c < Tile::DEPTH; c += 8) {
      if (c >= depth) break;
      simdgroup_matrix<T, 8, 8> a[2], b;
      simdgroup_load(a[0], rows + c, Tile::A_LINE);
      simdgroup_load(a[1], rows + 8 * Tile::A_LINE + c, Tile::A_LINE);
      UNROLL for (int n = 0; n < COLUMNS / 8; ++n) {
        if (8 * n >= width) break;
        if (TRANSPOSED)
          simdgroup_load(
              b, weights + 8 * n * Tile::B_LINE + c, Tile::B_LINE, ulong2(0, 0), true);
        else
          simdgroup_load(b, weights + c * Tile::B_LINE + 8 * n, Tile::B_LINE);
        simdgroup_multiply_accumulate(sums[0][n], a[0], b, sums[0][n]);
        simdgroup_multiply_accumulate(sums[1][n], a[1], b, sums[1][n]);
      }
    }
  }

  void store(threadgroup float* to) thread {
    UNROLL for (int n = 0; n < COLUMNS / 8; ++n)
      UNROLL for (int i = 0; i < 2; ++i)
        simdgroup_store(sums[i][n], to + 8 * i * COLUMNS + 8 * n, COLUMNS);
  }
};

// Whether rows are written to their places in y; else they are sorted, from the first
// tile on, a copy for each split. Whether threadgroups are (tile, columns), for weights
// that are larger than the cache, instead of (columns, tile).
enum GemmFlags { PLACED = 1, TILES_FIRST = 2 };

// Threadgroups (columns, tile, split). sizes: first tile, rows, K, channels of x and of
// y, splits, flags. Reads matrix_tiles.metal too.
template <
    typename T,
    typename OUT,
    int COLUMNS,
    bool TRANSPOSED,
    bool BIAS,
    typename WEIGHTS,
    typename SUMS = GemmSums<T, COLUMNS, TRANSPOSED>>
void sorted_gemm(
    const device T* x,
    const thread WEIGHTS& w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const device T* bias,
    const constant int* sizes,
    device OUT* y,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  using Tile = GemmTile<T, COLUMNS, TRANSPOSED>;
  const int first_tile = sizes[0], n = sizes[1], volume = sizes[2];
  const int c_x = sizes[3], c_y = sizes[4], splits = sizes[5];
  const int thread_index = LANES * simdgroup + lane;
  const bool swapped = (sizes[6] & TILES_FIRST) != 0;
  const int tile = first_tile + int(swapped ? group.x : group.y);
  const int column = COLUMNS * int(swapped ? group.y : group.x);
  const int width = min(COLUMNS, c_y - column);
  const int left = n - tile * TILE_ROWS;
  const int blocks = min(SIMDGROUPS, (left + BLOCK_ROWS - 1) / BLOCK_ROWS);
  const int words = (volume + 31) / 32;
  TileOffsets offsets(
      masks + size_t(tile) * SIMDGROUPS * words, blocks, simdgroup, volume);

  // The steps of this split: (offset, channels), channels the faster.
  const int chunks = (c_x + Tile::DEPTH - 1) / Tile::DEPTH;
  int steps = volume * chunks, chunk = 0, k = offsets.next(0);
  if (splits > 1) {
    const int total = offsets.count() * chunks, split = int(group.z);
    const int first = int(long(total) * split / splits);
    steps = int(long(total) * (split + 1) / splits) - first;
    k = offsets.next(0);
    for (int skipped = first / chunks; skipped > 0; --skipped) k = offsets.next(k + 1);
    chunk = first % chunks;
  }

  const int place = tile * TILE_ROWS + BLOCK_ROWS * simdgroup + lane / 2;
  const device int* neighbours = table + size_t(min(place, n - 1)) * volume;
  threadgroup T* staged = (threadgroup T*)memory;
  GemmStage<T, COLUMNS, TRANSPOSED, WEIGHTS> stage;
  SUMS sums;
  sums.start(lane);

  bool more = steps > 0 && k < volume, used = offsets.used(k);
  int from = used && place < n ? neighbours[k] : -1;
  if (more) {
    stage.fetch_weights(w, k, chunk * Tile::DEPTH, column, c_x, c_y, thread_index);
    stage.put_weights(staged + Tile::A_SIZE, thread_index);
    if (used) {
      stage.fetch_rows(x, from, chunk * Tile::DEPTH, c_x, lane);
      stage.put_rows(staged, simdgroup, lane);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int buffer = 0; more; buffer ^= 1) {
    const int depth = c_x - chunk * Tile::DEPTH;
    const bool multiplies = used;
    if (++chunk == chunks) {
      chunk = 0;
      k = offsets.next(k + 1);
      used = offsets.used(k);
      from = used && place < n ? neighbours[k] : -1;
    }
    more = --steps > 0 && k < volume;
    // The next step travels while this one is multiplied.
    if (more) {
      stage.fetch_weights(w, k, chunk * Tile::DEPTH, column, c_x, c_y, thread_index);
      if (used) stage.fetch_rows(x, from, chunk * Tile::DEPTH, c_x, lane);
    }
    const threadgroup T* now = staged + buffer * Tile::BUFFER;
    if (multiplies)
      sums.multiply(
          now + BLOCK_ROWS * simdgroup * Tile::A_LINE, now + Tile::A_SIZE, depth,
          width);
    if (more) {
      threadgroup T* next = staged + (buffer ^ 1) * Tile::BUFFER;
      stage.put_weights(next + Tile::A_SIZE, thread_index);
      if (used) stage.put_rows(next, simdgroup, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  threadgroup float* sorted = memory + BLOCK_ROWS * COLUMNS * simdgroup;
  sums.store(sorted);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const int start = tile * TILE_ROWS + BLOCK_ROWS * simdgroup;
  const int kept = n - first_tile * TILE_ROWS;
  for (int e = lane; e < BLOCK_ROWS * COLUMNS / 4; e += LANES) {
    const int r = e / (COLUMNS / 4), c = e % (COLUMNS / 4) * 4;
    if (start + r >= n || c >= width) continue;
    float4 line;
    for (int j = 0; j < 4; ++j) {
      line[j] = sorted[r * COLUMNS + c + j];
      if (BIAS && c + j < width) line[j] += float(bias[column + c + j]);
    }
    const size_t to = (sizes[6] & PLACED) != 0
        ? size_t(rows[start + r])
        : size_t(group.z) * kept + size_t(start + r - first_tile * TILE_ROWS);
    write_sums(y + to * c_y + column + c, line, width - c);
  }
}

// One thread a (four channels, sorted row): adds the splits in order. sizes: rows,
// channels, splits.
template <typename T, bool BIAS>
void add_splits(
    const device float* partial,
    const device int* rows,
    const device T* bias,
    const constant int* sizes,
    device T* y,
    uint2 at) {
  const int n = sizes[0], channels = sizes[1], splits = sizes[2], c = 4 * int(at.x);
  const int left = channels - c;
  float4 sum = float4(0);
  for (int s = 0; s < splits; ++s) {
    Four<float> part;
    fetch(part, partial + (size_t(s) * n + at.y) * channels + c, left);
    for (int j = 0; j < 4; ++j) sum[j] += part.v[j];
  }
  for (int j = 0; j < 4; ++j)
    if (BIAS && j < left) sum[j] += float(bias[c + j]);
  write_sums(y + size_t(rows[at.y]) * channels + c, sum, left);
}
