// dW[k] = sum over the edges (i, o, k) of x[i]^T dy[o]: matrix tiles over kernel-major
// edges, as narrow as the channels allow.
//
//   threadgroup: 128 x 64 (down to 16 x 16) channels of one dW[k], the edges of one
//     range of output rows
//     for 32 (64) bytes' worth of edges: x[i] [depth, 128] | dy[o] [depth, 64] ->
//     threadgroup memory, two buffers; simdgroup: a quarter, 8 x 4 8x8 sums
//
// Any K, channels, half, bfloat and float; float sums; ranges depend on sizes only. The
// sum of a range is a split, and splits are added in order: the same bits on every run.
// Traffic per edge: its features once for 64 channels of the other side and its
// gradients once for 128; splits x K x C_in x C_out x 4 bytes, written and read once,
// none where one range is enough. Threadgroups of all offsets go range by range, so
// that the features of a range, or those of one offset in it, are read from memory
// once. Wins from a few thousand edges.

template <typename T, int IN, int OUT>
struct GradTile {
  static constant constexpr int DEPTH = (IN + OUT > 128 ? 32 : 64) / int(sizeof(T));
  static constant constexpr int PAD = 16 / int(sizeof(T));
  static constant constexpr int A_LINE = IN + PAD;
  static constant constexpr int B_LINE = OUT + PAD;
  static constant constexpr int BUFFER = DEPTH * (A_LINE + B_LINE);
  // A part of each simdgroup's sums passes through the same memory at the end.
  static constant constexpr int FLOATS = 2 * BUFFER * int(sizeof(T)) / 4;
};

// The edges of one offset whose output rows lie in one split of them: edges are sorted
// by (k, o).
struct RowRange {
  size_t first, stop;

  METAL_FUNC RowRange(
      const device int* starts, const device int* edges, int k, int split, int splits,
      int rows) thread {
    const size_t low = size_t(starts[k]), high = size_t(starts[k + 1]);
    first = bound(edges, low, high, piece_start(rows, split, splits));
    stop = bound(edges, first, high, piece_start(rows, split + 1, splits));
  }

  METAL_FUNC static size_t bound(
      const device int* edges, size_t low, size_t high, int row) {
    while (low < high) {
      const size_t at = (low + high) / 2;
      if (edges[3 * at + 1] < row)
        low = at + 1;
      else
        high = at;
    }
    return low;
  }
};

// Which tile of which unit a threadgroup has: units are (split, k), k the faster, each of
// C_in lines; the side with fewer channels passes first, so that it stays in cache.
struct GradPlace {
  int row, column, k, split;

  METAL_FUNC GradPlace(
      uint3 group, int first, int volume, int c_in, int c_out, int high,
      int wide) thread {
    const int down = (c_in + high - 1) / high, across = (c_out + wide - 1) / wide;
    const int at = int(group.x);
    row = high * (c_in <= c_out ? at % down : at / across);
    column = wide * (c_in <= c_out ? at / down : at % across);
    const uint unit = uint(first / c_in) + group.y;
    k = int(unit % uint(volume));
    split = int(unit / uint(volume));
  }
};

// A thread's share of `DEPTH` rows of `WIDTH` channels.
template <typename T, int DEPTH, int WIDTH>
struct EdgeRows {
  static constant constexpr int ALL = DEPTH * WIDTH;
  static constant constexpr int FOURS = (ALL / 4 + THREADS - 1) / THREADS;
  Four<T> rows[FOURS];

