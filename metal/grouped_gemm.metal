// dW[k] = sum over the edges (i, o, k) of x[i]^T dy[o]: matrix tiles over kernel-major
// edges, as narrow as the channels allow.
//
//   threadgroup: 128 x 64 (down to 16 x 16) channels of one dW[k], the edges of one
//     range of output rows; simdgroup: 64 (32, 16) x 32 (16) channels, and where these
//     are fewer than four parts, every second or fourth eight of the edges
//     for 16 to 64 edges: x[i] [depth, 128] | dy[o] [depth, 64] -> registers ->
//     threadgroup memory; the next ones travel while these are multiplied
//
// Any K, channels, half, bfloat and float; float sums; ranges depend on sizes only. The
// sum of a range is a split, and splits are added in order: the same bits on every run.
// Traffic per edge: its features once for 64 channels of the other side and its
// gradients once for 128; splits x K x C_in x C_out x 4 bytes, written and read once,
// none where one range is enough. Threadgroups of all offsets go range by range, so
// that the features of a range, or those of one offset in it, are read from memory
// once. Wins from a few thousand edges. Reads matrix_tiles.metal too.

template <typename T, int IN, int OUT>
struct GradTile {
  // Channels of a simdgroup; parts of the tile beside one another, and all of them;
  // simdgroups that share a part.
  static constant constexpr int ROWS = IN > 64 ? 64 : IN > 16 ? 32 : 16;
  static constant constexpr int WIDTH = OUT > 16 ? 32 : 16;
  static constant constexpr int ACROSS = OUT / WIDTH, PARTS = IN / ROWS * ACROSS;
  static constant constexpr int SHARES = SIMDGROUPS / PARTS;
  static constant constexpr int BYTES = IN + OUT > 128 ? 32 : IN + OUT > 32 ? 64 : 128;
  static constant constexpr int EACH = BYTES / int(sizeof(T)), LEAST = 8 * SHARES;
  static constant constexpr int DEPTH = EACH > LEAST ? EACH : LEAST;
  static constant constexpr int PAD = 16 / int(sizeof(T));
  static constant constexpr int A_LINE = IN + PAD, B_LINE = OUT + PAD;
  static constant constexpr int A_SIZE = DEPTH * A_LINE;
  static constant constexpr int STAGED = (A_SIZE + DEPTH * B_LINE) * int(sizeof(T)) / 4;
  // 16 rows of each simdgroup's sums pass through the same memory at the end.
  static constant constexpr int SUMS = SIMDGROUPS * 16 * WIDTH;
  static constant constexpr int FLOATS = STAGED > SUMS ? STAGED : SUMS;
};

// The edges of one offset whose output rows lie in one split of them: edges are sorted
// by (k, o). All lanes of a simdgroup look for them together.
template <typename INDEX>
struct RowRange {
  INDEX first, stop;

  METAL_FUNC RowRange(
      const device int* starts, const device int* edges, int k, int split, int splits,
      int rows, int lane) thread {
    first = INDEX(starts[k]);
    stop = INDEX(starts[k + 1]);
    if (splits == 1) return;
    first = bound(edges, first, stop, split_start(rows, split, splits), lane);
    stop = bound(edges, first, stop, split_start(rows, split + 1, splits), lane);
  }

  // The first edge whose row is not below `row`: each lane looks at the end of one of
  // 33 pieces, so that few reads wait for one another.
  METAL_FUNC static INDEX bound(
      const device int* edges, INDEX low, INDEX high, int row, int lane) {
    while (low < high) {
      const INDEX piece = (high - low + LANES) / (LANES + 1);
      const INDEX end = low + INDEX(lane + 1) * piece - 1;
      const bool below = end < high && edges[3 * end + 1] < row;
      const int pieces = simd_sum(below ? 1 : 0);
      low += INDEX(pieces) * piece;
      if (pieces < LANES) high = min(high, low + piece - 1);
    }
    return low;
  }
};

// Which tile of which unit a threadgroup has: units are (split, k), k the faster, each of
// C_in lines; the side with fewer channels passes first, so that it stays in cache.
// unit: of those of the dispatch.
struct GradPlace {
  int row, column, k, split;
  uint unit;

