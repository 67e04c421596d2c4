// Hash table of coordinate rows, and what is found with it.
//
// A slot holds the index of a row and beside it the row's whole hash, or -1 and -1: 8
// bytes a slot, at least two slots a row. Rows of one hash are compared in full, so any
// int32 coordinates in one to four dimensions will do, and equal rows share the slot of
// the least index whatever the order of threads.
//
//   slots   [ -1 -1 | 7 h7 ][ -1 -1 | -1 -1 ][ 2 h2 | 5 h5 ] ...   in pairs of 16 bytes,
//                     |                        |                   probed linearly from
//   coords  rows (batch, x, y, z), W = 1 + D columns               hash(row) on
//
// A large table is filled part by part, a dispatch each: the high bits of a row's hash
// name its part, and probing goes round inside of it. A table that is only collected,
// of candidates for new rows, has no hashes.
//
// Traffic per look-up: 16 bytes of one line, and only for a row that is found its
// coordinates, which lie beside those of the row before. It beats sorting and binary
// search (log2 N misses) from a few thousand rows on.

#include <metal_stdlib>
using namespace metal;

template <int W>
struct Row {
  int at[W];
};

constant constexpr long LEAST_INT32 = -2147483648L, MOST_INT32 = 2147483647L;

METAL_FUNC bool beyond_int32(long value) {
  return value < LEAST_INT32 || value > MOST_INT32;
}

template <int W>
METAL_FUNC void read_row(const device int* coords, int index, thread Row<W>& row) {
  for (int a = 0; a < W; ++a) row.at[a] = coords[size_t(index) * W + a];
}

// In one load: a packed vector needs no alignment but its elements'.
template <>
METAL_FUNC void read_row(const device int* coords, int index, thread Row<4>& row) {
  const int4 at = int4(*(const device packed_int4*)(coords + size_t(index) * 4));
  for (int a = 0; a < 4; ++a) row.at[a] = at[a];
}

template <int W>
METAL_FUNC bool same_row(const thread Row<W>& a, const thread Row<W>& b) {
  bool same = true;
  for (int c = 0; c < W; ++c) same = same && a.at[c] == b.at[c];
  return same;
}

// Every column passes through a full avalanche, so lattices do not cluster.
template <int W>
METAL_FUNC uint hash_row(const thread Row<W>& row) {
  uint h = 0x9e3779b9u;
  for (int c = 0; c < W; ++c) {
    h ^= uint(row.at[c]);
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
  }
  return h;
}

// The slot after another, round the part: `part` is its number of slots less one.
METAL_FUNC uint next_slot(uint slot, uint part) {
  return (slot & ~part) | ((slot + 1) & part);
}

// Rules by which input rows give the rows of a new set: Rule of output_rows.py. CELLS
// are those of several strides, each in a part of the table.
enum Rule { ITSELF, CELL, REACH, EXPAND, CELLS };

// A stride, and whether it is a power of two, as nearly all are: then it shifts. A
// difference of two int32 has 32 bits and a sign, so nothing is divided in 64 bits,
// which takes a GPU hundreds of cycles.
struct Step {
  uint size, shift;
  bool shifts;

  METAL_FUNC Step(long stride) thread
      : size(uint(min(stride, 0xffffffffL))),
        shift(ctz(size)),
        shifts((size & (size - 1)) == 0) {}

  METAL_FUNC uint quotient(uint value) const thread {
    return shifts ? value >> shift : value / size;
  }

  METAL_FUNC int floor_divide(int value) const thread {
    return value < 0 ? ~int(quotient(uint(~value))) : int(quotient(uint(value)));
  }

  // value * size into `to`; false where no offset brings it back into 32 bits.
  METAL_FUNC bool multiply(int value, thread long& to) const thread {
    const uint given = value < 0 ? uint(-long(value)) : uint(value);
    const uint whole = shifts ? given << shift : given * size;
    if (shifts ? whole >> shift != given : mulhi(given, size) != 0) return false;
    to = value < 0 ? -long(whole) : long(whole);
    return true;
  }

  // (a - b) / size into `to`; false where it leaves a rest.
  METAL_FUNC bool divide_difference(int a, int b, thread long& to) const thread {
    const uint apart = a < b ? uint(b) - uint(a) : uint(a) - uint(b);
    const uint whole = quotient(apart);
    if ((shifts ? whole << shift : whole * size) != apart) return false;
    to = a < b ? -long(whole) : long(whole);
    return true;
  }
};

