// dW[k] = sum over the edges (i, o, k) of x[i]^T dy[o]: route relation_traversal's
// weight_grad, over kernel-major edges, deterministic.
//
//   edges of k, cut into P parts -> partial (P, K, blocks of 4 inputs, 4, C_out)
//   thread (4 outputs, part, k, 4 inputs): walks its edges, 4 x 4 sums in registers
//   then one thread an element adds its P partials in order
//
// Any dtype, channels and groups. No atomics: parts and their order depend on sizes
// only. Traffic per edge: 4 features and 4 gradients for 16 multiply-adds, from cache;
// partials are written and read once, P x K x C_in x C_out x 4 bytes. The floor of the
// pass.

#include <metal_stdlib>
using namespace metal;

// The edges of one part: starts are those of the offsets, (K + 1).
struct EdgePart {
  size_t first, stop;

  METAL_FUNC EdgePart(const device int* starts, int k, int part, int parts) thread {
    size_t start = size_t(starts[k]), count = size_t(starts[k + 1]) - start;
    first = start + count * part / parts;
    stop = start + count * (part + 1) / parts;
  }
};

// sizes: first unit, parts, K, groups, inputs and outputs a group. A unit is (part, k,
// block of 4 inputs), the last fastest.
template <typename T>
METAL_FUNC void weight_grad_parts(
    const device T* x,
    const device T* dy,
    const device int* starts,
    const device int* edges,
    const constant int* sizes,
    device float* partial,
    uint2 at) {
  const int parts = sizes[1], volume = sizes[2], groups = sizes[3];
  const int c_in = sizes[4], c_out = sizes[5];
  const int in_blocks = (c_in + 3) / 4, out_blocks = (c_out + 3) / 4;
  const size_t unit = size_t(sizes[0]) + at.y;
  const int a = 4 * int(unit % in_blocks), k = int(unit / in_blocks % volume);
  const int group = int(at.x) / out_blocks, b = 4 * (int(at.x) % out_blocks);
  const int last_a = min(3, c_in - 1 - a), last_b = min(3, c_out - 1 - b);
  const EdgePart part(starts, k, int(unit / in_blocks / volume), parts);
  float4 sums[4] = {float4(0), float4(0), float4(0), float4(0)};
  for (size_t e = part.first; e < part.stop; ++e) {
    const device T* from = x + (size_t(edges[3 * e]) * groups + group) * c_in + a;
    const device T* to = dy + (size_t(edges[3 * e + 1]) * groups + group) * c_out + b;
    // Channels beyond the last repeat it: never stored.
    float4 g = float4(
        float(to[0]), float(to[min(1, last_b)]), float(to[min(2, last_b)]),
        float(to[last_b]));
    for (int j = 0; j < 4; ++j) sums[j] += float(from[min(j, last_a)]) * g;
  }
  const int width = groups * c_out;
  device float* to = partial + (size_t(at.y) * 4) * width + group * c_out + b;
  for (int j = 0; j < 4; ++j)
    for (int c = 0; c < 4; ++c)
      if (c <= last_b) to[size_t(j) * width + c] = j <= last_a ? sums[j][c] : 0.0f;
}

// One thread an element of dW (K x inputs a group, C_out), from a row on. sizes: parts,
// K, inputs a group, inputs of a partial, C_out, first row.
template <typename T>
METAL_FUNC void add_parts(
    const device float* partial, const constant int* sizes, device T* dw, uint2 at) {
  const int parts = sizes[0], volume = sizes[1], c_in = sizes[2], padded = sizes[3],
            c_out = sizes[4];
  const int row = sizes[5] + int(at.y), k = row / c_in, a = row % c_in;
  float sum = 0;
  for (int p = 0; p < parts; ++p)
    sum += partial[((size_t(p) * volume + k) * padded + a) * c_out + at.x];
  dw[size_t(at.y) * c_out + at.x] = T(sum);
}
