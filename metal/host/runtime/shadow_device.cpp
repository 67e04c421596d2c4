// Device memory of a checked launch: bounds, initialisation, races and byte counts.
//
// All buffers are copied into one arena with red zones between them. Each byte has a
// state (inside a buffer, holds a value, written or read by this launch). For outputs
// each group of four bytes has its last writer and its last reader: the thread, the
// device epoch of its group and the bytes touched. Two accesses by different threads,
// one of them a write and not both atomic, are a race unless both threads are of one
// group and a barrier over device memory stands between them.
//
// One reader is remembered per byte, so a write that races with an earlier one of two
// reads can escape; a random order finds it on another seed.
#include <algorithm>

#include "state.h"

namespace mtlhost {

namespace {

// thread + 1 : 32 | epoch : 27 | atomic : 1 | byte mask : 4
struct Access {
  uint64_t bits;
  uint32_t thread() const { return uint32_t(bits >> 32); }
  uint32_t epoch() const { return uint32_t(bits >> 5) & 0x7ffffff; }
  bool atomic() const { return bits >> 4 & 1; }
  uint32_t mask() const { return bits & 15; }
};

uint32_t threads_per_group(const Launch& launch) {
  const U3& t = launch.options.threadgroup;
  return t.x * t.y * t.z;
}

bool unordered(Worker* w, Access before, uint32_t thread, uint32_t mask, bool atomic) {
  if (!(before.mask() & mask) || before.thread() == thread) return false;
  if (before.atomic() && atomic) return false;
  bool same_group = (before.thread() - 1) / threads_per_group(*w->launch) == w->group;
  return !same_group || before.epoch() == (w->device_epoch & 0x7ffffff);
}

std::string near(const Launch& launch, size_t offset) {
  for (size_t b = 0; b < launch.arena.buffers.size(); ++b) {
    const DeviceBuffer& buffer = launch.arena.buffers[b];
    auto relative = intptr_t(launch.arena.data + offset - buffer.begin);
    if (relative >= -intptr_t(kDeviceRedZone / 2) &&
        relative < intptr_t(buffer.size + kDeviceRedZone / 2))
      return format("byte %ld of '%s', which has %lu bytes", long(relative),
                    launch.described[b].name, (unsigned long)buffer.size);
  }
  return "an address far from every buffer";
}

void out_of_bounds(Worker* w, size_t offset, unsigned size, bool write,
                   const void* site) {
  const char* kind = write ? "device write out of bounds" : "device read out of bounds";
  if (seen(w, kind, site)) return;
  auto message = format("%u bytes at ", size) + near(*w->launch, offset) + ", " +
                 describe(*w->current);
  if (write) fail(w, kind, site, message);
  fault(w, kind, site, message);
}

void report_race(Worker* w, const char* kind, Access before, size_t offset,
                 const void* site) {
  if (seen(w, kind, site)) return;
  uint32_t per_group = threads_per_group(*w->launch), other = before.thread() - 1;
  fault(w, kind, site,
        near(*w->launch, offset) + ", " + describe(*w->current) +
            format(" after thread #%u of threadgroup #%u", other % per_group,
                   other / per_group));
}

void check_races(Worker* w, size_t offset, unsigned size, bool write, bool atomic,
                 const void* site) {
  DeviceArena& arena = w->launch->arena;
  uint32_t thread =
      uint32_t(w->group * threads_per_group(*w->launch) + w->index(w->current)) + 1;
  for (unsigned i = 0, count; i < size; i += count) {
    size_t word = (offset + i) >> 2;
    unsigned first = (offset + i) & 3;
    count = std::min(4 - first, size - i);
    uint32_t mask = ((1u << count) - 1) << first;
    Access writer{arena.writer[word]}, reader{arena.reader[word]};
    if (unordered(w, writer, thread, mask, atomic))
      report_race(w, write ? "device write-write race" : "device read-after-write race",
                  writer, offset + i, site);
    else if (write && unordered(w, reader, thread, mask, atomic))
      report_race(w, "device write-after-read race", reader, offset + i, site);
    Access before = write ? writer : reader;
    uint32_t merged = before.thread() == thread ? mask | before.mask() : mask;
    (write ? arena.writer : arena.reader)[word] =
        uint64_t(thread) << 32 | uint64_t(w->device_epoch & 0x7ffffff) << 5 |
        uint64_t(atomic) << 4 | merged;
  }
}

}  // namespace

void device_access(Worker* w, size_t offset, unsigned size, bool write, bool atomic,
                   const void* site) {
  DeviceArena& arena = w->launch->arena;
  uint8_t* state = arena.state + offset;
  for (unsigned i = 0; i < size; ++i)
    if (!(state[i] & kAddressable)) return out_of_bounds(w, offset, size, write, site);
  DeviceBuffer* buffer = arena.buffers.data();
  while (size_t(arena.data + offset - buffer->begin) >= buffer->size) ++buffer;
  if (buffer->output) check_races(w, offset, size, write, atomic, site);

  if (w->launch->options.checked == kCounted) note_line(w, buffer, offset, size, write);
  if (atomic)
    buffer->atomics += !write;  // an update is a read and a write: count it once
  else
    (write ? buffer->written_bytes : buffer->read_bytes) += size;
  if (write) {
    if (!buffer->output && !seen(w, "write to an input", site))
      fault(w, "write to an input", site, near(*w->launch, offset));
    for (unsigned i = 0; i < size; ++i) state[i] |= kWritten | kWrittenHere;
    if (!atomic) w->counts.device_written_bytes += size;
    return;
  }
  bool written = true;
  for (unsigned i = 0; i < size; ++i) {
    written &= (state[i] & kWritten) != 0;
    state[i] |= kReadHere;
  }
  if (!written && !seen(w, "uninitialised device read", site))
    fault(w, "uninitialised device read", site,
          format("%u bytes at ", size) + near(*w->launch, offset) + ", " +
              describe(*w->current));
  if (!atomic) w->counts.device_read_bytes += size;
}

}  // namespace mtlhost
