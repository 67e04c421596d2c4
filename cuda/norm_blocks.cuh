// What the passes of a norm by channel share: the rows of a block, what normalises the
// channels of a thread, and sums over a block's threads in a fixed order. Needs
// alignment.cuh, channels.cuh and activations.cuh.

namespace lattice {

// Floats that kernels are told, in this order.
enum NormNumber { NORM_EPS, NORM_MOMENTUM, NORM_SLOPE };
constexpr int NORM_THREADS = 256;  // of a block that shares its rows with others
// Rows whose reads are on their way at once, of one array and of several.
constexpr int ONE_AHEAD = 4, SEVERAL_AHEAD = 2;

// Channels of x, of a residual, and of a gradient; and the segment of their row.
template <typename T, int EACH, int COUNT>
struct RowChannels {
  Channels<T, EACH> of[COUNT];
  int segment = 0;
};

// The rows of a block: those of a segment's piece, or an equal share of all.
struct BlockRows {
  int first, stop;

  __device__ __forceinline__ BlockRows(int first, int stop) : first(first), stop(stop) {}
  __device__ __forceinline__ BlockRows(const int* bounds, int rows) {
    const int block = blockIdx.x;
    const int each = (rows + (int)gridDim.x - 1) / (int)gridDim.x;
    first = bounds ? bounds[block] : min(rows, block * each);
    stop = bounds ? bounds[block + 1] : min(rows, first + each);
  }
};

// The first of the channels of this thread.
template <int EACH>
__device__ __forceinline__ int channel_of_thread() {
  return (int)(blockIdx.y * blockDim.x + threadIdx.x) * EACH;
}

// What normalises EACH channels of a segment: its line of each array.
template <int EACH>
struct ChannelFit {
  float mean[EACH], rstd[EACH], scale[EACH], bias[EACH];

  template <typename P>
  __device__ __forceinline__ void load(const float* means, const float* vars,
                                       const P* weight, const P* shift, float eps,
                                       long long segment, int channel, int channels) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const long long at = segment * channels + channel + j;
      mean[j] = means[at];
      rstd[j] = rsqrtf(vars[at] + eps);
      scale[j] = weight ? rstd[j] * static_cast<float>(weight[at]) : rstd[j];
      bias[j] = shift ? static_cast<float>(shift[at]) : 0.0f;
    }
  }
  __device__ __forceinline__ float value(int j, float x) const {
    return (x - mean[j]) * scale[j] + bias[j];
  }
};

// The sum over LANES neighbouring threads, a power of two, in each of them.
template <int LANES>
__device__ __forceinline__ float add_lanes(float v) {
#pragma unroll
  for (int by = LANES / 2; by; by /= 2) v += __shfl_xor_sync(~0u, v, by);
  return v;
}

// Adds the threads of a block that have the same channels, in a fixed order. Thread row
// 0 has the sums then.
template <int EACH>
__device__ __forceinline__ void add_thread_rows(float (&a)[EACH], float (&b)[EACH]) {
  __shared__ float kept[2 * EACH * NORM_THREADS];
  const int across = blockDim.x, down = blockDim.y;
  const int thread = threadIdx.y * across + threadIdx.x;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    kept[j * NORM_THREADS + thread] = a[j];
    kept[(EACH + j) * NORM_THREADS + thread] = b[j];
  }
  for (int half = NORM_THREADS / 2; half; half /= 2) {
    __syncthreads();
    if ((int)threadIdx.y >= half || (int)threadIdx.y + half >= down) continue;
#pragma unroll
    for (int j = 0; j < 2 * EACH; ++j) {
      float* sums = kept + j * NORM_THREADS + thread;
      sums[0] += sums[half * across];
    }
  }
  if (threadIdx.y == 0) {
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      a[j] = kept[j * NORM_THREADS + thread];
      b[j] = kept[(EACH + j) * NORM_THREADS + thread];
    }
  }
}

// One block's line of the partials: rows, and two values a channel.
template <int EACH>
__device__ __forceinline__ void write_partials(float* partials, int rows, int channel,
                                               int channels, const float (&a)[EACH],
                                               const float (&b)[EACH]) {
  if (threadIdx.y != 0 || channel >= channels) return;
  float* to = partials + (long long)blockIdx.x * 3 * channels + channel;
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    to[j] = (float)rows;
    to[channels + j] = a[j];
    to[2 * channels + j] = b[j];
  }
}

// Running statistics of a channel, if there are any, and how far they move. Read before
// what they are moved by is known, so that nobody waits for them.
struct Running {
  float mean = 0.0f, var = 0.0f, by;
  bool there;

  __device__ __forceinline__ Running(const float* means, const float* vars,
                                     const float* norm_numbers, long long at, bool inside)
      : by(norm_numbers[NORM_MOMENTUM]), there(means != nullptr) {
    if (there && inside) mean = means[at], var = vars[at];
  }
};

// Writes the statistics of a channel, from its mean and the sum of squares about it, and
// running ones moved by them. One row moves the mean alone; without running ones, moved are
// the mean and the unbiased variance.
__device__ __forceinline__ void write_statistics(float rows, float m, float squares,
                                                 const Running& old, long long at,
                                                 float* mean, float* var,
                                                 float* moved_mean, float* moved_var) {
  const float v = rows > 0.0f ? squares / rows : 0.0f;
  const float unbiased = rows > 1.0f ? squares / (rows - 1.0f) : v;
  mean[at] = m;
  var[at] = v;
  moved_mean[at] = old.there ? (1.0f - old.by) * old.mean + old.by * m : m;
  if (old.there && !(rows > 1.0f)) {
    moved_var[at] = old.var;
  } else {
    moved_var[at] = old.there ? (1.0f - old.by) * old.var + old.by * unbiased : unbiased;
  }
}

// Calls use(load(row), row) for this thread's rows of a block; what several load is on
// its way at once. order: the row of each place, or null.
template <int AHEAD, typename L, typename U>
__device__ __forceinline__ void each_block_row(const BlockRows& rows, const int* order,
                                               L load, U use) {
  const int down = blockDim.y;
  for (int at = rows.first + (int)threadIdx.y; at < rows.stop; at += AHEAD * down) {
    decltype(load(0ll)) values[AHEAD];
    long long row[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int place = at + a * down;
      row[a] = place >= rows.stop ? -1 : order ? order[place] : place;
      if (row[a] >= 0) values[a] = load(row[a]);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (row[a] >= 0) use(values[a], row[a]);
    }
  }
}

}  // namespace lattice
