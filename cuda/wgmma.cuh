// The warpgroup matrix product (wgmma) on 16-bit and TF32 operands with float32
// accumulators, and how its operands stand in shared memory.
//
// An operand tile has rows of 128 bytes (64 channels), eight rows an atom, and the 16-byte
// chunk c of row r stands at place c ^ (r & 7): wgmma's 128-byte swizzle. A row runs along
// the summed dimension ("K-major") or across it ("MN-major"); the descriptor and one
// transpose bit say which, so no operand is ever transposed in memory. Needs hopper.cuh.

namespace lattice {

__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Describes an operand tile: address, the strides in bytes between atoms along its
// rows (`lead`) and between groups of eight rows (`step`), and the swizzle's width.
template <int SWIZZLE>
__device__ __forceinline__ unsigned long long operand(unsigned at, int lead, int step) {
  constexpr unsigned long long MODE = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3;
  return (unsigned long long)((at & 0x3ffff) >> 4) |
         (unsigned long long)(lead >> 4) << 16 | (unsigned long long)(step >> 4) << 32 |
         MODE << 62;
}

// Bytes of a stage's weights of BN output channels. If these run along the rows
// ("MN-major"), atoms of 64 are whole.
template <int BN, bool ALONG_COLUMNS>
constexpr int WEIGHT_BYTES =
    (ALONG_COLUMNS && BN > 32 ? (BN + 63) / 64 * 64 : BN) * 128;

// The byte at which chunk `column` of summed index `depth` stands in an MN-major tile:
// atoms of 64 entries, or rows of 32 entries (64 bytes).
template <int SWIZZLE>
__device__ __forceinline__ unsigned place_across(int depth, int column) {
  if constexpr (SWIZZLE == 64) return depth * 64 + ((column ^ ((depth >> 1) & 3)) << 4);
  return (column >> 3) * 8192 + depth * 128 + (((column & 7) ^ (depth & 7)) << 4);
}

#define LATTICE_R8(d, i)                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
      "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LATTICE_R16(d, i) LATTICE_R8(d, i), LATTICE_R8(d, i + 8)
#define LATTICE_R24(d, i) LATTICE_R16(d, i), LATTICE_R8(d, i + 16)
#define LATTICE_R32(d, i) LATTICE_R16(d, i), LATTICE_R16(d, i + 16)
#define LATTICE_R40(d, i) LATTICE_R32(d, i), LATTICE_R8(d, i + 32)
#define LATTICE_R48(d, i) LATTICE_R32(d, i), LATTICE_R16(d, i + 32)
#define LATTICE_R56(d, i) LATTICE_R32(d, i), LATTICE_R24(d, i + 32)
#define LATTICE_R64(d, i) LATTICE_R32(d, i), LATTICE_R32(d, i + 32)
#define LATTICE_N16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LATTICE_N32 \
  LATTICE_N16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LATTICE_N24 LATTICE_N16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define LATTICE_N40 LATTICE_N32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define LATTICE_N56 LATTICE_N48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define LATTICE_N80                                                             \
  LATTICE_N64                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define LATTICE_N112                                                            \
  LATTICE_N96                                                                   \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define LATTICE_N48                                                             \
  LATTICE_N32                                                                   \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define LATTICE_N64                                                             \
  LATTICE_N32                                                                   \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"   \
  "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LATTICE_N96                                                             \
  LATTICE_N64                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,"   \
  "%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define LATTICE_N128                                                            \
  LATTICE_N64                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,"   \
  "%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,"    \
  "%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114," \
  "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define LATTICE_R80(d, i) LATTICE_R64(d, i), LATTICE_R16(d, i + 64)
#define LATTICE_R96(d, i) LATTICE_R64(d, i), LATTICE_R32(d, i + 64)
#define LATTICE_R112(d, i) LATTICE_R64(d, i), LATTICE_R48(d, i + 64)
#define LATTICE_R128(d, i) LATTICE_R64(d, i), LATTICE_R64(d, i + 64)

// N columns, in R = N / 2 registers: operands a, b and the four flags follow them.
#define LATTICE_WGMMA(N, R, A, B, FLAG_A, FLAG_B, TYPE)                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE    \
               " {" LATTICE_N##R "}, %" #A ", %" #B ", 1, 1, 1, %" #FLAG_A        \
               ", %" #FLAG_B ";"                                                  \
               : LATTICE_R##R(d, 0)                                               \
               : "l"(a), "l"(b), "n"(int(A_TRANSPOSED)), "n"(int(B_TRANSPOSED)))

// The same in TF32, which has one form alone: both operands run along the summed channels.
#define LATTICE_WGMMA_TF32(N, R, A, B)                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {"      \
               LATTICE_N##R "}, %" #A ", %" #B ", 1, 1, 1;"                     \
               : LATTICE_R##R(d, 0)                                             \
               : "l"(a), "l"(b))

