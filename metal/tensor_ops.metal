// The contractions of sorted_implicit_gemm and grouped_gemm through Metal 4 TensorOps:
// forward, input gradient and weight gradient on the neural accelerators of M5 and
// later.
//
//   simdgroup, alone: 64 (32, 16) sorted rows x 32 channels
//     for k used by its rows, for 32 (64) channels:
//       W[k] [32, 32], gathered rows [16, 32] -> registers -> 16 x 32 x 16 -> float sums
//
// Nothing is staged and nobody waits: a lane reads what its operands hold from device
// memory, 16 (32) bytes of a row or of weights at once, four lanes 64 or 128. Which
// channel stands where in an operand is free as long as both agree, so four lanes share
// a row's channels in succession. Simdgroups of a threadgroup have the same 64 rows,
// which meet in cache. Skipping, order, splits and determinism are those of the two
// siblings; blocks of 16 rows are skipped. Needs macOS 26 and MSL 4; it is compiled only
// where the device says that it has the hardware. Half and bfloat, whose products are
// exact in float; float32 is left to the siblings. Wins over the siblings on such
// devices, by up to four times where the multiplications bound them.

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

// Below that target, and in headers that do not know it, Apple's tensors are laid out
// another way, and products would be wrong without a word.
#if !__TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2
#error "tensor_ops needs the cooperative tensors of a deployment target of 26.2 or later"
#endif

// Where a lane's elements of a 16 x 16 fragment lie: four of a row, and four of the row
// eight below. This is the layout that MLX's own kernels rely on (steel/gemm/nax.h).
struct FragmentPlace {
  int row, column;

  METAL_FUNC FragmentPlace(int lane) thread
      : row((lane / 4 & 4) | (lane / 2 & 3)),
        column(((lane / 4 & 2) | (lane & 1)) * 4) {}
};

// Where a line of the first of COUNT fragments stands among their lines, if four in
// succession of each follow one another: a lane's four of all fragments then touch.
template <int COUNT>
METAL_FUNC int interleaved(int line) {
  return line / 4 * (4 * COUNT) + line % 4;
}

// What products of T are added up in.
template <typename T>
struct SumOf {
  using Type = float;
};
template <>
struct SumOf<int8_t> {
  using Type = int;
};

// Reads four elements that are all there, or those up to `left`; the rest is zero.
template <typename T, bool WHOLE>
METAL_FUNC void read_four(thread T* to, const device T* from, int left) {
  Four<T> four;
  if (WHOLE)
    four = *(const device Four<T>*)(from);
  else
    fetch(four, from, left);
  UNROLL for (int j = 0; j < 4; ++j) to[j] = four.v[j];
}

// Reads COUNT fours in succession, each to APART elements after the one before.
template <int COUNT, int APART, bool WHOLE, typename T>
METAL_FUNC void read_fours(thread T* to, const device T* from, int left) {
  UNROLL for (int f = 0; f < COUNT; ++f)
    read_four<T, WHOLE>(to + APART * f, from + 4 * f, left - 4 * f);
}

// Those of int8 that are all there begin at a multiple of four bytes.
template <int COUNT>
struct Words {
  uint v[COUNT];
};
template <int COUNT, int APART>
METAL_FUNC void read_words(thread int8_t* to, const device int8_t* from) {
  const Words<COUNT> words = *(const device Words<COUNT>*)(from);
  UNROLL for (int f = 0; f < COUNT; ++f)
    UNROLL for (int j = 0; j < 4; ++j) {
      to[APART * f + j] = int8_t(words.v[f] >> (8 * j));
    }
}
template <int COUNT, int APART, bool WHOLE>
METAL_FUNC void read_fours(thread int8_t* to, const device int8_t* from, int left) {
  if (WHOLE)
    read_words<COUNT, APART>(to, from);
  else
    read_fours<COUNT, APART, false, int8_t>(to, from, left);
}

// sums (16 x 32) += a (16 x 16) b (16 x 32), of which either is read across if so said.
template <typename T, bool ACROSS_A, bool ACROSS_B>
METAL_FUNC void multiply_fragments(
    thread typename SumOf<T>::Type* sums, const thread T* a, const thread T* b) {
  using Sum = typename SumOf<T>::Type;
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 16, ACROSS_A, ACROSS_B, true,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
  auto left = product.template get_left_input_cooperative_tensor<T, T, Sum>();
  auto right = product.template get_right_input_cooperative_tensor<T, T, Sum>();
  auto result = product.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<decltype(left)>,
      metal::remove_addrspace_t<decltype(right)>, Sum>();
  UNROLL for (int i = 0; i < 8; ++i) left[i] = a[i];
  UNROLL for (int i = 0; i < 16; ++i) right[i] = b[i];
  UNROLL for (int i = 0; i < 16; ++i) result[i] = sums[i];
  product.run(left, right, result);
  UNROLL for (int i = 0; i < 16; ++i) sums[i] = result[i];
}

