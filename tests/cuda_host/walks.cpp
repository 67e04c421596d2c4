// Reads edges, walks through them in splits as grouped_gemm does, and writes how often
// each edge was met, and the sums: see test_cuda_host.py.

#include "device.h"
#include "interfaces.h"

// clang-format off: the kernels' files, as they are joined for a launch
#include "alignment.cuh"
#include "channels.cuh"
#include "edge_walk.cuh"
// clang-format on

#include "streams.h"

#include <atomic>
#include <cmath>

using namespace lattice;

int main() {
  struct Sizes {
    int edges, volume, splits;
  };
  constexpr int STAGE = 32, ELEMENTS = 2;
  const Sizes s = read<Sizes>(1)[0];
  // (i, o) of each; a turned offset's are those of another.
  const auto pairs = read<int>(2 * s.edges), spans = read<int>(2 * s.volume);
  const auto firsts = read<int>(s.volume + 1);
  // A split leaves one sum for each of its offsets: of the rows i, and of ones.
  std::vector<int> met(s.edges, 0);
  std::vector<float> partials(ELEMENTS * (s.splits + s.volume), NAN);
  const int span = (firsts[s.volume] + s.splits - 1) / s.splits;
  std::atomic<bool> shared = false;  // two splits have one slot
  emulated::launch(s.splits, 32, [&] {
    const int split = blockIdx.x;
    EdgeWalk<STAGE> walk(spans.data(), firsts.data(), s.volume, split, span);
    if (threadIdx.x > 0) return;  // a warp finds its place, and one lane walks
    while (!walk.done()) {
      float* slot = &partials[ELEMENTS * (split + walk.k)];
      if (!std::isnan(slot[0])) shared = true;
      slot[0] = slot[1] = 0;
      do {
        for (int e = 0; e < walk.count(); ++e) {
          const int2 rows = rows_of(walk.pair(pairs.data(), e), walk.turned);
          // Two splits that run side by side meet an edge that is turned for one.
          __atomic_fetch_add(&met[walk.at + e], 1, __ATOMIC_RELAXED);
          slot[0] += rows.x, slot[1] += 1;
        }
      } while (!walk.advance());
    }
  });
  if (shared) return 1;
  std::vector<float> sums(ELEMENTS * s.volume, NAN);
  emulated::launch((ELEMENTS * s.volume + 255) / 256, 256, [&] {
    const AddSplitsSizes sizes{0, 1, ELEMENTS, s.splits, s.volume};
    add_partials<float>(partials.data(), firsts.data(), sizes, sums.data());
  });
  write(met), write(sums);
}
