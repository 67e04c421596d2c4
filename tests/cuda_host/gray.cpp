// Reads a table of more than 64 offsets, sorts its rows by the two words of their Gray
// ranks, and writes their order: see test_cuda_host.py.

#include "device.h"
#include "interfaces.h"
// clang-format off: the kernels' files, as they are joined for a launch
#include "rows.cuh"
#include "radix_sort.cu"
#include "gray_words.cu"
// clang-format on

#include "streams.h"

using namespace lattice;
using Key = unsigned long long;

namespace {

struct Sizes {
  int n, volume, digit_bits, passes;
};

std::vector<int> sorted(const std::vector<Key>& keys, std::vector<unsigned>& scratch,
                        int bits, int passes, const int* order) {
  const int n = keys.size(), tiles = (n + SORT_TILE - 1) / SORT_TILE;
  std::vector<Key> out(n), work(n);
  std::vector<int> rows(n), work_rows(n);
  emulated::launch((tiles + 1) / 2, SORT_THREADS, [&] {
    radix_sort<Key, true, false>(keys.data(), order, scratch.data(), {n, bits, passes},
                                 out.data(), work.data(), rows.data(),
                                 work_rows.data());
  });
  return rows;
}

std::vector<unsigned> scratch_for(int n, int passes) {
  const int tiles = (n + SORT_TILE - 1) / SORT_TILE;
  return std::vector<unsigned>(HEADER + passes * (1 + tiles) * BINS + tiles, 0);
}

}  // namespace

int main() {
  const Sizes s = read<Sizes>(1)[0];
  const auto table = read<int>((size_t)s.n * s.volume);
  auto of_low = scratch_for(s.n, LOW_PASSES), of_high = scratch_for(s.n, s.passes);
  std::vector<Key> low(s.n), high(s.n);
  emulated::launch(3, 256, [&] {
    gray_words(table.data(), of_low.data(), of_high.data(),
               {s.n, s.volume, s.digit_bits, s.passes}, low.data(), high.data());
  });
  const auto first = sorted(low, of_low, LOW_DIGIT, LOW_PASSES, nullptr);
  write(sorted(high, of_high, s.digit_bits, s.passes, first.data()));
}
