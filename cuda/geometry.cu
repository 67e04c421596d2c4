// Coordinate look-up and relation views: a hash table of row numbers, neighbour tables,
// their transposes, mask-sorted tables and kernel-major edges.
//
// The hash table holds row numbers only, in open addressing at most a quarter full; a probe
// compares the whole coordinates, so any int32 value and any number of dimensions are
// legal. Equal rows share a slot, which keeps the least of them.
// One thread a probe: (row, offset), offsets fastest, so that a row's coordinates are
// read once a warp and its table entries are written together. A point-symmetric kernel
// over its own rows searches half of the offsets and writes both ends of each edge.
// Traffic: 4 K bytes a row for the table; 16 to 32 bytes a probe, mostly from L2.
// Wins over sorted search from a few thousand rows on: no sort, two dependent reads.

namespace lattice {

template <int COLUMNS>
struct Row {
  int at[COLUMNS];

  __device__ __forceinline__ unsigned hash() const {
    unsigned h = 0x9e3779b9u;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      h ^= (unsigned)at[c];
      h *= 0x85ebca6bu;
      h ^= h >> 15;
    }
    h *= 0xc2b2ae35u;
    return h ^ (h >> 16);
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

// at / by; 64-bit division is many times slower, and seldom needed.
__device__ __forceinline__ long long divided(long long at, int by) {
  return at >> 32 ? at / by : (long long)((unsigned)at / (unsigned)by);
}

// bounds (2, blocks, COLUMNS): the least and the greatest of each column, a block each.
// Launched over the rows with many blocks, then over their bounds with one.
template <int COLUMNS>
__device__ __forceinline__ void column_bounds(const int* lows, const int* highs,
                                              int* bounds, int n) {
  __shared__ int low_of[COLUMNS], high_of[COLUMNS];
  if (threadIdx.x < COLUMNS) low_of[threadIdx.x] = 0x7fffffff;
  if (threadIdx.x < COLUMNS) high_of[threadIdx.x] = -0x7fffffff - 1;
  __syncthreads();
  int low[COLUMNS], high[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) low[c] = 0x7fffffff, high[c] = -0x7fffffff - 1;
  for (long long i = grid_thread(); i < n; i += grid_threads()) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      low[c] = min(low[c], lows[i * COLUMNS + c]);
      high[c] = max(high[c], highs[i * COLUMNS + c]);
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    low[c] = __reduce_min_sync(~0u, low[c]), high[c] = __reduce_max_sync(~0u, high[c]);
    if ((threadIdx.x & 31) == 0) {
      atomicMin(low_of + c, low[c]);
      atomicMax(high_of + c, high[c]);
    }
  }
  __syncthreads();
  if (threadIdx.x < COLUMNS) {
    const long long all = (long long)gridDim.x * COLUMNS;
    bounds[blockIdx.x * COLUMNS + threadIdx.x] = low_of[threadIdx.x];
    bounds[all + blockIdx.x * COLUMNS + threadIdx.x] = high_of[threadIdx.x];
  }
}

// Puts every row into slots (capacity, a power of two, all -1 before). repeat (1, all ones
// before) becomes the least row that equals an earlier one.
template <int COLUMNS>
__device__ __forceinline__ void hash_rows(const int* coords, int* slots,
                                          unsigned* repeat, int n, unsigned capacity) {
  for (long long i = grid_thread(); i < n; i += grid_threads()) {
    const auto row = load_row<COLUMNS>(coords, i);
    unsigned slot = row.hash() & (capacity - 1);
    while (true) {
      const int there = atomicCAS(slots + slot, -1, (int)i);
      if (there == -1) break;
      if (row.equals(coords + (long long)there * COLUMNS)) {
        // Whatever the order of arrival, the second of equal rows meets the first.
        const int other = atomicMin(slots + slot, (int)i);
        atomicMin(repeat, (unsigned)max(other, (int)i));
        break;
      }
      slot = (slot + 1) & (capacity - 1);
    }
  }
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

// The row that offset k leads to, or false where it lies beyond int32 or off the lattice.
// Forward: in = out * stride + offset. Transposed: out = in * stride + offset.
template <int COLUMNS, bool TRANSPOSED>
__device__ __forceinline__ bool source_row(Row<COLUMNS>& row, const int* offset,
                                           const int* stride) {
#pragma unroll
  for (int c = 1; c < COLUMNS; ++c) {
    long long v = row.at[c];
    if (TRANSPOSED) {
      v -= offset[c - 1];
      if (v % stride[c - 1] != 0) return false;
      v /= stride[c - 1];
    } else {
      v = v * stride[c - 1] + offset[c - 1];
    }
    row.at[c] = (int)v;
    if (row.at[c] != v) return false;
  }
  return true;
}

// table (n_out, volume): the input row of each edge, or -1.
template <int COLUMNS, bool TRANSPOSED>
__device__ __forceinline__ void neighbour_table(const int* in_coords, const int* slots,
                                                const int* out_coords,
                                                const int* offsets, const int* stride,
                                                int* table, int n_out, int volume,
                                                unsigned capacity) {
  const long long all = (long long)n_out * volume;
  for (long long at = grid_thread(); at < all; at += grid_threads()) {
    const long long o = divided(at, volume);
    const int k = (int)(at - o * volume);
    auto row = load_row<COLUMNS>(out_coords, o);
    int found = -1;
    if (source_row<COLUMNS, TRANSPOSED>(row, offsets + k * (COLUMNS - 1), stride)) {
      found = find_row<COLUMNS>(row, in_coords, slots, capacity);
    }
    table[at] = found;
  }
}

// The same for a point-symmetric kernel over its own rows; table is all -1 before.
template <int COLUMNS>
__device__ __forceinline__ void mirrored_table(const int* coords, const int* slots,
                                               const int* offsets, int* table, int n,
                                               int volume, unsigned capacity) {
  const int half = volume / 2, probes = half + 1;
  const int ones[4] = {1, 1, 1, 1};
  const long long all = (long long)n * probes;
  for (long long at = grid_thread(); at < all; at += grid_threads()) {
    const long long o = divided(at, probes);
    const int k = (int)(at - o * probes);
    if (k == half) {
      if (volume & 1) table[o * volume + half] = (int)o;
      continue;
    }
    auto row = load_row<COLUMNS>(coords, o);
    if (!source_row<COLUMNS, false>(row, offsets + k * (COLUMNS - 1), ones)) continue;
    const int i = find_row<COLUMNS>(row, coords, slots, capacity);
    if (i >= 0) {
      table[o * volume + k] = i;
      table[(long long)i * volume + volume - 1 - k] = (int)o;
    }
  }
}

// transposed (n_in, volume), all -1 before: the row of table that holds each entry.
__device__ __forceinline__ void transpose_table(const int* table, int* transposed,
                                                int n_out, int volume) {
  const long long all = (long long)n_out * volume;
  for (long long at = grid_thread(); at < all; at += grid_threads()) {
    const int i = table[at];
    if (i < 0) continue;
    const long long o = divided(at, volume);
    transposed[(long long)i * volume + (at - o * volume)] = (int)o;
  }
}

// keys (n): the rank of each row's mask among Gray codes. volume is at most KEY's bits.
// A warp reads 32 rows of the table as one run and packs it into volume words of bits;
// then each lane takes its own row's. 256 threads a block.
template <typename KEY>
__device__ __forceinline__ void gray_keys(const int* table, KEY* keys, int n,
                                          int volume) {
  __shared__ unsigned packed[8][66];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  unsigned* bits = packed[warp];
  for (long long first = ((long long)blockIdx.x * 8 + warp) * 32; first < n;
       first += (long long)gridDim.x * 256) {
    const long long last = (long long)n * volume;
    for (int word = 0; word < volume; ++word) {
      const long long at = first * volume + 32 * word + lane;
      const unsigned there = __ballot_sync(~0u, at < last && table[at] >= 0);
      if (lane == 0) bits[word] = there;
    }
    if (lane == 0) bits[volume] = bits[volume + 1] = 0;
    __syncwarp();
    const int start = lane * volume, word = start / 32, shift = start % 32;
    KEY mask = __funnelshift_r(bits[word], bits[word + 1], shift);
    if constexpr (sizeof(KEY) == 8) {
      if (volume > 32) {
        // A row of 33 to 64 bits touches up to three words.
        const unsigned third = word + 2 <= volume + 1 ? bits[word + 2] : 0;
        mask |= (KEY)__funnelshift_r(bits[word + 1], third, shift) << 32;
      }
    }
    if (volume < (int)sizeof(KEY) * 8) mask &= ((KEY)1 << volume) - 1;
#pragma unroll
    for (int by = 1; by < (int)sizeof(KEY) * 8; by *= 2) mask ^= mask >> by;
    if (first + lane < n) keys[first + lane] = mask;
    __syncwarp();
  }
}

// sorted (volume, pitch) = table[rows] the other way round, -1 past the n rows; masks
// (pitch / 32, words): the offsets that any of 32 rows uses. One thread a sorted row.
__device__ __forceinline__ void sort_table(const int* table, const int* rows, int* sorted,
                                           unsigned* masks, int n, int pitch,
                                           int volume) {
  const long long at = grid_thread();
  if (at >= pitch) return;
  const long long row = at < n ? rows[at] : -1;
  const int words = (volume + 31) / 32;
  for (int word = 0; word < words; ++word) {
    unsigned used = 0;
    for (int bit = 0; bit < 32 && 32 * word + bit < volume; ++bit) {
      const int k = 32 * word + bit;
      const int i = row >= 0 ? table[row * volume + k] : -1;
      sorted[(long long)k * pitch + at] = i;
      used |= (unsigned)(__ballot_sync(~0u, i >= 0) != 0) << bit;
    }
    if ((threadIdx.x & 31) == 0) masks[at / 32 * words + word] = used;
  }
}

constexpr int EDGE_CHUNK = 4096;  // table entries that one block counts or writes

// counts (volume, chunks): edges of each chunk of a column. columns is (volume, n).
__device__ __forceinline__ void count_edges(const int* columns, int* counts, int n,
                                            int chunks) {
  const int k = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int* column = columns + (long long)k * n;
  int count = 0;
  for (int i = threadIdx.x; i < EDGE_CHUNK; i += blockDim.x) {
    const int o = chunk * EDGE_CHUNK + i;
    count += o < n && column[o] >= 0;
  }
  count = __reduce_add_sync(~0u, count);
  __shared__ int of_warp[32];
  if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) sum += of_warp[w];
    counts[blockIdx.x] = sum;
  }
}

// edges (E, 3) of (i, o, k) in order of (k, o); ends are the running sums of counts.
__device__ __forceinline__ void write_edges(const int* columns, const long long* ends,
                                            int* edges, int n, int chunks) {
  const int k = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int* column = columns + (long long)k * n;
  __shared__ int of_warp[32];
  long long base = blockIdx.x == 0 ? 0 : ends[blockIdx.x - 1];
  for (int start = 0; start < EDGE_CHUNK; start += blockDim.x) {
    const int o = chunk * EDGE_CHUNK + start + threadIdx.x;
    const int i = o < n ? column[o] : -1;
    const unsigned present = __ballot_sync(~0u, i >= 0);
    if (lane == 0) of_warp[warp] = __popc(present);
    __syncthreads();
    int before = 0, sum = 0;
    for (int w = 0; w < warps; ++w) {
      before += w < warp ? of_warp[w] : 0;
      sum += of_warp[w];
    }
    if (i >= 0) {
      int* edge = edges + 3 * (base + before + __popc(present & ((1u << lane) - 1)));
      edge[0] = i, edge[1] = o, edge[2] = k;
    }
    base += sum;
    __syncthreads();
  }
}

}  // namespace lattice
