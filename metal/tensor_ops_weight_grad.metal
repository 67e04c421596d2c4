// dW[k] = sum over the edges (i, o, k) of x[i]^T dy[o] through Metal 4 TensorOps: the
// tiles of grouped_gemm.metal on the neural accelerators of M5 and later.
//
//   threadgroup: 128 (64, 32, 16) x 64 (32) channels of one dW[k], the edges of one
//     range of output rows; simdgroup: 64 (48, 32, 16) x 32
//     for 32 edges: x[i] [16, 64], dy[o] [16, 32] -> registers -> 16 x 32 x 16 -> sums
//
// As in tensor_ops.metal, which it reads, nothing is staged: lanes read both operands
// from device memory, four lanes a whole line. Where a tile has fewer parts than there
// are simdgroups, these take edges in turn, 32 each, and their sums are added in order
// at the end: that alone passes through threadgroup memory. Ranges, traffic and
// determinism are those of grouped_gemm.metal, whose RowRange it takes.

// The part of a tile that a simdgroup has: TALL x 32. Which channel stands in which line
// of a fragment is free, but where channels end within the part.
template <typename T, int TALL, bool FAR = true>
struct TensorGrad {
  using Index = typename IndexOf<FAR>::Type;
  static constant constexpr int PARTS = TALL / 16;
  float sums[PARTS][16];

  METAL_FUNC void start() thread {
    UNROLL for (int i = 0; i < PARTS; ++i)
      UNROLL for (int j = 0; j < 16; ++j) sums[i][j] = 0.0f;
  }

  // Reads the rows of an edge that a lane holds, and of the one eight further on, from
  // channel `start` on: of COUNT fragments four each, `apart` from one to the next.
  template <int COUNT, bool WHOLE>
  METAL_FUNC static void gather(
      thread T* to, const device T* features, int channels, const thread int* from,
      int start, int apart) {
    UNROLL for (int h = 0; h < 2; ++h)
      UNROLL for (int i = 0; i < COUNT; ++i) {
        thread T* four = to + 8 * i + 4 * h;
        UNROLL for (int j = 0; j < 4; ++j) four[j] = T(0);
        const int at = start + apart * i;
        if (from[h] >= 0)
          read_four<T, WHOLE>(
              four, features + (Index(from[h]) * Index(channels) + at), channels - at);
      }
  }

  // Multiplies up to 32 edges, of which a lane has one: its rows, or -1.
  template <bool WHOLE>
  METAL_FUNC void multiply(
      const device T* x, const device T* dy, int in_row, int out_row, int left, int top,
      int side, int c_in, int c_out, const thread FragmentPlace& place) thread {
    const int high = top + place.column * (WHOLE ? PARTS : 1);
    UNROLL for (int f = 0; f < 2; ++f) {
      if (16 * f >= left) break;
      int from[2], to[2];
      UNROLL for (int h = 0; h < 2; ++h) {
        const ushort edge = ushort(16 * f + 8 * h + place.row);
        from[h] = simd_shuffle(in_row, edge);
        to[h] = simd_shuffle(out_row, edge);
      }
      T a[PARTS * 8], b[16];
      gather<2, WHOLE>(b, dy, c_out, to, side + 2 * place.column, 4);
      gather<PARTS, WHOLE>(a, x, c_in, from, high, WHOLE ? 4 : 16);
      UNROLL for (int i = 0; i < PARTS; ++i) {
        if (!WHOLE && top + 16 * i >= c_in) break;
        multiply_fragments<T, true, false>(sums[i], a + 8 * i, b);
      }
    }
  }
};

// Threadgroups (tiles of channels, unit) as those of grouped_gemm; memory: 512
// floats for each simdgroup but those whose sums are written, if there are any.
template <
    typename T, typename OUT, int HEIGHT, int WIDTH, int TALL, bool FAR>
METAL_FUNC void tensor_ops_weight_grad(
    const device T* x,
    const device T* dy,
    const device int* starts,
    const device int* edges,
    const thread WeightGradSizes& sizes,
    device OUT* dw,
    threadgroup float* memory,
    uint3 group,
    int simdgroup,
    int lane) {
  constexpr int BESIDE = WIDTH / TENSOR_WIDTH, PARTS = HEIGHT / TALL * BESIDE;
  constexpr int SHARES = SIMDGROUPS / PARTS;
  const int volume = sizes.volume, c_in = sizes.c_in, c_out = sizes.c_out;
  const GradPlace at(group, sizes.first, volume, c_in, c_out, HEIGHT, WIDTH);
  const RowRange<size_t> range(
      starts, edges, at.k, at.split, sizes.splits, sizes.n_out, lane);
  const int part = simdgroup % PARTS, share = simdgroup / PARTS;
  const int top = at.row + TALL * (part / BESIDE);
  const int side = at.column + TENSOR_WIDTH * (part % BESIDE);
  const bool inside = top < c_in && side < c_out;
  const bool whole = top + TALL <= c_in && side + TENSOR_WIDTH <= c_out;
  const FragmentPlace place(lane);
  TensorGrad<T, TALL, FAR> own;
  own.start();
  const int count = inside ? int(range.stop - range.first) : 0;
  const device int* walk = edges + 3 * range.first;
  int edge = LANES * share + lane;
  int in_row = edge < count ? walk[3 * edge] : -1;
  int out_row = edge < count ? walk[3 * edge + 1] : -1;
  for (int e = LANES * share; e < count; e += LANES * SHARES) {
    const int from = in_row, to = out_row;
    // The next edges are looked up while these are multiplied.
    edge += LANES * SHARES;
    in_row = edge < count ? walk[3 * edge] : -1;
    out_row = edge < count ? walk[3 * edge + 1] : -1;
    if (whole)
      own.template multiply<true>(
          x, dy, from, to, count - e, top, side, c_in, c_out, place);
    else
      own.template multiply<false>(
          x, dy, from, to, count - e, top, side, c_in, c_out, place);
  }

  if (SHARES > 1) {
    UNROLL for (int i = 0; i < TALL / 16; ++i) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (share > 0)
        UNROLL for (int j = 0; j < 16; ++j)
          memory[512 * (simdgroup - PARTS) + LANES * j + lane] = own.sums[i][j];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (share == 0)
        for (int s = 0; s < SHARES - 1; ++s)
          UNROLL for (int j = 0; j < 16; ++j)
            own.sums[i][j] += memory[512 * (part + PARTS * s) + LANES * j + lane];
    }
  }
  if (share > 0 || !inside) return;
  dw += size_t(at.unit) * c_in * c_out;
  UNROLL for (int i = 0; i < TALL / 16; ++i)
    UNROLL for (int h = 0; h < 2; ++h) {
      const int line = place.row + 8 * h;
      const int r = top + (whole ? interleaved<TALL / 16>(line) + 4 * i : line + 16 * i);
      if (r >= c_in) continue;
      UNROLL for (int g = 0; g < 2; ++g) {
        const int c = side + 2 * place.column + 4 * g;
        if (c >= c_out) continue;
        float4 sums;
        UNROLL for (int j = 0; j < 4; ++j) sums[j] = own.sums[i][8 * g + 4 * h + j];
        write_sums(dw + size_t(r) * c_out + c, sums, c_out - c);
      }
    }
}
