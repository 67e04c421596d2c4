// Neighbour tables, and what the views of a relation start from: masks and counts.
//
// A block takes bands of 64 rows. Its threads probe one (row, offset) each, offsets
// fastest, so that table entries are written together and a column of the kernel reads
// its slots together. The ballots of the probes are the rows' occupancy masks end to
// end: from them come the Gray rank of every row with the histograms of its digits, which
// the radix sort needs, and the edges of each offset and band, so that the table is not
// read again for either.
// All K offsets are searched, the mirrored ones too: half a search would cost a fill and
// scattered writes, more than it saves.
// Traffic: 4 K bytes a row for the table; a probe reads 4 to 20 bytes, mostly from L2.

#ifndef LATTICE_MAX_OFFSETS
#define LATTICE_MAX_OFFSETS 512
#endif

namespace lattice {

constexpr int BAND = 64;   // rows of a block's turn, and of one count of edges
constexpr int PROBES = 2;  // that a thread has under way

// FORWARD: in = out * stride + offset. TRANSPOSED: out = in * stride + offset. UNIT: in =
// out + offset, either of them on stride 1.
enum Stride { FORWARD, TRANSPOSED, UNIT };

// The row that an offset leads to, or false where it lies beyond int32 or off the lattice.
template <int COLUMNS, int RULE>
__device__ __forceinline__ bool source_row(Row<COLUMNS>& row, const int* offset,
                                           const int* stride) {
  bool legal = true;
#pragma unroll
  for (int c = 1; c < COLUMNS; ++c) {
    if constexpr (RULE == UNIT) {
      const int from = row.at[c], by = offset[c - 1];
      row.at[c] = (int)((unsigned)from + (unsigned)by);
      legal &= ((from ^ row.at[c]) & (by ^ row.at[c])) >= 0;
    } else {
      long long v = row.at[c];
      const int step = stride[c - 1];
      if (RULE == TRANSPOSED) {
        v -= offset[c - 1];
        legal &= v % step == 0;
        v /= step;
      } else {
        v = v * step + offset[c - 1];
      }
      row.at[c] = (int)v;
      legal &= row.at[c] == v;
    }
  }
  return legal;
}

// Surveys n rows. A PROBE is begun with a row, an offset, their place in the table and
// whether it is in there; it seeks and matches; it ends with an input row or -1. A thread
// has several under way, so that their reads are waited for together. digits: the
// offsets (volume), the bits of a digit of a rank, its digits.
// WORDS: 32-bit words of a mask that is ranked, 0 for none.
// ranks (n): the rank of each row's mask among Gray codes. counts (volume, bands): edges
// of each offset in each band. scratch, all 0 before: edges (64 bits), arrivals; from
// HEADER on the histograms of the ranks' digits. edges (1): all.
// 256 threads.
template <int WORDS, typename KEY, typename PROBE>
__device__ __forceinline__ void survey(PROBE start, KEY* ranks, int* counts,
                                       unsigned* scratch, long long* edges, int n,
                                       const int* digits) {
  constexpr int KEY_BITS = 8 * (int)sizeof(KEY), PASSES = WORDS == 2 ? 8 : 4;
  __shared__ unsigned bits[BAND * LATTICE_MAX_OFFSETS / 32 + 2];
  __shared__ int histogram[WORDS ? PASSES * BINS : 1];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int volume = digits[0], digit_bits = digits[1];
  const int passes = WORDS ? digits[2] : 0;
  for (int i = threadIdx.x; i < passes * BINS; i += 256) histogram[i] = 0;
  if (threadIdx.x < 2) bits[BAND / 32 * volume + threadIdx.x] = 0;
  const long long bands = ((long long)n + BAND - 1) / BAND;
  long long found_edges = 0;
  // at / volume for at below 2^32 / volume: bands are shorter.
  const unsigned inverse = volume > 1 ? 0xffffffffu / (unsigned)volume + 1 : 0;
  for (long long band = blockIdx.x; band < bands; band += gridDim.x) {
    const long long first = band * BAND;
    const int rows = (int)min((long long)BAND, n - first), all = rows * volume;
    for (int word = warp; word < BAND / 32 * volume; word += 8 * PROBES) {
      PROBE probes[PROBES];
#pragma unroll
      for (int i = 0; i < PROBES; ++i) {
        probes[i] = start;
        const int at = 32 * (word + 8 * i) + lane;
        const unsigned row = inverse ? __umulhi((unsigned)at, inverse) : at;
        const int k = at - (int)row * volume;
        probes[i].begin(first + row, k, first * volume + at, at < all);
      }
      for (bool more = true; more;) {
        more = false;
#pragma unroll
        for (int i = 0; i < PROBES; ++i) more |= probes[i].seek();
      }
#pragma unroll
      for (int i = 0; i < PROBES; ++i) probes[i].match();
#pragma unroll
      for (int i = 0; i < PROBES; ++i) {
        const int at = 32 * (word + 8 * i) + lane;
        const int found = at < all ? probes[i].end(first * volume + at) : -1;
        const unsigned there = __ballot_sync(~0u, found >= 0);
        if (lane == 0 && at < BAND * volume) bits[word + 8 * i] = there;
      }
    }
    __syncthreads();
    KEY masks[BAND / 32];  // of this lane's rows
    if constexpr (WORDS > 0) {
#pragma unroll
      for (int half = 0; half < BAND / 32; ++half) {
        const int at = (half * 32 + lane) * volume, word = at / 32, shift = at % 32;
        masks[half] = __funnelshift_r(bits[word], bits[word + 1], shift);
        if constexpr (WORDS == 2) {
          // A row of 33 to 64 bits touches up to three words.
          const int third = min(word + 2, BAND / 32 * volume + 1);
          masks[half] |= (KEY)__funnelshift_r(bits[word + 1], bits[third], shift) << 32;
        }
        if (volume < KEY_BITS) masks[half] &= ((KEY)1 << volume) - 1;
      }
    }
    for (int k = warp; k < volume; k += 8) {
      int count = 0;
#pragma unroll
      for (int half = 0; half < BAND / 32; ++half) {
        bool set;
        if constexpr (WORDS > 0) {
          set = masks[half] >> k & 1;
        } else {
          const int at = (half * 32 + lane) * volume + k;
          set = bits[at / 32] >> (at % 32) & 1u;
        }
        count += __popc(__ballot_sync(~0u, set));
      }
      if (lane == 0) counts[k * bands + band] = count, found_edges += count;
    }
    if constexpr (WORDS > 0) {
      if ((int)threadIdx.x < rows) {
        KEY mask = warp == 0 ? masks[0] : masks[1];
#pragma unroll
        for (int by = 1; by < KEY_BITS; by *= 2) mask ^= mask >> by;
        ranks[first + threadIdx.x] = mask;
        for (int pass = 0; pass < passes; ++pass) {
          const int digit = (int)(mask >> (pass * digit_bits)) & ((1 << digit_bits) - 1);
          atomicAdd(histogram + pass * BINS + digit, 1);
        }
      }
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < passes * BINS; i += 256) {
    if (histogram[i]) atomicAdd(scratch + HEADER + i, (unsigned)histogram[i]);
  }
  unsigned long long* total = reinterpret_cast<unsigned long long*>(scratch);
  if (lane == 0 && found_edges) atomicAdd(total, (unsigned long long)found_edges);
  if (is_last_block(scratch + 2, 0) && threadIdx.x == 0) {
    edges[0] = (long long)*(volatile unsigned long long*)total;
  }
}

// Looks an edge's input row up and writes it to the table.
template <int COLUMNS, int RULE>
struct TableProbe {
  const int *in_coords, *slots, *out_coords, *offsets, *stride;
  int* table;
  unsigned capacity;
  int bits;
  Search<COLUMNS> search;
  bool matched;

  __device__ __forceinline__ void begin(long long o, int k, long long, bool inside) {
    search.there = -1;
    if (!inside) return;
    search.row = load_row<COLUMNS>(out_coords, o);
    const int* offset = offsets + k * (COLUMNS - 1);
    if (source_row<COLUMNS, RULE>(search.row, offset, stride)) {
      search.begin(slots, capacity, bits);
    }
  }
  __device__ __forceinline__ bool seek() { return search.seek(slots, capacity, bits); }
  __device__ __forceinline__ void match() { matched = search.matches(in_coords, bits); }
  __device__ __forceinline__ int end(long long at) {
    const int found = search.end(matched, in_coords, slots, capacity, bits);
    table[at] = found;
    return found;
  }
};

// table (n_out, volume): the input row of each edge, or -1; and its survey. rule holds
// the offsets, COLUMNS - 1 numbers each, then the strides.
template <int COLUMNS, int RULE, int WORDS, typename KEY>
__device__ __forceinline__ void neighbour_table(
    const int* in_coords, const int* slots, const int* out_coords, const int* rule,
    int* table, KEY* ranks, int* counts, unsigned* scratch, long long* edges, int n_in,
    int n_out, const int* digits) {
  __shared__ int offsets[LATTICE_MAX_OFFSETS * (COLUMNS - 1)];
  const int numbers = digits[0] * (COLUMNS - 1);
  for (int i = threadIdx.x; i < numbers; i += 256) offsets[i] = rule[i];
  __syncthreads();
  TableProbe<COLUMNS, RULE> start;
  start.in_coords = in_coords, start.slots = slots, start.out_coords = out_coords;
  start.offsets = offsets, start.stride = rule + numbers;
  start.table = table, start.capacity = slots_for(n_in);
  start.bits = row_bits(n_in);
  survey<WORDS>(start, ranks, counts, scratch, edges, n_out, digits);
}

struct ReadProbe {
  const int* table;
  int found;
  __device__ __forceinline__ void begin(long long, int, long long at, bool inside) {
    found = inside ? table[at] : -1;
  }
  __device__ __forceinline__ bool seek() { return false; }
  __device__ __forceinline__ void match() {}
  __device__ __forceinline__ int end(long long) { return found; }
};

// The survey of a table that was made otherwise.
template <int WORDS, typename KEY>
__device__ __forceinline__ void survey_table(const int* table, KEY* ranks, int* counts,
                                             unsigned* scratch, long long* edges, int n,
                                             const int* digits) {
  survey<WORDS>(ReadProbe{table, -1}, ranks, counts, scratch, edges, n, digits);
}

}  // namespace lattice
