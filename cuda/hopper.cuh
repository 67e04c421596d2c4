// What the Hopper kernels are made of: barriers in shared memory, the ring of stages
// between producer and consumer warps, the warpgroup matrix product (wgmma) on 16-bit
// and TF32 operands with float32 accumulators, and what finishes and writes its sums.
//
// An operand tile has rows of 128 bytes (64 channels), eight rows an atom, and the 16-byte
// chunk c of row r stands at place c ^ (r & 7): wgmma's 128-byte swizzle. A row runs along
// the summed dimension ("K-major") or across it ("MN-major"); the descriptor and one
// transpose bit say which, so no operand is ever transposed in memory.
namespace lattice {

__device__ __forceinline__ void barrier_init(unsigned bar, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives when the earlier asynchronous copies of this thread are complete.
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

// Waits for `threads` threads of the block; id 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Makes ordinary and cp.async writes to shared memory visible to wgmma.
__device__ __forceinline__ void fence_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// As above. Copies that are not ALIGNED are complete: the thread stored them itself.
template <bool ALIGNED>
__device__ __forceinline__ void barrier_arrive_after_copies(
    unsigned bar, cuda::std::bool_constant<ALIGNED>) {
  if constexpr (ALIGNED) {
    barrier_arrive_after_copies(bar);
  } else {
    fence_for_wgmma();
    barrier_arrive(bar);
  }
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

// Barriers of a ring of stages, which producers fill and consumers empty.
template <int STAGES>
struct Ring {
  unsigned long long full[STAGES], empty[STAGES];

  __device__ __forceinline__ void init(int fills, int empties) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(shared_address(&full[s]), fills);
      barrier_init(shared_address(&empty[s]), empties);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// A position in a ring of SIZE stages: the stage, and the parity of the rounds made.
template <int SIZE>
struct RingPosition {
  int slot = 0;
  unsigned phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == SIZE) slot = 0, phase ^= 1;
  }
};

// Registers of a thread, with PER blocks on a multiprocessor: PRODUCERS warpgroups give
// some of theirs to CONSUMERS warpgroups, where these hold more SUMS than they have
// registers for when all have equally many.
template <int CONSUMERS, int PRODUCERS, int PER, int SUMS>
struct RegisterBudget {
  static constexpr int WARPGROUPS = CONSUMERS + PRODUCERS;
  static constexpr int EQUAL = 512 / PER / WARPGROUPS & ~7;
  static constexpr int CONSUMER = (SUMS + 48) & ~7;
  static constexpr int PRODUCER =
      (EQUAL * WARPGROUPS - CONSUMER * CONSUMERS) / PRODUCERS & ~7;
  static constexpr bool MOVES = EQUAL < SUMS + 56 && PRODUCER >= 56 && PRODUCER < EQUAL;
  static_assert(MOVES || EQUAL >= SUMS + 32, "too few registers for the sums");
  static constexpr int BESIDE = EQUAL - SUMS;  // as the compiler allots them

  __device__ __forceinline__ static void in_producer() {
    if constexpr (MOVES) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER));
    }
  }
  __device__ __forceinline__ static void in_consumer() {
    if constexpr (MOVES) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER));
    }
  }
};

// base + i * step bytes, hidden from the compiler, which would keep every multiple in a
// register.
__device__ __forceinline__ const void* at_multiple(const char* base, unsigned i,
                                                   unsigned step) {
  const void* at;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(i), "r"(step), "l"(base));
  return at;
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

// Adds a bias to the sums of a 64 x BN tile; `left` of its columns exist.
template <typename T, int BN>
__device__ __forceinline__ void add_bias(float (&sums)[BN / 2], const T* bias, int left) {
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
    const int c = 8 * j + (threadIdx.x & 3) * 2;
    const float u = c < left ? (float)bias[c] : 0.0f;
    const float v = c < left ? (float)bias[c + 1] : 0.0f;
    sums[4 * j] += u, sums[4 * j + 1] += v, sums[4 * j + 2] += u, sums[4 * j + 3] += v;
  }
}

// Writes the part that a thread has of one of its two rows (`half`) in float32, eight
// bytes a column pair.
template <typename T, int BN>
__device__ __forceinline__ void store_row(float* to, const float (&sums)[BN / 2], int half,
                                          int left) {
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
    const int c = 8 * j + (threadIdx.x & 3) * 2;
    if (c < left) {
      *reinterpret_cast<float2*>(to + c) =
          make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
    }
  }
}

