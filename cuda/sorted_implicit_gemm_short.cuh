// ShortTile of sorted_implicit_gemm, on Hopper: y[o] = sum over k of x[table[o, k]] @
// W[k], and what follows, in half or bfloat16 with float32 accumulators, for kernels of 32
// offsets at most.
//
// Tile: 64 rows, sorted by the Gray rank of their mask, by BN channels; each thread block
// has one. Its one warpgroup copies and multiplies: row indices are fetched into registers
// beside the mask, and no warp waits for another but once a stage. Traffic per output row
// as of WideTile. Wins where a tile is little but the wait for its reads: rows of an edge
// or two, or that feed themselves alone, and few channels.

namespace lattice {

// Names the kernel in a template: PER blocks of it lie side by side on a multiprocessor.
// TAIL as of WideTile. OFFSETS: those whose row indices are fetched beside the mask, or 0
// where every row is fed by itself alone, and neither the table nor masks are read.
template <int BN, int STAGES, int PER, int TAIL, int OFFSETS>
struct ShortTile {};

// Waits until GROUPS of the thread's groups of copies, the last ones, are not complete.
template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Arguments as of sorted_implicit_gemm.
template <bool TRANSPOSED, bool MIRRORED, int BN, int STAGES, int PER, int TAIL,
          int OFFSETS, typename T, typename OUT, typename S, typename AFTER>
__device__ __forceinline__ void multiply_tiles(ShortTile<BN, STAGES, PER, TAIL, OFFSETS>,
                                               const T* x, const T* w, const int* table,
                                               const int* rows, const unsigned* masks,
                                               const AFTER& after, const S& sizes,
                                               OUT* y) {
  static_assert(sizeof(T) == 2, "half and bfloat16 alone");
  const int pitch = sizes.pitch, volume = sizes.volume;
  const int c_in = sizes.c_x, c_out = sizes.c_y;
  constexpr int BM = 64, THREADS = 128, EACH = BM * 8 / THREADS;
  constexpr bool ITSELF = OFFSETS == 0;
  constexpr int DEPTH = 128 / sizeof(T);  // summed channels of a stage
  constexpr int A_BYTES = BM * 128, STAGE_BYTES = A_BYTES + WEIGHT_BYTES<BN, !TRANSPOSED>;
  extern __shared__ unsigned char lattice_shared[];
  __shared__ __align__(16) float2 kept[KEPT<AFTER, BN>];
  __shared__ __align__(8) float about[sums_moments<AFTER> ? BN : 2];

  // The last tiles first, as of WideTile.
  const int place = gridDim.x - 1 - blockIdx.x;
  const int column_tiles = (c_out + BN - 1) / BN;
  const int tile = place / column_tiles;
  const int first_column = (place % column_tiles) * BN;
  const int thread = threadIdx.x, lane = thread & 31;
  const unsigned stages = (shared_address(lattice_shared) + 1023) & ~1023u;

  // All that a tile is read by, on its way at once.
  const int chunk = thread & 7, row = thread >> 3;
  unsigned left = 1;  // offsets to come, as bits
  const int4* from = reinterpret_cast<const int4*>(table + (long long)tile * BM) + row;
  int4 indices[ITSELF ? 1 : OFFSETS];
  if constexpr (ITSELF) {
    const int at = tile * BM + row * EACH, there = sizes.rows - at;
    indices[0] = make_int4(there > 0 ? at : -1, there > 1 ? at + 1 : -1,
                           there > 2 ? at + 2 : -1, there > 3 ? at + 3 : -1);
  } else {
    const int block = tile * (BM / 32) + lane;
    const bool has_mask = lane < BM / 32 && block < pitch / 32;
    left = has_mask ? __ldg(masks + block) : 0;
#pragma unroll
    for (int k = 0; k < OFFSETS; ++k) {
      indices[k] = make_int4(-1, -1, -1, -1);
      if (k < volume) indices[k] = __ldg(from + k * (pitch >> 2));
    }
  }
  constexpr int BESIDE = (PER < 3 ? 255 : 512 / PER) - BN / 2;  // registers
  SortedResult<T, BN, BESIDE, 1, OUT, AFTER> result{
      after, kept, ITSELF ? nullptr : rows, y, sizes.rows, int(blockIdx.y), c_out};
  result.begin(tile * BM, first_column);
  if constexpr (AFTER::FINISHES) {
    keep_channels<BN>(kept, after, first_column, c_out, thread, THREADS);
  }
  Sum<T> sums[BN / 2];
#pragma unroll
  for (int i = 0; i < BN / 2; ++i) sums[i] = 0;

  // The offsets of this split, and the stages they take.
  if constexpr (!ITSELF) left = __reduce_or_sync(~0u, left);
  const int offsets = __popc(left), splits = gridDim.y;
  const int begin = offsets * blockIdx.y / splits;
  const int end = offsets * (blockIdx.y + 1) / splits;
  for (int i = 0; i < begin; ++i) left &= left - 1;
  const int each = (c_in + DEPTH - 1) / DEPTH;
  const int steps = (end - begin) * each;

  const unsigned a_row = row * EACH * 128;
  const long long x_row = (long long)c_in * sizeof(T);
  const WeightCopies<const T*, BN, THREADS, TRANSPOSED, TAIL> weights(
      w, (long long)sizes.w_row_stride * sizeof(T), first_column, c_out, thread);
  auto run = [&](auto aligned) {
    int k = __ffs(left) - 1, c = 0;
    auto fill = [&](int slot) {  // with the next stage there is
      const unsigned a = stages + slot * STAGE_BYTES;
      int4 of = indices[0];
#pragma unroll
      for (int o = 1; o < OFFSETS; ++o) {
        if (k == o) of = indices[o];
      }
      if (!ITSELF && k >= OFFSETS) of = __ldg(from + k * (pitch >> 2));
      const int rows_of[EACH] = {of.x, of.y, of.z, of.w};
      const bool inside = !TAIL || c + chunk * int(16 / sizeof(T)) < c_in;
      const char* x_from = reinterpret_cast<const char*>(x + c) + chunk * 16;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        copy16(a + a_row + i * 128 + ((chunk ^ (row * EACH + i & 7)) << 4),
               x_from + (unsigned long long)(unsigned)rows_of[i] * x_row,
               inside && rows_of[i] >= 0, aligned);
      }
      const long long of_offset =
          (MIRRORED ? volume - 1 - k : k) * (long long)sizes.w_offset_stride * sizeof(T);
      weights.copy(a + A_BYTES, weights.base + of_offset + c / DEPTH * weights.stage,
                   c_in - c, thread, aligned);
      c += DEPTH;
      if (c >= c_in) c = 0, left &= left - 1, k = __ffs(left) - 1;
    };
#pragma unroll
    for (int slot = 0; slot < STAGES; ++slot) {
      if (slot < steps) fill(slot);
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
    int of_offset = 0;  // stages that were multiplied
    for (int step = 0, slot = 0; step < steps; ++step) {
      wait_for_copies<STAGES - 1>();
      fence_for_wgmma();
      __syncthreads();
      const unsigned a = stages + slot * STAGE_BYTES;
      wgmma_begin();
      const bool is_last = ++of_offset == each;
      multiply_stage<T, BN, TRANSPOSED, TAIL>(sums, a, a + A_BYTES, is_last);
      if (is_last) of_offset = 0;
      wgmma_commit();
      wgmma_wait<0>();
      if (step + STAGES < steps) {
        __syncthreads();
        fill(slot);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
  };
  by_alignment(run, x, w);
  wait_for_copies<0>();

  if constexpr (AFTER::FINISHES) __syncthreads();
  result.store(sums, 0);
  TileMoments<AFTER, T, BN, THREADS> moments;
  moments.begin(about, sums, min(BM, sizes.rows - tile * BM));
  moments.add(about, sums, result.row[0]);
  moments.write(after, about, lattice_shared, tile, first_column, c_out);
}

}  // namespace lattice
