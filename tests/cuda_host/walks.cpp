// Reads edges, walks through them in ranges as grouped_gemm does, and writes how often
// each edge was met, and the sums: see test_cuda_host.py.

#include "device.h"
// clang-format off: the kernels' files, as they are joined for a launch
#include "edge_walk.cuh"
// clang-format on

#include "streams.h"

#include <cmath>

using namespace lattice;

int main() {
  struct Sizes {
    int edges, volume, ranges;
  };
  constexpr int STAGE = 32, ELEMENTS = 2;
  const Sizes s = read<Sizes>(1)[0];
  const auto edges = read<int>(3 * s.edges), starts = read<int>(s.volume + 1);
  const auto blocks = read<int>(s.volume + 1);
  // A range leaves one sum for each of its offsets: of the rows i, and of ones.
  std::vector<int> met(s.edges, 0);
  std::vector<float> partials(ELEMENTS * (s.ranges + s.volume), NAN);
  const int span = (blocks[s.volume] + s.ranges - 1) / s.ranges;
  for (int range = 0; range < s.ranges; ++range) {
    EdgeWalk<STAGE> walk(starts.data(), blocks.data(), s.volume, range, span);
    while (!walk.done()) {
      float* slot = &partials[ELEMENTS * (range + walk.k)];
      if (!std::isnan(slot[0])) return 1;  // two ranges share it
      slot[0] = slot[1] = 0;
      do {
        for (int e = walk.at; e < walk.at + walk.count(); ++e) {
          ++met[e], slot[0] += edges[3 * e], slot[1] += 1;
        }
      } while (!walk.advance());
    }
  }
  std::vector<float> sums(ELEMENTS * s.volume, NAN);
  emulated::launch((ELEMENTS * s.volume + 255) / 256, 256, [&] {
    add_partials<float>(partials.data(), blocks.data(), sums.data(), s.ranges, s.volume,
                        ELEMENTS);
  });
  write(met), write(sums);
}
