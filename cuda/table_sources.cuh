// Where the entries of a neighbour table come from: a rule's look-ups in the hash table of a
// set (Find), or a table that is there (Read). neighbour_table.cu calls either. Needs
// rows.cuh.

namespace lattice {

constexpr int PART_OFFSETS = 64;  // offsets of one mask
constexpr int GROUP = 3;          // offsets that a thread looks up together

// FORWARD: in = out * stride + offset. TRANSPOSED: out = in * stride + offset. UNIT: in =
// out + offset, either of them on stride 1.
enum Stride { FORWARD, TRANSPOSED, UNIT };

// What Python has worked out of a rule: words of this header, then the first group of
// each part of offsets and the number of groups; groups of twelve words: first offset,
// count, last coordinate, its step; leading coordinates from word 4 on; their remainders
// by the stride from word 8 on. For TRANSPOSED coordinates are those of -offset / stride,
// rounded up, and the pairs hold this and the remainder of each offset's last coordinate.
enum Rule {
  STRIDES = 0,
  SHIFTS = 4,   // of strides that are powers of two, else -1
  IS_WIDE = 8,  // -1 where offsets or strides ask for 64 bits, else 0
  GROUPS_AT = 9,
  PAIRS_AT = 10,
  OFFSETS_AT = 11,
  PARTS_AT = 12,
};

// The row that an offset leads to, or false where it lies beyond int32 or off the lattice.
template <int COLUMNS, int RULE>
__device__ __forceinline__ bool source_row(Row<COLUMNS>& row, const int* offset,
                                           const int* stride) {
  bool legal = true;
#pragma unroll
  for (int c = 1; c < COLUMNS; ++c) {
    long long v = row.at[c];
    const int step = RULE == UNIT ? 1 : stride[c - 1];
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
  return legal;
}

// Finds the input rows of edges through the hash table of a set.
template <int COLUMNS, int RULE>
struct Find {
  static constexpr bool ROWS_ABREAST = true;  // lanes of a warp have rows, or groups
  RowTable<COLUMNS> rows;
  const int *out_coords, *rule;
  const int4* all_groups;

  __device__ __forceinline__ Find(const int* in_coords, const int* table,
                                  const int* order, const int* out_coords,
                                  const int* rule, int n_in)
      : rows(in_coords, table, order, n_in), out_coords(out_coords), rule(rule),
        all_groups(reinterpret_cast<const int4*>(rule + __ldg(rule + GROUPS_AT))) {
    if (__ldg(rows.words() + ORDERED) == -1) rows.order = nullptr;
  }

  __device__ __forceinline__ int groups(int part, int, int& first) const {
    first = __ldg(rule + PARTS_AT + part);
    return __ldg(rule + PARTS_AT + part + 1) - first;
  }

  // Scales an output row; its remainders by the stride go to rest. Whether all sums of
  // its coordinates and offsets stay in int32: both lie within 2^30 of 0.
  __device__ __forceinline__ bool scale(Row<COLUMNS>& row, Row<COLUMNS>& rest) const {
    unsigned wide = (unsigned)__ldg(rule + IS_WIDE);
#pragma unroll
    for (int c = 1; c < COLUMNS; ++c) {
      const int x = row.at[c];
      if constexpr (RULE == FORWARD) {
        const long long v = (long long)x * __ldg(rule + STRIDES + c - 1);
        row.at[c] = (int)v;
        wide |= (unsigned)((v + (1ll << 30)) >> 31 != 0) << 31;
      } else {
        wide |= (unsigned)x + (1u << 30);
      }
      if constexpr (RULE == TRANSPOSED) {
        const int shift = __ldg(rule + SHIFTS + c - 1);
        if (shift >= 0) {
          row.at[c] = x >> shift, rest.at[c] = x & ((1 << shift) - 1);
        } else {
          const int stride = __ldg(rule + STRIDES + c - 1);
          int quotient = x / stride, left = x - quotient * stride;
          if (left < 0) left += stride, --quotient;
          row.at[c] = quotient, rest.at[c] = left;
        }
      }
    }
    return (int)wide >= 0;
  }

  // An output row, to be looked up from.
  struct From {
    Row<COLUMNS> row, rest;
    bool is_plain;  // whether sums stay in int32, and rows can be read whole
  };

  __device__ __forceinline__ From from(long long o) const {
    From it;
    it.row = load_row<COLUMNS>(out_coords, o);
    it.is_plain = scale(it.row, it.rest) && is_aligned<COLUMNS>(rows.coords);
    return it;
  }

  // Where the offsets of a group lead from a row.
  struct Targets {
    Row<COLUMNS> row;  // up to the last coordinate
    int last[GROUP];   // coordinates
    unsigned left;     // offsets that are to be looked up
  };

  __device__ __forceinline__ Targets targets(const From& from, const int4* words,
                                             int4 head) const {
    const int4 lead = __ldg(words + 1);
    const int leads[3] = {lead.x, lead.y, lead.z}, count = head.y;
    Targets it{from.row};
    bool legal = true;
#pragma unroll
    for (int c = 1; c < COLUMNS - 1; ++c) it.row.at[c] += leads[c - 1];
    if constexpr (RULE == TRANSPOSED) {
      const int4 left = __ldg(words + 2);
      const int lefts[3] = {left.x, left.y, left.z};
#pragma unroll
      for (int c = 1; c < COLUMNS - 1; ++c) legal &= from.rest.at[c] == lefts[c - 1];
    }
    const int start = from.row.at[COLUMNS - 1];
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      bool lives = legal && j < count;
      it.last[j] = start + head.z + j * head.w;
      if constexpr (RULE == TRANSPOSED) {
        const int k = head.x + min(j, count - 1);
        const int* pair = rule + __ldg(rule + PAIRS_AT) + 2 * k;
        it.last[j] = start + __ldg(pair);
        lives &= from.rest.at[COLUMNS - 1] == __ldg(pair + 1);
      }
      it.left |= (unsigned)lives << j;
    }
    return it;
  }

  // Looks up the line of the first offset that is left, for all that lie in it.
  __device__ __forceinline__ void take_line(Targets& it, int (&found)[GROUP]) const {
    static_assert(GROUP == 3);
    const unsigned left = it.left;
    const int at = left & 1 ? it.last[0] : left & 2 ? it.last[1] : it.last[2];
    it.row.at[COLUMNS - 1] = at;
    const Line line = rows.template line_of<true>(it.row);
    unsigned taken = 0, met = 0;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      const bool inside = left >> j & 1 && (it.last[j] ^ at) >> 5 == 0;
      const bool there = inside && line.has(it.last[j]);
      taken |= (unsigned)inside << j, met |= (unsigned)there << j;
      found[j] = there ? line.place(it.last[j]) : found[j];
    }
    it.left = left & ~taken;
    if (!rows.order) return;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      if (met >> j & 1) found[j] = rows.row_at(found[j]);
    }
  }

  // Looks up the offsets of a group that are wanted: first says its first one. Those that
  // another line answers for may be deferred, as a mask. Returns the group's length.
  template <typename F>
  __device__ __forceinline__ int look_up(const From& from, long long o, int group, int,
                                         unsigned wanted, int& first,
                                         int (&found)[GROUP], F defer) const {
    const int4* words = all_groups + 3 * group;
    const int4 head = __ldg(words);
    first = head.x;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) found[j] = -1;
    if (!from.is_plain) {
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (j < head.y) found[j] = find_wide(o, first + j);
      }
      return head.y;
    }
    Targets it = targets(from, words, head);
    it.left &= wanted;
    while (it.left) {
      take_line(it, found);
      if (it.left && defer(it.left)) break;
    }
    return head.y;
  }

  __device__ __noinline__ int find_wide(long long o, int k) const {
    Row<COLUMNS> row = load_row<COLUMNS>(out_coords, o);
    const int* offset = rule + rule[OFFSETS_AT] + k * (COLUMNS - 1);
    if (!source_row<COLUMNS, RULE>(row, offset, rule + STRIDES)) return -1;
    return rows.find(row);
  }
};

// Reads the entries of a table that is there.
struct Read {
  static constexpr bool ROWS_ABREAST = false;
  const int* table;
  int volume;

  __device__ __forceinline__ int groups(int, int width, int& first) const {
    first = 0;
    return (width + GROUP - 1) / GROUP;
  }
  struct From {};
  __device__ __forceinline__ From from(long long) const { return {}; }
  template <typename F>
  __device__ __forceinline__ int look_up(const From&, long long o, int group, int part,
                                         unsigned, int& first, int (&found)[GROUP],
                                         F) const {
    first = part * PART_OFFSETS + group * GROUP;
    const int count = min(GROUP, min(volume, (part + 1) * PART_OFFSETS) - first);
#pragma unroll
    for (int j = 0; j < GROUP; ++j) {
      found[j] = j < count ? table[o * volume + first + j] : -1;
    }
    return count;
  }
};

}  // namespace lattice
