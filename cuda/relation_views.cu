// Views of a neighbour table: its transpose, and its edges.
//
// Edges are listed by offset and row: counts by band of 64 rows (made with the table), a
// scan of them, then each block of rows writes its edges to their places.
// Traffic: 4 K bytes a row read, 12 an edge written, or 8.

namespace lattice {

constexpr int BANDS = 4;  // bands of a block that writes edges: 256 rows

// transposed (n_in, volume), all -1 before: the row of table that holds each entry.
__device__ __forceinline__ void transpose_table(const int* table,
                                                TransposeTableSizes sizes,
                                                int* transposed) {
  const int volume = sizes.volume;
  const long long all = (long long)sizes.rows * volume;
  for (long long at = grid_thread(); at < all; at += grid_threads()) {
    const int i = table[at];
    if (i < 0) continue;
    const long long o = at >> 32 ? at / volume : (unsigned)at / (unsigned)volume;
    transposed[(long long)i * volume + (at - o * volume)] = (int)o;
  }
}

// starts (volume, bands): the sum of the counts of the bands before; sums (volume): of
// all bands. One block of 1024 threads an offset.
__device__ __forceinline__ void scan_counts(const int* counts, ScanCountsSizes sizes,
                                            int* starts, int* sums) {
  const int bands = sizes.bands;
  __shared__ int of_warp[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const long long row = (long long)blockIdx.x * bands;
  int carry = 0;
  for (int first = 0; first < bands; first += 4096) {
    const int at = first + 4 * threadIdx.x;
    int count[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      count[i] = at + i < bands ? counts[row + at + i] : 0;
      sum += count[i];
    }
    const int end = sum_up_to_lane(sum);
    if (lane == 31) of_warp[warp] = end;
    __syncthreads();
    int before = carry + end - sum;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) before += of_warp[w];
      carry += of_warp[w];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i < bands) starts[row + at + i] = before;
      before += count[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = carry;
}

// Where the pairs of an offset begin and end; ~begin where they are (o, i). Those of the
// first half of a mirrored relation's offsets are the pairs of the others too.
__device__ __forceinline__ void write_spans(int k, int begin, int end, int volume,
                                            int listed, int* spans) {
  spans[2 * k] = begin, spans[2 * k + 1] = end;
  const int other = volume - 1 - k;
  if (other >= listed) spans[2 * other] = ~begin, spans[2 * other + 1] = end;
}

// edges (E, WORDS) of (i, o, k), or (i, o), in order of (k, o), those of the first `listed`
// offsets. starts_of: of three words (listed + 1), where each offset's start; of two the
// spans (volume, 2). 256 threads and rows a block.
template <int WORDS>
__device__ __forceinline__ void write_edges(const int* table, const int* starts,
                                            const int* sums, WriteEdgesSizes sizes,
                                            int* edges, int* starts_of) {
  const int n = sizes.rows, volume = sizes.volume, bands = sizes.bands;
  const int listed = sizes.listed;
  __shared__ int slabs[8][32][SLAB + 1], places[SLAB][8], staged[8][32 * WORDS];
  __shared__ long long bases[SLAB], carried;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const long long o = (long long)blockIdx.x * 256 + threadIdx.x;
  const int row = o < n ? (int)o : -1;
  if (threadIdx.x == 0) carried = 0;
  for (int k0 = 0; k0 < listed; k0 += SLAB) {
    const int offsets = min(SLAB, listed - k0);
    load_slab(table, slabs[warp], row, k0, volume);
    for (int j = 0; j < offsets; ++j) {
      const unsigned there = __ballot_sync(~0u, slabs[warp][lane][j] >= 0);
      if (lane == 0) places[j][warp] = __popc(there);
    }
    __syncthreads();
    if (warp == 0) {
      // Where the offsets of this slab start, and its rows within them.
      const long long sum = lane < offsets ? sums[k0 + lane] : 0;
      const long long end = sum_up_to_lane(sum);
      const long long start = carried + end - sum;
      if (lane < offsets) {
        bases[lane] = start + starts[(long long)(k0 + lane) * bands + BANDS * blockIdx.x];
        int before = 0;
        for (int w = 0; w < 8; ++w) {
          const int count = places[lane][w];
          places[lane][w] = before;
          before += count;
        }
        if (blockIdx.x == 0 && WORDS == 2) {
          write_spans(k0 + lane, (int)start, (int)(start + sum), volume, listed, starts_of);
        } else if (blockIdx.x == 0) {
          starts_of[k0 + lane] = (int)start;
          if (k0 + lane == listed - 1) starts_of[listed] = (int)(start + sum);
        }
      }
      __syncwarp();
      if (lane == 31) carried += end;
    }
    __syncthreads();
    for (int j = 0; j < offsets; ++j) {
      const int i = slabs[warp][lane][j];
      const unsigned there = __ballot_sync(~0u, i >= 0);
      const int at = WORDS * __popc(there & ((1u << lane) - 1));
      if (i >= 0) {
        staged[warp][at] = i, staged[warp][at + 1] = (int)o;
        if (WORDS == 3) staged[warp][at + 2] = k0 + j;
      }
      __syncwarp();
      int* to = edges + WORDS * (bases[j] + places[j][warp]);
      for (int w = lane; w < WORDS * __popc(there); w += 32) to[w] = staged[warp][w];
      __syncwarp();
    }
    __syncthreads();
  }
}

}  // namespace lattice
