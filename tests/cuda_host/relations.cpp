// Reads one relation's set and rule, runs the kernels of a table, its tiles and its edges,
// and writes what they made: see test_cuda_host.py.

#include "device.h"
#include "interfaces.h"
// clang-format off: the kernels' files, as they are joined for a launch
#include "rows.cuh"
#include "hash_rows.cu"
#include "table_sources.cuh"
#include "neighbour_table.cu"
#include "radix_sort.cu"
#include "sort_table.cu"
#include "relation_tiles.cu"
#include "relation_views.cu"
// clang-format on

#include "streams.h"

using namespace lattice;

namespace {

struct Sizes {
  int kind, columns, n_in, n_out, volume, rule, digit_bits, passes, chunk_rows, start;
};

template <int COLUMNS, typename SOURCE>
void make(const SOURCE& source, const Sizes& s) {
  const int n = s.n_out, bands = (n + BAND - 1) / BAND;
  const int pitch = pitch_of(n);
  const TableSizes sizes{n, s.volume, s.digit_bits, s.passes, s.chunk_rows};
  std::vector<int> table((size_t)n * s.volume, -7), counts((size_t)s.volume * bands, -7);
  long long edges = -7, edges_again = -7;
  std::vector<unsigned> scratch(HEADER, 0);
  auto count_by = [&](auto key) {
    emulated::launch(2, 256, [&] {
      band_counts<decltype(key)>(source, scratch.data(), sizes, table.data(),
                                 counts.data(), &edges);
    });
  };
  if (s.volume <= 32) count_by(0u);
  else count_by(0ull);
  write(table), write(counts), write(std::vector<long long>{edges});
  std::vector<int> new_table(table.size(), -7), rows(n), sorted((size_t)s.volume * pitch);
  std::vector<unsigned> masks((size_t)pitch / 32 * ((s.volume + 31) / 32));
  auto tiles_by = [&](auto key, const auto& source, const int* from, int* to) {
    using Key = decltype(key);
    std::vector<Key> work(3 * (size_t)n);
    std::vector<unsigned> state(scratch_words(n, s.passes), 0);
    emulated::launch(3, SORT_THREADS, [&] {
      relation_tiles<Key>(source, state.data(), sizes, from, to, counts.data(),
                          &edges_again, rows.data(), sorted.data(), masks.data(),
                          work.data());
    });
    write(rows), write(sorted), write(masks);
    write(std::vector<long long>{edges_again});
  };
  auto both = [&](auto key) {
    tiles_by(key, source, new_table.data(), new_table.data());
    tiles_by(key, Read{table.data(), s.volume}, table.data(), nullptr);
  };
  if (s.volume <= 32) both(0u);
  else both(0ull);
  write(new_table);
  std::vector<int> starts(counts.size()), sums(s.volume), listed(3 * max(edges, 1ll));
  std::vector<int> offset_starts(s.volume + 1);
  emulated::launch(s.volume, 1024, [&] {
    scan_counts(counts.data(), {bands}, starts.data(), sums.data());
  });
  emulated::launch((n + 255) / 256, 256, [&] {
    write_edges<3>(table.data(), starts.data(), sums.data(), {n, s.volume, bands, s.volume},
                   listed.data(), offset_starts.data());
  });
  write(listed), write(offset_starts);
}

template <int COLUMNS>
void all(const Sizes& s) {
  // start words into an array: rows need not begin at 16 bytes.
  auto rows = read<int>(s.start + (size_t)s.n_in * COLUMNS);
  const auto out = read<int>((size_t)s.n_out * COLUMNS);
  auto rule = read<int4>((s.rule + 3) / 4);
  const int* coords = rows.data() + s.start;
  const unsigned capacity = slots_for(s.n_in);
  constexpr int BLOCKS = 3;
  const size_t words = 2 * capacity + BOUNDS + 2 * COLUMNS * BLOCKS;
  std::vector<int4> memory((words + 3) / 4, {-1, -1, -1, -1});
  std::vector<int> order(capacity + s.n_in, -7);
  int* slots = &memory[0].x;
  std::vector<int> repeat(2), ends(2 * COLUMNS);
  emulated::launch(BLOCKS, 64, [&] {
    int* ranges[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) ranges[c] = ends.data() + 2 * c;
    int* const(&all_ranges)[COLUMNS] = reinterpret_cast<int* const(&)[COLUMNS]>(ranges);
    hash_rows<COLUMNS>(coords, slots, {s.n_in}, repeat.data(), all_ranges, order.data());
  });
  write(repeat), write(ends), write(std::vector<int>{slots[2 * capacity + ORDERED]});
  const auto find = [&](auto rule_of) {
    constexpr int RULE = decltype(rule_of)::value;
    make<COLUMNS>(Find<COLUMNS, RULE>(coords, slots, order.data(), out.data(), &rule[0].x,
                                      s.n_in),
                  s);
  };
  if (s.kind == UNIT) find(std::integral_constant<int, UNIT>());
  else if (s.kind == FORWARD) find(std::integral_constant<int, FORWARD>());
  else find(std::integral_constant<int, TRANSPOSED>());
}

}  // namespace

int main() {
  const Sizes s = read<Sizes>(1)[0];
  if (s.columns == 2) all<2>(s);
  else if (s.columns == 4) all<4>(s);
  else all<5>(s);
}
