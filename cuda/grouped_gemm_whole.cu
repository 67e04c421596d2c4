// grouped_gemm_whole: the weight gradient of few edges on Hopper, with no partial sums in
// memory: dW[k] = sum over edges (i, o, k) of x[i]^T dy[o], in half or bfloat16 with
// float32 accumulators.
//
// Tile: 64 * CONSUMERS channels of x by BN channels of dy, of one offset and all of its
// edges, so that one launch writes dW itself, in either layout, by way of shared memory.
// Traffic per edge: its row of x once per BN channels, its row of dy once per tile's rows.
// Wins where an offset has few stages: there the sums of EdgeTile's splits, which are
// written and read again, are more than what they are sums of. Bound by the latency of its
// reads: rows are known AHEAD stages before they are copied.

namespace lattice {

template <int CONSUMERS, int BN>
struct WholeStage {
  static constexpr int HEIGHT = 64 * CONSUMERS;
  static constexpr int A_BYTES = CONSUMERS * 8192;
  static constexpr int STAGE_BYTES = A_BYTES + WEIGHT_BYTES<BN, true>;
};

// Where the sums of a tile stand in shared memory, as dW has them: C_in or C_out along a
// line. The padding spreads a warp's writes over all banks.
template <int CONSUMERS, int BN, bool TRANSPOSED>
struct WholeSums {
  static constexpr int LINES = TRANSPOSED ? BN : 64 * CONSUMERS;
  static constexpr int ALONG = TRANSPOSED ? 64 * CONSUMERS : BN;
  static constexpr int PITCH = ALONG + (TRANSPOSED ? 4 : 8);

