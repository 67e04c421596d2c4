// The order of coordinate rows along a Hilbert or Morton curve, one batch element after another.
#include "box.h"
#include "operations.h"
#include "primitive.h"
#include "sort.h"

namespace lattice {
namespace {

constexpr int most_axes = 4;

// Skilling's transform ("Programming the Hilbert curve", 2004): the interleaved bits of x are then the place.
void to_hilbert(uint32_t* x, int axes, int bits) {
  for (int bit = bits - 1; bit > 0; --bit) {
    uint32_t low = (uint32_t(1) << bit) - 1;
    for (int a = 0; a < axes; ++a) {
      if (x[a] >> bit & 1) {
        x[0] ^= low;
      } else {
        uint32_t swap = (x[0] ^ x[a]) & low;
        x[0] ^= swap, x[a] ^= swap;
      }
    }
  }
  for (int a = 1; a < axes; ++a) x[a] ^= x[a - 1];
  uint32_t flip = 0;
  for (int bit = bits - 1; bit > 0; --bit)
    if (x[axes - 1] >> bit & 1) flip ^= (uint32_t(1) << bit) - 1;
  for (int a = 0; a < axes; ++a) x[a] ^= flip;
}

// (N,) the order of (N, 1 + D) rows. Keys have 62 bits at most.
struct CurveOrder {
  std::vector<int> low;  // the least batch index, and what cells of each axis are counted from
  int bits;              // of an axis
  bool is_hilbert, is_swapped;

  static constexpr const char* name = "curve_order";
  bool operator==(const CurveOrder&) const = default;
  std::vector<mx::Shape> shapes(const std::vector<array>& in) const { return {{in[0].shape(0)}}; }
  std::vector<mx::Dtype> dtypes(const std::vector<array>&) const { return {mx::int32}; }

  void evaluate(const std::vector<Tensor>& in, const std::vector<Tensor>& out) const {
    const int32_t* coords = in[0].as<int32_t>();
    const int64_t n = in[0].dim(0);
    const int axes = int(in[0].dim(1)) - 1;
    std::vector<uint64_t> keys(n);
    std::vector<int32_t> order(n);
    parallel_range(n, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int32_t* row = coords + i * (1 + axes);
        uint32_t x[most_axes];
        for (int a = 0; a < axes; ++a) {
          int from = is_swapped && a < 2 ? 1 - a : a;
          x[a] = uint32_t(row[1 + from]) - uint32_t(low[1 + from]);
        }
        if (is_hilbert) to_hilbert(x, axes, bits);
        uint64_t key = uint32_t(row[0]) - uint32_t(low[0]);
        for (int bit = bits - 1; bit >= 0; --bit)
          for (int a = 0; a < axes; ++a) key = key << 1 | (x[a] >> bit & 1);
        keys[i] = key, order[i] = int32_t(i);
      }
    });
    radix_sort(keys, order);
    std::copy(order.begin(), order.end(), out[0].as<int32_t>());
  }
};

}  // namespace

array curve_order(const array& coords, const std::vector<int>& low, int bits, bool is_hilbert, bool is_swapped,
                  Stream s) {
  want_rank(CurveOrder::name, "coords", coords, 2, "(N, 1 + D)");
  want_dtype(CurveOrder::name, "coords", coords, mx::int32);
  int columns = coords.shape(1);
  if (columns < 2 || columns > 1 + most_axes || int(low.size()) != columns)
    fail(CurveOrder::name, "coords must have 2 to 5 columns (batch and 1 to 4 axes) and low as many values, but they have " +
                               std::to_string(columns) + " and " + std::to_string(low.size()) + ".");
  if (bits < 1 || bits > 32 || bits * (columns - 1) > 62)
    fail(CurveOrder::name, "bits must be 1 to 32, and 62 at most of all axes, but are " + std::to_string(bits) + ".");
  if (is_swapped && columns < 3) fail(CurveOrder::name, "there are no two axes to swap.");
  return build(CurveOrder{low, bits, is_hilbert, is_swapped}, {coords}, s)[0];
}

}  // namespace lattice
