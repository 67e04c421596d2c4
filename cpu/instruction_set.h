// Which instruction set's loops run: the best that the processor has, or the one that MLX_LATTICE_CPU_ISA names.
#pragma once
#include <string>
#include <vector>

namespace lattice {

// The name of the one in use, and of all that this build and processor have, the best first.
const char* isa();
std::vector<std::string> isas();
// Takes another one (for tests); false where the processor lacks it.
bool set_isa(const char* name);

}  // namespace lattice
