// A set of keys as a bit for every cell of their box: insertion in any order, then the keys in order and the place of
// each, with no sort. It serves where the box is not much larger than the set.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "thread_pool.h"

namespace lattice {

// A bitmap reads every cell's bit a few times; a sort moves every key several times. They cost the same near here.
inline bool bitmap_serves(uint64_t cells, int64_t keys) { return cells != 0 && cells / 200 <= uint64_t(keys); }

// Set bits of a word; the builtin is a call where the instruction may be missing.
inline int ones(uint64_t x) {
  x -= x >> 1 & 0x5555555555555555;
  x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
  return int(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56);
}

class Bitmap {
 public:
  explicit Bitmap(uint64_t cells) : size_(int64_t(cells / 64) + 2), words_(new uint64_t[size_]) {
    parallel_range(size_, 1 << 15, [&](int64_t begin, int64_t end) {
      std::fill(words_.get() + begin, words_.get() + end, 0);
    });
  }

  // Adds the keys `key` + j for each bit j of `mask`; returns whether all were new. Any threads, at once.
  bool insert(uint64_t key, uint64_t mask = 1) {
    uint64_t* word = &words_[key / 64];
    int shift = int(key % 64);
    bool fresh = set(word, mask << shift);
    if (uint64_t rest = shift ? mask >> (64 - shift) : 0) fresh &= set(word + 1, rest);
    return fresh;
  }

  // Numbers the keys in order and returns how many there are; the set is complete.
  int64_t number() {
    before_.reset(new int32_t[size_]);
    int64_t pieces = (size_ + piece - 1) / piece, at = 0;
    first_.assign(pieces + 1, 0);
    parallel_for(pieces, [&](int64_t p) {
      int32_t count = 0;
      for (int64_t w = p * piece; w < end_of(p); ++w) {
        before_[w] = count;
        if (words_[w]) count += ones(words_[w]);
      }
      first_[p] = count;
    });
    for (auto& f : first_) at += std::exchange(f, at);
    return at;
  }

  // The place of a key that is in the set.
  int64_t rank(uint64_t key) const {
    int64_t w = int64_t(key / 64);
    return first_[w / piece] + before_[w] + ones(words_[w] & ((uint64_t(1) << key % 64) - 1));
  }

  // Calls visit(rank, key) for every key. Pieces are visited in parallel, each in order and with a copy of `shared`.
  template <class Visit>
  void each(const Visit& shared) const {
    parallel_for(int64_t(first_.size()) - 1, [&](int64_t p) {
      Visit visit = shared;
      int64_t rank = first_[p];
      for (int64_t w = p * piece; w < end_of(p); ++w)
        for (uint64_t bits = words_[w]; bits; bits &= bits - 1) visit(rank++, uint64_t(w * 64 + __builtin_ctzll(bits)));
    });
  }

 private:
  static constexpr int64_t piece = 4096;
  int64_t end_of(int64_t p) const { return std::min(size_, (p + 1) * piece); }

  static bool set(uint64_t* word, uint64_t bits) {
    // Most repeats are seen by a plain read, which costs far less than the locked write.
    if ((__atomic_load_n(word, __ATOMIC_RELAXED) & bits) == bits) return false;
    return (__atomic_fetch_or(word, bits, __ATOMIC_RELAXED) & bits) == 0;
  }

  int64_t size_;
  std::unique_ptr<uint64_t[]> words_;
  std::unique_ptr<int32_t[]> before_;  // keys before each word, within its piece
  std::vector<int64_t> first_;         // keys before each piece
};

}  // namespace lattice
