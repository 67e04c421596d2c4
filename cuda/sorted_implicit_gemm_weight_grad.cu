// The weight gradient of sorted_implicit_gemm on Hopper, for at most 64 input channels:
// dW[k] = sum over rows o of x[table[o, k]]^T dy[o], in half or bfloat16 with float32
// accumulators.
//
// A thread block has some offsets and a split of the mask-sorted rows. CONSUMERS
// warpgroups hold 64 rows of dW each (OFFSETS offsets: one of up to 64 channels, two of up
// to 32, four of up to 16) by BN channels. A stage is 64 sorted rows: dy once for all the
// offsets of the block, and x gathered for each; an offset that no row of the stage uses
// is neither copied nor multiplied, and a stage that none uses is left out.
// Traffic: x once an edge, dy once per CONSUMERS * OFFSETS offsets (grouped_gemm: once an
// edge). Wins at few channels and many edges a row, where the gathers are what costs.

namespace lattice {

constexpr int MAX_BLOCKS = 1024;  // blocks of 64 rows in a split

template <int CONSUMERS, int BN>
struct WeightGradTile {
  static constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
  // Two producer warpgroups fill every other stage each: while one waits for its row
  // indices, the other copies.
  static constexpr int PRODUCER_THREADS = 128;
  static constexpr int THREADS = CONSUMER_THREADS + 2 * PRODUCER_THREADS;
  static constexpr int A_BYTES = CONSUMERS * 8192;
  static constexpr int B_BYTES = BN * 128;
  static constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
};

// x (n_in, c_in), c_in at most 64 / OFFSETS; dy (n_out, c_out); table, rows, masks as in
// sorted_implicit_gemm; partials float32 (splits, volume, c_in, c_out). Thread blocks:
// (groups of CONSUMERS * OFFSETS offsets * tiles of c_out, splits), of 128 * CONSUMERS +
// 256 threads. A split is of at most MAX_BLOCKS blocks of 64 rows.
template <typename T, int CONSUMERS, int BN, int STAGES, int OFFSETS, bool MIRRORED>
__device__ __forceinline__ void sorted_implicit_gemm_weight_grad(
    const T* x, const T* dy, const int* table, const int* rows, const unsigned* masks,
    const WeightGradSizes& sizes, float* partials) {
  const int n_out = sizes.n_out, pitch = sizes.pitch, volume = sizes.volume;
  const int c_in = sizes.c_in, c_out = sizes.c_out;
  const int span = ((n_out + 63) / 64 + gridDim.y - 1) / gridDim.y;
  using Tile = WeightGradTile<CONSUMERS, BN>;
  constexpr int BLOCK_OFFSETS = CONSUMERS * OFFSETS;
  extern __shared__ unsigned char lattice_shared[];
  __shared__ Ring<STAGES> ring;
  __shared__ unsigned uses[MAX_BLOCKS];  // block << 16 | warpgroups with an offset it uses
  __shared__ int use_count;

  const int column_tiles = (c_out + BN - 1) / BN;
  const int first_offset = blockIdx.x / column_tiles * BLOCK_OFFSETS;
  const int first_column = blockIdx.x % column_tiles * BN;
  const int split = blockIdx.y;
  const int first_block = split * span;
  const int block_count = max(0, min(span, (n_out + 63) / 64 - first_block));
  int thread = threadIdx.x;
  const unsigned stages = (shared_address(lattice_shared) + 1023) & ~1023u;

  if (thread == 0) ring.init(Tile::PRODUCER_THREADS, 4 * CONSUMERS);
  const int words = (volume + 31) / 32;
  for (int b = thread; b < block_count; b += Tile::THREADS) {
    unsigned warpgroups = 0;
    for (int i = 0; i < BLOCK_OFFSETS && first_offset + i < volume; ++i) {
      const int k = first_offset + i;
      const unsigned* mask = masks + 2LL * (first_block + b) * words + k / 32;
      warpgroups |= ((mask[0] | mask[words]) >> (k % 32) & 1) << (i / OFFSETS);
    }
    uses[b] = (unsigned)b << 16 | warpgroups;
  }
  __syncthreads();
  if (thread < 32) {
    // Keep, in order, the blocks that use an offset of this thread block.
    int count = 0;
    for (int start = 0; start < block_count; start += 32) {
      const unsigned use = start + thread < block_count ? uses[start + thread] : 0;
      const unsigned kept = __ballot_sync(~0u, (use & 0xffff) != 0);
      if (use & 0xffff) uses[count + __popc(kept & ((1u << thread) - 1))] = use;
      count += __popc(kept);
      __syncwarp();
    }
    if (thread == 0) use_count = count;
  }
  __syncthreads();
  const int steps = uniform(use_count);

  const int group = uniform(thread / 128);
  if (group >= CONSUMERS) {
    thread -= Tile::CONSUMER_THREADS;
    const int producer = uniform(thread / Tile::PRODUCER_THREADS);
    thread %= Tile::PRODUCER_THREADS;
    const int chunk = thread & 7;
    const int row = (thread >> 3) * 4;  // four consecutive rows of a stage
    const int low = row & 7;
    const int within = chunk / (8 / OFFSETS);  // which offset of a warpgroup's
    const int channel = chunk % (8 / OFFSETS) * 8;
    const bool of_x = channel < c_in;
    const long long x_row = (long long)c_in * sizeof(T);
    const long long dy_row = (long long)c_out * sizeof(T);
    const char* x_from = reinterpret_cast<const char*>(x + channel);
    const char* dy_from = reinterpret_cast<const char*>(dy + first_column + 8 * chunk);
    int4 index[CONSUMERS];
    int out[4];
    auto prefetch = [&](int step) {
      if (step >= steps) return;
      const unsigned use = uses[step];
      const int at = (first_block + (int)(use >> 16)) * 64 + row;
#pragma unroll
      for (int g = 0; g < CONSUMERS; ++g) {
        const int k = first_offset + g * OFFSETS + within;
        index[g] = (use >> g & 1) && k < volume
                       ? __ldg(reinterpret_cast<const int4*>(
                             table + (long long)k * pitch + at))
                       : make_int4(-1, -1, -1, -1);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = at + i < n_out ? __ldg(rows + at + i) : -1;
    };
    prefetch(producer);
    auto copy = [&](auto aligned) {
      for (int step = producer; step < steps; step += 2) {
        const int slot = step % STAGES;
        const unsigned a = stages + slot * Tile::STAGE_BYTES;
        const unsigned b = a + Tile::A_BYTES;
        const unsigned use = uses[step];
        barrier_wait(shared_address(&ring.empty[slot]), ((step / STAGES) & 1) ^ 1);
#pragma unroll
        for (int g = 0; g < CONSUMERS; ++g) {
          if (of_x && (use >> g & 1)) {
            const int indices[4] = {index[g].x, index[g].y, index[g].z, index[g].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              copy16(a + g * 8192 + (row + i) * 128 + ((chunk ^ low ^ i) << 4),
                     x_from + (unsigned long long)(unsigned)indices[i] * x_row,
                     indices[i] >= 0, aligned);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const char* from = dy_from + (unsigned long long)(unsigned)out[i] * dy_row;
          const int r = row + i;
          if constexpr (BN == 32) {
            if (chunk < 4 && first_column + 8 * chunk < c_out) {
              copy16(b + place_across<64>(r, chunk), from, out[i] >= 0, aligned);
            }
          } else {
#pragma unroll
            for (int n = 0; n < BN / 64; ++n) {
              if (first_column + 64 * n + 8 * chunk < c_out) {
                copy16(b + n * 8192 + r * 128 + ((chunk ^ low ^ i) << 4), from + 128 * n,
                       out[i] >= 0, aligned);
              }
            }
          }
        }
        barrier_arrive_after_copies(shared_address(&ring.full[slot]), aligned);
        prefetch(step + 2);
      }
    };
    by_alignment(copy, x, dy);
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    const int lane = thread & 31, warp = (thread >> 5) & 3;
    float sums[BN / 2];
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sums[i] = 0.0f;
    for (int step = 0; step < steps; ++step) {
      const int slot = step % STAGES;
      barrier_wait(shared_address(&ring.full[slot]), (step / STAGES) & 1);
      if (uses[step] >> group & 1) {
        const unsigned a = stages + slot * Tile::STAGE_BYTES + group * 8192;
        const unsigned b = stages + slot * Tile::STAGE_BYTES + Tile::A_BYTES;
        multiply_columns<T, BN>(sums, a, b);
        // Meanwhile the other warpgroups keep the tensor cores busy.
        wgmma_wait<0>();
      }
      if (lane == 0) barrier_arrive(shared_address(&ring.empty[slot]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp * 16 + lane / 4 + 8 * half;
      const int k = first_offset + group * OFFSETS + r / (64 / OFFSETS);
      const int i = r % (64 / OFFSETS);
      if (k >= volume || i >= c_in) continue;
      const long long weight = MIRRORED ? volume - 1 - k : k;
      float* to = partials + (((long long)split * volume + weight) * c_in + i) * c_out;
      store_row<T, BN>(to + first_column, sums, half, c_out - first_column);
    }
  }
}

}  // namespace lattice