// The rows that coords give by a rule: candidate n * volume + k is made of input n and
// offset k; of CELLS, where `volume` is the number of inputs, k * volume + n of input n
// and stride k. `limits` holds stride, least and greatest value, D of each; of CELLS
// the strides, and no cell is outside the int32 box.
template <int W, int RULE>
struct Candidates {
  const device int* coords;
  const device int* offsets;
  const device int64_t* limits;
  int volume;

  // The input of a candidate that has an offset; of CELLS the place of its stride.
  METAL_FUNC int quotient(int id) const thread {
    const Step each(volume);
    return int(each.quotient(uint(id)));
  }

  // Whether there is such a row: not off the lattice, nor outside the int32 box.
  METAL_FUNC bool make(int id, thread Row<W>& row) const thread {
    constexpr int D = W - 1;
    // The other rules have one offset, which they leave as it is.
    constexpr bool OFFSETS = RULE == REACH || RULE == EXPAND;
    const int each = OFFSETS || RULE == CELLS ? quotient(id) : 0;
    const int n = OFFSETS ? each : id - each * volume;
    read_row<W>(coords, n, row);
    if (RULE == ITSELF) return true;
    if (RULE == CELLS) {
      for (int a = 0; a < D; ++a) {
        const Step step(limits[each * D + a]);
        row.at[a + 1] = step.floor_divide(row.at[a + 1]);
      }
      return true;
    }
    const device int* offset = offsets + (OFFSETS ? id - n * volume : 0) * D;
    for (int a = 0; a < D; ++a) {
      const Step step(limits[a]);
      const int at = row.at[a + 1];
      long value = at;
      if (RULE == CELL) value = step.floor_divide(at);
      if (RULE == EXPAND) {
        if (!step.multiply(at, value)) return false;
        value += offset[a];
      }
      if (RULE == REACH && !step.divide_difference(at, offset[a], value)) return false;
      if (value < limits[D + a] || value > limits[2 * D + a]) return false;
      row.at[a + 1] = int(value);
    }
    return true;
  }
};

// One thread a candidate: puts it into its slot of one part of the table, which starts
// as -1. A row's hash follows it into the slot; who meets one without looks at the row,
// as who meets its own. sizes.first: the first slot of this part; of CELLS the table
// has all parts, and sizes.last_slot is that of one.
template <int W, int RULE>
METAL_FUNC void insert_candidates(
    const device int* coords,
    const device int* offsets,
    const device int64_t* limits,
    HashTableSizes sizes,
    device atomic_int* slots,
    uint id) {
  constexpr bool HASHES = RULE == ITSELF;
  constexpr int WORDS = HASHES ? 2 : 1;
  const uint mask = uint(sizes.last_slot), part = uint(sizes.last_of_part);
  Candidates<W, RULE> candidates = {coords, offsets, limits, sizes.volume};
  Row<W> row;
  if (!candidates.make(int(id), row)) return;
  const uint hash = hash_row(row);
  uint slot = hash & mask & (HASHES ? ~1u : ~0u);
  if (RULE == CELLS) {
    slot += uint(candidates.quotient(int(id))) * (part + 1);
  } else {
    if ((slot & ~part) != uint(sizes.first)) return;
    slot &= part;
  }
  while (true) {
    device atomic_int* at = slots + WORDS * slot;
    int held = atomic_load_explicit(at, memory_order_relaxed);
    if (held < 0) {
      int empty = -1;
      if (atomic_compare_exchange_weak_explicit(
              at, &empty, int(id), memory_order_relaxed, memory_order_relaxed)) {
        if (HASHES) atomic_store_explicit(at + 1, int(hash), memory_order_relaxed);
        return;
      }
      continue;  // another thread took the slot, or the exchange failed for no reason
    }
    bool same = true;
    if (HASHES) {
      const int found = atomic_load_explicit(at + 1, memory_order_relaxed);
      same = found == -1 || uint(found) == hash;
    }
    if (same) {
      Row<W> other;
      candidates.make(held, other);
      same = same_row(row, other);
    }
    if (same) {
      // The holder may change under us, but only to an equal row of a lower index.
      atomic_fetch_min_explicit(at, int(id), memory_order_relaxed);
      return;
    }
    slot = next_slot(slot, part);
  }
}

