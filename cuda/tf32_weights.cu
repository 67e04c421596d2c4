// tf32_weights: float32 weights as the Hopper tiles of float32 read them: along the summed
// channels, which is wgmma's only form of TF32, and rounded to TF32 (PARTS 1), or split
// into the nearest TF32 and the nearest to what is left (PARTS 2).
//
// One block a kernel offset and 32 x 32 entries, which turn in shared memory where w runs
// the other way. Traffic: w once, the result once.

namespace lattice {

// w: element (k, channel, line) at k * w_offset_stride + channel * w_channel_stride +
// line * w_line_stride; out (PARTS * volume, lines, channels), lines and channels with
// padding up to multiples of 4, which is zero: offset k at PARTS * k. 256 threads; thread
// blocks: volume * tiles of lines * tiles of channels.
template <int PARTS>
__device__ __forceinline__ void tf32_weights(const float* w,
                                             const Tf32WeightsSizes& sizes, float* out) {
  __shared__ float turned[32][33];
  const int lines = (sizes.lines + 3) / 4 * 4, channels = (sizes.channels + 3) / 4 * 4;
  const int across = (channels + 31) / 32, down = (lines + 31) / 32;
  const int k = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
  const int first_line = tile / across * 32, first_channel = tile % across * 32;
  const int lane = threadIdx.x & 31;
  const bool along = sizes.w_channel_stride == 1;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int i = (threadIdx.x >> 5) + 8 * n;
    const int line = along ? i : lane, channel = along ? lane : i;
    const bool inside =
        first_line + line < sizes.lines && first_channel + channel < sizes.channels;
    turned[line][channel] =
        inside ? w[(long long)k * sizes.w_offset_stride +
                   (long long)(first_channel + channel) * sizes.w_channel_stride +
                   (long long)(first_line + line) * sizes.w_line_stride]
               : 0.0f;
  }
  __syncthreads();
  // A thread writes four channels of a line.
  const int i = threadIdx.x >> 3, c = 4 * (threadIdx.x & 7);
  const int line = first_line + i, channel = first_channel + c;
  if (line >= lines || channel >= channels) return;
  uint4 high, low;
  auto split = [](float v, unsigned& high, unsigned& low) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(v));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(v - __uint_as_float(high)));
  };
  split(turned[i][c], high.x, low.x), split(turned[i][c + 1], high.y, low.y);
  split(turned[i][c + 2], high.z, low.z), split(turned[i][c + 3], high.w, low.w);
  const long long part = (long long)lines * channels;
  float* to = out + PARTS * k * part + (long long)line * channels + channel;
  *reinterpret_cast<uint4*>(to) = high;
  if constexpr (PARTS == 2) *reinterpret_cast<uint4*>(to + part) = low;
}

}  // namespace lattice
