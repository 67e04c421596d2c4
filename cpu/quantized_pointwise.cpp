// Route quantized_pointwise: a kernel of one offset over the same rows, with packed weights: y = bias + x @ W.
//
// words (C_out, stored * bits / 32) uint32, scales and biases (C_out, stored / group_size): see contract_packed. W is
// unpacked into panels in each call, all at once where they are small, else a panel at a time.
#include "contraction.h"

namespace lattice {

array quantized_pointwise(const array& x, const array& words, const array& scales, const array& biases,
                          const MaybeArray& bias, int bits, int group_size, const Epilogue& epilogue, Stream s) {
  return contract_packed("quantized_pointwise", Form::identity, x, words, scales, biases, {}, 0, bias, 1, bits,
                         group_size, epilogue, s);
}

}  // namespace lattice