// The columns of a simdgroup, and its rows' operands of a step of DEEP x 16 channels.
constant constexpr int TENSOR_WIDTH = 32;

// Float weights as they stand: W[k] has lines along C_y, or along C_x if TRANSPOSED.
template <typename T, bool TRANSPOSED, bool FAR = true>
struct TensorWeights {
  static constant constexpr bool ACROSS = TRANSPOSED;
  using Index = typename IndexOf<FAR>::Type;
  const device T* w;
  int offset_stride, line_stride;

  // Whether steps may be read as wholes, wherever arrays begin.
  METAL_FUNC bool in_steps(const device T* x, int c_x) const thread { return true; }

  // Reads channels from c on, and 32 columns from `column` on, as right operands of
  // products; beyond C_x and C_y there are zeros.
  template <int DEEP, bool WHOLE>
  METAL_FUNC void read(
      thread T* to, int k, int c, int column, int c_x, int c_y,
      const thread FragmentPlace& place) const thread {
    constexpr int LINES = TRANSPOSED ? 2 : DEEP, LONG = TRANSPOSED ? DEEP : 2;
    const int lines = TRANSPOSED ? c_y : c_x, length = TRANSPOSED ? c_x : c_y;
    const int first = (TRANSPOSED ? column : c) + interleaved<LINES>(place.row);
    const int start = (TRANSPOSED ? c : column) + place.column * LONG;
    const Index own =
        Index(k) * Index(offset_stride) + Index(first) * Index(line_stride) + start;
    UNROLL for (int i = 0; i < LINES; ++i)
      UNROLL for (int h = 0; h < 2; ++h)
        UNROLL for (int j = 0; j < LONG; ++j) {
          const int further = 4 * i + 8 * LINES * h;
          const int f = TRANSPOSED ? j : i, side = TRANSPOSED ? i : j;
          const bool inside = WHOLE || first + further < lines;
          read_four<T, WHOLE>(
              to + 16 * f + 8 * side + 4 * h,
              w + (inside ? own + Index(further) * Index(line_stride) + 4 * j : 0),
              inside ? length - start - 4 * j : 0);
        }
  }
};

// The rows that a simdgroup gathers for an offset, and its sums of them.
template <typename T, int HEIGHT, bool FAR = true>
struct TensorRows {
  using Index = typename IndexOf<FAR>::Type;
  static constant constexpr Index NONE = ~Index(0);
  static constant constexpr int BLOCKS_16 = HEIGHT / 16;
  static constant constexpr int ENTRIES = (HEIGHT + LANES - 1) / LANES;
  typename SumOf<T>::Type sums[BLOCKS_16][16];
  // Where each row begins that this lane reads of; NONE where there is no edge.
  Index rows[BLOCKS_16][2];

  METAL_FUNC void start() thread {
    UNROLL for (int i = 0; i < BLOCKS_16; ++i)
      UNROLL for (int j = 0; j < 16; ++j) sums[i][j] = 0;
  }

  // Reads the table's entries of live rows, one or two of each lane.
  METAL_FUNC static void look_up(
      thread int* entries, const device int* table, int first, int n, int volume, int k,
      uint live, int lane) {
    UNROLL for (int j = 0; j < ENTRIES; ++j) {
      const int row = lane + LANES * j;
      const bool used = row < HEIGHT && (live >> (row / 16) & 1u) && first + row < n;
      entries[j] = used ? table[size_t(first + row) * volume + k] : -1;
    }
  }

  // Passes entries to the lanes that read the rows.
  METAL_FUNC void find(
      const thread int* entries, int c_x, const thread FragmentPlace& place) thread {
    UNROLL for (int i = 0; i < BLOCKS_16; ++i)
      UNROLL for (int h = 0; h < 2; ++h) {
        const int at = 16 * i + 8 * h;
        const int from =
            simd_shuffle(entries[at / LANES], ushort(at % LANES + place.row));
        rows[i][h] = from < 0 ? NONE : Index(from) * Index(c_x);
      }
  }

