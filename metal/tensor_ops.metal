// The tiles of sorted_implicit_gemm and grouped_gemm through Metal 4 TensorOps:
// forward, input gradient and weight gradient on the neural accelerators of M5 and
// later.
//
//   tensor_ops             simdgroup: 64 (32, 16) rows x 32 columns
//   tensor_ops_weight_grad simdgroup: 64 (32, 16) x 32 of a 128 x 64 tile of dW[k]
//   staged rows, weights -> cooperative tensors, 16 x 32 x 16 each -> float sums
//
// Rows, staging, skipping, splits and traffic are those of the two siblings, and so are
// the results' determinism and the float sums. Needs macOS 26 and MSL 4; it is compiled
// only where the device says that it has the hardware. Half and bfloat, whose products
// are exact in float; float32 is left to the siblings. Blocks of 16 rows are skipped.
// Wins over the siblings on such devices, by up to four times where the multiplications
// bound them.

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

template <typename T>
METAL_FUNC void load_fragment(
    thread T* to, const threadgroup T* from, int line, int lane) {
  const FragmentPlace place(lane);
  UNROLL for (int i = 0; i < 2; ++i) {
    const Four<T> four = *(const threadgroup Four<T>*)(
        from + (place.row + 8 * i) * line + place.column);
    UNROLL for (int j = 0; j < 4; ++j) to[4 * i + j] = four.v[j];
  }
}

// sums (16 x 32) += a (16 x 16) b (16 x 32), of which either is read across if so said.
template <typename T, bool ACROSS_A, bool ACROSS_B>
METAL_FUNC void multiply_fragments(
    thread float* sums, const thread T* a, const thread T* b) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 16, ACROSS_A, ACROSS_B, true,
      mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<descriptor, metal::execution_simdgroup> product;
  auto left = product.template get_left_input_cooperative_tensor<T, T, float>();
  auto right = product.template get_right_input_cooperative_tensor<T, T, float>();
  auto result = product.template get_destination_cooperative_tensor<
      metal::remove_addrspace_t<decltype(left)>,
      metal::remove_addrspace_t<decltype(right)>, float>();
  UNROLL for (int i = 0; i < 8; ++i) left[i] = a[i];
  UNROLL for (int i = 0; i < 16; ++i) right[i] = b[i];
  UNROLL for (int i = 0; i < 16; ++i) result[i] = sums[i];
  product.run(left, right, result);
  UNROLL for (int i = 0; i < 16; ++i) sums[i] = result[i];
}

// ROWS x 32 sums, 16 rows at a time: the right operand serves all of them.
template <int ROWS>
struct TensorRows {
  float sums[ROWS / 16][16];
  int lane;

  METAL_FUNC void clear(int own_lane) thread {
    lane = own_lane;
    UNROLL for (int i = 0; i < ROWS / 16; ++i)
      UNROLL for (int j = 0; j < 16; ++j) sums[i][j] = 0.0f;
  }

  // Writes 16 rows, in lines of `line`.
  METAL_FUNC void write(threadgroup float* to, int part, int line) const thread {
    const FragmentPlace place(lane);
    UNROLL for (int i = 0; i < ROWS / 16; ++i) {
      if (i != part) continue;
      UNROLL for (int j = 0; j < 16; ++j) {
        const int row = place.row + j % 8 / 4 * 8;
        to[row * line + j / 8 * 16 + place.column + j % 4] = sums[i][j];
      }
    }
  }
};

// In the place of GemmSums: tiles of 64 (32, 16) x 32.
template <typename T, int COLUMNS, bool TRANSPOSED>
struct TensorSums {
  static_assert(sizeof(T) == 2, "float32 is left to simdgroup matrices");
  static constant constexpr int WIDTH = 32, SKIPPED = 16;
  using Tile = GemmTile<T, COLUMNS, TRANSPOSED, WIDTH>;
  TensorRows<Tile::ROWS> own;

  METAL_FUNC void start(int lane) thread { own.clear(lane); }

