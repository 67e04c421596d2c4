// Threadgroup memory of a checked launch: bounds, initialisation and races.
//
// Each byte remembers its last writer and one reader, with the count of barriers over
// threadgroup memory passed so far (the epoch) and that of their simdgroup. Two
// accesses by different threads in one epoch, one of them a write and not both atomic,
// are a race, unless both lanes are of one simdgroup and a simdgroup_barrier stands
// between them. That lanes happen to run in step orders nothing.
#include "state.h"

namespace mtlhost {

namespace {

struct Race {
  const char* kind = nullptr;
  uint32_t other = 0;
};

const Variable* variable_at(Worker* w, size_t offset, size_t margin) {
  for (auto& v : w->variables)
    if (offset + margin >= v.offset && offset < v.offset + v.size + margin) return &v;
  return nullptr;
}

bool inside_one_variable(Worker* w, size_t offset, unsigned size) {
  const Variable* v = variable_at(w, offset, 0);
  return v && offset + size <= v->offset + v->size;
}

void out_of_bounds(Worker* w, size_t offset, unsigned size, bool write,
                   const void* site) {
  const char* kind =
      write ? "threadgroup write out of bounds" : "threadgroup read out of bounds";
  if (seen(w, kind, site)) return;
  std::string where = "an address far from every variable";
  if (auto* v = variable_at(w, offset, kRedZone / 2))
    where = format("byte %ld of '%s', which has %zu bytes",
                   long(offset) - long(v->offset), v->name, v->size);
  auto message = format("%u bytes at ", size) + where + ", " + describe(*w->current);
  if (write) fail(w, kind, site, message);
  fault(w, kind, site, message);
}

}  // namespace

void threadgroup_access(Worker* w, size_t offset, unsigned size, bool write,
                        bool atomic, const void* site) {
  if (!inside_one_variable(w, offset, size))
    return out_of_bounds(w, offset, size, write, site);
  uint32_t index = w->index(w->current), thread = index + 1, simdgroup = index >> 5;
  uint32_t epoch = w->threadgroup_epoch, simd_epoch = w->simdgroups[simdgroup].epoch;
  auto unordered = [&](uint32_t other, uint32_t at, uint32_t simd_at) {
    return other && other != thread && at == epoch &&
           ((other - 1) >> 5 != simdgroup || simd_at == simd_epoch);
  };
  Race race;
  bool written = true;
  for (unsigned i = 0; i < size; ++i) {
    ThreadgroupShadow& s = w->shadow[offset + i];
    if (!(atomic && s.by_atomic) &&
        unordered(s.writer, s.write_epoch, s.write_simd_epoch))
      race = {
          write ? "threadgroup write-write race" : "threadgroup read-after-write race",
          s.writer};
    if (write) {
      bool read = unordered(s.reader, s.read_epoch, s.read_simd_epoch) ||
                  (s.many_readers && s.read_epoch == epoch);
      if (!atomic && read && !race.kind)
        race = {"threadgroup write-after-read race", s.reader};
      s.writer = thread;
      s.write_epoch = epoch;
      s.write_simd_epoch = simd_epoch;
      s.written = true;
      s.by_atomic = atomic;
    } else {
      written &= s.written;
      bool again = s.reader && s.read_epoch == epoch;
      s.many_readers = again && (s.many_readers || (s.reader - 1) >> 5 != simdgroup);
      s.reader = thread;
      s.read_epoch = epoch;
      s.read_simd_epoch = simd_epoch;
    }
  }
  if (race.kind && !seen(w, race.kind, site)) {
    const Variable* v = variable_at(w, offset, 0);
    fault(w, race.kind, site,
          format("byte %zu of '%s', ", offset - v->offset, v->name) +
              describe(*w->current) + " and " + describe(w->threads[race.other - 1]) +
              " with no barrier between them");
  }
  if (!written && !seen(w, "uninitialised threadgroup read", site)) {
    const Variable* v = variable_at(w, offset, 0);
    fault(w, "uninitialised threadgroup read", site,
          format("%u bytes at byte %zu of '%s', ", size, offset - v->offset, v->name) +
              describe(*w->current));
  }
  if (!atomic)
    (write ? w->counts.threadgroup_written_bytes : w->counts.threadgroup_read_bytes) +=
        size;
}

}  // namespace mtlhost
