// How grouped_gemm cuts the edges into splits of equal work, and how their partial sums
// are added. Reads channels.cuh too.

namespace lattice {

// The rows i and o of a pair. Called where they are used: turned at once, a pair that is
// read ahead would be waited for.
__device__ __forceinline__ int2 rows_of(int2 pair, bool turned) {
  return turned ? int2{pair.y, pair.x} : pair;
}

// Walks the stages of one split. A stage is at most STAGE edges of one offset. Offset k has
// the stages firsts[k] to firsts[k + 1], and split s the `span` stages from s * span on.
// spans (K, 2): where the pairs (i, o) of an offset begin and end; ~begin where they are
// `turned`, those of the opposite offset, (o, i).
// Which edges of its offset a stage holds follows from its place in the split: all splits,
// and so all offsets, move through the rows together, and what one gathers is still in the
// L2 cache when the next needs it.
template <int STAGE>
struct EdgeWalk {
  const int *spans, *firsts;
  int split, span, first, steps, step = 0;
  int k, at, edges_begin, edges_end, stages_end, low, low_rest, high, high_rest;
  bool turned = false;

  __device__ __forceinline__ EdgeWalk(const int* spans, const int* firsts, int volume,
                                      int split, int span)
      : spans(spans), firsts(firsts), split(split), span(span) {
    const long long all = firsts[volume], begin = (long long)split * span;
    first = (int)min(all, begin);
    steps = (int)min(all - first, (long long)span);
    // The offset of the first stage: the last whose stages start at or before it.
    k = -1;
#pragma unroll 1
    for (int some = 0; some < volume; some += 32) {
      const int each = some + (threadIdx.x & 31);
      k += __popc(__ballot_sync(~0u, each < volume && firsts[each] <= first));
    }
    if (!done()) enter();
  }

  __device__ __forceinline__ bool done() const { return step >= steps; }
  __device__ __forceinline__ int count() const { return min(STAGE, edges_end - at); }
  // The pair of an edge of the stage, whose rows rows_of(pair, turned) says.
  __device__ __forceinline__ int2 pair(const int* pairs, int edge) const {
    return __ldg(reinterpret_cast<const int2*>(pairs) + at + edge);
  }

  // Moves on by one stage. Returns whether a new offset begins, or the split ends.
  __device__ __forceinline__ bool advance() {
    ++step;
    if (done()) return true;
    if (first + step < stages_end) {
      locate();
      return false;
    }
    do {
      ++k;
    } while (firsts[k + 1] <= first + step);
    enter();
    return true;
  }

 private:
  __device__ __forceinline__ void enter() {
    low = firsts[k] / span, low_rest = firsts[k] % span;
    stages_end = firsts[k + 1];
    high = stages_end / span, high_rest = stages_end % span;
    edges_begin = spans[2 * k], edges_end = spans[2 * k + 1];
    turned = edges_begin < 0;
    if (turned) edges_begin = ~edges_begin;
    locate();
  }

  // The stages of an offset are in order of place, then of split: finds the edges of this.
  __device__ __forceinline__ void locate() {
    const int before = (high - low) * step + min(high_rest, step) - min(low_rest, step);
    at = edges_begin + (before + split - low - (step < low_rest)) * STAGE;
  }
};

// The partial sums of an offset: `count` arrays of elements, `step` floats apart.
struct PartialSums {
  const float* first;
  long long step;
  int count;
};

// Returns those of offset k in partials (splits + K, elements): split s of it stands at
// s + k, elements = lines * channels. firsts (K + 1): where the stages, or edges, of each
// offset start, of which a split has `span`.
__device__ __forceinline__ PartialSums partial_sums_of(const float* partials,
                                                       const int* firsts,
                                                       const AddSplitsSizes& sizes,
                                                       int k) {
  const long long elements = (long long)sizes.lines * sizes.channels;
  const int splits = sizes.splits;
  const int span = (firsts[sizes.volume] + splits - 1) / splits;
  const int first = firsts[k], last = firsts[k + 1];
  if (first >= last) return {partials, elements, 0};
  const int begin = first / span;
  return {partials + (begin + k) * elements, elements, (last - 1) / span - begin + 1};
}

// Returns the sum of what load(array) returns of each array, some Channels: in order, so
// that the bits are those of any AHEAD. So many are on their way at once: an offset may
// have hundreds.
template <int AHEAD, typename LOAD>
__device__ __forceinline__ auto add_in_order(const PartialSums& of, LOAD load) {
  decltype(load(of.first)) sum = {};
  for (int r = 0; r < of.count; r += AHEAD) {
    decltype(sum) partial[AHEAD] = {};
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (r + a < of.count) partial[a] = load(of.first + (r + a) * of.step);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (r + a >= of.count) break;
#pragma unroll
      for (int j = 0; j < int(sizeof(sum) / sizeof(float)); ++j) {
        sum.v[j] += partial[a].v[j];
      }
    }
  }
  return sum;
}

// dw (K, elements) are the sums of partials, an element a thread.
template <typename T>
__device__ __forceinline__ void add_partials(const float* partials, const int* firsts,
                                             const AddSplitsSizes& sizes, T* dw) {
  const int elements = sizes.lines * sizes.channels;
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= (long long)sizes.volume * elements) return;
  const int k = (int)(at / elements), element = (int)(at % elements);
  const auto load = [&](const float* from) -> Channels<float, 1> {
    return {from[element]};
  };
  const auto of = partial_sums_of(partials, firsts, sizes, k);
  dw[at] = static_cast<T>(add_in_order<8>(of, load).v[0]);
}

}  // namespace lattice
