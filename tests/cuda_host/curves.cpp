// Reads rows and a curve, sorts the rows by its keys, and writes their order: see
// test_cuda_host.py.

#include "device.h"
#include "interfaces.h"
// clang-format off: the kernels' files, as they are joined for a launch
#include "rows.cuh"
#include "radix_sort.cu"
#include "curve_keys.cu"
// clang-format on

#include "streams.h"

using namespace lattice;

namespace {

struct Sizes {
  int n, columns, is_hilbert, is_swapped, is_wide, digit_bits, passes;
};

template <int COLUMNS, bool HILBERT, bool SWAPPED, typename Key>
void sort(const Sizes& s) {
  const auto rows = read<int>((size_t)s.n * COLUMNS);
  const auto frame = read<int>(COLUMNS + 1);
  const int n = s.n, tiles = (n + SORT_TILE - 1) / SORT_TILE;
  std::vector<unsigned> scratch(scratch_words(n, s.passes), 0);
  std::vector<Key> keys(n), out(n), work(n);
  std::vector<int> order(n), next(n);
  emulated::launch(3, 256, [&] {
    curve_keys<COLUMNS, HILBERT, SWAPPED>(rows.data(), frame.data(), scratch.data(),
                                          {n, s.digit_bits, s.passes}, keys.data());
  });
  emulated::launch((tiles + 1) / 2, SORT_THREADS, [&] {
    radix_sort<Key, true, false>(keys.data(), scratch.data(),
                                 {n, s.digit_bits, s.passes}, out.data(), work.data(),
                                 order.data(), next.data());
  });
  write(order);
}

template <int COLUMNS, bool HILBERT, bool SWAPPED>
void by_width(const Sizes& s) {
  if (s.is_wide) sort<COLUMNS, HILBERT, SWAPPED, unsigned long long>(s);
  else sort<COLUMNS, HILBERT, SWAPPED, unsigned>(s);
}

template <int COLUMNS>
void all(const Sizes& s) {
  if (s.is_hilbert && s.is_swapped) by_width<COLUMNS, true, true>(s);
  else if (s.is_hilbert) by_width<COLUMNS, true, false>(s);
  else if (s.is_swapped) by_width<COLUMNS, false, true>(s);
  else by_width<COLUMNS, false, false>(s);
}

}  // namespace

int main() {
  const Sizes s = read<Sizes>(1)[0];
  if (s.columns == 3) all<3>(s);
  else if (s.columns == 4) all<4>(s);
  else all<5>(s);
}
