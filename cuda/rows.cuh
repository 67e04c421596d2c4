// Coordinate rows and the hash table that finds them; what every kernel over rows shares.
//
// The table holds lines: bricks of 32 cells along the last axis. A slot names one row of
// a line and which of its cells have rows. Where the rows of a set are in order, those of
// a line follow each other, so a cell's row is the line's first row plus the number of
// occupied cells before it; else row numbers stand in an array of their own, line by
// line. One slot answers for all offsets of a kernel that differ in the last coordinate.
// Lines lie in open addressing, at most half full, beside a tag of their hash in the
// bits that row numbers leave. A match compares coordinates: any int32 value and number
// of dimensions is legal.

namespace lattice {

constexpr int BINS = 512;   // of a digit of the radix sort, at most
constexpr int HEADER = 32;  // words of a sort's scratch before the histograms
constexpr int LINE = 32;    // cells of a line

template <int COLUMNS>
struct Row {
  int at[COLUMNS];

  // A number of its line.
  __device__ __forceinline__ unsigned mixed() const {
    constexpr unsigned FACTORS[] = {0x9e3779b1u, 0x85ebca77u, 0xc2b2ae3du, 0x27d4eb2fu,
                                    0x165667b1u};
    unsigned h = (unsigned)(at[COLUMNS - 1] >> 5) * FACTORS[COLUMNS - 1];
#pragma unroll
    for (int c = 0; c < COLUMNS - 1; ++c) h += (unsigned)at[c] * FACTORS[c];
    h ^= h >> 15;
    h *= 0x2c1b3c6du;
    h ^= h >> 12;
    h *= 0x297a2d39u;
    return h ^ h >> 15;
  }

  __device__ __forceinline__ bool shares_line(const Row& other) const {
    int differ = (at[COLUMNS - 1] ^ other.at[COLUMNS - 1]) >> 5;
#pragma unroll
    for (int c = 0; c < COLUMNS - 1; ++c) differ |= at[c] ^ other.at[c];
    return differ == 0;
  }

  __device__ __forceinline__ bool comes_before(const Row& other) const {
    bool before = false;
#pragma unroll
    for (int c = COLUMNS - 1; c >= 0; --c) {
      before = at[c] < other.at[c] || (at[c] == other.at[c] && before);
    }
    return before;
  }
};

// A user's rows may be a view that starts anywhere. Whether they can be read whole.
template <int COLUMNS>
__device__ __forceinline__ bool is_aligned(const int* coords) {
  return COLUMNS != 4 || (reinterpret_cast<size_t>(coords) & 15) == 0;
}

// ALIGNED: they are known to be.
template <int COLUMNS, bool ALIGNED = false>
__device__ __forceinline__ Row<COLUMNS> load_row(const int* coords, long long row) {
  Row<COLUMNS> r;
  const int* from = coords + row * COLUMNS;
  if constexpr (COLUMNS == 4) {
    if (ALIGNED || is_aligned<COLUMNS>(coords)) {
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

// The sum of a value over the lanes of a warp up to this one, itself included.
template <typename T>
__device__ __forceinline__ T sum_up_to_lane(T value) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const T other = __shfl_up_sync(~0u, value, by);
    if (lane >= by) value += other;
  }
  return value;
}

// Slots of the table of n rows: a power of two of at least 2 n.
__device__ __forceinline__ unsigned slots_for(int n) {
  return n <= 8 ? 16u : 1u << (32 - __clz((unsigned)(2ll * n - 1)));
}

// Whether this is the last of some blocks to come here; what the others wrote is visible
// then. arrivals counts up from start.
__device__ __forceinline__ bool is_last_block(unsigned* arrivals, unsigned start,
                                              int blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrivals, 1u) - start == (unsigned)blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Numbers from 0 on that blocks take one by one. Who holds one may wait for what holders
// of lower ones make: those are blocks that run, so that nothing is asked of how many run
// at a time. The next is fetched while one is worked on.
struct Tickets {
  unsigned* taken;
  unsigned start;  // what taken held at first
  int* mine;       // shared by the block

  __device__ __forceinline__ void fetch() const {
    __syncthreads();
    if (threadIdx.x == 0) *mine = (int)(atomicAdd(taken, 1u) - start);
  }
  __device__ __forceinline__ int next() const {
    __syncthreads();
    return *mine;
  }
};

// Waits until a count, from start on, reaches a number; what was written before is
// visible then.
__device__ __forceinline__ void wait_for(const unsigned* count, unsigned number,
                                         unsigned start = 0) {
  if (threadIdx.x == 0) {
    const volatile unsigned* now = count;
    while (*now - start < number) __nanosleep(40);
    __threadfence();
  }
  __syncthreads();
}

__device__ __forceinline__ void add_done(unsigned* count, unsigned by = 1) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(count, by);
}

// A line that was looked up: the place of its first row, and the cells that have one.
struct Line {
  int first;
  unsigned cells;

