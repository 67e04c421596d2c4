// What the Hopper kernels are made of, beside the matrix product (wgmma.cuh): barriers in
// shared memory, the ring of stages between producer and consumer warps, registers, and
// what finishes and writes sums.
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

// Returns what all lanes of a warp have alike, so that the compiler knows it: addresses of
// barriers and of wgmma's operands, and loops, then need no code for lanes that differ.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

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
// Without `rows` these are in order.
__device__ __forceinline__ void find_rows(int (&row)[2], const int* rows, int first,
                                          int n_out) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int sorted =
        first + (threadIdx.x >> 5 & 3) * 16 + (threadIdx.x & 31) / 4 + 8 * half;
    row[half] = sorted >= n_out ? -1 : rows ? __ldg(rows + sorted) : sorted;
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

}  // namespace lattice
