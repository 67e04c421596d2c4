// Matrix products of 64 x 64 tiles by four warps, or, in float32, of 128 x 128 tiles by
// eight, through mma.sync, from shared memory:
// half and bfloat16 by m16n8k16, float32 as three TF32 products of split operands (high
// x high + high x low + low x high), which keep float32's accuracy, or as one of rounded
// operands, where TF32 was asked for.
//
// A stage holds 64 summed 16-bit channels, or 32 of float32. A tile is stored in rows of
// 64 tile entries ("along" false: a row a summed index) or of the stage's summed indices
// ("along" true: a row a tile entry). 16-byte chunks are swizzled so that neither the
// copies nor the fragment loads meet bank conflicts.

namespace lattice {

// Names, in a kernel's template, the tiles of this file, SIDE x SIDE, and the PRODUCTS of
// float32, 1 or 3. 2 * SIDE threads: a warp has SIDE / 2 rows by 32 columns.
template <int PRODUCTS = 1, int SIDE = 64>
struct MmaTile {};

template <typename T, int SIDE = 64>
struct TensorCore {
  static_assert(SIDE == 64 || sizeof(T) == 4, "16-bit rows of a tile are 128 bytes");
  static constexpr int DEPTH = 128 / sizeof(T);   // summed indices of a stage
  static constexpr int TILE_BYTES = SIDE * 128;    // one operand's stage
  static constexpr int EACH = 16 / sizeof(T);     // entries of a chunk

  // Address of (tile entry, summed index) within a stage, at a chunk's first entry.
  template <bool ALONG>
  __device__ static __forceinline__ unsigned place(int entry, int depth) {
    if constexpr (ALONG) {
      return entry * 128 + (((depth / EACH) ^ (entry & 7)) << 4);
    } else if constexpr (sizeof(T) == 2) {
      return depth * 128 + (((entry / EACH) ^ (depth & 7)) << 4);
    } else {
      return depth * (4 * SIDE) + (((entry / EACH) ^ ((depth & 3) << 1)) << 4);
    }
  }
};

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned at) {
  if constexpr (TRANSPOSED) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(at));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
  }
}

// One float32 entry of a tile.
template <typename Core, bool ALONG>
__device__ __forceinline__ unsigned load_entry(unsigned tile, int entry, int depth) {
  const unsigned at = tile + Core::template place<ALONG>(entry, depth) +
                      4 * ((ALONG ? depth : entry) & 3);
  unsigned v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

template <typename T>
__device__ __forceinline__ void mma16(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                      unsigned b1) {
  if constexpr (is_bfloat16<T>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 32 summed channels of int8.
template <typename T>
__device__ __forceinline__ void mma16(int (&d)[4], const unsigned (&a)[4], unsigned b0,
                                      unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
      "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4],
                                         unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
      "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// SPLIT: v as the nearest TF32, and the nearest to what is left: together float32's bits.
// Else v itself, of which tensor cores leave out the last 13 bits.
template <bool SPLIT>
__device__ __forceinline__ void split_tf32(unsigned v, unsigned& high, unsigned& low) {
  high = v;
  if constexpr (SPLIT) {
    const float value = __uint_as_float(v);
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(value));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(value - __uint_as_float(high)));
  }
}

// d (the warp's 16 M x 32, of which a thread has 16 M sums) += a * b over one stage.
template <typename Core, typename T, bool A_ALONG, bool B_ALONG, int PRODUCTS, int M>
__device__ __forceinline__ void multiply_stage(Sum<T> (&d)[M][4][4], unsigned a,
                                               unsigned b, int first_row,
                                               int first_column) {
  const int lane = threadIdx.x & 31;
  if constexpr (sizeof(T) <= 2) {
    constexpr int EACH = Core::EACH;
    const int matrix = lane >> 3, r = lane & 7;
#pragma unroll
    for (int k = 0; k < Core::DEPTH; k += 2 * EACH) {
      unsigned as[M][4], bs[2][4];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const int row = first_row + 16 * m + (matrix & 1) * 8 + (A_ALONG ? r : 0);
        const int depth = k + (matrix >> 1) * EACH + (A_ALONG ? 0 : r);
        load_matrices<!A_ALONG>(as[m], a + Core::template place<A_ALONG>(row, depth));
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = first_column + 16 * n + (matrix >> 1) * 8 + (B_ALONG ? r : 0);
        const int depth = k + (matrix & 1) * EACH + (B_ALONG ? 0 : r);
        load_matrices<!B_ALONG>(bs[n], b + Core::template place<B_ALONG>(column, depth));
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          mma16<T>(d[m][n], as[m], bs[n / 2][2 * (n & 1)], bs[n / 2][2 * (n & 1) + 1]);
        }
      }
    }
  } else {
    const int g = lane >> 2, t = lane & 3;
    // Tensor cores truncate their sums: each stage has its own, which is added rounded.
    float part[M][4][4] = {};
#pragma unroll
    for (int k = 0; k < Core::DEPTH; k += 8) {
      unsigned high[M][4], low[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first_row + 16 * m + g + 8 * (i & 1);
          const unsigned v = load_entry<Core, A_ALONG>(a, row, k + t + 4 * (i >> 1));
          split_tf32<PRODUCTS == 3>(v, high[m][i], low[m][i]);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        unsigned b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = first_column + 8 * n + g;
          const unsigned v = load_entry<Core, B_ALONG>(b, column, k + t + 4 * i);
          split_tf32<PRODUCTS == 3>(v, b_high[i], b_low[i]);
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
          if constexpr (PRODUCTS == 3) {
            mma_tf32(part[m][n], low[m], b_high[0], b_high[1]);
            mma_tf32(part[m][n], high[m], b_low[0], b_low[1]);
          }
          mma_tf32(part[m][n], high[m], b_high[0], b_high[1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[m][n][i] += part[m][n][i];
      }
    }
  }
}

}  // namespace lattice
