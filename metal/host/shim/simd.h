// Functions over the 32 lanes of a simdgroup and the 4 of a quad.
//
// Every function is one collective: each lane passes a Lane, and when all live lanes
// have come, the function runs once over the array of them. Lanes that are not there
// are null: reductions leave them out, and a shuffle from one gives 0xDB in every byte,
// which is as good as what the GPU gives.
//
// Reductions add as a tree, neighbours first; Metal leaves the order open, so a result
// may differ from the GPU's in the last bits.
#pragma once
#include "math.h"
#include "../runtime/interface.h"

namespace metal {
namespace simd {

template <class T>
struct Lane {
  T in, out, extra;  // `extra`: what fills a shuffle, where a scan starts
  int index;
};

#ifdef MTL_MEASURED
// A function of values that no compiler sees into, for pressure.py.
template <class T>
__attribute__((const)) T met(T x, int index);
#endif

// Runs F()(lanes, mask) once for all the lanes that meet here.
template <class T, class F>
METAL_FUNC T meet(T x, F, int index = 0, T extra = T()) {
#ifdef MTL_MEASURED
  return met(x, index);
#endif
  Lane<T> own{x, x, extra, index};
  mtl_collective(
      [](void** arguments, uint32_t mask) {
        Lane<T>* lanes[32];
        for (int i = 0; i < 32; ++i)
          lanes[i] = (mask >> i) & 1 ? static_cast<Lane<T>*>(arguments[i]) : nullptr;
        F()(lanes, mask);
      },
      &own, mtlhost::kActiveLanes, 0);
  return own.out;
}

template <class T>
METAL_FUNC T absent() {
  T x;
  __builtin_memset(&x, 0xDB, sizeof x);
  return x;
}

template <class T, int Width, class Op>
METAL_FUNC T reduce(T x) {
  return meet(x, [](Lane<T>** lanes, uint32_t) {
    for (int g = 0; g < 32; g += Width) {
      T value[Width];
      bool have[Width];
      for (int i = 0; i < Width; ++i) {
        have[i] = lanes[g + i];
        if (have[i]) value[i] = lanes[g + i]->in;
      }
      for (int step = 1; step < Width; step *= 2)
        for (int i = 0; i + step < Width; i += 2 * step)
          if (have[i + step]) {
            value[i] = have[i] ? Op()(value[i], value[i + step]) : value[i + step];
            have[i] = true;
          }
      for (int i = 0; i < Width; ++i)
        if (lanes[g + i]) lanes[g + i]->out = value[0];
    }
  });
}

template <class T, bool Exclusive, class Op>
METAL_FUNC T scan(T x, T start) {
  auto run = [](Lane<T>** lanes, uint32_t mask) {
    T sum = lanes[__builtin_ctz(mask)]->extra;
    for (int i = 0; i < 32; ++i)
      if (lanes[i]) {
        T next = Op()(sum, lanes[i]->in);
        lanes[i]->out = Exclusive ? sum : next;
        sum = next;
      }
  };
  return meet(x, run, 0, start);
}

// Each lane reads lane Source()(own, k) of its group; outside of it, its own value.
template <class T, int Width, class Source>
METAL_FUNC T shuffle(T x, int k) {
  auto run = [](Lane<T>** lanes, uint32_t) {
    for (int i = 0; i < 32; ++i) {
      if (!lanes[i]) continue;
      int from = Source()(i & (Width - 1), lanes[i]->index);
      const Lane<T>* other = lanes[i];
      if (from >= 0 && from < Width) other = lanes[(i & ~(Width - 1)) + from];
      lanes[i]->out = other ? other->in : absent<T>();
    }
  };
  return meet(x, run, k);
}

// Shuffles up or down; lanes shifted in come from `fill`, seen as the next simdgroup.
template <class T, bool Up>
METAL_FUNC T shuffle_and_fill(T x, T fill, int k) {
  auto run = [](Lane<T>** lanes, uint32_t) {
    for (int i = 0; i < 32; ++i) {
      if (!lanes[i]) continue;
      int from = Up ? i - lanes[i]->index : i + lanes[i]->index;
      const Lane<T>* other = lanes[(from + 32) & 31];
      bool inside = from >= 0 && from < 32;
      lanes[i]->out = !other ? absent<T>() : inside ? other->in : other->extra;
    }
  };
  return meet(x, run, k, fill);
}

struct First {
  template <class T>
  void operator()(Lane<T>** lanes, uint32_t mask) const {
    for (int i = 0; i < 32; ++i)
      if (lanes[i]) lanes[i]->out = lanes[__builtin_ctz(mask)]->in;
  }
};
struct Ballot {
  void operator()(Lane<uint>** lanes, uint32_t) const {
    uint votes = 0;
    for (int i = 0; i < 32; ++i)
      if (lanes[i] && lanes[i]->in) votes |= 1u << i;
    for (int i = 0; i < 32; ++i)
      if (lanes[i]) lanes[i]->out = votes;
  }
};

#define OPERATION(name, expression)          \
  struct name {                              \
    template <class T>                       \
    constexpr T operator()(T a, T b) const { \
      return static_cast<T>(expression);     \
    }                                        \
  };
OPERATION(Sum, a + b)
OPERATION(Product, a* b)
OPERATION(Min, metal::min(a, b))
OPERATION(Max, metal::max(a, b))
OPERATION(And, a& b)
OPERATION(Or, a | b)
OPERATION(Xor, a ^ b)
#undef OPERATION
#define SOURCE(name, expression)                                                 \
  struct name {                                                                  \
    constexpr int operator()(int i, int k) const { return (void)i, expression; } \
  };
SOURCE(At, k)
SOURCE(Exclusive, i ^ k)
SOURCE(Below, i - k)
SOURCE(Above, i + k)
SOURCE(BelowAround, (i - k) & 31)
SOURCE(AboveAround, (i + k) & 31)
#undef SOURCE
}  // namespace simd

#define REDUCTION(name, Op)                  \
  template <class T>                         \
  METAL_FUNC T simd_##name(T x) {            \
    return simd::reduce<T, 32, simd::Op>(x); \
  }                                          \
  template <class T>                         \
  METAL_FUNC T quad_##name(T x) {            \
    return simd::reduce<T, 4, simd::Op>(x);  \
  }
