// A relation's tiles in one launch: its table, the order of its rows by the Gray rank of
// their masks (see count_chunk), and the table in that order.
//
//   chunks of rows -> table, ranks, counts -> tiles of each radix pass -> sorted table
//
// Blocks take tickets: first for chunks, then for the tiles of the first pass, and so on.

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

// Has a block take chunks of rows: their ranks go to work, see count_chunk for the rest.
// Returns the first ticket beyond the chunks.
template <typename KEY, typename SOURCE>
__device__ __forceinline__ int count_chunks(TileScratch& shared, const Tickets& tickets,
                                            const SOURCE& source, unsigned* scratch,
                                            TableSizes sizes, int* new_table,
                                            int* counts, long long* edges, KEY* work) {
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
  return ticket;
}

// Sorts the rows that are ranked then, by tickets from this one on.
template <typename KEY>
__device__ __forceinline__ void sort_ranked(TileScratch& shared, const Tickets& tickets,
                                            int ticket, unsigned* scratch,
                                            TableSizes sizes, const int* table, int* rows,
                                            int* sorted, unsigned* masks, KEY* work) {
  const int n = sizes.rows, chunk_rows = sizes.chunk_rows, passes = sizes.passes;
  const int chunks = (int)(((long long)n + chunk_rows - 1) / chunk_rows);
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

// sizes.passes: the digits of a rank. work: keys (n) twice, then rows (n). scratch, all 0
// before: see above, and radix_tile. The rest: count_chunk and sort_table. SORT_THREADS
// threads, a TileScratch of dynamic memory.
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
  const int ticket = count_chunks(shared, tickets, source, scratch, sizes, new_table,
                                  counts, edges, work);
  sort_ranked(shared, tickets, ticket, scratch, sizes, table, rows, sorted, masks, work);
}

}  // namespace lattice
