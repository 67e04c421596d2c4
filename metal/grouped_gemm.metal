// dW[k] = sum over the edges (i, o, k) of x[i]^T dy[o]: matrix tiles over kernel-major
// edges, the weight gradient of sorted_implicit_gemm, grouped_gemm, dense_channel and
// cout16.
//
//   threadgroup: 64 x 64 (32, 16) channels of one dW[k], one part of its edges
//     for 64 bytes' worth of edges: x[i] [depth, 64] | dy[o] [depth, 64] -> threadgroup
//     memory, two buffers; simdgroup: 32 x 32 of the tile, 4 x 4 8x8 sums
//
// Any K, channels, half, bfloat and float; float sums; parts depend on sizes only and
// are added in order: the same bits on every run. Traffic per edge: its features and
// gradients once for 64 channels of the other side; partials P x K x C_in x C_out x 4
// bytes, written and read once, none where one part is enough. Threadgroups of all
// offsets run part by part, so that the rows of a part stay in cache. Wins from a few
// thousand edges on.

template <typename T, int IN, int OUT>
struct GradTile {
  static constant constexpr int DEPTH = 64 / int(sizeof(T));
  static constant constexpr int PAD = 16 / int(sizeof(T));
  static constant constexpr int A_LINE = IN + PAD;
  static constant constexpr int B_LINE = OUT + PAD;
  static constant constexpr int BUFFER = DEPTH * (A_LINE + B_LINE);
  static constant constexpr int STAGED = 2 * BUFFER * int(sizeof(T)) / 4;
  static constant constexpr int FLOATS = STAGED > IN * OUT ? STAGED : IN * OUT;
};

// A thread's share of `DEPTH` rows of `WIDTH` channels.
template <typename T, int DEPTH, int WIDTH>
struct EdgeRows {
  static constant constexpr int ALL = DEPTH * WIDTH;
  static constant constexpr int FOURS = (ALL / 4 + THREADS - 1) / THREADS;
  Four<T> rows[FOURS];

  // Column `side` of an edge is its row; edges from `left` on are zero.
  void read(
      const device T* features, const device int* edges, int side, int left, int column,
      int channels, int thread_index) thread {
    UNROLL for (int j = 0; j < FOURS; ++j) {
      const int e = 4 * (j * THREADS + thread_index);
      const int edge = e / WIDTH, c = column + e % WIDTH;
      const bool inside = e < ALL && edge < left && c < channels;
      const size_t row = inside ? size_t(edges[3 * edge + side]) : size_t(0);
      fetch(
          rows[j], features + row * channels + (inside ? c : 0),
          inside ? channels - c : 0);
    }
  }

  void write(threadgroup T* to, int line, int thread_index) const thread {
    UNROLL for (int j = 0; j < FOURS; ++j) {
      const int e = 4 * (j * THREADS + thread_index);
      if (e < ALL) put(to + e / WIDTH * line + e % WIDTH, rows[j]);
    }
  }
};

// The quarter of a tile that a simdgroup has: IN / 2 x OUT / 2.
template <typename T, int IN, int OUT>
struct GradSums {
  using Tile = GradTile<T, IN, OUT>;
  static constant constexpr int TALL = IN / 16, WIDE = OUT / 16;
  simdgroup_matrix<float, 8, 8> sums[TALL][WIDE];
  int top, side;