// The same in 16 bits: the four lanes that hold a row exchange words, so that each writes
// 16 bytes. All lanes must call it.
template <typename T, int BN>
__device__ __forceinline__ void store_row(T* to, const float (&sums)[BN / 2], int half,
                                          int left) {
  const int lane = threadIdx.x & 3;
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int j = 0; j < BN / 8; j += 4) {
    unsigned v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (j + i) + 2 * half;
      // 48 columns are one and a half times 32.
      v[i] = at < BN / 2 ? pack2<T>(sums[at], sums[at + 1]) : 0;
    }
    const unsigned p = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
    const unsigned q = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    const unsigned a0 = odd ? p : v[0], a1 = odd ? v[1] : p;
    const unsigned a2 = odd ? q : v[2], a3 = odd ? v[3] : q;
    const unsigned r = __shfl_xor_sync(~0u, upper ? a0 : a2, 2);
    const unsigned s = __shfl_xor_sync(~0u, upper ? a1 : a3, 2);
    const int c = 8 * (j + lane);
    if (c < left && (BN % 32 == 0 || c < BN)) {
      *reinterpret_cast<uint4*>(to + c) =
          upper ? make_uint4(r, s, a2, a3) : make_uint4(a0, a1, r, s);
    }
  }
}

// Finishes the sums of a 64 x BN tile, of which `columns` exist. added: what is added to the
// two rows of a thread, from its own first column on, or null; several columns of both are
// on their way at once, as far as REGISTERS hold them beside the sums.
template <typename T, int BN, int REGISTERS, typename AFTER>
__device__ __forceinline__ void finish_rows(float (&sums)[BN / 2], const AFTER& after,
                                            const float2* kept, const T* const (&added)[2],
                                            int columns) {
  constexpr int PAIRS = BN / 8, FREE = (REGISTERS - 32) / int(sizeof(T));
  const int first = (threadIdx.x & 3) * 2;
  auto run = [&](auto aligned) {
    constexpr int MOST = !decltype(aligned)::value ? 1 : FREE < 2 ? 2 : FREE < 8 ? FREE : 8;
    constexpr int AHEAD = MOST < PAIRS ? MOST : PAIRS;
#pragma unroll
    for (int j = 0; j < PAIRS; j += AHEAD) {
      Channels<T, 2> more[2][AHEAD] = {};
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (j + i < PAIRS && added[0] && 8 * (j + i) + first < columns) {
          more[0][i] = load_channels<2>(added[0] + 8 * (j + i), aligned);
          more[1][i] = load_channels<2>(added[1] + 8 * (j + i), aligned);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD && j + i < PAIRS; ++i) {
        const float4 of = *reinterpret_cast<const float4*>(kept + 8 * (j + i) + first);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& u = sums[4 * (j + i) + 2 * half];
          float& v = sums[4 * (j + i) + 2 * half + 1];
          u = fmaf(of.x, u, of.y) + static_cast<float>(more[half][i].v[0]);
          v = fmaf(of.z, v, of.w) + static_cast<float>(more[half][i].v[1]);
        }
      }
      asm volatile("" ::: "memory");  // the next loads stay behind: registers are few
    }
  };
  by_alignment(run, after.residual);
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) sums[i] = AFTER::activate(sums[i]);
}

// The two rows of y that a thread has of 64 rows at `first` on in sorted order, or -1.
__device__ __forceinline__ void find_rows(int (&row)[2], const int* rows, int first,
                                          int n_out) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int sorted =
        first + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4 + 8 * half;
    row[half] = sorted < n_out ? __ldg(rows + sorted) : -1;
  }
}

// What follows the sums of tiles over sorted rows, a warpgroup's BLOCKS blocks of 64 x BN:
// adds the bias, if there is one, or finishes them, and writes them to the rows of y. With
// several splits, y is (splits, n_out, c_out). kept: see keep_channels; REGISTERS: of the
// thread, beside sums. The rows are looked up when the tile begins: under the load of the
// copies, a read takes a thousand cycles and more. Of int8 see hopper_int8.cuh.
template <typename T, int BN, int REGISTERS, int BLOCKS, typename OUT, typename AFTER>
struct SortedResult {
  const AFTER& after;
  const float2* kept;
  const int* rows;
  OUT* y;
  int n_out, split, c_out;
  int first_column = 0;
  int row[BLOCKS][2] = {};

