// The edges of a table's rows by offset: see InnerLoops::bucket. Included by inner_loops.cpp only.
//
// AVX-512 takes 16 rows at a time: a block of the table is transposed in registers, and of each column the places that
// hold an edge are compressed into a vector that is stored whole: what is beyond them is overwritten by the next.
#pragma once
#include "simd.h"
#include "transpose.h"

namespace lattice::LATTICE_ISA {
namespace {

#if defined(__AVX512F__)
// Of the rows [o, o + 16), the first of which begins at `table`; returns the largest input row.
LATTICE_INLINE int32_t bucket_sixteen(const int32_t* table, int64_t o, int64_t volume, int32_t* in, int32_t* out,
                                      int64_t* end, int32_t* empty_rows, int64_t* n_empty) {
  const __m512i none = _mm512_set1_epi32(-1);
  __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  places = _mm512_add_epi32(places, _mm512_set1_epi32(int32_t(o)));
  __m512i most = none;
  uint32_t seen = 0;  // rows that have had an edge
  for (int64_t k0 = 0; k0 < volume; k0 += 16) {
    int64_t width = volume - k0 < 16 ? volume - k0 : 16;
    Vec column[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      column[i] = (Vec)_mm512_mask_loadu_epi32(none, __mmask16((1u << width) - 1), table + i * volume + k0);
    transpose(column);
    alignas(64) int32_t columns[16][16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_store_si512(columns[i], (__m512i)column[i]);
    for (int64_t k = k0; k < k0 + width; ++k) {
      __m512i rows = _mm512_load_si512(columns[k - k0]);
      uint32_t present = _mm512_cmpge_epi32_mask(rows, _mm512_setzero_si512());
      __m512i to = _mm512_mask_xor_epi32(places, __mmask16(present & ~seen), places, none);
      seen |= present;
      most = _mm512_max_epi32(most, rows);
      int64_t at = end[k];
      _mm512_storeu_si512(in + at, _mm512_maskz_compress_epi32(__mmask16(present), rows));
      _mm512_storeu_si512(out + at, _mm512_maskz_compress_epi32(__mmask16(present), to));
      end[k] = at + __builtin_popcount(present);
    }
  }
  for (uint32_t empty = ~seen & 0xffff; empty; empty &= empty - 1)
    empty_rows[(*n_empty)++] = int32_t(o) + __builtin_ctz(empty);
  return _mm512_reduce_max_epi32(most);
}
#endif

int32_t bucket(const int32_t* table, int64_t rows, int64_t volume, int32_t* in, int32_t* out, int64_t* end,
               int32_t* empty_rows, int64_t* n_empty) {
  int32_t largest = -1;
  int64_t o = 0;
#if defined(__AVX512F__)
  for (; o + 16 <= rows; o += 16, table += 16 * volume) {
    int32_t most = bucket_sixteen(table, o, volume, in, out, end, empty_rows, n_empty);
    largest = most > largest ? most : largest;
  }
#endif
  for (; o < rows; ++o, table += volume) {
    int32_t first = -1;  // all ones until an edge has come
    // Offsets in words of 64: one loop over their bits, so that its end is mispredicted once a row.
    for (int64_t k0 = 0; k0 < volume; k0 += 64) {
      uint64_t present = 0;
      for (int64_t k = k0; k < volume && k < k0 + 64; k += mask_lanes)
        present |= uint64_t(mask_present(table + k, volume - k < mask_lanes ? volume - k : mask_lanes)) << (k - k0);
      for (; present; present &= present - 1) {
        int64_t k = k0 + __builtin_ctzll(present), at = end[k]++;
        int32_t i = table[k];
        largest = i > largest ? i : largest;
        in[at] = i;
        out[at] = int32_t(o) ^ first;
        first = 0;
      }
    }
    if (first) empty_rows[(*n_empty)++] = int32_t(o);
  }
  return largest;
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
