// Floor division of coordinates by a stride in three ways, for the doctor's experiments:
// what 64-bit arithmetic costs on a chip. No route launches it.
//
//   thread: one number of coords -> its floor division by the stride
//   HOW: 64, a long division; 32, one of int; 0, a shift (the stride is a power of two)
//
// Traffic: 4 bytes read and written a number; it is a copy but for the division.

METAL_FUNC int floor_divided(int value, int stride) {
  const int quotient = value / stride;
  return value % stride < 0 ? quotient - 1 : quotient;
}

METAL_FUNC int floor_divided_long(long value, long stride) {
  const long quotient = value / stride;
  return int(value % stride < 0 ? quotient - 1 : quotient);
}

template <int HOW>
METAL_FUNC void experiment_division(
    const device int* coords,
    const thread ExperimentDivisionSizes& sizes,
    device int* quotients,
    uint index) {
  const int value = coords[index], stride = sizes.stride;
  int quotient = value >> sizes.shift;
  if (HOW == 32) quotient = floor_divided(value, stride);
  if (HOW == 64) quotient = floor_divided_long(value, stride);
  quotients[index] = quotient;
}
