// Neighbour tables, and what the views of a relation start from: masks and counts.
//
// A block takes chunks of up to 256 rows, 64 offsets (a part) at a time. A thread looks
// up a group of up to three offsets of one row that differ in the last coordinate alone:
// one line of the hash table mostly answers for all of them. Offsets that another line
// answers for are deferred and looked up later by full warps: one in sixteen of a 3x3x3
// kernel. A warp looks up the same group of neighbouring rows: rows that are close in
// space read the same cache lines.
// Entries go through shared memory, so that whole sectors are written. The rows' occupancy
// masks are made beside them; from the masks come the edges of each offset and band of
// rows and, where the rows are sorted next (relation_tiles.cu), the masks' Gray ranks with
// the histograms of their digits: the table is not read again for any of them.
// All K offsets are searched, the mirrored ones too: half a search would cost a fill and
// scattered writes, more than it saves.
// Traffic: 4 K bytes a row for the table; a group reads a slot of 8 bytes and, where a
// slot has its tag, a row of 16, from L2 or nearer. Needs table_sources.cuh.

namespace lattice {

constexpr int BAND = 64;             // rows of one count of edges
constexpr int CHUNK_ENTRIES = 8192;  // of the table that a block holds
constexpr int CHUNK_ROWS = 256;      // or fewer
constexpr int DEFERRED = 1024;       // look-ups that a block may defer

// The rows of a work chunk: fewer where some of a table's blocks would have none.
__device__ __forceinline__ int chunk_rows_of(int n, int volume, int blocks) {
  int rows = volume <= 32 ? CHUNK_ROWS : CHUNK_ROWS / 2;
  while (rows > BAND && n < 2ll * rows * blocks) rows /= 2;
  return rows;
}

template <typename KEY>
struct Chunk {
  int entries[CHUNK_ENTRIES];
  KEY masks[CHUNK_ROWS];
  int deferred[DEFERRED];  // row | offsets of the group << 8 | group << 11
  int defers;
};

__device__ __forceinline__ void set_bits(unsigned* mask, unsigned bits, int from) {
  atomicOr(mask, bits << from);
}

__device__ __forceinline__ void set_bits(unsigned long long* mask, unsigned bits,
                                         int from) {
  // Shared memory has no such operation on 64 bits.
  const unsigned long long both = (unsigned long long)bits << from;
  unsigned* words = reinterpret_cast<unsigned*>(mask);
  if ((unsigned)both) atomicOr(words, (unsigned)both);
  if (both >> 32) atomicOr(words + 1, (unsigned)(both >> 32));
}

// Takes the rows from first on, at most chunk_rows of the n: a power of two from BAND to
// the threads of a block.
// sizes: the offsets (volume), the bits of a digit of a rank, its digits (passes).
// table: where entries are to be written, or null. counts (volume, bands): edges of each
// offset in each band. Lane 0 of each warp adds the edges it counted to edges.
// ranks (n): the rank of each row's mask among Gray codes, or null; histogram: of their
// digits, BINS words each. Of several parts the mask is of the last 63 offsets, which
// leave hardly a tie: tiles of 5x5x5 and 7x7x7 kernels use up to 2% more offsets by it
// than by all.
template <typename KEY, typename SOURCE>
__device__ __forceinline__ void count_chunk(const SOURCE& source, Chunk<KEY>& chunk,
                                            long long first, int chunk_rows, int n,
                                            TableSizes sizes, int* table, int* counts,
                                            long long& edges, KEY* ranks,
                                            unsigned* histogram) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int volume = sizes.volume, bits = sizes.digit_bits, passes = sizes.passes;
  const int rows = (int)min((long long)chunk_rows, n - first);
  const long long bands = ((long long)n + BAND - 1) / BAND;
  for (int part = 0; part * PART_OFFSETS < volume; ++part) {
    const int k0 = part * PART_OFFSETS, width = min(PART_OFFSETS, volume - k0);
    for (int i = threadIdx.x; i < chunk_rows; i += blockDim.x) chunk.masks[i] = 0;
    if (threadIdx.x == 0) chunk.defers = 0;
    __syncthreads();
    int first_group;
    const int groups = source.groups(part, width, first_group);
    const auto look_up = [&](const typename SOURCE::From& from, int row, int group,
                             unsigned wanted, auto defer) {
      int k, found[GROUP];
      const int count = source.look_up(from, first + row, first_group + group, part,
                                       wanted, k, found, defer);
      int* entries = chunk.entries + row * width + k - k0;
      unsigned bits = 0;
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (j >= count || !(wanted >> j & 1)) continue;
        entries[j] = found[j];
        bits |= (unsigned)(found[j] >= 0) << j;
      }
      if (bits) set_bits(chunk.masks + row, bits, k - k0);
    };
    const auto never = [](unsigned) { return false; };
    if constexpr (SOURCE::ROWS_ABREAST) {
      const int row = threadIdx.x & (chunk_rows - 1), abreast = blockDim.x / chunk_rows;
      if (row < rows) {
        const auto from = source.from(first + row);
        for (int group = threadIdx.x / chunk_rows; group < groups; group += abreast) {
          look_up(from, row, group, ~0u, [&](unsigned left) {
            const int at = atomicAdd(&chunk.defers, 1);
            if (at < DEFERRED) chunk.deferred[at] = row | (int)left << 8 | group << 11;
            return at < DEFERRED;
          });
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < min(chunk.defers, DEFERRED); i += blockDim.x) {
        const int it = chunk.deferred[i], row = it & (CHUNK_ROWS - 1);
        look_up(source.from(first + row), row, it >> 11, it >> 8 & 7, never);
      }
    } else {
      // at / groups for at below 2^32 / groups.
      const unsigned inverse = groups > 1 ? 0xffffffffu / (unsigned)groups + 1 : 0;
      for (int at = threadIdx.x; at < rows * groups; at += blockDim.x) {
        const int row = inverse ? (int)__umulhi((unsigned)at, inverse) : at;
        look_up({}, row, at - row * groups, ~0u, never);
      }
    }
    __syncthreads();
    if (table && width == volume) {
      // A chunk starts at a multiple of 16 bytes.
      int* to = table + first * volume;
      const int words = rows * volume, fours = words / 4;
      const int4* from = reinterpret_cast<const int4*>(chunk.entries);
      for (int i = threadIdx.x; i < fours; i += blockDim.x) {
        reinterpret_cast<int4*>(to)[i] = from[i];
      }
      const int i = 4 * fours + threadIdx.x;
      if (i < words) to[i] = chunk.entries[i];
    } else if (table) {
      for (int row = warp; row < rows; row += warps) {
        for (int k = lane; k < width; k += 32) {
          table[(first + row) * volume + k0 + k] = chunk.entries[row * width + k];
        }
      }
    }
    const int chunk_bands = chunk_rows / BAND, parts = max(1, warps / chunk_bands);
    for (int task = warp; task < chunk_bands * parts; task += warps) {
      const int band = task / parts;
      if (band * BAND >= rows) break;
      const KEY low = chunk.masks[band * BAND + lane];
      const KEY high = chunk.masks[band * BAND + 32 + lane];
      for (int k = task - band * parts; k < width; k += parts) {
        const int count = __popc(__ballot_sync(~0u, low >> k & 1)) +
                          __popc(__ballot_sync(~0u, high >> k & 1));
        if (lane == 0) {
          counts[(k0 + k) * bands + first / BAND + band] = count;
          edges += count;
        }
      }
    }
    if (ranks) {
      constexpr int BITS = 8 * (int)sizeof(KEY);
      for (int row = threadIdx.x; row < rows; row += blockDim.x) {
        KEY rank = chunk.masks[row];
        if (k0 + width < volume) {  // of the part before the last the next takes bits
          ranks[first + row] = rank;
          continue;
        }
        if (part > 0) {
          if (width < BITS) {
            rank = rank << (BITS - width) | ranks[first + row] >> width;
          }
          rank >>= 1;
        }
#pragma unroll
        for (int by = 1; by < BITS; by *= 2) rank ^= rank >> by;
        ranks[first + row] = rank;
        for (int pass = 0; pass < passes; ++pass) {
          const int digit = (int)(rank >> (pass * bits)) & ((1 << bits) - 1);
          atomicAdd(histogram + pass * BINS + digit, 1u);
        }
      }
    }
    __syncthreads();
  }
}

