// The buffers of a checked launch: into the arena before, out of it after.
//
// A view stands as many bytes past an aligned address as in its array: vectors that are
// read there are misaligned on the GPU too.
//
// After the run every byte of an output must hold a value; what does not is reported,
// since on the GPU it would be whatever the memory held before. Reading a buffer's
// state back also gives the bytes that were touched at least once, the traffic that no
// cache can save.
#include <sys/mman.h>

#include <cstring>

#include "state.h"

namespace mtlhost {

static char* reserve(size_t size) {
  return static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

static size_t word_bytes(const DeviceArena& arena) { return (arena.size / 4 + 1) * 8; }

void map_arena(Launch& launch, Buffer* buffers, int count) {
  DeviceArena& arena = launch.arena;
  std::vector<size_t> offsets(count);
  arena.size = kDeviceRedZone;
  for (int i = 0; i < count; ++i) {
    offsets[i] = arena.size + buffers[i].start;
    arena.size = (offsets[i] + buffers[i].size + kBufferAlign - 1) / kBufferAlign *
                     kBufferAlign +
                 kDeviceRedZone;
  }
  arena.data = reserve(arena.size);
  arena.state = reinterpret_cast<uint8_t*>(reserve(arena.size));
  arena.writer = reinterpret_cast<uint64_t*>(reserve(word_bytes(arena)));
  arena.reader = reinterpret_cast<uint64_t*>(reserve(word_bytes(arena)));
  arena.buffers.resize(count);
  for (int i = 0; i < count; ++i) {
    char* begin = arena.data + offsets[i];
    arena.buffers[i].begin = begin;
    arena.buffers[i].size = buffers[i].size;
    arena.buffers[i].output = buffers[i].flags & kOutput;
    memcpy(begin, buffers[i].data, buffers[i].size);
    bool written = buffers[i].flags & kInitialised;
    memset(arena.state + offsets[i], kAddressable | (written ? kWritten : 0),
           buffers[i].size);
    launch.buffers[i] = begin;
  }
}

static void check_written(Launch& launch, const Buffer& buffer, const uint8_t* state) {
  uint64_t missing = 0, first = 0;
  for (uint64_t k = 0; k < buffer.size; ++k)
    if (!(state[k] & kWritten) && !missing++) first = k;
  if (!missing) return;
  launch.faults.push_back(
      {"output not written", nullptr,
       format("%lu of the %lu bytes of '%s', first byte %lu", (unsigned long)missing,
              (unsigned long)buffer.size, buffer.name, (unsigned long)first),
       1});
}

void unmap_arena(Launch& launch, Buffer* buffers, int count) {
  DeviceArena& arena = launch.arena;
  for (int i = 0; i < count; ++i) {
    const DeviceBuffer& used = arena.buffers[i];
    const uint8_t* state = arena.state + (used.begin - arena.data);
    Buffer& b = buffers[i];
    b.read_bytes = used.read_bytes;
    b.written_bytes = used.written_bytes;
    b.atomics = used.atomics;
    b.read_lines = used.read_lines;
    b.read_line_bytes = used.read_line_bytes;
    b.written_lines = used.written_lines;
    b.written_line_bytes = used.written_line_bytes;
    b.distinct_read_bytes = b.distinct_written_bytes = 0;
    for (uint64_t k = 0; k < b.size; ++k) {
      b.distinct_read_bytes += (state[k] & kReadHere) != 0;
      b.distinct_written_bytes += (state[k] & kWrittenHere) != 0;
    }
    if (!used.output) continue;
    if (!launch.stop) check_written(launch, b, state);
    memcpy(b.data, used.begin, b.size);
  }
  munmap(arena.data, arena.size);
  munmap(arena.state, arena.size);
  munmap(arena.writer, word_bytes(arena));
  munmap(arena.reader, word_bytes(arena));
}

}  // namespace mtlhost
