// The choice of the instruction set: the best that the processor has, or what MLX_LATTICE_CPU_ISA names.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "inner_loops.h"

namespace lattice {

namespace baseline {
extern const InnerLoops table;
}
#ifdef LATTICE_X86
namespace avx2 {
extern const InnerLoops table;
}
namespace avx512 {
extern const InnerLoops table;
}
#endif

namespace {

struct Candidate {
  const InnerLoops* table;
  bool supported;
};

// Returns the best that this processor supports, or the wanted one; nullptr where it does not support that. `names`
// gets the names of all that it supports.
const InnerLoops* find(const char* wanted, std::string* names = nullptr) {
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
    if (c.supported && names) *names += (names->empty() ? "" : ", ") + std::string(c.table->name);
  for (auto& c : candidates)
    if (c.supported && (!wanted || !std::strcmp(wanted, c.table->name))) return c.table;
  return nullptr;
}

std::atomic<const InnerLoops*>& chosen() {
  static std::atomic<const InnerLoops*> table{[] {
    const char* wanted = std::getenv("MLX_LATTICE_CPU_ISA");
    std::string names;
    if (auto found = find(wanted && *wanted ? wanted : nullptr, &names)) return found;
    throw std::invalid_argument("MLX_LATTICE_CPU_ISA is '" + std::string(wanted) +
                                "', but this processor and build have " + names + ".");
  }()};
  return table;
}

}  // namespace

const InnerLoops& inner_loops() { return *chosen(); }
const char* isa() { return inner_loops().name; }
bool set_isa(const char* name) {
  const InnerLoops* found = find(name);
  if (found) chosen() = found;
  return found;
}

}  // namespace lattice