// One thread a slot: writes the row of a taken slot to its place, ends[slot] - 1, and
// the key that sorts it: its number in a box, those of one of CELLS' strides after the
// other's. `packing` holds least values, weights, and the weight of a stride. Unsigned
// 32-bit differences are right although coordinates may be any int32.
template <int W, int RULE, typename KEY>
METAL_FUNC void collect_candidates(
    const device int* coords,
    const device int* offsets,
    const device int64_t* limits,
    const device int* slots,
    const device int* ends,
    const device int64_t* packing,
    HashTableSizes sizes,
    device int* rows,
    device KEY* keys,
    uint slot) {
  int id = slots[slot];
  if (id < 0) return;
  Candidates<W, RULE> candidates = {coords, offsets, limits, sizes.volume};
  Row<W> row;
  candidates.make(id, row);
  const size_t place = size_t(ends[slot] - 1);
  KEY key = RULE == CELLS ? KEY(candidates.quotient(id)) * KEY(packing[2 * W]) : 0;
  for (int c = 0; c < W; ++c) {
    rows[place * W + c] = row.at[c];
    key += (KEY(row.at[c]) - KEY(packing[c])) * KEY(packing[W + c]);
  }
  keys[place] = key;
}

// Whether a slot has the row that is looked for.
template <int W>
METAL_FUNC bool holds_row(
    int2 slot, uint hash, const device int* coords, const thread Row<W>& row) {
  if (uint(slot.y) != hash) return false;
  Row<W> other;
  read_row<W>(coords, slot.x, other);
  return same_row(row, other);
}

// The index of a row in the table, or -1: by pairs of slots, none behind an empty one.
template <int W>
METAL_FUNC int find_row(
    const device int* slots,
    const device int* coords,
    uint mask,
    uint part,
    const thread Row<W>& row) {
  const device int4* pairs = (const device int4*)slots;
  const uint hash = hash_row(row);
  for (uint at = (hash & mask) >> 1;; at = next_slot(at, part >> 1)) {
    const int4 pair = pairs[at];
    if (pair.x < 0) return -1;
    if (holds_row(pair.xy, hash, coords, row)) return pair.x;
    if (pair.z < 0) return -1;
    if (holds_row(pair.zw, hash, coords, row)) return pair.z;
  }
}

// The input row of (output row, offset): in = out * stride + offset, or for the
// transposed rule the in with out = in * stride + offset. Without a stride it is 1.
template <int W, bool TRANSPOSED>
METAL_FUNC int find_neighbour(
    const device int* slots,
    const device int* in_coords,
    uint mask,
    uint part,
    const device int* out,
    const device int* offset,
    const device int* stride) {
  Row<W> row;
  row.at[0] = out[0];
  for (int a = 0; a < W - 1; ++a) {
    const int at = out[a + 1];
    long value = at;
    if (stride) {
      const Step step(stride[a]);
      if (TRANSPOSED && !step.divide_difference(at, offset[a], value)) return -1;
      if (!TRANSPOSED && !step.multiply(at, value)) return -1;
    }
    if (!stride || !TRANSPOSED) value += offset[a];
    if (beyond_int32(value)) return -1;
    row.at[a + 1] = int(value);
  }
  return find_row<W>(slots, in_coords, mask, part, row);
}

// One thread an (offset, output row): table (N_out, K), from the row sizes.first on.
template <int W, bool TRANSPOSED>
METAL_FUNC void neighbour_table(
    const device int* slots,
    const device int* in_coords,
    const device int* out_coords,
    const device int* offsets,
    const device int* stride,
    HashTableSizes sizes,
    device int* table,
    uint2 at) {
  const device int* out = out_coords + (size_t(sizes.first) + at.y) * W;
  table[size_t(at.y) * sizes.volume + at.x] = find_neighbour<W, TRANSPOSED>(
      slots, in_coords, uint(sizes.last_slot), uint(sizes.last_of_part), out,
      offsets + size_t(at.x) * (W - 1), stride);
}

// The table of a point-symmetric kernel over its own rows, by half of the look-ups: the
// edge (i, o, k) gives (o, i, K - 1 - k). One thread an (offset below K / 2, row); the
// table starts as -1, and no entry is written twice.
template <int W>
METAL_FUNC void submanifold_table(
    const device int* slots,
    const device int* coords,
    const device int* offsets,
    HashTableSizes sizes,
    device int* table,
    uint2 at) {
  const int volume = sizes.volume, k = int(at.x), o = int(at.y);
  if (k == 0 && volume % 2) table[size_t(o) * volume + volume / 2] = o;
  int i = find_neighbour<W, false>(
      slots, coords, uint(sizes.last_slot), uint(sizes.last_of_part),
      coords + size_t(o) * W, offsets + k * (W - 1), nullptr);
  if (i < 0) return;
  table[size_t(o) * volume + k] = i;
  table[size_t(i) * volume + (volume - 1 - k)] = o;
}