  // Multiplies DEEP x 16 channels from c on of the live blocks.
  template <int DEEP, bool WHOLE, bool ACROSS>
  METAL_FUNC void multiply(
      const device T* x, const thread T* b, int c, int c_x, uint live,
      const thread FragmentPlace& place) thread {
    const int start = c + place.column * DEEP;
    UNROLL for (int i = 0; i < BLOCKS_16; ++i) {
      if ((live >> i & 1u) == 0) continue;
      T a[DEEP][8];
      UNROLL for (int h = 0; h < 2; ++h) {
        const Index row = rows[i][h];
        UNROLL for (int f = 0; f < DEEP; ++f)
          UNROLL for (int j = 0; j < 4; ++j) a[f][4 * h + j] = T(0);
        if (row != NONE)
          read_fours<DEEP, 8, WHOLE>(a[0] + 4 * h, x + (row + start), c_x - start);
      }
      UNROLL for (int f = 0; f < DEEP; ++f)
        multiply_fragments<T, false, ACROSS>(sums[i], a[f], b + 16 * f);
    }
  }
};

// Writes what follows four sums, the `left` first of them, of a row of C_y from c on.
template <typename OUT, typename T, int ACTIVATION, typename P, int EPS>
METAL_FUNC void write_line(
    device OUT* to, const thread Epilogue<T, ACTIVATION, P, EPS>& after,
    thread float4& sums, size_t row, int c_y, int c, int left) {
  after.finish(sums, row, c_y, c, left);
  write_sums(to, sums, left);
}

// Threadgroups (column and tile, 1, split), as those of sorted_tiles: a simdgroup has
// HEIGHT rows of a tile and 32 of its COLUMNS, steps of DEEP x 16 channels. FAR: 32 bits
// do not hold the place of every element of every array.
template <
    typename T, typename OUT, int COLUMNS, int HEIGHT, int DEEP, bool PLACED,
    bool FAR, typename WEIGHTS, typename AFTER, typename MOMENTS>
