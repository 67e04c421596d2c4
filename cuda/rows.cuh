// Coordinate rows and the hash table that finds them; what every kernel over rows shares.
//
// The table holds row numbers, in open addressing at most a quarter full, and in the bits
// that they leave a tag of the hash, so that most other rows are passed over unread. A
// match compares the whole coordinates: any int32 value and number of dimensions is
// legal. Equal rows share a slot, which keeps the least of them.
// Eight neighbours along the last axis hash into eight slots side by side, so that the
// offsets of one column of a kernel read one or two sectors together. Rows that find
// their slot taken go on by strides of their own, so that full columns make no runs.

namespace lattice {

constexpr int BINS = 512;   // of a digit of the radix sort, at most
constexpr int HEADER = 16;  // words of a sort's scratch before the histograms

template <int COLUMNS>
struct Row {
  int at[COLUMNS];

  // The first slot; step, which is odd, leads to the next ones; tag tells rows apart.
  __device__ __forceinline__ unsigned hash(unsigned& step, unsigned& tag) const {
    constexpr unsigned FACTORS[] = {0x9e3779b1u, 0x85ebca77u, 0xc2b2ae3du, 0x27d4eb2fu,
                                    0x165667b1u};
    unsigned h = (unsigned)(at[COLUMNS - 1] >> 3) * FACTORS[COLUMNS - 1];
#pragma unroll
    for (int c = 0; c < COLUMNS - 1; ++c) h += (unsigned)at[c] * FACTORS[c];
    h ^= h >> 15;
    h *= 0x2c1b3c6du;
    h ^= h >> 12;
    h *= 0x297a2d39u;
    h ^= h >> 15;
    const unsigned low = (unsigned)at[COLUMNS - 1] & 7u;
    step = (h >> 17 << 3) + 1, tag = h >> 19 << 3 | low;
    return h << 3 | low;
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

// Bits of a slot that number one of n rows; those above, but the highest, are the tag's.
__device__ __forceinline__ int row_bits(int n) { return 32 - __clz((unsigned)n); }

// What stands in the slot of a row.
__device__ __forceinline__ int tagged(unsigned tag, int bits, int row) {
  return bits > 30 ? row : (int)(tag << bits & 0x7fffffffu) | row;
}

// A search for a row, in steps, so that several can be under way together.
template <int COLUMNS>
struct Search {
  Row<COLUMNS> row;
  unsigned slot, step;
  int tag, there;

  __device__ __forceinline__ void begin(const int* slots, unsigned capacity, int bits) {
    unsigned full_tag;
    slot = row.hash(step, full_tag) & (capacity - 1);
    tag = tagged(full_tag, bits, 0);
    there = __ldg(slots + slot);
  }

  // Whether the slot is neither empty nor one of this tag: then to the next.
  __device__ __forceinline__ bool seek(const int* slots, unsigned capacity, int bits) {
    if (there == -1 || ((there ^ tag) & ~((1u << bits) - 1)) == 0) return false;
    slot = (slot + step) & (capacity - 1);
    there = __ldg(slots + slot);
    return true;
  }

  __device__ __forceinline__ int number(int bits) const {
    return there & (int)((1u << bits) - 1);
  }

  // Whether the row that was sought stands there, if any does.
  __device__ __forceinline__ bool matches(const int* coords, int bits) const {
    const long long other = there == -1 ? 0 : number(bits);
    return row.equals(coords + other * COLUMNS);
  }

  // The row's number among coords, or -1.
  __device__ __forceinline__ int end(bool matched, const int* coords, const int* slots,
                                     unsigned capacity, int bits) {
    while (there != -1 && !matched) {
      slot = (slot + step) & (capacity - 1);
      there = __ldg(slots + slot);
      while (seek(slots, capacity, bits)) {
      }
      matched = matches(coords, bits);
    }
    return there == -1 ? -1 : number(bits);
  }
};

}  // namespace lattice