// d (64 x N, N / 2 sums a thread) += a (64 x 32 bytes) * b (32 bytes x N). Float32 is read
// as TF32: without its last 13 bits.
template <typename T, int N, bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], unsigned long long a,
                                      unsigned long long b) {
  static_assert(N == 32 || N == 48 || N == 64 || N == 80 || N == 96 || N == 112 ||
                    N == 128 || N == 160 || N == 192 || N == 224 || N == 256,
                "no such tile");
  if constexpr (sizeof(T) == 4) {
    static_assert(!A_TRANSPOSED && !B_TRANSPOSED, "TF32 runs along the summed channels");
    if constexpr (N == 32) LATTICE_WGMMA_TF32(32, 16, 16, 17);
    if constexpr (N == 48) LATTICE_WGMMA_TF32(48, 24, 24, 25);
    if constexpr (N == 64) LATTICE_WGMMA_TF32(64, 32, 32, 33);
    if constexpr (N == 80) LATTICE_WGMMA_TF32(80, 40, 40, 41);
    if constexpr (N == 96) LATTICE_WGMMA_TF32(96, 48, 48, 49);
    if constexpr (N == 112) LATTICE_WGMMA_TF32(112, 56, 56, 57);
    if constexpr (N == 128) LATTICE_WGMMA_TF32(128, 64, 64, 65);
    if constexpr (N == 160) LATTICE_WGMMA_TF32(160, 80, 80, 81);
    if constexpr (N == 192) LATTICE_WGMMA_TF32(192, 96, 96, 97);
    if constexpr (N == 224) LATTICE_WGMMA_TF32(224, 112, 112, 113);
    if constexpr (N == 256) LATTICE_WGMMA_TF32(256, 128, 128, 129);
  } else if constexpr (is_bfloat16<T>) {
    if constexpr (N == 32) LATTICE_WGMMA(32, 16, 16, 17, 18, 19, "bf16");
    if constexpr (N == 48) LATTICE_WGMMA(48, 24, 24, 25, 26, 27, "bf16");
    if constexpr (N == 64) LATTICE_WGMMA(64, 32, 32, 33, 34, 35, "bf16");
    if constexpr (N == 80) LATTICE_WGMMA(80, 40, 40, 41, 42, 43, "bf16");
    if constexpr (N == 96) LATTICE_WGMMA(96, 48, 48, 49, 50, 51, "bf16");
    if constexpr (N == 112) LATTICE_WGMMA(112, 56, 56, 57, 58, 59, "bf16");
    if constexpr (N == 128) LATTICE_WGMMA(128, 64, 64, 65, 66, 67, "bf16");
    if constexpr (N == 160) LATTICE_WGMMA(160, 80, 80, 81, 82, 83, "bf16");
    if constexpr (N == 192) LATTICE_WGMMA(192, 96, 96, 97, 98, 99, "bf16");
    if constexpr (N == 224) LATTICE_WGMMA(224, 112, 112, 113, 114, 115, "bf16");
    if constexpr (N == 256) LATTICE_WGMMA(256, 128, 128, 129, 130, 131, "bf16");
  } else {
    if constexpr (N == 32) LATTICE_WGMMA(32, 16, 16, 17, 18, 19, "f16");
    if constexpr (N == 48) LATTICE_WGMMA(48, 24, 24, 25, 26, 27, "f16");
    if constexpr (N == 64) LATTICE_WGMMA(64, 32, 32, 33, 34, 35, "f16");
    if constexpr (N == 80) LATTICE_WGMMA(80, 40, 40, 41, 42, 43, "f16");
    if constexpr (N == 96) LATTICE_WGMMA(96, 48, 48, 49, 50, 51, "f16");
    if constexpr (N == 112) LATTICE_WGMMA(112, 56, 56, 57, 58, 59, "f16");
    if constexpr (N == 128) LATTICE_WGMMA(128, 64, 64, 65, 66, 67, "f16");
    if constexpr (N == 160) LATTICE_WGMMA(160, 80, 80, 81, 82, 83, "f16");
    if constexpr (N == 192) LATTICE_WGMMA(192, 96, 96, 97, 98, 99, "f16");
    if constexpr (N == 224) LATTICE_WGMMA(224, 112, 112, 113, 114, 115, "f16");
    if constexpr (N == 256) LATTICE_WGMMA(256, 128, 128, 129, 130, 131, "f16");
  }
}
#undef LATTICE_WGMMA
#undef LATTICE_WGMMA_TF32

// Starts d += a^T * b over a stage of 64 rows: 64 columns at a by N columns at b, both of
// which run along the rows ("MN-major").
template <typename T, int N>
__device__ __forceinline__ void multiply_columns(float (&d)[N / 2], unsigned a,
                                                 unsigned b) {
  fence_for_wgmma();
  wgmma_begin();
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const auto columns_of_a = operand<128>(a + q * 2048, 8192, 1024);
    if constexpr (N == 32) {
      wgmma<T, N, true, true>(d, columns_of_a, operand<64>(b + q * 1024, 4096, 512));
    } else {
      wgmma<T, N, true, true>(d, columns_of_a, operand<128>(b + q * 2048, 8192, 1024));
    }
  }
  wgmma_commit();
}

}  // namespace lattice
