// A relation's tiles in one launch: its table, the order of its rows by the Gray rank of
// their masks (see count_chunk), and the table in that order.
//
//   chunks of rows -> table, ranks, counts -> tiles of each radix pass -> sorted table
//
// Blocks take tickets: first for chunks, then for the tiles of the first pass, and so on.
// A launch may have several relations, each with its own blocks, tickets and scratch.

namespace lattice {

constexpr int TILE_TICKETS = 3;  // word of scratch: tickets taken; word 2: chunks done

union TileScratch {
  struct {
    Chunk<unsigned long long> chunk;
    unsigned histogram[8 * BINS];
  } counting;
  RadixTile<unsigned long long> radix;
  int slabs[SORT_THREADS / 32][32][SLAB + 1];
};
static_assert(sizeof(TileScratch) == 4 * (SORT_THREADS / 32) * 32 * (SLAB + 1),
              "a launch allots TILE_SCRATCH of cuda_tables.py");

// Words of work of n rows, whole 16 bytes of them: of a table, which is there if a launch
// makes several, and of keys (n) twice, then rows (n).
__device__ __forceinline__ long long table_words(int n, int volume) {
  return ((long long)n * volume + 3) / 4 * 4;
}

template <typename KEY>
__device__ __forceinline__ long long ranking_words(int n) {
  return (3ll * n * (int)(sizeof(KEY) / 4) + 3) / 4 * 4;
}

// sizes.passes: the digits of a rank. work: see ranking_words. scratch, all 0 before: see
// above, and radix_tile. The rest: count_chunk and sort_table. SORT_THREADS threads, a
// TileScratch of dynamic memory.
template <typename KEY, typename SOURCE>
__device__ __forceinline__ void relation_tiles(const SOURCE& source, unsigned* scratch,
                                               TableSizes sizes, const int* table,
                                               int* new_table, int* counts,
                                               long long* edges, int* rows, int* sorted,
                                               unsigned* masks, KEY* work) {
  extern __shared__ __align__(16) unsigned char lattice_shared[];
  auto& shared = reinterpret_cast<TileScratch&>(lattice_shared);
  __shared__ int mine;
  const Tickets tickets{scratch + TILE_TICKETS, 0, &mine};
  const int n = sizes.rows, chunk_rows = sizes.chunk_rows, passes = sizes.passes;
  const int chunks = (int)(((long long)n + chunk_rows - 1) / chunk_rows);
  unsigned* histogram = shared.counting.histogram;
  for (int i = threadIdx.x; i < passes * BINS; i += SORT_THREADS) histogram[i] = 0;
  tickets.fetch();
  int ticket = tickets.next(), my_chunks = 0;
  long long found = 0;
  for (; ticket < chunks; ticket = tickets.next(), ++my_chunks) {
    tickets.fetch();
    auto& chunk = reinterpret_cast<Chunk<KEY>&>(shared.counting.chunk);
    count_chunk<KEY>(source, chunk, (long long)ticket * chunk_rows, chunk_rows, n, sizes,
                     new_table, counts, found, work, histogram);
  }
  for (int i = threadIdx.x; i < passes * BINS; i += SORT_THREADS) {
    if (histogram[i]) atomicAdd(scratch + HEADER + i, histogram[i]);
  }
  finish_chunks(found, my_chunks, chunks, scratch, edges);
  const int tiles = (int)(((long long)n + SORT_TILE - 1) / SORT_TILE);
  for (ticket -= chunks; ticket < passes * tiles; ticket = tickets.next() - chunks) {
    tickets.fetch();
    const int pass = ticket / tiles;
    if (pass == 0) {
      wait_for(scratch + 2, chunks);
    } else {
      wait_for(scratch + DONE + pass - 1, tiles);
    }
    const bool even = pass % 2 == 0, here = (passes - 1 - pass) % 2 == 0;
    int* other_rows = reinterpret_cast<int*>(work + 2 * (long long)n);
    radix_tile<KEY, true, false>(reinterpret_cast<RadixTile<KEY>&>(shared.radix),
                                 ticket - pass * tiles, pass, even ? work : work + n,
                                 here ? other_rows : rows, sizes.digit_bits, passes,
                                 even ? work + n : work, here ? rows : other_rows,
                                 scratch, n);
    add_done(scratch + DONE + pass);
  }
  const int pitch = pitch_of(n);
  const int slabs = (pitch + SORT_THREADS - 1) / SORT_THREADS;
  ticket -= passes * tiles;
  for (; ticket < slabs; ticket = tickets.next() - chunks - passes * tiles) {
    tickets.fetch();
    wait_for(scratch + DONE + passes - 1, tiles);
    sort_table(shared.slabs[threadIdx.x / 32],
               (long long)ticket * SORT_THREADS + threadIdx.x, table, rows, sorted, masks,
               n, pitch, sizes.volume);
  }
}

}  // namespace lattice