  // Whether there is a row at a last coordinate, and its place.
  __device__ __forceinline__ bool has(int last) const {
    return cells >> (last & (LINE - 1)) & 1;
  }
  __device__ __forceinline__ int place(int last) const {
    return first + __popc(cells & ((1u << (last & (LINE - 1))) - 1));
  }
};

// Words after the slots, all -1 at first. ORDERED stays so where the rows are in order.
enum TableWord { LEAST_REPEAT, TABLE_TICKETS, ORDERED, PLACES, TABLE_DONE, ARRIVALS = 6,
                 BOUNDS = 8 };

// The hash table of n rows. A slot: a row of its line (the least, in the end) with the
// tag, its cells. order: the place of each slot's first row, then the row of each place;
// null where the rows are in order.
template <int COLUMNS>
struct RowTable {
  const int* coords;
  const int2* slots;
  const int* order;
  unsigned last_slot, row_mask;

  __device__ __forceinline__ RowTable(const int* coords, const int* table,
                                      const int* order, int n)
      : coords(coords), slots(reinterpret_cast<const int2*>(table)), order(order),
        last_slot(slots_for(n) - 1),
        row_mask((unsigned)(1ll << (32 - __clz((unsigned)n))) - 1) {}

  // Those of TableWord.
  __device__ __forceinline__ const int* words() const {
    return reinterpret_cast<const int*>(slots + last_slot + 1);
  }
  __device__ __forceinline__ unsigned tag(unsigned mixed) const {
    return mixed >> 1 & ~row_mask;
  }
  // Whether a slot holds a line of this tag.
  __device__ __forceinline__ bool is_alike(int slot, unsigned tag) const {
    return (((unsigned)slot ^ tag) & ~row_mask) == 0;
  }
  // The row that a slot names.
  __device__ __forceinline__ int row_of(int slot) const {
    return (int)((unsigned)slot & row_mask);
  }

  // The line of a row. SETTLED: no block writes the table any more, and rows can be
  // read whole.
  template <bool SETTLED>
  __device__ __forceinline__ Line line_of(const Row<COLUMNS>& row) const {
    const unsigned mixed = row.mixed(), wanted = tag(mixed);
    for (unsigned at = mixed & last_slot;; at = (at + 1) & last_slot) {
      const int2 slot = SETTLED ? __ldg(slots + at) : __ldcg(slots + at);
      if (slot.x == -1) return {0, 0};
      if (!is_alike(slot.x, wanted)) continue;
      const int known = row_of(slot.x);
      if (!row.shares_line(load_row<COLUMNS, SETTLED>(coords, known))) continue;
      return {order ? __ldcg(order + at) : known, (unsigned)slot.y};
    }
  }

  // The row at a place of a line.
  __device__ __forceinline__ int row_at(int place) const {
    return order ? __ldcg(order + last_slot + 1 + place) : place;
  }

  // The number of a row, or -1. Out of line: few rows need it.
  __device__ __noinline__ int find(Row<COLUMNS> row) const {
    const Line line = line_of<false>(row);
    const int last = row.at[COLUMNS - 1];
    return line.has(last) ? row_at(line.place(last)) : -1;
  }
};

}  // namespace lattice
