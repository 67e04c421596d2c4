// Arrays whose first element is not at a multiple of 16 bytes: a slice of a flat array.
//
// A kernel that reads 16 bytes at once holds its copying loop twice, for aligned and for
// other arrays, and picks one from the addresses when it starts: Python does not know
// the address of a lazy array, and makes no aligned copy.

namespace lattice {

// Calls f with whether every array begins at a multiple of 16 bytes, as a constant.
template <typename F, typename... P>
__device__ __forceinline__ void by_alignment(F f, const P*... arrays) {
  if (((reinterpret_cast<unsigned long long>(arrays) | ...) & 15) == 0) {
    f(cuda::std::true_type());
  } else {
    f(cuda::std::false_type());
  }
}

}  // namespace lattice
