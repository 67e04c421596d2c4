// Bytes that miss a cache of least recently used objects, touched in the order in which
// threadgroups run, one after another. Compiled and called by tile_model.py.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

class Cache {
 public:
  Cache(int64_t objects, int64_t capacity)
      : next_(objects + 1), before_(objects + 1), size_(objects + 1), end_(objects),
        capacity_(capacity) {
    next_[end_] = before_[end_] = int32_t(end_);
  }

  void touch(int64_t object, int size) {
    if (size_[object] != 0) {
      if (next_[end_] == object) return;
      unlink(object);
    } else {
      missed += size;
      if (size > capacity_) return;
      size_[object] = size;
      held_ += size;
    }
    const int32_t first = next_[end_];
    next_[object] = first;
    before_[object] = int32_t(end_);
    before_[first] = next_[end_] = int32_t(object);
    while (held_ > capacity_) {
      const int32_t last = before_[end_];
      unlink(last);
      held_ -= size_[last];
      size_[last] = 0;
    }
  }

  int64_t missed = 0;

 private:
  void unlink(int64_t object) {
    next_[before_[object]] = next_[object];
    before_[next_[object]] = before_[object];
  }

  std::vector<int32_t> next_, before_, size_;
  int64_t end_, capacity_, held_ = 0;
};

// Rows of an array: objects of their own, or lines that several share.
struct Rows {
  static constexpr int LINE = 128;
  int64_t base;
  int bytes;

  int64_t count(int64_t n) const {
    return bytes >= LINE ? n : (n * bytes + LINE - 1) / LINE;
  }
  void touch(Cache& cache, int64_t row) const {
    if (bytes >= LINE)
      cache.touch(base + row, bytes);
    else
      cache.touch(base + row * bytes / LINE, LINE);
  }
};

}  // namespace

// Tiles of rows times columns; `together` tiles pass a column before the next one.
extern "C" int64_t conv_misses(
    const int* table, int64_t n, int64_t n_in, int volume, int tile, int row_bytes,
    int weight_bytes, int out_bytes, int columns, int together, int64_t capacity) {
  const int64_t tiles = (n + tile - 1) / tile;
  const Rows x{0, row_bytes};
  const int64_t w = x.count(n_in), t = w + int64_t(volume) * columns;
  const int64_t y = t + tiles;
  Cache cache(y + tiles * columns, capacity);
  for (int64_t first = 0; first < tiles; first += together)
    for (int c = 0; c < columns; ++c)
      for (int64_t i = first; i < std::min(tiles, first + together); ++i) {
        const int64_t stop = std::min(n, (i + 1) * tile);
        // What streams through takes room too: the table and the output.
        cache.touch(t + i, int(stop - i * tile) * volume * 4);
        for (int k = 0; k < volume; ++k) {
          bool any = false;
          for (int64_t r = i * tile; r < stop; ++r) {
            const int from = table[r * volume + k];
            if (from < 0) continue;
            if (!any) cache.touch(w + int64_t(c) * volume + k, weight_bytes);
            any = true;
            x.touch(cache, from);
          }
        }
        cache.touch(y + i * columns + c, int(stop - i * tile) * out_bytes);
      }
  return cache.missed;
}

// Units (range of output rows, offset) times tiles of channels, tiles the fastest, of
// which those of one column first where `tall_first`. `together` units take all tiles of
// one column (or row) before those of the next, back and forth.
// `bounds` are the edges at which units start, (ranges x K) of first and stop.
extern "C" int64_t grad_misses(
    const int* edges, int64_t count, const int64_t* bounds, int64_t units, int64_t n_in,
    int64_t n_out, int tall, int wide, int in_bytes, int out_bytes, int tall_first,
    int together, int64_t capacity) {
  constexpr int STEP = 32;  // edges that are listed in one object
  const Rows x{0, in_bytes}, dy{0, out_bytes};
  const int64_t each_x = x.count(n_in), each_dy = dy.count(n_out);
  const int64_t y = each_x * tall, listed = y + each_dy * wide;
  Cache cache(listed + count / STEP + 1, capacity);
  const int fast = tall_first ? tall : wide, slow = tall_first ? wide : tall;
  for (int64_t first = 0; first < units; first += together)
    for (int slice = 0; slice < (together > 1 ? slow : 1); ++slice)
      for (int64_t i = 0; i < std::min<int64_t>(units - first, together); ++i)
        for (int at = 0; at < (together > 1 ? fast : fast * slow); ++at) {
          const int64_t unit = first + (slice % 2 == 0 ? i : together - 1 - i);
          const int faster = at % fast, slower = slice + at / fast;
          const int a = tall_first ? faster : slower, b = tall_first ? slower : faster;
          const Rows from{each_x * a, in_bytes}, to{y + each_dy * b, out_bytes};
          for (int64_t e = bounds[2 * unit]; e < bounds[2 * unit + 1]; ++e) {
            cache.touch(listed + e / STEP, 12 * STEP);
            from.touch(cache, edges[3 * e]);
            to.touch(cache, edges[3 * e + 1]);
          }
        }
  return cache.missed;
}