// Adds the edges of a block's chunks to the first two words of scratch and its chunks to
// the third. The block that comes last writes all edges.
__device__ __forceinline__ void finish_chunks(long long found, int chunks, int all_chunks,
                                             unsigned* scratch, long long* edges) {
  unsigned long long* total = reinterpret_cast<unsigned long long*>(scratch);
  if ((threadIdx.x & 31) == 0 && found) atomicAdd(total, (unsigned long long)found);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && chunks) {
    const int before = (int)atomicAdd(scratch + 2, (unsigned)chunks);
    __threadfence();
    if (before + chunks == all_chunks) {
      edges[0] = (long long)*reinterpret_cast<volatile unsigned long long*>(total);
    }
  }
}

// The table of sizes.rows rows, if wanted, with counts and edges. sizes.chunk_rows: rows of
// a work chunk. scratch, all 0 before: the edges (64 bits), the chunks that are done.
template <typename KEY, typename SOURCE>
__device__ __forceinline__ void band_counts(const SOURCE& source, unsigned* scratch,
                                            TableSizes sizes, int* table, int* counts,
                                            long long* edges) {
  __shared__ Chunk<KEY> chunk;
  const int n = sizes.rows, rows = sizes.chunk_rows;
  const int all = (int)(((long long)n + rows - 1) / rows);
  long long found = 0;
  int chunks = 0;
  for (long long at = blockIdx.x; at < all; at += gridDim.x, ++chunks) {
    count_chunk<KEY>(source, chunk, at * rows, rows, n, sizes, table, counts, found,
                     static_cast<KEY*>(nullptr), nullptr);
  }
  finish_chunks(found, chunks, all, scratch, edges);
}

}  // namespace lattice
