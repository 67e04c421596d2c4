// Arrays that begin anywhere: a slice of a flat one need not begin at 16 bytes.
//
// Kernels that read 16 bytes at once have a second body that does not, chosen as they
// start: the host does not know where lazy arrays will stand, and copies none of them.

namespace lattice {

// Calls f with whether all the arrays begin at 16 bytes, as a constant.
template <typename F, typename... P>
__device__ __forceinline__ void by_alignment(F f, const P*... arrays) {
  if (((reinterpret_cast<unsigned long long>(arrays) | ...) & 15) == 0) {
    f(cuda::std::true_type());
  } else {
    f(cuda::std::false_type());
  }
}

}  // namespace lattice