  METAL_FUNC void multiply(
      const threadgroup T* rows, const threadgroup T* weights, int depth, int width,
      uint live) thread {
    if (width <= 0) return;
    const int lane = own.lane;
    UNROLL for (int c = 0; c < Tile::DEPTH; c += 16) {
      if (c >= depth) break;
      T a[8], b[16];
      UNROLL for (int half_of = 0; half_of < 2; ++half_of) {
        const int line = TRANSPOSED ? 16 * half_of : c;
        const int at = TRANSPOSED ? c : 16 * half_of;
        load_fragment(
            b + 8 * half_of, weights + line * Tile::B_LINE + at, Tile::B_LINE, lane);
      }
      UNROLL for (int i = 0; i < Tile::ROWS / 16; ++i) {
        if ((live >> (2 * i) & 3u) == 0) continue;
        load_fragment(a, rows + 16 * i * Tile::A_LINE + c, Tile::A_LINE, lane);
        multiply_fragments<T, false, TRANSPOSED>(own.sums[i], a, b);
      }
    }
  }

  METAL_FUNC void store(threadgroup float* to, int part) thread {
    own.write(to, part, WIDTH);
  }
};

// In the place of GradSums: 64 (32, 16) rows x 32 columns of a tile.
template <typename T, int IN, int OUT>
struct TensorGradSums {
  static_assert(sizeof(T) == 2, "float32 is left to simdgroup matrices");
  static_assert(IN >= 64 && OUT >= 32, "at least 16 x 32 of each simdgroup");
  using Tile = GradTile<T, IN, OUT>;
  static constant constexpr int WIDTH = 32, PART = 16, ROWS = IN * (OUT / 32) / 4;
  TensorRows<ROWS> own;
  int top, side;

  METAL_FUNC void start(int simdgroup, int lane) thread {
    own.clear(lane);
    top = ROWS * (simdgroup / (OUT / 32));
    side = WIDTH * (simdgroup % (OUT / 32));
  }

  METAL_FUNC void multiply(
      const threadgroup T* from, const threadgroup T* to, int depth, int tall,
      int wide) thread {
    if (top >= tall || side >= wide) return;
    const int lane = own.lane;
    UNROLL for (int e = 0; e < Tile::DEPTH; e += 16) {
      if (e >= depth) break;
      T a[8], b[16];
      const threadgroup T* right = to + e * Tile::B_LINE + side;
      load_fragment(b, right, Tile::B_LINE, lane);
      load_fragment(b + 8, right + 16, Tile::B_LINE, lane);
      UNROLL for (int i = 0; i < ROWS / 16; ++i) {
        if (top + 16 * i >= tall) break;
        load_fragment(
            a, from + e * Tile::A_LINE + top + 16 * i, Tile::A_LINE, lane);
        multiply_fragments<T, true, false>(own.sums[i], a, b);
      }
    }
  }

  METAL_FUNC void store(threadgroup float* to, int part) thread {
    own.write(to, part, WIDTH);
  }
};

template <
    typename T, typename OUT, int COLUMNS, bool TRANSPOSED, bool PLACED, bool SLICED,
    int ACTIVATION = BIAS_ALONE, typename P = T, int EPS = 0,
    typename S = P>
METAL_FUNC void tensor_ops(
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
  sorted_tiles<
      T, OUT, COLUMNS, TRANSPOSED, PLACED, SLICED, FloatWeights<T>,
      Epilogue<T, ACTIVATION, P, EPS, S>, TensorSums<T, COLUMNS, TRANSPOSED>>(
      x, weights, table, rows, masks, after, sizes, y, memory, group, simdgroup, lane);
}

template <typename T, typename OUT, int HEIGHT, int WIDTH>
METAL_FUNC void tensor_ops_weight_grad(
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
  weight_grad_tiles<T, OUT, HEIGHT, WIDTH, TensorGradSums<T, HEIGHT, WIDTH>>(
      x, dy, starts, edges, sizes, dw, memory, group, simdgroup, lane);
}