  __device__ __forceinline__ static int place(int row, int column) {
    return TRANSPOSED ? column * PITCH + row : row * PITCH + column;
  }
};

// x (n_in, c_in); dy (n_out, c_out); pairs, spans as of grouped_gemm; dw (K, C_in, C_out)
// or, if TRANSPOSED, (C_out, K, C_in). Thread blocks: volume * tiles of c_in * tiles of
// c_out, of 128 * CONSUMERS + 128 threads. Channels are multiples of 16 bytes.
template <typename T, int CONSUMERS, int BN, int STAGES, bool TRANSPOSED>
__device__ __forceinline__ void grouped_gemm_whole(const T* x, const T* dy,
                                                   const int* pairs, const int* spans,
                                                   const WeightGradSizes& sizes, T* dw) {
  using Tile = WholeStage<CONSUMERS, BN>;
  using Sums = WholeSums<CONSUMERS, BN, TRANSPOSED>;
  constexpr int PRODUCER_THREADS = 128, THREADS = 128 * CONSUMERS + PRODUCER_THREADS;
  constexpr int RING_BYTES = STAGES * Tile::STAGE_BYTES;
  static_assert(Sums::LINES * Sums::PITCH * 4 <= RING_BYTES,
                "the sums take the place of the stages");
  const int volume = sizes.volume, c_in = sizes.c_in, c_out = sizes.c_out;
  extern __shared__ unsigned char lattice_shared[];
  __shared__ Ring<STAGES> ring;

  const int row_tiles = (c_in + Tile::HEIGHT - 1) / Tile::HEIGHT;
  const int column_tiles = (c_out + BN - 1) / BN;
  const int tile = blockIdx.x % (row_tiles * column_tiles);
  // The offset in the middle begins: of a submanifold relation it has the most edges.
  const int k = (blockIdx.x / (row_tiles * column_tiles) + volume / 2) % volume;
  const int first_row = tile / column_tiles * Tile::HEIGHT;
  const int first_column = tile % column_tiles * BN;
  const int2 span = __ldg(reinterpret_cast<const int2*>(spans) + k);
  const bool turned = span.x < 0;
  const int begin = turned ? ~span.x : span.x, end = span.y;
  int thread = threadIdx.x;
  const int steps = (end - begin + 63) / 64;
  const unsigned stages = (shared_address(lattice_shared) + 1023) & ~1023u;
  // The sums take the place of the stages once these are multiplied.
  float* tile_sums = reinterpret_cast<float*>(
      lattice_shared + (stages - shared_address(lattice_shared)));

  if (thread == 0) ring.init(PRODUCER_THREADS, 4 * CONSUMERS);
  __syncthreads();

  const int group = uniform(thread / 128);
  if (group >= CONSUMERS) {
    thread -= 128 * CONSUMERS;
    constexpr int HIGH = PRODUCER_THREADS / 8, EACH = 64 / HIGH;  // edges of one thread
    constexpr int AHEAD = 4;
    const int chunk = thread & 7, row = thread >> 3;
    const unsigned swizzled = (unsigned)(row * 128 + ((chunk ^ (row & 7)) << 4));
    const long long x_row = (long long)c_in * sizeof(T);
    const long long dy_row = (long long)c_out * sizeof(T);
    const char* x_from = reinterpret_cast<const char*>(x + first_row + 8 * chunk);
    const char* dy_from = reinterpret_cast<const char*>(dy + first_column + 8 * chunk);
    int2 next[AHEAD][EACH];
    auto prefetch = [&](int step, int2 (&to)[EACH]) {
      const int first = begin + step * 64 + row;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int at = first + HIGH * e;
        to[e] = step < steps && at < end
                    ? __ldg(reinterpret_cast<const int2*>(pairs) + at)
                    : make_int2(-1, -1);
      }
    };
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) prefetch(s, next[s]);
    auto copy = [&](auto aligned) {
      RingPosition<STAGES> at;
      // Channels past the end only reach sums that are never stored: nothing zeroes them.
      auto fill = [&](const int2 (&edges)[EACH]) {
        int2 of[EACH];  // i and o, turned here: at once, a read would be waited for
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          of[e] = turned ? make_int2(edges[e].y, edges[e].x) : edges[e];
        }
        const unsigned a = stages + at.slot * Tile::STAGE_BYTES, b = a + Tile::A_BYTES;
        barrier_wait(shared_address(&ring.empty[at.slot]), at.phase ^ 1);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          const char* from = x_from + (unsigned long long)(unsigned)of[e].x * x_row;
#pragma unroll
          for (int g = 0; g < CONSUMERS; ++g) {
            copy16_if(first_row + 64 * g + 8 * chunk < c_in,
                      a + g * 8192 + swizzled + e * (HIGH * 128), from + 128 * g,
                      of[e].x >= 0, aligned);
          }
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          const char* from = dy_from + (unsigned long long)(unsigned)of[e].y * dy_row;
#pragma unroll
          for (int n = 0; n < (BN + 63) / 64; ++n) {
            const int column = 64 * n + 8 * chunk;
            const unsigned to = BN == 32 ? b + place_across<64>(row + HIGH * e, chunk)
                                         : b + n * 8192 + swizzled + e * (HIGH * 128);
            copy16_if(column < BN && first_column + column < c_out, to, from + 128 * n,
                      of[e].y >= 0, aligned);
          }
        }
        barrier_arrive_after_copies(shared_address(&ring.full[at.slot]), aligned);
        at.advance();
      };
      for (int step = 0; step < steps; step += AHEAD) {
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
          if (step + s < steps) {
            fill(next[s]);
            prefetch(step + s + AHEAD, next[s]);
          }
        }
      }
    };
    by_alignment(copy, x, dy);
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    const int lane = thread & 31;
    float sums[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sums[i] = 0.0f;
    RingPosition<STAGES> at;
    int pending = -1;  // the stage whose product is in flight
    auto release = [&]() {
      if (lane == 0 && pending >= 0) barrier_arrive(shared_address(&ring.empty[pending]));
    };
    // Unrolled by the compiler, it waits for each product before it starts the next.
#pragma unroll 1
    for (int step = 0; step < steps; ++step, at.advance()) {
      const unsigned a = stages + at.slot * Tile::STAGE_BYTES + group * 8192;
      const unsigned b = stages + at.slot * Tile::STAGE_BYTES + Tile::A_BYTES;
      barrier_wait(shared_address(&ring.full[at.slot]), at.phase);
      multiply_columns<T, BN>(sums, a, b);
      wgmma_wait<1>();
      release();
      pending = at.slot;
    }
    wgmma_wait<0>();
    named_barrier(1, 128 * CONSUMERS);
    const int first = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      const int column = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
      tile_sums[Sums::place(first + (i & 2) * 4, column)] = sums[i];
    }
  }
  __syncthreads();

  // Eight channels of a line a thread.
  constexpr int ACROSS = Sums::ALONG / 8;
  for (int v = threadIdx.x; v < Sums::LINES * ACROSS; v += THREADS) {
    const int line = v / ACROSS, along = v % ACROSS * 8;
    const int i = first_row + (TRANSPOSED ? along : line);
    const int o = first_column + (TRANSPOSED ? line : along);
    if (i >= c_in || o >= c_out) continue;
    const auto sum =
        *reinterpret_cast<const Channels<float, 8>*>(tile_sums + line * Sums::PITCH + along);
    T* to = TRANSPOSED ? dw + ((long long)o * volume + k) * c_in + i
                       : dw + ((long long)k * c_in + i) * c_out + o;
    store_channels(to, sum.v);
  }
}

}  // namespace lattice
