// The weights of a stage, 128 bytes of summed channels by BN output channels of one offset:
// how producer threads copy them, and a warpgroup multiplies by them. Needs tiles.cuh and
// wgmma.cuh.

namespace lattice {

// Weights that run along the output channels and are 32 wide have rows of 64 bytes.
template <int BN, bool TRANSPOSED>
constexpr int WEIGHT_SWIZZLE = !TRANSPOSED && BN == 32 ? 64 : 128;

// What one of PRODUCERS threads copies: nothing of packed weights.
template <typename W, int BN, int PRODUCERS, bool TRANSPOSED, int TAIL>
struct WeightCopies {
  const char* base = nullptr;
  long long stage = 0;
  template <typename... A>
  __device__ __forceinline__ WeightCopies(const A&...) {}
};

// Floats run along the summed channels (TRANSPOSED), or along the output channels: then a
// row of them is copied in parts whose chunks are a power of two.
template <typename T, int BN, int PRODUCERS, bool TRANSPOSED, int TAIL>
struct WeightCopies<const T*, BN, PRODUCERS, TRANSPOSED, TAIL> {
  static constexpr int DEPTH = 128 / sizeof(T);  // summed channels of a stage
  static constexpr int SWIZZLE = WEIGHT_SWIZZLE<BN, TRANSPOSED>;
  static constexpr int HEIGHT = PRODUCERS / 8;  // lines down a stage; 8 threads copy one
  static constexpr int WIDTH = BN / 8 & -(BN / 8), PARTS = BN / 8 / WIDTH;
  static constexpr int HIGH = PRODUCERS / WIDTH;
  const char* base;       // of the thread's first line and chunk
  long long step, stage;  // bytes to its next line, and to the next stage
  int left;               // output channels from that line, or chunk, on

  __device__ __forceinline__ WeightCopies(const T* w, long long line, int first_column,
                                          int c_out, int thread) {
    if constexpr (TRANSPOSED) {
      left = c_out - first_column - thread / 8;
      base = reinterpret_cast<const char*>(w) + (first_column + thread / 8) * line +
             thread % 8 * 16;
      step = HEIGHT * line, stage = 128;
    } else {
      const int column = first_column + thread % WIDTH * 8;
      left = c_out - column;
      base = reinterpret_cast<const char*>(w) + thread / WIDTH * line + column * sizeof(T);
      step = HIGH * line, stage = DEPTH * line;
    }
  }

  // Copies the stage at `from` to `b`. channels: summed ones from the stage's first on.
  template <typename ALIGNED>
  __device__ __forceinline__ void copy(unsigned b, const char* from, int channels,
                                       int thread, ALIGNED aligned) const {
    if constexpr (TRANSPOSED) {
      const int chunk = thread & 7, row = thread >> 3;
      const unsigned to = b + row * 128 + ((chunk ^ (row & 7)) << 4);
      const bool inside = !TAIL || chunk * int(16 / sizeof(T)) < channels;
#pragma unroll
      for (int i = 0; i < BN / HEIGHT; ++i) {
        copy16(to + i * (HEIGHT * 128), from + i * step, inside && HEIGHT * i < left,
               aligned);
      }
    } else {
      const int column = thread % WIDTH, row = thread / WIDTH;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
#pragma unroll
        for (int i = 0; i < DEPTH / HIGH; ++i) {
          const int depth = row + HIGH * i;
          copy16(b + place_across<SWIZZLE>(depth, column + part * WIDTH),
                 from + i * step + part * WIDTH * 16,
                 part * WIDTH * 8 < left && (!TAIL || depth < channels), aligned);
        }
      }
    }
  }
};

// Adds the products of 64 rows of 128 bytes at `a` and the weights of a stage at `b`: of
// the first SLICES of its four slices of 32 bytes.
template <typename T, int BN, bool TRANSPOSED, int SLICES>
__device__ __forceinline__ void multiply_slices(Sum<T> (&sums)[BN / 2], unsigned a,
                                                unsigned b) {
#pragma unroll
  for (int q = 0; q < SLICES; ++q) {
    const auto rows_of_a = operand<128>(a + q * 32, 16, 1024);
    if constexpr (TRANSPOSED) {
      wgmma<T, BN, false, false>(sums, rows_of_a, operand<128>(b + q * 32, 16, 1024));
    } else if constexpr (WEIGHT_SWIZZLE<BN, TRANSPOSED> == 64) {
      wgmma<T, BN, false, true>(sums, rows_of_a, operand<64>(b + q * 1024, 4096, 512));
    } else {
      wgmma<T, BN, false, true>(sums, rows_of_a, operand<128>(b + q * 2048, 8192, 1024));
    }
  }
}

// The same of a whole stage, or of the TAIL slices that an offset's last stage has.
template <typename T, int BN, bool TRANSPOSED, int TAIL>
__device__ __forceinline__ void multiply_stage(Sum<T> (&sums)[BN / 2], unsigned a,
                                               unsigned b, bool is_last) {
  if (TAIL % 4 && is_last) {
    multiply_slices<T, BN, TRANSPOSED, TAIL>(sums, a, b);
  } else {
    multiply_slices<T, BN, TRANSPOSED, 4>(sums, a, b);
  }
}

}  // namespace lattice
