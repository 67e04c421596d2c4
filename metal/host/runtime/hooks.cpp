// The hooks that clang's sanitizers insert into a checked kernel, served by us.
//
// -fsanitize=thread makes every load and store that is left after -O1 call __tsan_read4
// and its like; we give those to the shadow memory instead of linking a sanitizer.
// -fsanitize=array-bounds,integer-divide-by-zero,alignment reports what addresses
// cannot show: an index beyond a thread's own array or a row of a threadgroup array,
// a division the GPU defines and the host traps on, a vector load that is not aligned.
#include <dlfcn.h>

#include <cstring>

#include "state.h"

using namespace mtlhost;

namespace mtlhost {

void shared_access(Worker* w, const void* address, unsigned size, bool write,
                   bool atomic, const void* site) {
  if (!w->current || !w->launch->options.checked) return;
  auto p = static_cast<const char*>(address);
  Launch& launch = *w->launch;
  if (size_t(p - launch.arena.data) < launch.arena.size)
    return device_access(w, p - launch.arena.data, size, write, atomic, site);
  if (size_t(p - w->arena) < kArenaBytes)
    return threadgroup_access(w, p - w->arena, size, write, atomic, site);
  // The launch glue reads the thread state and the buffer table.
  if (size_t(p - (const char*)w) < sizeof(Worker)) return;
  auto table = (const char*)launch.buffers.data();
  if (size_t(p - table) < launch.buffers.size() * sizeof(void*)) return;
  Dl_info library, own;  // constant tables and function constants of the kernel library
  if (!write && dladdr(address, &library) && dladdr((void*)launch.invoke, &own) &&
      library.dli_fbase == own.dli_fbase)
    return;
  auto message = format("%u bytes at an address far from every buffer, ", size) +
                 describe(*w->current);
  if (write) fail(w, "device write out of bounds", site, message);
  fault(w, "device read out of bounds", site, message);
}

}  // namespace mtlhost

#define CALLER __builtin_return_address(0)

namespace {
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeMismatch {
  SourceLocation location;
  const void* type;
  uint8_t log_alignment, check;
};

void undefined(const char* kind, const void* site, const char* message) {
  Worker* w = worker;
  if (w && w->current) fault(w, kind, site, message + describe(*w->current));
}
}  // namespace

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define HOOK(kind, size)                                                             \
  void __tsan_##kind##read##size(void* p) { access(p, size, false, false, CALLER); } \
  void __tsan_##kind##write##size(void* p) { access(p, size, true, false, CALLER); } \
  void __tsan_##kind##read_write##size(void* p) {                                    \
    access(p, size, false, false, CALLER);                                           \
    access(p, size, true, false, CALLER);                                            \
  }
#define HOOKS(size) \
  HOOK(, size)      \
  HOOK(unaligned_, size) HOOK(volatile_, size) HOOK(unaligned_volatile_, size)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_read_range(void* p, size_t size) {
  access(p, unsigned(size), false, false, CALLER);
}
void __tsan_write_range(void* p, size_t size) {
  access(p, unsigned(size), true, false, CALLER);
}
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  access(from, unsigned(size), false, false, CALLER);
  access(to, unsigned(size), true, false, CALLER);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  access(from, unsigned(size), false, false, CALLER);
  access(to, unsigned(size), true, false, CALLER);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  access(to, unsigned(size), true, false, CALLER);
  return memset(to, value, size);
}

void __ubsan_handle_out_of_bounds(SourceLocation*, uintptr_t) {
  undefined("index outside of an array", CALLER, "");
}
void __ubsan_handle_divrem_overflow(SourceLocation*, uintptr_t, uintptr_t) {
  Worker* w = worker;
  if (w && w->current)
    fail(w, "integer division by zero", CALLER, describe(*w->current));
}
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
  undefined("misaligned access", CALLER,
            format("address %#zx is not a multiple of %d, ", size_t(address),
                   1 << data->log_alignment)
                .c_str());
}

// Conversions that clang may call and libgcc before 13 lacks.
__bf16 __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  auto rounded =
      uint16_t(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  __bf16 result;
  memcpy(&result, &rounded, 2);
  return result;
}
__bf16 __truncdfbf2(double x) { return __truncsfbf2(float(x)); }
}
