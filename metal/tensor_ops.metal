// The tiles of sorted_implicit_gemm and grouped_gemm through Metal 4 TensorOps:
// forward, input gradient and weight gradient on the neural accelerators of M5 and
// later.
//
//   sorted_gemm            simdgroup: 16 rows x 64 (32), 16 x 32 x 16 matmul2d
//   grouped_weight_grad    simdgroup: 16 x 64 (32) of a 64 x 64 (32) tile of dW[k]
//   staged rows, weights -> cooperative tensors -> float sums in registers
//
// Rows, staging, skipping, splits and traffic are those of the two siblings, and so are
// the results' determinism and the float sums. Needs macOS 26 and MSL 4; it is compiled
// only where the device says that it has the hardware. Products of half and bfloat are
// exact in float; float operands are asked for without relaxed precision. Wins over the
// siblings on such devices, by up to four times where the multiplications bound them.

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

// Where a lane's elements of a 16 x 16 fragment lie: four of a row, and four of the row
// eight below. This is the layout that MLX's own kernels rely on (steel/gemm/nax.h).
struct FragmentPlace {
  int row, column;

  FragmentPlace(int lane)
      : row((lane / 4 & 4) | (lane / 2 & 3)),
        column(((lane / 4 & 2) | (lane & 1)) * 4) {}
};

template <typename T>
inline void load_fragment(
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
inline void multiply_fragments(
    thread float* sums, const thread T* a, const thread T* b) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 16, ACROSS_A, ACROSS_B, sizeof(T) == 2,
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

// 16 rows of sums, 32 columns at a time.
template <int COLUMNS>
struct TensorRows {
  float sums[COLUMNS / 32][16];
  int lane;

  void clear(int own_lane) thread {
    lane = own_lane;
    UNROLL for (int n = 0; n < COLUMNS / 32; ++n)
      UNROLL for (int i = 0; i < 16; ++i) sums[n][i] = 0.0f;
  }

  void write(threadgroup float* to) const thread {
    const FragmentPlace place(lane);
    UNROLL for (int n = 0; n < COLUMNS / 32; ++n)
      UNROLL for (int i = 0; i < 16; ++i) {
        const int row = place.row + i % 8 / 4 * 8;
        const int column = 32 * n + i / 8 * 16 + place.column + i % 4;
        to[row * COLUMNS + column] = sums[n][i];
      }
  }
};

// In the place of GemmSums.
template <typename T, int COLUMNS, bool TRANSPOSED>
struct TensorSums {
  using Tile = GemmTile<T, COLUMNS, TRANSPOSED>;
  TensorRows<COLUMNS> rows_of;

  void start(int lane) thread { rows_of.clear(lane); }

  void multiply(
      const threadgroup T* rows, const threadgroup T* weights, int depth,
      int width) thread {
    const int lane = rows_of.lane;
    UNROLL for (int c = 0; c < Tile::DEPTH; c += 16) {
      if (c >= depth) break;
      T a[8], b[16];
      load_fragment(a, rows + c, Tile::A_LINE, lane);
      UNROLL for (int n = 0; n < COLUMNS / 32; ++n) {
        if (32 * n >= width) break;
        UNROLL for (int side = 0; side < 2; ++side) {
          const int column = 32 * n + 16 * side;
          const int line = TRANSPOSED ? column : c, at = TRANSPOSED ? c : column;
          load_fragment(
              b + 8 * side, weights + line * Tile::B_LINE + at, Tile::B_LINE, lane);
        }
        multiply_fragments<T, false, TRANSPOSED>(rows_of.sums[n], a, b);
      }
    }
  }

  void store(threadgroup float* to) thread { rows_of.write(to); }
};

// In the place of GradSums: a simdgroup has a quarter of the tile's rows, all its
// columns.
template <typename T, int IN, int OUT>
struct TensorGradSums {
  using Tile = GradTile<T, IN, OUT>;
  static_assert(IN == 64, "four simdgroups of 16 rows");
  TensorRows<OUT> rows_of;
  int top;

  void start(int simdgroup, int lane) thread {
    rows_of.clear(lane);
    top = 16 * simdgroup;
  }

  void multiply(
      const threadgroup T* from, const threadgroup T* to, int depth, int tall,
      int wide) thread {
    if (top >= tall) return;
    const int lane = rows_of.lane;
    UNROLL for (int e = 0; e < Tile::DEPTH; e += 16) {
      if (e >= depth) break;
      T a[8], b[16];
      load_fragment(a, from + e * Tile::A_LINE + top, Tile::A_LINE, lane);
      UNROLL for (int n = 0; n < OUT / 32; ++n) {
        if (32 * n >= wide) break;
        load_fragment(b, to + e * Tile::B_LINE + 32 * n, Tile::B_LINE, lane);
        load_fragment(b + 8, to + e * Tile::B_LINE + 32 * n + 16, Tile::B_LINE, lane);
        multiply_fragments<T, true, false>(rows_of.sums[n], a, b);
      }
    }
  }

  void store(threadgroup float* tile) thread { rows_of.write(tile + top * OUT); }
};
