// Adds partial sums into the layouts (K, C_in, C_out) and (C_out, K, C_in), split by
// offset and as whole gradients: see test_cuda_host.py.

#include "device.h"
#include "interfaces.h"

// clang-format off: the kernels' files, as they are joined for a launch
#include "alignment.cuh"
#include "channels.cuh"
#include "edge_walk.cuh"
#include "transposed_sums.cu"
// clang-format on

#include "streams.h"

#include <cmath>
#include <type_traits>

using namespace lattice;

int main() {
  struct Sizes {
    int splits, volume, c_in, c_out;
  };
  const Sizes s = read<Sizes>(1)[0];
  const int elements = s.c_in * s.c_out, whole = s.volume * elements;
  const auto firsts = read<int>(s.volume + 1);
  const auto given = read<int>((s.splits + s.volume) * elements);
  const auto gradients = read<int>(s.splits * whole);
  const std::vector<float> slots(given.begin(), given.end());
  const std::vector<float> splits(gradients.begin(), gradients.end());
  const AddSplitsSizes sizes{0, s.c_in, s.c_out, s.splits, s.volume};
  const auto tiles = [&](int rows) {
    return s.volume * ((s.c_in + rows - 1) / rows) * ((s.c_out + 31) / 32);
  };
  const std::vector<float> none(whole, NAN);
  std::vector<float> sums = none, added = none;
  emulated::launch((whole + 255) / 256, 256, [&] {
    add_partials<float>(slots.data(), firsts.data(), sizes, sums.data());
  });
  emulated::launch(tiles(32), 256, [&] {
    add_splits_transposed<float, 1>(splits.data(), sizes, added.data());
  });
  write(sums), write(added);
  const auto shared = [&](auto shares) {
    std::vector<float> transposed = none;
    emulated::launch(tiles(32 / shares), 256, [&] {
      add_partials_transposed<float, shares>(slots.data(), firsts.data(), sizes,
                                             transposed.data());
    });
    write(transposed);
  };
  shared(std::integral_constant<int, 1>()), shared(std::integral_constant<int, 2>());
  shared(std::integral_constant<int, 4>()), shared(std::integral_constant<int, 8>());
}
