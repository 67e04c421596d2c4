// What a warpgroup of Hopper's tiles does with its sums, as functions: for tests.

namespace lattice {

template <typename T, int BN, int REGISTERS, typename OUT, typename AFTER>
void stored(Sum<T> (&sums)[1][BN / 2], const AFTER& after, const float2* kept, const int* rows,
            OUT* y, int first, int n_out, int first_column, int c_out) {
  SortedResult<T, BN, REGISTERS, 1, OUT, AFTER> result = {
      after, kept, rows, y, n_out, 0, c_out};
  result.begin(first, first_column);
  result.ahead();
  result.store(sums[0], 0);
}

// A block's tiles of 64 rows, one after another, and statistics of what is written.
template <typename T, int BN, typename AFTER>
void summed(const float* partial, const AFTER& after, const int* rows, int n_out, int c_out,
            T* y) {
  __shared__ __align__(8) float about[BN];
  __shared__ __align__(8) unsigned char memory[4 * BN * sizeof(float2)];
  const int column_tiles = (c_out + BN - 1) / BN, warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32, first_column = blockIdx.x % column_tiles * BN;
  TileMoments<AFTER, T, BN, 128> moments;
  for (int tile = blockIdx.x; tile < (n_out + 63) / 64 * column_tiles; tile += gridDim.x) {
    const int first = tile / column_tiles * 64;
    float sums[BN / 2];  // as wgmma leaves them
    for (int i = 0; i < BN / 2; ++i) {
      const int row = first + warp * 16 + lane / 4 + i / 2 % 2 * 8;
      const int column = first_column + i / 4 * 8 + lane % 4 * 2 + i % 2;
      sums[i] = row < n_out && column < c_out ? partial[row * c_out + column] : 0.0f;
    }
    SortedResult<T, BN, 64, 1, T, AFTER> result = {after, nullptr, rows, y, n_out, 0, c_out};
    result.begin(first, first_column);
    result.store(sums, 0);
    moments.begin(about, sums, min(64, n_out - first));
    moments.add(about, sums, result.row[0]);
  }
  moments.write(after, about, memory, blockIdx.x / column_tiles, first_column, c_out);
}

}  // namespace lattice
