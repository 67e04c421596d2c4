// The choice of the instruction set: the best that the processor has, or what MLX_LATTICE_CPU_ISA names.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernel_table.h"

namespace lattice {

namespace baseline {
extern const Kernels table;
}
#ifdef LATTICE_X86
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

struct Candidate {
  const Kernels* table;
  bool runs;
};

// The best that runs here, or the wanted one; nullptr where that does not. `names` gets all that run.
const Kernels* find(const char* wanted, std::string* names = nullptr) {
#ifdef LATTICE_X86
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  const Candidate candidates[] = {{&avx512::table, has_avx512}, {&avx2::table, has_avx2}, {&baseline::table, true}};
#else
  const Candidate candidates[] = {{&baseline::table, true}};
#endif
  for (auto& c : candidates)
    if (c.runs && names) *names += (names->empty() ? "" : ", ") + std::string(c.table->name);
  for (auto& c : candidates)
    if (c.runs && (!wanted || !std::strcmp(wanted, c.table->name))) return c.table;
  return nullptr;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> table{[] {
    const char* wanted = std::getenv("MLX_LATTICE_CPU_ISA");
    std::string names;
    if (auto found = find(wanted && *wanted ? wanted : nullptr, &names)) return found;
    throw std::invalid_argument("MLX_LATTICE_CPU_ISA is '" + std::string(wanted) +
                                "', but this processor and build have " + names + ".");
  }()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *chosen(); }
const char* isa() { return kernels().name; }
bool set_isa(const char* name) {
  const Kernels* found = find(name);
  if (found) chosen() = found;
  return found;
}

}  // namespace lattice
