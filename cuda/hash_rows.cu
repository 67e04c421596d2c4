// The hash table of a coordinate set (rows.cuh), and what must be known of a user's rows:
// the first repeat and the bounds of every column.
//
//   chunks of 256 rows -> lines, whether rows ascend -+ if they do not:
//   parts of the slots -> places of each line        <+
//   chunks of 256 rows -> the row of each place, repeats
//
// A warp joins the cells of rows that follow each other in a line, and its first row
// puts them into the table. Rows that strictly ascend are all different, and in order as
// they are: the rest is left out then.
// After the slots stand the words that blocks share: see TableWord, then each block's
// bounds, which the last block joins. MLX reads arrays of 8 bytes on the CPU without
// a copy, so each pair of numbers that Python reads is an array of its own.
// Traffic: the rows once, and 16 bytes of the table a line; for rows in another order
// the table and the rows twice more.

namespace lattice {

constexpr int PART = 8;  // slots of a thread at a time
constexpr int NO_ROW = 0x7fffffff;

// Puts the lines of 32 rows from a lane's row on into the table; lanes past the n rows
// bring the last one again. Returns whether each row comes after the one before it.
template <int COLUMNS>
__device__ __forceinline__ bool put_lines(const RowTable<COLUMNS>& table,
                                           const Row<COLUMNS>& row, long long i, int n) {
  constexpr int LAST = COLUMNS - 1;
  const int lane = threadIdx.x & 31;
  const bool live = i < n;
  Row<COLUMNS> before;
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) before.at[c] = __shfl_up_sync(~0u, row.at[c], 1);
  if (lane == 0 && live && i > 0) before = load_row<COLUMNS>(table.coords, i - 1);
  const bool starts = live && (lane == 0 || !row.shares_line(before));
  const unsigned all_starts = __ballot_sync(~0u, starts);
  unsigned cells = live ? 1u << (row.at[LAST] & (LINE - 1)) : 0;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const unsigned others = __shfl_down_sync(~0u, cells, by);
    const bool same = (all_starts >> lane >> 1 & ((1u << by) - 1)) == 0;
    if (same && lane + by < 32) cells |= others;
  }
  if (starts) {
    const unsigned mixed = row.mixed(), tag = table.tag(mixed);
    const int mine = (int)(tag | (unsigned)i);
    const unsigned long long both = (unsigned long long)cells << 32 | (unsigned)mine;
    for (unsigned at = mixed & table.last_slot;; at = (at + 1) & table.last_slot) {
      int* slot = const_cast<int*>(&table.slots[at].x);
      const unsigned long long there =
          atomicCAS(reinterpret_cast<unsigned long long*>(slot), ~0ull, both);
      if (there == ~0ull) break;
      if (!table.is_alike((int)there, tag)) continue;
      const int known = table.row_of((int)there);
      if (!row.shares_line(load_row<COLUMNS>(table.coords, known))) continue;
      atomicMin(slot, mine);
      atomicOr(reinterpret_cast<unsigned*>(slot) + 1, cells);
      break;
    }
  }
  return !live || i == 0 || before.comes_before(row);
}

// Gives the rows of each line of a part of the table places that follow each other.
template <int COLUMNS>
__device__ __forceinline__ void give_places(const RowTable<COLUMNS>& table, int* order,
                                            unsigned* places, long long part) {
  __shared__ int before[32], start;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const long long first = part * PART * blockDim.x + threadIdx.x;
  int counts[PART], own = 0;
#pragma unroll
  for (int i = 0; i < PART; ++i) {
    const long long at = first + i * blockDim.x;
    int2 slot = {-1, 0};
    if (at <= table.last_slot) slot = __ldcg(table.slots + at);
    counts[i] = slot.x == -1 ? 0 : __popc((unsigned)slot.y);
    own += counts[i];
  }
  const int end = sum_up_to_lane(own);
  if (lane == 31) before[warp] = end;
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int w = 0; w < (int)blockDim.x / 32; ++w) {
      const int of_warp = before[w];
      before[w] = sum, sum += of_warp;
    }
    start = (int)(atomicAdd(places, (unsigned)sum) + 1);
  }
  __syncthreads();
  int place = start + before[warp] + end - own;
#pragma unroll
  for (int i = 0; i < PART; ++i) {
    if (counts[i]) order[first + i * blockDim.x] = place;
    for (int end = place + counts[i]; place < end; ++place) {
      order[table.last_slot + 1 + place] = NO_ROW;
    }
  }
}