  METAL_FUNC GradPlace(
      uint3 group, int first, int volume, int c_in, int c_out, int high,
      int wide) thread {
    const int down = (c_in + high - 1) / high, across = (c_out + wide - 1) / wide;
    const int at = int(group.x);
    unit = group.y;
    row = high * (c_in <= c_out ? at % down : at / across);
    column = wide * (c_in <= c_out ? at / down : at % across);
    const uint of_all = uint(first / c_in) + unit;
    k = int(of_all % uint(volume));
    split = int(of_all / uint(volume));
  }
};

// A thread's share of `DEPTH` rows of `WIDTH` channels. FAR: 32 bits do not hold the
// place of every element.
template <typename T, int DEPTH, int WIDTH, bool FAR>
struct EdgeRows {
  using Index = typename IndexOf<FAR>::Type;
  static constant constexpr int COUNT = Wide<T>::COUNT, ALL = DEPTH * WIDTH;
  static constant constexpr int PARTS = (ALL / COUNT + THREADS - 1) / THREADS;
  Wide<T> rows[PARTS];

  // Column `side` of an edge is its row; edges from `left` on are zero. `wide`: rows
  // begin at multiples of 16 bytes.
  METAL_FUNC void read(
      const device T* features, const device int* edges, int side, int left, int column,
      int channels, bool wide, int thread_index) thread {
    UNROLL for (int j = 0; j < PARTS; ++j) {
      const int e = COUNT * (j * THREADS + thread_index);
      const int edge = e / WIDTH, c = column + e % WIDTH;
      const bool inside = e < ALL && edge < left && c < channels;
      const Index row = inside ? Index(edges[3 * edge + side]) : Index(0);
      fetch(
          rows[j], features + (row * Index(channels) + Index(inside ? c : 0)),
          inside ? channels - c : 0, wide);
    }
  }

  METAL_FUNC void write(threadgroup T* to, int line, int thread_index) const thread {
    UNROLL for (int j = 0; j < PARTS; ++j) {
      const int e = COUNT * (j * THREADS + thread_index);
      if (e < ALL) put(to + e / WIDTH * line + e % WIDTH, rows[j]);
    }
  }
};

// What a simdgroup has of a tile: a part, and a share of the edges. Matrices are of
// type M.
template <typename T, typename M, int IN, int OUT>
struct GradSums {
  using Tile = GradTile<T, IN, OUT>;
  using Load = Matrices<T, M>;
  static constant constexpr int TALL = Tile::ROWS / 8, WIDE = Tile::WIDTH / 8;
  simdgroup_matrix<float, 8, 8> sums[TALL][WIDE];
  int top, side, share;

  METAL_FUNC GradSums() thread {}

