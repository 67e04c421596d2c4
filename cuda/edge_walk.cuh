// How grouped_gemm shares out the edges, and how the sums of the shares are added.

namespace lattice {

// Walks the stages of one range: blocks of at most STAGE edges, each of one offset. Offset
// k has the blocks blocks[k] to blocks[k + 1], and range g those from g * span on, span
// of them. Which edges of its offset a block holds follows its place in the range: all
// ranges, and so all offsets, move through the rows together, and what one gathers is
// still in the L2 cache when the next asks for it.
template <int STAGE>
struct EdgeWalk {
  const int *starts, *blocks;
  int range, span, first, steps, step = 0;
  int k, at, edges_begin, edges_end, blocks_end, low, low_rest, high, high_rest;

  __device__ __forceinline__ EdgeWalk(const int* starts, const int* blocks, int volume,
                                      int range, int span)
      : starts(starts), blocks(blocks), range(range), span(span) {
    const long long all = blocks[volume], begin = (long long)range * span;
    first = (int)min(all, begin);
    steps = (int)min(all - first, (long long)span);
    // The offset that owns the first block: the last start that is not after it.
    int least = 0, most = volume - 1;
    while (least < most) {
      const int middle = (least + most + 1) >> 1;
      if (blocks[middle] <= first) least = middle;
      else most = middle - 1;
    }
    k = least;
    if (!done()) enter();
  }

  __device__ __forceinline__ bool done() const { return step >= steps; }
  __device__ __forceinline__ int count() const { return min(STAGE, edges_end - at); }

  // Moves on by one stage. Returns whether a new offset begins, or the range ends.
  __device__ __forceinline__ bool advance() {
    ++step;
    if (done()) return true;
    if (first + step < blocks_end) {
      locate();
      return false;
    }
    do {
      ++k;
    } while (blocks[k + 1] <= first + step);
    enter();
    return true;
  }

 private:
  __device__ __forceinline__ void enter() {
    low = blocks[k] / span, low_rest = blocks[k] % span;
    blocks_end = blocks[k + 1];
    high = blocks_end / span, high_rest = blocks_end % span;
    edges_begin = starts[k], edges_end = starts[k + 1];
    locate();
  }

  // The offset's blocks in order of their places, then of their ranges: this one's rank.
  __device__ __forceinline__ void locate() {
    const int before = (high - low) * step + min(high_rest, step) - min(low_rest, step);
    at = edges_begin + (before + range - low - (step < low_rest)) * STAGE;
  }
};

// Adds the partial sums of each offset in order of their ranges: one thread an element.
// Offset k is cut at multiples of span counted from firsts[k] to firsts[k + 1].
template <typename T>
__device__ __forceinline__ void add_partials(const float* partials, const int* firsts,
                                             T* dw, int ranges, int volume,
                                             int elements) {
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= (long long)volume * elements) return;
  const int span = (firsts[volume] + ranges - 1) / ranges;
  const int k = (int)(at / elements), element = (int)(at % elements);
  const int first = firsts[k], last = firsts[k + 1];
  float sum = 0.0f;
  if (first < last) {
    const int g_last = (last - 1) / span;
    for (int g = first / span; g <= g_last; ++g) {
      sum += partials[(long long)(g + k) * elements + element];
    }
  }
  dw[at] = static_cast<T>(sum);
}

}  // namespace lattice