  void start(int simdgroup, int) thread {
    top = IN / 2 * (simdgroup / 2);
    side = OUT / 2 * (simdgroup % 2);
    UNROLL for (int i = 0; i < TALL; ++i)
      UNROLL for (int n = 0; n < WIDE; ++n)
        sums[i][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  // Multiplies `depth` staged edges into tall x wide channels of the tile, by eights.
  void multiply(
      const threadgroup T* from, const threadgroup T* to, int depth, int tall,
      int wide) thread {
    UNROLL for (int e = 0; e < Tile::DEPTH; e += 8) {
      if (e >= depth) break;
      simdgroup_matrix<T, 8, 8> a[TALL], b;
      UNROLL for (int i = 0; i < TALL; ++i)
        simdgroup_load(
            a[i], from + e * Tile::A_LINE + top + 8 * i, Tile::A_LINE, ulong2(0, 0),
            true);
      UNROLL for (int n = 0; n < WIDE; ++n) {
        if (side + 8 * n >= wide) break;
        simdgroup_load(b, to + e * Tile::B_LINE + side + 8 * n, Tile::B_LINE);
        UNROLL for (int i = 0; i < TALL; ++i)
          if (top + 8 * i < tall)
            simdgroup_multiply_accumulate(sums[i][n], a[i], b, sums[i][n]);
      }
    }
  }

  void store(threadgroup float* tile) thread {
    UNROLL for (int i = 0; i < TALL; ++i)
      UNROLL for (int n = 0; n < WIDE; ++n)
        simdgroup_store(sums[i][n], tile + (top + 8 * i) * OUT + side + 8 * n, OUT);
  }
};

// Threadgroups (tiles of channels, unit), a unit is (part, k), k the faster: so out is
// (parts, K, C_in, C_out). sizes: first unit, parts, K, C_in, C_out. Reads
// weight_grad.metal and matrix_tiles.metal too.
template <
    typename T,
    typename RESULT,
    int IN,
    int OUT,
    typename SUMS = GradSums<T, IN, OUT>>
void grouped_weight_grad(
    const device T* x,
    const device T* dy,
    const device int* starts,
    const device int* edges,
    const constant int* sizes,
    device RESULT* out,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  using Tile = GradTile<T, IN, OUT>;
  const int parts = sizes[1], volume = sizes[2], c_in = sizes[3], c_out = sizes[4];
  const int across = (c_out + OUT - 1) / OUT;
  const int row = IN * (int(group.x) / across), column = OUT * (int(group.x) % across);
  const size_t unit = size_t(sizes[0]) + group.y;
  const EdgePart part(starts, int(unit % volume), int(unit / volume), parts);
  const int thread_index = LANES * simdgroup + lane;
  SUMS sums;
  sums.start(simdgroup, lane);
  EdgeRows<T, Tile::DEPTH, IN> from;
  EdgeRows<T, Tile::DEPTH, OUT> to;
  threadgroup T* staged = (threadgroup T*)memory;
  const int a_size = Tile::DEPTH * Tile::A_LINE;
  const device int* walk = edges + 3 * part.first;
  int left = int(part.stop - part.first);
  if (left > 0) {
    from.read(x, walk, 0, left, row, c_in, thread_index);
    to.read(dy, walk, 1, left, column, c_out, thread_index);
    from.write(staged, Tile::A_LINE, thread_index);
    to.write(staged + a_size, Tile::B_LINE, thread_index);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int buffer = 0; left > 0; buffer ^= 1) {
    const int depth = left;
    left -= Tile::DEPTH;
    walk += 3 * Tile::DEPTH;
    // The next edges travel while these are multiplied.
    if (left > 0) {
      from.read(x, walk, 0, left, row, c_in, thread_index);
      to.read(dy, walk, 1, left, column, c_out, thread_index);
    }
    const threadgroup T* now = staged + buffer * Tile::BUFFER;
    sums.multiply(now, now + a_size, depth, c_in - row, c_out - column);
    if (left > 0) {
      threadgroup T* next = staged + (buffer ^ 1) * Tile::BUFFER;
      from.write(next, Tile::A_LINE, thread_index);
      to.write(next + a_size, Tile::B_LINE, thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  sums.store(memory);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out += size_t(group.y) * c_in * c_out;
  for (int e = thread_index; e < IN * OUT / 4; e += THREADS) {
    const int r = e / (OUT / 4), c = e % (OUT / 4) * 4;
    if (row + r >= c_in || column + c >= c_out) continue;
    float4 line;
    for (int j = 0; j < 4; ++j) line[j] = memory[r * OUT + c + j];
    write_sums(
        out + size_t(row + r) * c_out + column + c, line, c_out - column - c);
  }
}