  METAL_FUNC void start(int simdgroup) thread {
    const int part = simdgroup % Tile::PARTS;
    top = Tile::ROWS * (part / Tile::ACROSS);
    side = Tile::WIDTH * (part % Tile::ACROSS);
    share = simdgroup / Tile::PARTS;
    UNROLL for (int i = 0; i < TALL; ++i)
      UNROLL for (int n = 0; n < WIDE; ++n)
        sums[i][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }

  // Multiplies `depth` staged edges into tall x wide channels of the tile, by eights.
  METAL_FUNC void multiply(
      const threadgroup T* from, const threadgroup T* to, int depth, int tall,
      int wide) thread {
    if (top >= tall || side >= wide) return;
    UNROLL for (int j = 0; j < Tile::DEPTH / (8 * Tile::SHARES); ++j) {
      const int e = 8 * (j * Tile::SHARES + share);
      if (e >= depth) break;
      simdgroup_matrix<M, 8, 8> a, b[WIDE];
      UNROLL for (int n = 0; n < WIDE; ++n) {
        if (side + 8 * n >= wide) break;
        Load::template load<false>(
            b[n], to + e * Tile::B_LINE + side + 8 * n, Tile::B_LINE);
      }
      UNROLL for (int i = 0; i < TALL; ++i) {
        if (top + 8 * i >= tall) break;
        Load::template load<true>(
            a, from + e * Tile::A_LINE + top + 8 * i, Tile::A_LINE);
        UNROLL for (int n = 0; n < WIDE; ++n) {
          if (side + 8 * n >= wide) break;
          simdgroup_multiply_accumulate(sums[i][n], a, b[n], sums[i][n]);
        }
      }
    }
  }

  // Stores 16 rows of sums, in lines of WIDTH.
  METAL_FUNC void store(threadgroup float* to, int piece) thread {
    UNROLL for (int i = 0; i < TALL; ++i) {
      if (i / 2 != piece) continue;
      UNROLL for (int n = 0; n < WIDE; ++n)
        simdgroup_store(
            sums[i][n], to + 8 * (i % 2) * Tile::WIDTH + 8 * n, Tile::WIDTH);
    }
  }
};

// Threadgroups (tiles of channels, unit).
template <
    typename T, typename OUT, int HEIGHT, int WIDTH, typename M, bool FAR>
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
  using Tile = GradTile<T, HEIGHT, WIDTH>;
  using Index = typename IndexOf<FAR>::Type;
  const int volume = sizes.volume, c_in = sizes.c_in, c_out = sizes.c_out;
  const GradPlace at(group, sizes.first, volume, c_in, c_out, HEIGHT, WIDTH);
  const int row = at.row, column = at.column;
  const RowRange<Index> range(
      starts, edges, at.k, at.split, sizes.splits, sizes.n_out, lane);
  const int thread_index = LANES * simdgroup + lane;
  const bool wide_x = c_in % Wide<T>::COUNT == 0 && begins_wide(x);
  const bool wide_dy = c_out % Wide<T>::COUNT == 0 && begins_wide(dy);
  GradSums<T, M, HEIGHT, WIDTH> sums;
  sums.start(simdgroup);
  EdgeRows<T, Tile::DEPTH, HEIGHT, FAR> from;
  EdgeRows<T, Tile::DEPTH, WIDTH, FAR> to;
  threadgroup T* staged = (threadgroup T*)memory;
  const device int* walk = edges + 3 * range.first;
  int left = int(range.stop - range.first);
  if (left > 0) {
    from.read(x, walk, 0, left, row, c_in, wide_x, thread_index);
    to.read(dy, walk, 1, left, column, c_out, wide_dy, thread_index);
  }
  while (left > 0) {
    from.write(staged, Tile::A_LINE, thread_index);
    to.write(staged + Tile::A_SIZE, Tile::B_LINE, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int depth = left;
    left -= Tile::DEPTH;
    walk += 3 * Tile::DEPTH;
    // The next edges travel while these are multiplied.
    if (left > 0) {
      from.read(x, walk, 0, left, row, c_in, wide_x, thread_index);
      to.read(dy, walk, 1, left, column, c_out, wide_dy, thread_index);
    }
    sums.multiply(staged, staged + Tile::A_SIZE, depth, c_in - row, c_out - column);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Shares of a part stand PARTS pieces from one another, and are added in order.
  constexpr int PIECE = 16 * Tile::WIDTH, FOURS = Tile::WIDTH / 4;
  const threadgroup float* own = memory + PIECE * (simdgroup % Tile::PARTS);
  dw += Index(at.unit) * Index(c_in) * Index(c_out);
  for (int piece = 0; piece < Tile::ROWS / 16; ++piece) {
    sums.store(memory + PIECE * simdgroup, piece);
    if (Tile::SHARES > 1)
      threadgroup_barrier(mem_flags::mem_threadgroup);
    else
      simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int e = LANES * sums.share + lane; e < PIECE / 4; e += LANES * Tile::SHARES) {
      const int r = row + sums.top + 16 * piece + e / FOURS;
      const int c = column + sums.side + e % FOURS * 4;
      if (r >= c_in || c >= c_out) continue;
      float4 line = float4(0);
      UNROLL for (int s = 0; s < Tile::SHARES; ++s)
        UNROLL for (int j = 0; j < 4; ++j)
          line[j] += own[PIECE * Tile::PARTS * s + 4 * e + j];
      write_sums(dw + (Index(r) * Index(c_out) + Index(c)), line, c_out - c);
    }
    if (Tile::SHARES > 1)
      threadgroup_barrier(mem_flags::mem_threadgroup);
    else
      simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}
