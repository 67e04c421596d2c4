// Lines of memory that a counted launch asks for.
//
// A step is what a simdgroup does between two threadgroup_barriers: what it asks of a
// line within a step comes with one fetch of the line, if the cache is as small as a
// step's lines. Of each line the bytes asked for are remembered by a bit each; where
// the step ends they are added up, and forgotten.
#include "state.h"

namespace mtlhost {

void note_line(Worker* w, DeviceBuffer* buffer, size_t offset, unsigned size,
               bool write) {
  auto& lines = w->lines[w->simdgroup_of(w->current)][write];
  for (unsigned i = 0; i < size; ++i) {
    LineUse& use = lines[(offset + i) / kLineBytes];
    use.buffer = buffer;
    unsigned bit = (offset + i) % kLineBytes;
    use.asked[bit / 64] |= uint64_t(1) << bit % 64;
  }
}

void end_step(Worker* w) {
  for (int i = 0; i < w->simdgroup_count; ++i)
    for (int write = 0; write < 2; ++write) {
      for (auto& [line, use] : w->lines[i][write]) {
        DeviceBuffer& b = *use.buffer;
        (write ? b.written_lines : b.read_lines)++;
        (write ? b.written_line_bytes : b.read_line_bytes) +=
            __builtin_popcountll(use.asked[0]) + __builtin_popcountll(use.asked[1]);
      }
      w->lines[i][write].clear();
    }
}

}  // namespace mtlhost
