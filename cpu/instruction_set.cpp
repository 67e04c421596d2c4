// The table of instruction sets, and the choice of one.
#include "instruction_set.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "inner_loops.h"
#include "integer_loops.h"

#if defined(LATTICE_X86)
#include <cpuid.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace lattice {

namespace baseline {
extern const InnerLoops table;
extern const IntegerLoops integer_table;
}  // namespace baseline
#if defined(LATTICE_X86)
namespace avx2 {
extern const InnerLoops table;
extern const IntegerLoops integer_table;
}  // namespace avx2
namespace avx_vnni {
extern const IntegerLoops integer_table;
}
namespace avx512 {
extern const InnerLoops table;
extern const IntegerLoops integer_table;
}  // namespace avx512
namespace avx512_vnni {
extern const IntegerLoops integer_table;
}
#elif defined(LATTICE_ARM64)
namespace dotprod {
extern const IntegerLoops integer_table;
}
namespace i8mm {
extern const IntegerLoops integer_table;
}
#endif

namespace {

// An instruction set: the loops of floats and those of integers.
struct Candidate {
  const char* name;
  const InnerLoops* table;
  const IntegerLoops* integers;
  bool supported;
};

#if defined(LATTICE_X86)
// __builtin_cpu_supports knows "avxvnni" from GCC 11 and from no clang of that time: bit 4 of EAX of leaf 7, 1.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#elif defined(LATTICE_ARM64)
bool has_arm(const char* feature, [[maybe_unused]] int word, [[maybe_unused]] int bit) {
#if defined(__APPLE__)
  int there = 0;
  size_t size = sizeof(there);
  return !sysctlbyname(feature, &there, &size, nullptr, 0) && there;
#elif defined(__linux__)
  return getauxval(word == 1 ? AT_HWCAP : AT_HWCAP2) >> bit & 1;
#else
  return false;
#endif
}
#endif

// All of this build, the best first.
const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> all = [] {
    std::vector<Candidate> found;
#if defined(LATTICE_X86)
    __builtin_cpu_init();
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    found = {{"avx512_vnni", &avx512::table, &avx512_vnni::integer_table, has_vnni},
             {"avx512", &avx512::table, &avx512::integer_table, has_avx512},
             {"avx_vnni", &avx2::table, &avx_vnni::integer_table, has_avx2 && has_avx_vnni()},
             {"avx2", &avx2::table, &avx2::integer_table, has_avx2}};
#elif defined(LATTICE_ARM64)
    bool has_dotprod = has_arm("hw.optional.arm.FEAT_DotProd", 1, 20);
    bool has_i8mm = has_arm("hw.optional.arm.FEAT_I8MM", 2, 13);
    found = {{"i8mm", &baseline::table, &i8mm::integer_table, has_dotprod && has_i8mm},
             {"dotprod", &baseline::table, &dotprod::integer_table, has_dotprod}};
#endif
    found.push_back({"baseline", &baseline::table, &baseline::integer_table, true});
    return found;
  }();
  return all;
}

// Returns the best that this processor supports, or the wanted one; nullptr where it does not support that.
const Candidate* find(const char* wanted) {
  for (auto& c : candidates())
    if (c.supported && (!wanted || !std::strcmp(wanted, c.name))) return &c;
  return nullptr;
}

std::atomic<const Candidate*>& chosen() {
  static std::atomic<const Candidate*> table{[] {
    const char* wanted = std::getenv("MLX_LATTICE_CPU_ISA");
    if (auto found = find(wanted && *wanted ? wanted : nullptr)) return found;
    std::string names;
    for (auto& name : isas()) names += (names.empty() ? "" : ", ") + name;
    throw std::invalid_argument("MLX_LATTICE_CPU_ISA is '" + std::string(wanted) +
                                "', but this processor and build have " + names + ".");
  }()};
  return table;
}

}  // namespace

const InnerLoops& inner_loops() { return *chosen().load()->table; }
const IntegerLoops& integer_loops() { return *chosen().load()->integers; }
const char* isa() { return chosen().load()->name; }
std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (auto& c : candidates())
    if (c.supported) names.push_back(c.name);
  return names;
}
bool set_isa(const char* name) {
  const Candidate* found = find(name);
  if (found) chosen() = found;
  return found;
}

}  // namespace lattice