METAL_FUNC void tensor_tiles(
    const device T* x,
    const thread WEIGHTS& w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const thread AFTER& after,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    thread MOMENTS& moments,
    uint3 group,
    int simdgroup,
    int lane) {
  constexpr int STEP = 16 * DEEP, BESIDE = COLUMNS / TENSOR_WIDTH;
  const int first_tile = sizes.first, n = sizes.rows, volume = sizes.volume;
  const int c_x = sizes.c_x, c_y = sizes.c_y, splits = sizes.splits;
  const int across = (c_y + COLUMNS - 1) / COLUMNS;
  const int own_tile = int(group.x) / across;
  // Where all have the same rows, a compiler sees that they skip the same ones.
  const int down = HEIGHT == TILE_ROWS ? 0 : simdgroup / BESIDE;
  const int start = (first_tile + own_tile) * TILE_ROWS + HEIGHT * down;
  const int column =
      COLUMNS * (int(group.x) % across) + TENSOR_WIDTH * (simdgroup % BESIDE);
  const FragmentPlace place(lane);
  const int line = own_tile * (TILE_ROWS / HEIGHT) + down;
  const int first_channel = column + 2 * place.column;
  if (column >= c_y) return;
  if (start >= n) return moments.write(line, first_channel, c_y, lane);
  const int blocks = min(HEIGHT / BLOCK_ROWS, (n - start + BLOCK_ROWS - 1) / BLOCK_ROWS);
  const int words = (volume + 31) / 32;
  TileOffsets<HEIGHT / BLOCK_ROWS> offsets(
      masks + size_t(start / BLOCK_ROWS) * words, blocks, volume);

  // The steps of this split: (offset, channels), channels the faster.
  const int chunks = (c_x + STEP - 1) / STEP, split = int(group.z);
  int steps = volume * chunks, k = offsets.next(0), chunk = 0;
  if (splits > 1) {
    const int total = offsets.count() * chunks;
    const int from = split_start(total, split, splits);
    steps = split_start(total, split + 1, splits) - from;
    k = offsets.next(0);
    for (int skipped = from / chunks; skipped > 0; --skipped) k = offsets.next(k + 1);
    chunk = from % chunks;
  }

  const bool whole = column + TENSOR_WIDTH <= c_y, in_steps = w.in_steps(x, c_x);
  using Rows = TensorRows<T, HEIGHT, FAR>;
  Rows own;
  own.start();
  int entries[Rows::ENTRIES];
  T b[DEEP * 16];
  uint next = offsets.live_pairs(k);
  Rows::look_up(entries, table, start, n, volume, k < volume ? k : 0, next, lane);
  while (steps > 0 && k < volume) {
    own.find(entries, c_x, place);
    const uint live = next;
    const int now = k, stop = min(chunks, chunk + steps);
    const int last = min(stop * STEP, c_x);
    int c = chunk * STEP;
    steps -= stop - chunk;
    chunk = 0;
    // The rows of the next offset are looked up while this one is multiplied.
    k = offsets.next(k + 1);
    next = steps > 0 ? offsets.live_pairs(k) : 0;
    Rows::look_up(entries, table, start, n, volume, k < volume ? k : 0, next, lane);
    for (; in_steps && c + STEP <= last; c += STEP) {
      if (whole)
        w.template read<DEEP, true>(b, now, c, column, c_x, c_y, place);
      else
        w.template read<DEEP, false>(b, now, c, column, c_x, c_y, place);
      own.template multiply<DEEP, true, WEIGHTS::ACROSS>(x, b, c, c_x, live, place);
    }
    for (; c < last; c += 16) {
      w.template read<1, false>(b, now, c, column, c_x, c_y, place);
      own.template multiply<1, false, WEIGHTS::ACROSS>(x, b, c, c_x, live, place);
    }
  }

  const int kept = n - first_tile * TILE_ROWS;
  UNROLL for (int i = 0; i < HEIGHT / 16; ++i)
    UNROLL for (int h = 0; h < 2; ++h) {
      const int row = start + 16 * i + 8 * h + place.row;
      if (row >= n) continue;
      const int own_row = PLACED || after.residual ? rows[row] : 0;
      const int placed = PLACED ? own_row : row;
      const size_t to =
          size_t(group.z) * kept + size_t(placed - first_tile * TILE_ROWS);
      UNROLL for (int g = 0; g < 2; ++g) {
        const int channel = first_channel + 4 * g;
        if (channel >= c_y) continue;
        vec<typename SumOf<T>::Type, 4> sums;
        UNROLL for (int j = 0; j < 4; ++j) sums[j] = own.sums[i][8 * g + 4 * h + j];
        write_line(
            y + to * c_y + channel, after, sums, size_t(own_row), c_y, channel,
            c_y - channel);
        moments.add(g, sums);
      }
    }
  moments.write(line, first_channel, c_y, lane);
}

template <
    typename T, typename OUT, int COLUMNS, int HEIGHT, int DEEP, bool TRANSPOSED,
    bool PLACED, bool FAR, int ACTIVATION = BIAS_ALONE, typename P = T,
    int EPS = 0>
METAL_FUNC void tensor_ops(
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
    uint3 group,
    int simdgroup,
    int lane) {
  const TensorWeights<T, TRANSPOSED, FAR> weights = {
      w, sizes.w_offset_stride, sizes.w_row_stride};
  const Epilogue<T, ACTIVATION, P, EPS> after = {bias, scale, mean, var, residual};
  NoMoments none;
  tensor_tiles<T, OUT, COLUMNS, HEIGHT, DEEP, PLACED, FAR>(
      x, weights, table, rows, masks, after, sizes, y, none, group, simdgroup, lane);
}

// The same with statistics of the rows of y, a line of 3 x C_y for each simdgroup's rows.
template <
    typename T, typename OUT, int COLUMNS, int HEIGHT, int DEEP, bool TRANSPOSED,
    bool PLACED, bool FAR>
METAL_FUNC void tensor_ops(
    const device T* x,
    const device T* w,
    const device int* table,
    const device int* rows,
    const device uint* masks,
    const device Given<T>* bias,
    const thread SortedTilesSizes& sizes,
    device OUT* y,
    device float* lines,
    uint3 group,
    int simdgroup,
    int lane) {
  const TensorWeights<T, TRANSPOSED, FAR> weights = {
      w, sizes.w_offset_stride, sizes.w_row_stride};
  const Epilogue<T, BIAS_ALONE, T, 0> after = {bias, nullptr, nullptr, nullptr, nullptr};
  RowMoments<OUT, 2> moments(lines);
  tensor_tiles<T, OUT, COLUMNS, HEIGHT, DEEP, PLACED, FAR>(
      x, weights, table, rows, masks, after, sizes, y, moments, group, simdgroup, lane);
}
