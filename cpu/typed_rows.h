// Rows of any float type as float32, and back with round-to-nearest-even. Included by the files of inner loops only.
#pragma once
#include "inner_loops.h"
#include "simd.h"

namespace lattice::LATTICE_ISA {
namespace {

template <class T>
LATTICE_INLINE void load_row(const void* src, int64_t n, float* dst) {
  auto* p = static_cast<const typename T::Element*>(src);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store(dst + i, T::vector(p + i));
  for (; i < n; ++i) dst[i] = T::scalar(p + i);
}

// Calls f(F32{}), f(F16{}) or f(BF16{}).
template <class F>
LATTICE_INLINE void with_type(Type t, F f) {
  if (t == Type::f32)
    f(F32{});
  else if (t == Type::f16)
    f(F16{});
  else
    f(BF16{});
}
LATTICE_INLINE const void* offset(Type t, const void* p, int64_t elements) {
  return static_cast<const char*>(p) + elements * (t == Type::f32 ? 4 : 2);
}

void load_any(Type t, const void* src, int64_t n, float* dst) {
  with_type(t, [&](auto type) { load_row<decltype(type)>(src, n, dst); });
}

void store_any(Type t, const float* src, int64_t n, void* dst) {
  if (t == Type::f32) {
    memcpy(dst, src, size_t(n) * 4);
    return;
  }
  auto* p = static_cast<uint16_t*>(dst);
  int64_t i = 0;
  if (t == Type::f16) {
    for (; i + lanes <= n; i += lanes) store_f16(p + i, load(src + i));
    for (; i < n; ++i) p[i] = to_f16(src[i]);
  } else {
    for (; i < n; ++i) p[i] = to_bf16(src[i]);
  }
}

}  // namespace
}  // namespace lattice::LATTICE_ISA
