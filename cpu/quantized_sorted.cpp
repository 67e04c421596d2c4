// Route quantized_sorted: packed weights over the neighbour table (N_out, K), tiles as in blocked_gather_gemm.
//
// words (K, C_out, stored * bits / 32) uint32, scales and biases (K, C_out, stored / group_size): see contract_packed.
// The CPU takes rows as they are: a tile groups its edges by offset, which is what sorted rows are for on GPUs.
#include "contraction.h"

namespace lattice {

array quantized_sorted(const array& x, const array& words, const array& scales, const array& biases, const array& table,
                       const MaybeArray& bias, int groups, int bits, int group_size,
                       const Epilogue& epilogue, Stream s) {
  return contract_packed("quantized_sorted", Form::table, x, words, scales, biases, {table}, 0, bias, groups, bits,
                         group_size, epilogue, s);
}

}  // namespace lattice
