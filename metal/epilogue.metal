// What follows the sums of a contraction, four channels of a row at a time, in float32:
//
//   y = act((sum - mean) / sqrt(var + eps) * scale + shift + residual)
//
// Rounded once, where a kernel writes. Each array may be null. A norm is read as it is
// stored, so that nothing is computed, or kept, of it before. Traffic: the residual once;
// the rest from the caches. Reads matrix_tiles.metal and
// activations.metal too.

// P, which is not deduced: a null pointer has none.
template <typename P>
struct Stated {
  using Type = P;
};
template <typename P>
using Given = typename Stated<P>::Type;

// EPS: the bits of what is added to the variance.
template <typename T, int ACTIVATION, typename P, int EPS>
struct Epilogue {
  const device P* shift;
  const device P* scale;
  const device float* mean;
  const device float* var;
  const device T* residual;

  // Finishes the sums of the `left` first of four channels, from c on, of a row of C_y.
  template <typename INDEX>
  METAL_FUNC void finish(
      thread float4& sums, INDEX row, int c_y, int c, int left) const thread {
    Four<T> added;
    if (residual) fetch(added, residual + (row * INDEX(c_y) + INDEX(c)), left);
    for (int j = 0; j < 4; ++j) {
      if (j >= left) break;
      float v = sums[j];
      if (mean) v -= mean[c + j];
      if (var) v *= rsqrt(var[c + j] + as_type<float>(EPS));
      if (scale) v *= float(scale[c + j]);
      if (shift) v += float(shift[c + j]);
      if (residual) v += float(added.v[j]);
      sums[j] = activated_by_code<ACTIVATION>(v);
    }
  }
};
