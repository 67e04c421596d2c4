// The warpgroup matrix product (wgmma) on float32 operands, which it takes as TF32, with
// float32's accuracy: three products of split operands (high x high + high x low + low x
// high).
//
// wgmma truncates what it reads from shared memory, so its left operand comes from
// registers, where it is split; the weights are prepared (tf32_weights.cu). Both run along
// the summed channels: TF32 has no other form.
namespace lattice {

// Loads rows 16 * warp ... of a 64-row block, channels 8 * q ... of its stage, as wgmma's
// left operand: a row has 128 bytes, swizzled.
__device__ __forceinline__ void load_rows(unsigned (&r)[4], unsigned block, int q) {
  const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
  const unsigned at = block + row * 128 + (((2 * q + (lane >> 4)) ^ (lane & 7)) << 4);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

__device__ __forceinline__ unsigned rounded_tf32(float v) {
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
  return r;
}

// r as the nearest TF32, and the nearest to what is left.
__device__ __forceinline__ void split_rows(unsigned (&r)[4], unsigned (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float v = __uint_as_float(r[i]);
    r[i] = rounded_tf32(v);
    low[i] = rounded_tf32(v - __uint_as_float(r[i]));
  }
}

#define LATTICE_WGMMA_TF32(N, R, A0, A1, A2, A3, B)                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {"        \
               LATTICE_N##R "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B   \
               ", 1, 1, 1;"                                                       \
               : LATTICE_R##R(d, 0)                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d (64 x N, N / 2 sums a thread) += a (64 x 8, in registers) * b (8 x N).
template <int N>
__device__ __forceinline__ void wgmma_tf32(float (&d)[N / 2], const unsigned (&a)[4],
                                           unsigned long long b) {
  static_assert(N == 32 || N == 48 || N == 64 || N == 96 || N == 128, "no such tile");
  if constexpr (N == 32) LATTICE_WGMMA_TF32(32, 16, 16, 17, 18, 19, 20);
  if constexpr (N == 48) LATTICE_WGMMA_TF32(48, 24, 24, 25, 26, 27, 28);
  if constexpr (N == 64) LATTICE_WGMMA_TF32(64, 32, 32, 33, 34, 35, 36);
  if constexpr (N == 96) LATTICE_WGMMA_TF32(96, 48, 48, 49, 50, 51, 52);
  if constexpr (N == 128) LATTICE_WGMMA_TF32(128, 64, 64, 65, 66, 67, 68);
}
#undef LATTICE_WGMMA_TF32

// Adds three products of COUNT 8-channel steps of a block's rows, from step `first` of
// its stage on, with the weights at b. Tensor cores truncate what they add up, so each
// stage has its own sum, which is complete on return and added rounded.
template <int BN, int COUNT>
__device__ __forceinline__ void multiply_split(float (&sums)[BN / 2], unsigned block,
                                               unsigned b, int first) {
  unsigned high[COUNT][4], low[COUNT][4];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) load_rows(high[i], block, first + i);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) split_rows(high[i], low[i]);
  auto weights = [&](int i, int part) {
    return operand<128>(b + part * BN * 128 + (first + i) * 32, 16, 1024);
  };
  float part[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) part[i] = 0.0f;
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    wgmma_tf32<BN>(part, low[i], weights(i, 0));
    wgmma_tf32<BN>(part, high[i], weights(i, 1));
    wgmma_tf32<BN>(part, high[i], weights(i, 0));
  }
  wgmma_commit();
  wgmma_wait<0>();
  // No sum is read before the wait: the compiler knows of no other order.
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) sums[i] += part[i];
}

}  // namespace lattice
