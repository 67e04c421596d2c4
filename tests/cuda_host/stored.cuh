// What a warpgroup of Hopper's tiles does with its sums, as a function: for tests.

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

}  // namespace lattice