  // Column `side` of an edge is its row; edges from `left` on are zero.
  METAL_FUNC void read(
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

  METAL_FUNC void write(threadgroup T* to, int line, int thread_index) const thread {
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
  static constant constexpr int ROWS = IN / 2, WIDTH = OUT / 2;
  static constant constexpr int TALL = ROWS / 8, WIDE = WIDTH / 8;
  static constant constexpr int PART = ROWS > 8 ? 16 : 8;
  simdgroup_matrix<float, 8, 8> sums[TALL][WIDE];
  int top, side;

  METAL_FUNC GradSums() thread {}

  METAL_FUNC void start(int simdgroup, int) thread {
    top = ROWS * (simdgroup / 2);
    side = WIDTH * (simdgroup % 2);
    UNROLL for (int i = 0; i < TALL; ++i)
      UNROLL for (int n = 0; n < WIDE; ++n)
        sums[i][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  // Multiplies `depth` staged edges into tall x wide channels of the tile, by eights.
  METAL_FUNC void multiply(
      const threadgroup T* from, const threadgroup T* to, int depth, int tall,
      int wide) thread {
    UNROLL for (int e = 0; e < Tile::DEPTH; e += 8) {
      if (e >= depth) break;
      simdgroup_matrix<T, 8, 8> a, b[WIDE];
      UNROLL for (int n = 0; n < WIDE; ++n) {
        if (side + 8 * n >= wide) break;
        simdgroup_load(b[n], to + e * Tile::B_LINE + side + 8 * n, Tile::B_LINE);
      }
      UNROLL for (int i = 0; i < TALL; ++i) {
        if (top + 8 * i >= tall) break;
        simdgroup_load(
            a, from + e * Tile::A_LINE + top + 8 * i, Tile::A_LINE, ulong2(0, 0), true);
        UNROLL for (int n = 0; n < WIDE; ++n) {
          if (side + 8 * n >= wide) break;
          simdgroup_multiply_accumulate(sums[i][n], a, b[n], sums[i][n]);
        }
      }
    }
  }

  // Stores PART rows of sums, in lines of WIDTH.
  METAL_FUNC void store(threadgroup float* to, int part) thread {
    UNROLL for (int i = 0; i < TALL; ++i) {
      if (8 * i / PART != part) continue;
      UNROLL for (int n = 0; n < WIDE; ++n)
        simdgroup_store(sums[i][n], to + 8 * i % PART * WIDTH + 8 * n, WIDTH);
    }
  }
};

// Threadgroups (tiles of channels, unit). Reads matrix_tiles.metal too.
template <
    typename T,
    typename RESULT,
    int IN,
    int OUT,
    typename SUMS = GradSums<T, IN, OUT>>
METAL_FUNC void weight_grad_tiles(
    const device T* x,
    const device T* dy,
    const device int* starts,
    const device int* edges,
    const thread WeightGradSizes& sizes,
    device RESULT* dw,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  using Tile = GradTile<T, IN, OUT>;
  constexpr int PART = SUMS::PART, WIDTH = SUMS::WIDTH;
  static_assert(SIMDGROUPS * PART * WIDTH <= Tile::FLOATS, "sums fit where rows were");
  const int volume = sizes.volume, c_in = sizes.c_in, c_out = sizes.c_out;
  const GradPlace at(group, sizes.first, volume, c_in, c_out, IN, OUT);
  const int row = at.row, column = at.column;
  const RowRange range(starts, edges, at.k, at.split, sizes.splits, sizes.n_out);
  const int thread_index = LANES * simdgroup + lane;
  SUMS sums;
  sums.start(simdgroup, lane);
  EdgeRows<T, Tile::DEPTH, IN> from;
  EdgeRows<T, Tile::DEPTH, OUT> to;
  threadgroup T* staged = (threadgroup T*)memory;
  const int a_size = Tile::DEPTH * Tile::A_LINE;
  const device int* walk = edges + 3 * range.first;
  int left = int(range.stop - range.first);
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

  threadgroup float* own = memory + PART * WIDTH * simdgroup;
  dw += size_t(group.y) * c_in * c_out;
  for (int piece = 0; piece < SUMS::ROWS / PART; ++piece) {
    sums.store(own, piece);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = lane; e < PART * WIDTH / 4; e += LANES) {
      const int r = row + sums.top + PART * piece + e / (WIDTH / 4);
      const int c = column + sums.side + e % (WIDTH / 4) * 4;
      if (r >= c_in || c >= c_out) continue;
      float4 line;
      for (int j = 0; j < 4; ++j) line[j] = own[4 * e + j];
      write_sums(dw + size_t(r) * c_out + c, line, c_out - c);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <typename T, typename OUT, int HEIGHT, int WIDTH>
METAL_FUNC void grouped_gemm_weight_grad(
    const device T* x,
    const device T* dy,
    const device int* starts,
    const device int* edges,
    const thread WeightGradSizes& sizes,
    device OUT* dw,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  weight_grad_tiles<T, OUT, HEIGHT, WIDTH>(
      x, dy, starts, edges, sizes, dw, memory, group, simdgroup, lane);
}