// Puts every row into table, all -1 before: slots_for(n) slots, then the shared words.
// order (slots + n): written where rows are not in order, see RowTable.
// repeat (2): the least row that equals an earlier one, or -1; whether rows ascend.
// ranges[c] (2): the least and the greatest value of column c.
template <int COLUMNS>
__device__ __forceinline__ void hash_rows(const int* coords, int* table,
                                          HashRowsSizes sizes, int* repeat,
                                          int* const (&ranges)[COLUMNS], int* order) {
  const int n = sizes.rows, block = (int)blockIdx.x, blocks = (int)gridDim.x;
  const RowTable<COLUMNS> rows(coords, table, order, n);
  unsigned* shared_words =
      reinterpret_cast<unsigned*>(const_cast<int*>(rows.words()));
  int* bounds = reinterpret_cast<int*>(shared_words) + BOUNDS;
  int low[COLUMNS], high[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) low[c] = 0x7fffffff, high[c] = -0x7fffffff - 1;
  __shared__ int mine;
  const Tickets tickets{shared_words + TABLE_TICKETS, ~0u, &mine};
  const int chunks = (int)(((long long)n + blockDim.x - 1) / blockDim.x);
  const int part = PART * (int)blockDim.x;
  const int parts = (int)((rows.last_slot + (unsigned)part) / (unsigned)part);
  tickets.fetch();
  int ticket = tickets.next();
  unsigned done = 0;
  bool ascends = true;
  for (; ticket < chunks; ticket = tickets.next(), ++done) {
    tickets.fetch();
    const long long i = (long long)ticket * blockDim.x + threadIdx.x;
    const auto row = load_row<COLUMNS>(coords, i < n ? i : n - 1);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      low[c] = min(low[c], row.at[c]), high[c] = max(high[c], row.at[c]);
    }
    ascends &= put_lines<COLUMNS>(rows, row, i, n);
  }
  if (!ascends) shared_words[ORDERED] = 0;
  add_done(shared_words + TABLE_DONE, done);
  for (; ticket < parts + 2 * chunks; ticket = tickets.next()) {
    tickets.fetch();
    wait_for(shared_words + TABLE_DONE, (unsigned)chunks, ~0u);
    if (__ldcg(shared_words + ORDERED) == ~0u) break;
    if (ticket < chunks + parts) {
      give_places<COLUMNS>(rows, order, shared_words + PLACES, ticket - chunks);
      add_done(shared_words + TABLE_DONE + 1);
      continue;
    }
    wait_for(shared_words + TABLE_DONE + 1, (unsigned)parts, ~0u);
    const long long i = (long long)(ticket - chunks - parts) * blockDim.x + threadIdx.x;
    if (i >= n) continue;
    const auto row = load_row<COLUMNS>(coords, i);
    const int place = rows.template line_of<false>(row).place(row.at[COLUMNS - 1]);
    const int other = atomicMin(order + rows.last_slot + 1 + place, (int)i);
    // Whatever the order of arrival, the second of equal rows meets the first.
    if (other == NO_ROW) continue;
    atomicMin(shared_words + LEAST_REPEAT, (unsigned)max(other, (int)i));
  }
  __shared__ int low_of[COLUMNS], high_of[COLUMNS];
  const auto join = [&]() {
    __syncthreads();
    if (threadIdx.x < COLUMNS) {
      low_of[threadIdx.x] = 0x7fffffff, high_of[threadIdx.x] = -0x7fffffff - 1;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int l = __reduce_min_sync(~0u, low[c]), h = __reduce_max_sync(~0u, high[c]);
      if ((threadIdx.x & 31) == 0) atomicMin(low_of + c, l), atomicMax(high_of + c, h);
    }
    __syncthreads();
  };
  join();
  if (threadIdx.x < COLUMNS) {
    bounds[2 * (block * COLUMNS + threadIdx.x)] = low_of[threadIdx.x];
    bounds[2 * (block * COLUMNS + threadIdx.x) + 1] = high_of[threadIdx.x];
  }
  if (!is_last_block(shared_words + ARRIVALS, ~0u, blocks)) return;
  for (int other = threadIdx.x; other < blocks; other += blockDim.x) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int2 found =
          __ldcg(reinterpret_cast<const int2*>(bounds) + other * COLUMNS + c);
      low[c] = min(low[c], found.x), high[c] = max(high[c], found.y);
    }
  }
  join();
  if (threadIdx.x == 0) {
    repeat[0] = (int)__ldcg(shared_words + LEAST_REPEAT);
    repeat[1] = __ldcg(shared_words + ORDERED) == ~0u;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      ranges[c][0] = low_of[c], ranges[c][1] = high_of[c];
    }
  }
}

}  // namespace lattice
