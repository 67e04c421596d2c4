// Reads rows and what is to be made of them, runs the kernels that sort and number unique
// rows, and writes what they made: see test_cuda_host.py.

#include "device.h"
#include "interfaces.h"
// clang-format off: the kernels' files, as they are joined for a launch
#include "rows.cuh"
#include "radix_sort.cu"
#include "unique_rows.cu"
// clang-format on

#include "streams.h"

using namespace lattice;

namespace {

struct Sizes {
  int rule, n, volume, rule_words, digit_bits, passes, is_wide;
};

constexpr int MADE = 3;  // levels of CELLS

template <int RULE, typename Key>
void make(const Sizes& s) {
  constexpr int COLUMNS = 4;
  const auto rows = read<int>((size_t)s.n * COLUMNS);
  const auto rule = read<int>(s.rule_words);
  const auto ends = read<int>(2 * COLUMNS);
  const int *const given[] = {&ends[0], &ends[2], &ends[4], &ends[6]};
  int box[2 * COLUMNS], *const boxes[] = {box, box + 2, box + 4, box + 6};
  const int* ranges[COLUMNS];
  for (int c = 0; c < COLUMNS; ++c) ranges[c] = RULE == CELLS ? boxes[c] : given[c];
  constexpr int LEVELS = RULE == CELLS ? MADE : 1;
  const int n = s.n * s.volume, tiles = (n + SORT_TILE - 1) / SORT_TILE;
  std::vector<unsigned> scratch(scratch_words(n, s.passes), 0);
  std::vector<Key> keys(n), sorted(n), work(n), unique(n);
  std::vector<int> order(n), next(n), places(n, -7);
  emulated::launch(3, 256, [&] {
    pack_keys<COLUMNS, RULE>(rows.data(), rule.data(), given, scratch.data(),
                             {s.n, s.volume, s.digit_bits, s.passes}, keys.data(),
                             boxes);
  });
  emulated::launch((tiles + 1) / 2, SORT_THREADS, [&] {
    radix_sort<Key, true, true>(keys.data(), scratch.data(),
                                {n, s.digit_bits, s.passes}, sorted.data(), work.data(),
                                order.data(), next.data());
  });
  long long found[LEVELS], *to[LEVELS];
  for (int k = 0; k < LEVELS; ++k) found[k] = -7, to[k] = found + k;
  emulated::launch(tiles, SORT_THREADS, [&] {
    unique_keys<COLUMNS, Key, true>(sorted.data(), order.data(), ranges, scratch.data(),
                                    {n, s.passes}, unique.data(), to, places.data());
  });
  const long long all = found[LEVELS - 1];
  std::vector<int> made(all * COLUMNS);
  emulated::launch(2, 256, [&] {
    unpack_keys<COLUMNS>(unique.data(), &all, ranges, {}, made.data());
  });
  write(std::vector<long long>(found, found + LEVELS)), write(made), write(places);
}

template <int RULE>
void all(const Sizes& s) {
  if (s.is_wide) make<RULE, unsigned long long>(s);
  else make<RULE, unsigned>(s);
}

}  // namespace

int main() {
  const Sizes s = read<Sizes>(1)[0];
  if (s.rule == ITSELF) all<ITSELF>(s);
  else if (s.rule == CELL) all<CELL>(s);
  else if (s.rule == REACH) all<REACH>(s);
  else if (s.rule == EXPAND) all<EXPAND>(s);
  else all<CELLS>(s);
}
