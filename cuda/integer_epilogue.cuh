// What follows the int32 sums of a contraction of int8:
//
//   v = act(float(sum) * scale + shift + residual), each rounded by itself, in that order;
//   y = v in the dtype of the output, or int8: v * out_inverse, rounded half to even,
//   from -127 to 127.
//
// Scale and shift by channel; a residual of floats, or of int8 times residual_scale. All
// but the scale may be null. No product and sum are fused, so that every kernel, on every
// backend, gives the same bits. Reads alignment.cuh, channels.cuh, epilogue.cuh and
// tiles.cuh too.

namespace lattice {

// ACTIVATION: the code of one; SHIFTED, ADDED: whether there are a shift and a
// residual, of dtype R.
template <int ACTIVATION, bool SHIFTED, bool ADDED, typename R>
struct IntegerEpilogue {
  static constexpr bool FINISHES = true;
  static constexpr bool HAS_RESIDUAL = ADDED;
  using Residual = R;
  const float* scale;
  const float* shift;
  const R* residual;
  const float* residual_scale;
  const float* out_inverse;

  __device__ __forceinline__ static float activate(float v) {
    if constexpr (ACTIVATION == 1) return v <= 0.0f ? 0.0f : v;  // a NaN stays
    else return activated_by_code<ACTIVATION>(v);
  }

  // Scales and shifts of EACH channels from `channel` on; see keep_channels.
  template <int EACH, bool ALIGNED>
  __device__ __forceinline__ void load(float (&a)[EACH], float (&b)[EACH], int channel,
                                       cuda::std::bool_constant<ALIGNED> aligned) const {
    const auto scales = load_channels<EACH>(scale + channel, aligned);
    Channels<float, EACH> shifts = {};
    if constexpr (SHIFTED) shifts = load_channels<EACH>(shift + channel, aligned);
#pragma unroll
    for (int j = 0; j < EACH; ++j) a[j] = scales.v[j], b[j] = shifts.v[j];
  }

  // What the numbers of an int8 residual are multiplied by.
  __device__ __forceinline__ float step() const {
    if constexpr (ADDED && is_integer<R>) return __ldg(residual_scale);
    else return 1.0f;
  }

  // of: scale and shift of the channel.
  __device__ __forceinline__ float finish(int sum, float2 of, R added, float step) const {
    float v = __fmul_rn(__int2float_rn(sum), of.x);
    if constexpr (SHIFTED) v = __fadd_rn(v, of.y);
    if constexpr (ADDED) {
      const float more = static_cast<float>(added);
      v = __fadd_rn(v, is_integer<R> ? __fmul_rn(more, step) : more);
    }
    return activate(v);
  }
};

// What follows sums of a part of the offsets: nothing.
struct PartialSums {
  static constexpr bool FINISHES = false, HAS_RESIDUAL = false;
  using Residual = signed char;
  const void* none;
};

// v * inverse as int8 in the lowest byte; what stands above it is arbitrary.
__device__ __forceinline__ unsigned quantised(float v, float inverse) {
  const float of = fminf(fmaxf(__fmul_rn(v, inverse), -127.0f), 127.0f);
  // The sum's unit is 1: it is rounded half to even.
  return __float_as_uint(__fadd_rn(of, 12582912.0f));
}

// The lowest bytes of four words.
__device__ __forceinline__ unsigned low_bytes(unsigned a, unsigned b, unsigned c,
                                              unsigned d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// What int8 outputs are multiplied by.
template <typename OUT, typename AFTER>
__device__ __forceinline__ float inverse_of(const AFTER& after) {
  if constexpr (is_integer<OUT>) return __ldg(after.out_inverse);
  else return 1.0f;
}

// Finishes EACH sums of a row and writes them. kept: scale and shift of these channels;
// added: their residual; step and inverse: what `after` has of them.
template <int EACH, typename OUT, typename AFTER>
__device__ __forceinline__ void store_finished(
    const int (&sums)[EACH], const AFTER& after, const float2* kept,
    const Channels<typename AFTER::Residual, EACH>& added, float step, float inverse,
    OUT* to) {
  Channels<OUT, EACH> out;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const float v = after.finish(sums[j], kept[j], added.v[j], step);
    if constexpr (is_integer<OUT>) out.v[j] = static_cast<OUT>(quantised(v, inverse));
    else out.v[j] = static_cast<OUT>(v);
  }
  *reinterpret_cast<Channels<OUT, EACH>*>(to) = out;
}

// The same with what it reads, or sums alone where nothing follows. at: of the first
// channel, in y and in the residual.
template <int EACH, typename OUT, typename AFTER>
__device__ __forceinline__ void store_integers(const int (&sums)[EACH], const AFTER& after,
                                               const float2* kept, long long at, OUT* to) {
  if constexpr (!AFTER::FINISHES) {
    store_channels<EACH>(to, sums);
  } else {
    Channels<typename AFTER::Residual, EACH> added = {};
    if constexpr (AFTER::HAS_RESIDUAL) {
      added = load_channels<EACH>(after.residual + at, cuda::std::false_type());
    }
    store_finished(sums, after, kept, added, after.step(), inverse_of<OUT>(after), to);
  }
}

}  // namespace lattice
