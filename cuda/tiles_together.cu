// Tiles of several relations between some coordinate sets, in one launch: see
// relation_tiles.cu for those of one.
//
// Each relation is a job. It has blocks by its part of the work, tickets, scratch and work
// of its own, and a part of each output; parts follow each other in the order of jobs.

namespace lattice {

struct CoordinateSets {
  const int *coords[SETS], *slots[SETS], *orders[SETS];
  int rows[SETS];
};

// Words of a job: its rule begins at word RULE_AT of all rules, its sets are numbers.
enum Job { VOLUME, DIGIT_BITS, PASSES, KIND, SOURCE, TARGET, RULE_AT, JOB_WORDS = 8 };

constexpr int SORTED_OFFSETS = 8;  // that a row's place in the order takes as long as

// Words of work of n rows, whole 16 bytes of them: of their table, and of their ranks.
__device__ __forceinline__ long long table_words(int n, int volume) {
  return ((long long)n * volume + 3) / 4 * 4;
}

template <typename KEY>
__device__ __forceinline__ long long ranking_words(int n) {
  return (3ll * n * (int)(sizeof(KEY) / 4) + 3) / 4 * 4;
}

// Counts and tiles of n rows that each feed themselves alone.
__device__ __forceinline__ void feed_themselves(const Tickets& tickets, int n,
                                                int* counts, long long* edges, int* rows,
                                                int* sorted, unsigned* masks) {
  const int pitch = pitch_of(n), slabs = (pitch + SORT_THREADS - 1) / SORT_THREADS;
  tickets.fetch();
  for (int slab = tickets.next(); slab < slabs; slab = tickets.next()) {
    tickets.fetch();
    const int at = slab * SORT_THREADS + threadIdx.x;
    if (at < pitch) feed_itself(at, n, rows, sorted, masks);
    if (at < n && at % BAND == 0) counts[at / BAND] = min(BAND, n - at);
    if (at == 0) edges[0] = n;
  }
}

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// IS_UNIT: every rule is UNIT, or ITSELF. Code for others, which would not run, makes this
// one a third slower: 121 us in place of 91 for 100 000 rows of 27 offsets.
// counts and edges: see count_chunk. scratch, all 0 before. The rest: relation_tiles.
// SORT_THREADS threads, at least one block a job.
template <int COLUMNS, typename KEY, bool IS_UNIT>
__device__ __forceinline__ void tiles_together(
    const CoordinateSets& sets, const int* jobs, const int* rules, unsigned* scratch,
    TilesTogetherSizes sizes, int* counts, long long* edges, int* rows, int* sorted,
    unsigned* masks, unsigned* work) {
  const auto fact = [&](int job, int word) {
    return __ldg(jobs + job * JOB_WORDS + word);
  };
  const auto rows_of = [&](int job) { return sets.rows[fact(job, TARGET)]; };
  const auto work_of = [&](int job) {
    const bool is_made = fact(job, KIND) != ITSELF;
    return (long long)rows_of(job) * (is_made ? fact(job, VOLUME) + SORTED_OFFSETS : 1);
  };
  long long all = 0;
  for (int j = 0; j < sizes.jobs; ++j) all += work_of(j);
  // The first blocks have a job each, others the one where their part of all work is.
  const int blocks = (int)gridDim.x - sizes.jobs;
  int job = blockIdx.x;
  if (job >= sizes.jobs) {
    long long at = (2ll * (job - sizes.jobs) + 1) * all / (2 * blocks);
    for (job = 0; job < sizes.jobs - 1 && at >= work_of(job); ++job) at -= work_of(job);
  }
  for (int j = 0; j < job; ++j) {
    const int n = rows_of(j), volume = fact(j, VOLUME), pitch = pitch_of(n);
    scratch += scratch_words(n, fact(j, PASSES));
    counts += volume * ((n + BAND - 1) / BAND), rows += n;
    sorted += (long long)volume * pitch, masks += pitch / 32 * ((volume + 31) / 32);
    work += table_words(n, volume) + ranking_words<KEY>(n);
  }
  const int n = rows_of(job), volume = fact(job, VOLUME);
  extern __shared__ __align__(16) unsigned char lattice_shared[];
  auto& shared = reinterpret_cast<TileScratch&>(lattice_shared);
  __shared__ int mine;
  const Tickets tickets{scratch + TILE_TICKETS, 0, &mine};
  const int kind = fact(job, KIND), from = fact(job, SOURCE), to = fact(job, TARGET);
  if (kind == ITSELF) {
    feed_themselves(tickets, n, counts, edges + job, rows, sorted, masks);
    return;
  }
  const int own = 1 + (int)(blocks * work_of(job) / all);
  const TableSizes table_sizes{n, volume, fact(job, DIGIT_BITS), fact(job, PASSES),
                               chunk_rows_of(n, volume, own)};
  int* const table = reinterpret_cast<int*>(work);
  KEY* const ranks = reinterpret_cast<KEY*>(work + table_words(n, volume));
  int ticket = 0;
  const auto count_by = [&](auto rule) {
    const Find<COLUMNS, decltype(rule)::value> source(
        sets.coords[from], sets.slots[from], sets.orders[from], sets.coords[to],
        rules + fact(job, RULE_AT), sets.rows[from]);
    ticket = count_chunks(shared, tickets, source, scratch, table_sizes, table, counts,
                          edges + job, ranks);
  };
  if (IS_UNIT || kind == UNIT) {
    count_by(Constant<UNIT>());
  } else if constexpr (!IS_UNIT) {
    if (kind == FORWARD) count_by(Constant<FORWARD>());
    else count_by(Constant<TRANSPOSED>());
  }
  sort_ranked(shared, tickets, ticket, scratch, table_sizes, table, rows, sorted, masks,
              ranks);
}

}  // namespace lattice
