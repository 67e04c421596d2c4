// Coordinate rows and the hash table that finds them; what every kernel over rows shares.
//
// The table holds row numbers only, in open addressing at most a quarter full; a probe
// compares the whole coordinates, so any int32 value and any number of dimensions are
// legal. Equal rows share a slot, which keeps the least of them.
// Eight neighbours along the last axis hash into eight slots side by side, so that the
// offsets of one column of a kernel read one or two sectors together.

namespace lattice {

constexpr int BINS = 512;   // of a digit of the radix sort, at most
constexpr int HEADER = 16;  // words of a sort's scratch before the histograms

template <int COLUMNS>
struct Row {
  int at[COLUMNS];

  __device__ __forceinline__ unsigned hash() const {
    unsigned h = 0x9e3779b9u;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      h ^= (unsigned)(c == COLUMNS - 1 ? at[c] >> 3 : at[c]);
      h *= 0x85ebca6bu;
      h ^= h >> 15;
    }
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
    return h << 3 | ((unsigned)at[COLUMNS - 1] & 7u);
  }

  __device__ __forceinline__ bool equals(const int* other) const {
    if constexpr (COLUMNS == 4) {
      const int4 o = __ldg(reinterpret_cast<const int4*>(other));
      return ((at[0] ^ o.x) | (at[1] ^ o.y) | (at[2] ^ o.z) | (at[3] ^ o.w)) == 0;
    }
    bool same = true;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) same &= at[c] == other[c];
    return same;
  }
};

template <int COLUMNS>
__device__ __forceinline__ Row<COLUMNS> load_row(const int* coords, long long row) {
  Row<COLUMNS> r;
  if constexpr (COLUMNS == 4) {
    const int4 four = __ldg(reinterpret_cast<const int4*>(coords) + row);
    r.at[0] = four.x, r.at[1] = four.y, r.at[2] = four.z, r.at[3] = four.w;
  } else {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) r.at[c] = coords[row * COLUMNS + c];
  }
  return r;
}

__device__ __forceinline__ long long grid_thread() {
  return (long long)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ long long grid_threads() {
  return (long long)gridDim.x * blockDim.x;
}

// Slots of the table of n rows: a power of two of at least 4 n.
__device__ __forceinline__ unsigned slots_for(int n) {
  return n <= 4 ? 16u : 1u << (32 - __clz((unsigned)(4ll * n - 1)));
}

// Whether this is the last block to come here; what the others wrote is visible then.
// arrivals counts up from start.
__device__ __forceinline__ bool is_last_block(unsigned* arrivals, unsigned start) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrivals, 1u) - start == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

template <int COLUMNS>
__device__ __forceinline__ int find_row(const Row<COLUMNS>& row, const int* coords,
                                        const int* slots, unsigned capacity) {
  unsigned slot = row.hash() & (capacity - 1);
  while (true) {
    const int there = __ldg(slots + slot);
    if (there == -1 || row.equals(coords + (long long)there * COLUMNS)) return there;
    slot = (slot + 1) & (capacity - 1);
  }
}

}  // namespace lattice
