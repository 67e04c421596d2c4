// Route quantized_traversal: packed weights over the kernel-major edges (E, 3) of any relation, as in grouped_gemm.
//
// words (K, C_out, stored * bits / 32) uint32, scales and biases (K, C_out, stored / group_size): see contract_packed.
#include "contraction.h"

namespace lattice {

array quantized_traversal(const array& x, const array& words, const array& scales, const array& biases,
                          const array& edges, int n_out, const MaybeArray& bias, int groups, int bits, int group_size,
                          const Epilogue& epilogue, Stream s) {
  return contract_packed("quantized_traversal", Form::edges, x, words, scales, biases, {edges}, n_out, bias, groups,
                         bits, group_size, epilogue, s);
}

}  // namespace lattice
