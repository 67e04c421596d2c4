// The few Hopper instructions that the tile kernels are made of: asynchronous 16-byte
// copies that fill zeros where there is no source, shared-memory barriers, and the
// warpgroup matrix product (wgmma) on 16-bit operands with float32 accumulators.
//
// Operand tiles are rows of 128 bytes (64 channels), eight rows an atom, the 16-byte
// chunk c of row r at place c ^ (r & 7): wgmma's 128-byte swizzle. A row may run along
// the summed dimension ("K-major") or across it ("MN-major"); the descriptor and one
// transpose bit tell which, so no operand is ever permuted in memory.
namespace lattice {

__device__ __forceinline__ void barrier_init(unsigned bar, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives once this thread's earlier copies have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(unsigned bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned bar, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nwaiting:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra arrived;\nbra waiting;\narrived:\n}" ::"r"(bar), "r"(parity)
      : "memory");
}

// Joins `threads` threads of the block; id 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes ordinary and cp.async writes to shared memory visible to wgmma.
__device__ __forceinline__ void fence_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

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

#define LATTICE_R8(d, i)                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
      "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LATTICE_R16(d, i) LATTICE_R8(d, i), LATTICE_R8(d, i + 8)
#define LATTICE_R32(d, i) LATTICE_R16(d, i), LATTICE_R16(d, i + 16)
#define LATTICE_R64(d, i) LATTICE_R32(d, i), LATTICE_R32(d, i + 32)
#define LATTICE_N16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LATTICE_N32 \
  LATTICE_N16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LATTICE_N64                                                             \
  LATTICE_N32                                                                   \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"   \
  "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LATTICE_N128                                                            \
  LATTICE_N64                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,"   \
  "%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,"    \
  "%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114," \
  "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define LATTICE_R128(d, i) LATTICE_R64(d, i), LATTICE_R64(d, i + 64)

// N columns, in R = N / 2 registers: operands a, b and the four flags follow them.
#define LATTICE_WGMMA(N, R, A, B, FLAG_A, FLAG_B, TYPE)                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE    \
               " {" LATTICE_N##R "}, %" #A ", %" #B ", 1, 1, 1, %" #FLAG_A        \
               ", %" #FLAG_B ";"                                                  \
               : LATTICE_R##R(d, 0)                                               \
               : "l"(a), "l"(b), "n"(int(A_TRANSPOSED)), "n"(int(B_TRANSPOSED)))

// d (64 x N, this thread's share) += a (64 x 16) * b (16 x N).
template <typename T, int N, bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], unsigned long long a,
                                      unsigned long long b) {
  static_assert(N == 32 || N == 64 || N == 128 || N == 256, "no such tile");
  if constexpr (is_bfloat16<T>) {
    if constexpr (N == 32) LATTICE_WGMMA(32, 16, 16, 17, 18, 19, "bf16");
    if constexpr (N == 64) LATTICE_WGMMA(64, 32, 32, 33, 34, 35, "bf16");
    if constexpr (N == 128) LATTICE_WGMMA(128, 64, 64, 65, 66, 67, "bf16");
    if constexpr (N == 256) LATTICE_WGMMA(256, 128, 128, 129, 130, 131, "bf16");
  } else {
    if constexpr (N == 32) LATTICE_WGMMA(32, 16, 16, 17, 18, 19, "f16");
    if constexpr (N == 64) LATTICE_WGMMA(64, 32, 32, 33, 34, 35, "f16");
    if constexpr (N == 128) LATTICE_WGMMA(128, 64, 64, 65, 66, 67, "f16");
    if constexpr (N == 256) LATTICE_WGMMA(256, 128, 128, 129, 130, 131, "f16");
  }
}
#undef LATTICE_WGMMA

}  // namespace lattice