REDUCTION(sum, Sum)
REDUCTION(product, Product)
REDUCTION(min, Min)
REDUCTION(max, Max)
REDUCTION(and, And)
REDUCTION(or, Or)
REDUCTION(xor, Xor)
#undef REDUCTION

#define SCAN(name, exclusive, Op, start)                    \
  template <class T>                                        \
  METAL_FUNC T simd_prefix_##name(T x) {                    \
    return simd::scan<T, exclusive, simd::Op>(x, T(start)); \
  }
SCAN(inclusive_sum, false, Sum, 0)
SCAN(exclusive_sum, true, Sum, 0)
SCAN(inclusive_product, false, Product, 1)
SCAN(exclusive_product, true, Product, 1)
#undef SCAN

#define SHUFFLE(name, Source)                        \
  template <class T>                                 \
  METAL_FUNC T simd_##name(T x, ushort k) {          \
    return simd::shuffle<T, 32, simd::Source>(x, k); \
  }                                                  \
  template <class T>                                 \
  METAL_FUNC T quad_##name(T x, ushort k) {          \
    return simd::shuffle<T, 4, simd::Source>(x, k);  \
  }
SHUFFLE(shuffle, At)
SHUFFLE(broadcast, At)
SHUFFLE(shuffle_xor, Exclusive)
SHUFFLE(shuffle_up, Below)
SHUFFLE(shuffle_down, Above)
SHUFFLE(shuffle_rotate_up, BelowAround)
SHUFFLE(shuffle_rotate_down, AboveAround)
#undef SHUFFLE

template <class T>
METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort k) {
  return simd::shuffle_and_fill<T, true>(x, fill, k);
}
template <class T>
METAL_FUNC T simd_shuffle_and_fill_down(T x, T fill, ushort k) {
  return simd::shuffle_and_fill<T, false>(x, fill, k);
}
template <class T>
METAL_FUNC T simd_broadcast_first(T x) {
  return simd::meet(x, simd::First());
}

struct simd_vote {
  using vote_t = ulong;
  vote_t votes;
  constexpr explicit simd_vote(vote_t x = 0) : votes(x) {}
  constexpr explicit operator vote_t() const { return votes; }
  constexpr bool all() const { return votes == 0xffffffffu; }
  constexpr bool any() const { return votes != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool x) {
  return simd_vote(simd::meet<uint>(x, simd::Ballot()));
}
METAL_FUNC simd_vote simd_active_threads_mask() {
  return simd_vote(simd::meet<uint>(1u, simd::Ballot()));
}
METAL_FUNC bool simd_any(bool x) { return simd::meet<uint>(x, simd::Ballot()) != 0; }
METAL_FUNC bool simd_all(bool x) { return simd::meet<uint>(!x, simd::Ballot()) == 0; }
METAL_FUNC bool simd_is_first() {
  uint mask = simd::meet<uint>(1u, simd::Ballot());
  return uint(__builtin_ctz(mask)) == mtl_thread()->thread_index_in_simdgroup;
}
METAL_FUNC bool simd_is_helper_thread() { return false; }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return ushort(mtl_thread()->thread_index_in_simdgroup);
}

}  // namespace metal

using metal::__metal_get_thread_index_in_simdgroup;