  // first_row: of the blocks, in sorted order.
  __device__ __forceinline__ void begin(int first_row, int column) {
    first_column = column;
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) find_rows(row[j], rows, first_row + 64 * j, n_out);
  }

  // What may begin while the last product is in flight.
  __device__ __forceinline__ void ahead() {}

  __device__ __forceinline__ void store(float (&sums)[BN / 2], int block) {
    const int columns = c_out - first_column;
    if constexpr (AFTER::FINISHES) {
      const T* added[2] = {};
#pragma unroll
      for (int half = 0; half < 2 && after.residual; ++half) {
        const long long of = max(row[block][half], 0);  // a row that there is
        added[half] = after.residual + of * c_out + first_column + (threadIdx.x & 3) * 2;
      }
      finish_rows<T, BN, REGISTERS>(sums, after, kept, added, columns);
    } else if (after.bias) {
      add_bias<T, BN>(sums, after.bias + first_column, columns);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = row[block][half];
      OUT* to = y + ((long long)split * n_out + max(of, 0)) * c_out + first_column;
      store_row<T, BN>(to, sums, half, of < 0 ? 0 : columns);
    }
  }
};

#define LATTICE_R8(d, i)                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
      "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define LATTICE_R16(d, i) LATTICE_R8(d, i), LATTICE_R8(d, i + 8)
#define LATTICE_R24(d, i) LATTICE_R16(d, i), LATTICE_R8(d, i + 16)
#define LATTICE_R32(d, i) LATTICE_R16(d, i), LATTICE_R16(d, i + 16)
#define LATTICE_R48(d, i) LATTICE_R32(d, i), LATTICE_R16(d, i + 32)
#define LATTICE_R64(d, i) LATTICE_R32(d, i), LATTICE_R32(d, i + 32)
#define LATTICE_N16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LATTICE_N32 \
  LATTICE_N16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LATTICE_N24 LATTICE_N16 ",%16,%17,%18,%19,%20,%21,%22,%23"
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

#define LATTICE_R96(d, i) LATTICE_R64(d, i), LATTICE_R32(d, i + 64)
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
  static_assert(N == 32 || N == 48 || N == 64 || N == 96 || N == 128 || N == 192 ||
                    N == 256,
                "no such tile");
  if constexpr (sizeof(T) == 4) {
    static_assert(!A_TRANSPOSED && !B_TRANSPOSED, "TF32 runs along the summed channels");
    if constexpr (N == 32) LATTICE_WGMMA_TF32(32, 16, 16, 17);
    if constexpr (N == 48) LATTICE_WGMMA_TF32(48, 24, 24, 25);
    if constexpr (N == 64) LATTICE_WGMMA_TF32(64, 32, 32, 33);
    if constexpr (N == 96) LATTICE_WGMMA_TF32(96, 48, 48, 49);
    if constexpr (N == 128) LATTICE_WGMMA_TF32(128, 64, 64, 65);
    if constexpr (N == 192) LATTICE_WGMMA_TF32(192, 96, 96, 97);
    if constexpr (N == 256) LATTICE_WGMMA_TF32(256, 128, 128, 129);
  } else if constexpr (is_bfloat16<T>) {
    if constexpr (N == 32) LATTICE_WGMMA(32, 16, 16, 17, 18, 19, "bf16");
    if constexpr (N == 48) LATTICE_WGMMA(48, 24, 24, 25, 26, 27, "bf16");
    if constexpr (N == 64) LATTICE_WGMMA(64, 32, 32, 33, 34, 35, "bf16");
    if constexpr (N == 96) LATTICE_WGMMA(96, 48, 48, 49, 50, 51, "bf16");
    if constexpr (N == 128) LATTICE_WGMMA(128, 64, 64, 65, 66, 67, "bf16");
    if constexpr (N == 192) LATTICE_WGMMA(192, 96, 96, 97, 98, 99, "bf16");
    if constexpr (N == 256) LATTICE_WGMMA(256, 128, 128, 129, 130, 131, "bf16");
  } else {
    if constexpr (N == 32) LATTICE_WGMMA(32, 16, 16, 17, 18, 19, "f16");
    if constexpr (N == 48) LATTICE_WGMMA(48, 24, 24, 25, 26, 27, "f16");
    if constexpr (N == 64) LATTICE_WGMMA(64, 32, 32, 33, 34, 35, "f16");
    if constexpr (N == 96) LATTICE_WGMMA(96, 48, 48, 49, 50, 51, "f16");
    if constexpr (N == 128) LATTICE_WGMMA(128, 64, 64, 65, 66, 67, "f16");
    if constexpr (N == 192) LATTICE_WGMMA(192, 96, 96, 97, 98, 99, "f16");
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
