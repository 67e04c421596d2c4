// MmaTile of sorted_implicit_gemm: y[o] = sum over k of x[table[o, k]] @ W[k], and what
// follows, in half, bfloat16 or float32 with float32 accumulators, from compute capability 8.0 on. On Hopper,
// 16-bit inputs go to the other tiles instead.
//
// Tile: 64 rows, sorted by the Gray rank of their mask, by 64 channels; four warps of
// 32 x 32. A stage is 128 bytes of one offset's channels: the rows of x gathered by the
// neighbour table (zeros where there is none) and W[k]. Four stages are in flight.
// Offsets that no row of the tile uses are skipped.
// Traffic per output row: its live input rows once (per 64 channels), W[k] / 64 rows.
// float32 costs three TF32 products: the accuracy of float32 at a third of TF32's rate,
// which has one where it was asked for.

namespace lattice {

constexpr int PIPELINE = 4;  // stages in flight

// Arguments as of sorted_implicit_gemm; w may be PackedWeights. 128 threads.
template <bool TRANSPOSED, bool MIRRORED, int PRODUCTS, typename T, typename OUT,
          typename W, typename S, typename AFTER>
__device__ __forceinline__ void multiply_tiles(
    MmaTile<PRODUCTS>, const T* x, W w, const int* table, const int* rows,
    const unsigned* masks, const AFTER& after, const S& sizes, OUT* y) {
  const int n_out = sizes.rows, pitch = sizes.pitch, volume = sizes.volume;
  const int c_in = sizes.c_x, c_out = sizes.c_y;
  using Core = TensorCore<T>;
  constexpr int DEPTH = Core::DEPTH, EACH = Core::EACH;
  extern __shared__ __align__(128) unsigned char lattice_shared[];
  __shared__ unsigned short live[MAX_OFFSETS];
  __shared__ int live_count;
  __shared__ __align__(16) float2 kept[KEPT<AFTER, 64>];

  const int column_tiles = (c_out + 63) / 64;
  const int tile = blockIdx.x / column_tiles;
  const int first_column = (blockIdx.x % column_tiles) * 64;
  const int split = blockIdx.y, splits = gridDim.y;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread & 31;
  const unsigned stages = shared_address(lattice_shared);

  if (thread < 32) {
    const int count =
        list_offsets(live, masks, tile * 2, 2, pitch / 32, (volume + 31) / 32);
    if (thread == 0) live_count = count;
  }
  if constexpr (AFTER::FINISHES) {
    keep_channels<64>(kept, after, first_column, c_out, thread, 128);
  }
  __syncthreads();
  const int begin = (int)((long long)live_count * split / splits);
  const int end = (int)((long long)live_count * (split + 1) / splits);
  const int each = (c_in + DEPTH - 1) / DEPTH;
  const int steps = (end - begin) * each;

  const int chunk = thread & 7, row = thread >> 3, w_row = sizes.w_row_stride;
  auto weight_of = [&](int k) { return (long long)(MIRRORED ? volume - 1 - k : k); };
  // Packed weights pass through registers, one stage ahead of the copies.
  typename Held<W>::Chunk held[4];
  bool held_inside = false;
  auto fetch_weights = [&](int step, auto aligned) {
    if constexpr (is_packed<W>) {
      const int channel = step % each * DEPTH + chunk * EACH;
      held_inside = step < steps && channel < c_in;
      const long long k = held_inside ? weight_of(live[begin + step / each]) : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w.fetch(held[i], k, first_column + row + 16 * i, held_inside ? channel : 0,
                aligned);
      }
    }
  };
  auto copy = [&](int step, auto aligned) {
    const int k = live[begin + step / each];
    const int first = step % each * DEPTH;
    const unsigned a = stages + step % PIPELINE * 2 * Core::TILE_BYTES;
    const unsigned b = a + Core::TILE_BYTES;
    const int channel = first + chunk * EACH;
    const int* indices = table + (long long)k * pitch + tile * 64 + row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int index = __ldg(indices + 16 * i);
      const bool present = index >= 0 && channel < c_in;
      copy16(a + Core::template place<true>(row + 16 * i, chunk * EACH),
             present ? x + (long long)index * c_in + channel : x, present, aligned);
    }
    if constexpr (is_packed<W>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        W::store(b + Core::template place<true>(row + 16 * i, chunk * EACH), held[i],
                 held_inside);
      }
      fetch_weights(step + 1, aligned);
    } else if constexpr (TRANSPOSED) {
      const T* w_offset = w + weight_of(k) * sizes.w_offset_stride;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = row + 16 * i;
        const bool present = channel < c_in && first_column + n < c_out;
        copy16(b + Core::template place<true>(n, chunk * EACH),
               present ? w_offset + (long long)(first_column + n) * w_row + channel : w,
               present, aligned);
      }
    } else {
      constexpr int WIDTH = 64 / EACH;
      const int column = thread % WIDTH * EACH;
      const T* w_offset = w + weight_of(k) * sizes.w_offset_stride;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int depth = thread / WIDTH + 128 / WIDTH * i;
        const bool present = first + depth < c_in && first_column + column < c_out;
        copy16(b + Core::template place<false>(column, depth),
               present ? w_offset + (long long)(first + depth) * w_row + first_column +
                             column
                       : w,
               present, aligned);
      }
    }
  };
  auto fetch = [&](int step) {
    if (step < steps) {
      by_alignment([&](auto aligned) { copy(step, aligned); }, x, start_of(w));
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  Sum<T> sums[2][4][4] = {};
  const int first_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  by_alignment([&](auto aligned) { fetch_weights(0, aligned); }, x, start_of(w));
#pragma unroll
  for (int s = 0; s < PIPELINE - 1; ++s) fetch(s);
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(PIPELINE - 2) : "memory");
    __syncthreads();
    fetch(step + PIPELINE - 1);
    const unsigned a = stages + step % PIPELINE * 2 * Core::TILE_BYTES;
    multiply_stage<Core, T, true, TRANSPOSED, PRODUCTS>(sums, a, a + Core::TILE_BYTES,
                                                        first_row, warp_column);
  }

#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int sorted = tile * 64 + first_row + 16 * m + lane / 4 + 8 * half;
      if (sorted >= n_out) continue;
      const long long row = rows[sorted];
      OUT* to = y + ((long long)split * n_out + row) * c_out;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = warp_column + 8 * n + (lane & 3) * 2, c = first_column + column;
        if (c >= c_out) continue;
        if constexpr (is_integer<T>) {
          const int pair[2] = {sums[m][n][2 * half], sums[m][n][2 * half + 1]};
          store_integers(pair, after, kept + column, row * c_out + c, to + c);
        } else {
          float u = sums[m][n][2 * half], v = sums[m][n][2 * half + 1];
          if constexpr (AFTER::FINISHES) {
            const float4 of = *reinterpret_cast<const float4*>(kept + column);
            const T* added = after.residual ? after.residual + row * c_out + c : nullptr;
            u = fmaf(of.x, u, of.y) + (added ? (float)added[0] : 0.0f);
            v = fmaf(of.z, v, of.w) + (added ? (float)added[1] : 0.0f);
            u = AFTER::activate(u), v = AFTER::activate(v);
          } else if (after.bias) {
            u += (float)after.bias[c], v += (float)after.bias[c + 1];
          }
          if constexpr (sizeof(OUT) == 4) {
            *reinterpret_cast<float2*>(to + c) = make_float2(u, v);
          } else {
            *reinterpret_cast<unsigned*>(to + c) = pack2<OUT>(u, v);
          }
        }
      }
    }
  }
}

}  // namespace lattice
