// Faults: what a kernel did wrong, where, and which thread it was.
//
// A fault is recorded once for each kind and call site, with a count. One that would
// make the rest of the run meaningless (a write outside a buffer, diverging barriers)
// is fatal: the launch stops and its threads are left where they stand.
//
// A site is a return address in the kernel library; its debug lines give file and line.
// They are looked up by running a symbolizer, which only a faulty kernel has to wait
// for.
#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "state.h"

namespace mtlhost {

static std::string symbolizer;

std::string format(const char* pattern, ...) {
  char text[700];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

std::string describe(const Thread& t) {
  const ThreadState& s = *t.state;
  const U3 &p = s.thread_position_in_threadgroup, &g = s.threadgroup_position_in_grid;
  return format("thread (%u, %u, %u) of threadgroup (%u, %u, %u)", p.x, p.y, p.z, g.x,
                g.y, g.z);
}

// The innermost line that is the kernel's own, not the shim's.
static std::string first_kernel_line(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return "";
  std::string found;
  for (char line[2048]; fgets(line, sizeof line, pipe);) {
    line[strcspn(line, " \n")] = 0;
    if (!found.empty() || !strchr(line, ':') || line[0] == '?') continue;
    if (strstr(line, "/host/shim/")) continue;
    found = line;
  }
  pclose(pipe);
  found.erase(0, found.rfind('/') + 1);
  return found;
}

std::string place(const void* site) {
  static std::mutex mutex;
  static std::map<const void*, std::string> known;
  std::lock_guard<std::mutex> lock(mutex);
  if (auto it = known.find(site); it != known.end()) return it->second;
  Dl_info library;
  if (!site || symbolizer.empty() || !dladdr(site, &library)) return "";
  auto offset = size_t((const char*)site - (const char*)library.dli_fbase) - 1;
  return known[site] =
             first_kernel_line(format("%s '%s' 0x%zx 2>/dev/null", symbolizer.c_str(),
                                      library.dli_fname, offset));
}

bool seen(Worker* w, const char* kind, const void* site) {
  auto& index = w->launch->fault_index;
  auto it = index.find({kind, site});
  if (it == index.end()) return false;
  w->launch->faults[it->second].times++;
  return true;
}

void fault(Worker* w, const char* kind, const void* site, std::string message) {
  if (seen(w, kind, site)) return;
  Launch& launch = *w->launch;
  launch.fault_index[{kind, site}] = launch.faults.size();
  launch.faults.push_back({kind, site, std::move(message), 1});
}

void fail(Worker* w, const char* kind, const void* site, std::string message) {
  w->fatal = {kind, site, std::move(message), 1};
  w->failed = true;
  w->launch->stop = true;
  w->current = nullptr;
  void* abandoned;
  switch_stack(&abandoned, w->main_stack);
  __builtin_unreachable();
}

}  // namespace mtlhost

extern "C" void mtl_set_symbolizer(const char* command) {
  mtlhost::symbolizer = command;
}
