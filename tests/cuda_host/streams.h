// Arrays from standard input and to standard output.

#pragma once
#include <cstdio>
#include <cstdlib>
#include <vector>

template <typename T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (fread(values.data(), sizeof(T), count, stdin) != count) std::abort();
  return values;
}

template <typename T>
void write(const std::vector<T>& values) {
  fwrite(values.data(), sizeof(T), values.size(), stdout);
}
