// Coordinate rows and the hash table that finds them; what every kernel over rows shares.
//
// The table holds row numbers, in open addressing at most a quarter full, and in the bits
// that they leave a tag of the hash, so that most other rows are passed over unread. A
// match compares the whole coordinates: any int32 value and number of dimensions is
// legal. Equal rows share a slot, which keeps the least of them.
// Eight slots, one sector of memory, are a bucket. Eight neighbours along the last axis
// share theirs, so that the offsets of one column of a kernel read one or two sectors; a
// row takes the first free slot from its own on, around the bucket, and then goes on to
// other buckets. So a bucket that was read whole nearly always tells: a row that is not
// in it is in no other while it has a free slot.

namespace lattice {

constexpr int BINS = 512;   // of a digit of the radix sort, at most
constexpr int HEADER = 32;  // words of a sort's scratch before the histograms
constexpr int BUCKET = 8;   // slots

// The slots that a row may take, in order: a bucket of number mixed from low on, then
// those a step, which is odd, further.
struct Trail {
  unsigned mixed, low;

  __device__ __forceinline__ unsigned step() const { return mixed >> 17 | 1; }
  __device__ __forceinline__ unsigned tag() const { return mixed >> 19 << 3 | low; }
  __device__ __forceinline__ unsigned slot(unsigned i) const {
    return (mixed + i / BUCKET * step()) * BUCKET + (low + i) % BUCKET;
  }
};

template <int COLUMNS>
struct Row {
  int at[COLUMNS];

  // Of all rows that differ in the last three bits of the last column alone.
  __device__ __forceinline__ unsigned mixed() const {
    constexpr unsigned FACTORS[] = {0x9e3779b1u, 0x85ebca77u, 0xc2b2ae3du, 0x27d4eb2fu,
                                    0x165667b1u};
    unsigned h = (unsigned)(at[COLUMNS - 1] >> 3) * FACTORS[COLUMNS - 1];
#pragma unroll
    for (int c = 0; c < COLUMNS - 1; ++c) h += (unsigned)at[c] * FACTORS[c];
    h ^= h >> 15;
    h *= 0x2c1b3c6du;
    h ^= h >> 12;
    h *= 0x297a2d39u;
    return h ^ h >> 15;
  }

  __device__ __forceinline__ Trail trail() const {
    return {mixed(), (unsigned)at[COLUMNS - 1] & 7u};
  }

  __device__ __forceinline__ bool equals(const Row& other) const {
    int differ = 0;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) differ |= at[c] ^ other.at[c];
    return differ == 0;
  }
};

// A user's rows may be a view that starts anywhere: 16 bytes at a time where they can be.
template <int COLUMNS>
__device__ __forceinline__ Row<COLUMNS> load_row(const int* coords, long long row) {
  Row<COLUMNS> r;
  const int* from = coords + row * COLUMNS;
  if constexpr (COLUMNS == 4) {
    if ((reinterpret_cast<size_t>(coords) & 15) == 0) {
      const int4 four = __ldg(reinterpret_cast<const int4*>(from));
      r.at[0] = four.x, r.at[1] = four.y, r.at[2] = four.z, r.at[3] = four.w;
      return r;
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) r.at[c] = __ldg(from + c);
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

// Whether a slot holds a row of a tag.
__device__ __forceinline__ bool is_alike(int there, int tag, int bits) {
  return (((unsigned)there ^ (unsigned)tag) & ~0u << bits) == 0;
}

// The row that a slot holds.
__device__ __forceinline__ int row_of(int there, int bits) {
  return there & (int)~(~0u << bits);
}

// What of a bucket has a tag in its high bits, or -1; full: whether no slot is free.
__device__ __forceinline__ int of_tag(int4 low, int4 high, int tag, int bits,
                                      bool& full) {
  const int slots[BUCKET] = {low.x,  low.y,  low.z,  low.w,
                             high.x, high.y, high.z, high.w};
  int match = -1, all = 0;
#pragma unroll
  for (int i = 0; i < BUCKET; ++i) {
    if (is_alike(slots[i], tag, bits)) match = slots[i];
    all |= slots[i];
  }
  full = all >= 0;
  return match;
}

// The place of a row in coords, or -1. Out of line: few rows need it.
template <int COLUMNS>
__device__ __noinline__ int find_row(Row<COLUMNS> row, const int* coords,
                                     const int* slots, unsigned last_slot, int bits) {
  const Trail trail = row.trail();
  const int tag = tagged(trail.tag(), bits, 0);
  for (unsigned first = 0;; first += BUCKET) {
    const int* bucket = slots + (trail.slot(first) & last_slot & ~(BUCKET - 1u));
    bool full = true;
#pragma unroll
    for (int i = 0; i < BUCKET; ++i) {
      const int there = __ldg(bucket + i), found = row_of(there, bits);
      full &= there >= 0;
      if (!is_alike(there, tag, bits)) continue;
      if (row.equals(load_row<COLUMNS>(coords, found))) return found;
    }
    if (!full) return -1;
  }
}

}  // namespace lattice
