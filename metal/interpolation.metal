// Weighted gathers of a few rows a query: multilinear interpolation, J = 2^D corners.
//
//   y[q]    = sum over j of weight[q, j] x[row[q, j]]     thread (4 channels, q)
//   dx[i]   = sum over the (q, j) with row i of weight[q, j] dy[q]      by CSR
//   dw[q, j] = dy[q] . x[row[q, j]]                       thread (j, q)
//
// Row -1 is an absent corner and counts as zeros. Any dtype, float32 weights and sums,
// in order of j or of (q, j): the same bits on every run. Traffic per output channel: J
// features; 8 J bytes of rows and weights a query, shared by its threads. Bound by
// memory; it beats J gathers of (Q, C) arrays that are each written and read again.

#include <metal_stdlib>
using namespace metal;

// sizes: first query, J, channels.
template <typename T>
void interpolate(
    const device T* x,
    const device int* rows,
    const device float* weights,
    const constant int* sizes,
    device T* y,
    uint2 at) {
  const int corners = sizes[1], channels = sizes[2], channel = 4 * int(at.x);
  const int count = min(4, channels - channel);
  const size_t query = size_t(sizes[0]) + at.y;
  float4 sum = float4(0);
  for (int j = 0; j < corners; ++j) {
    const int row = rows[query * corners + j];
    if (row < 0) continue;
    const float weight = weights[query * corners + j];
    const device T* from = x + size_t(row) * channels + channel;
    for (int c = 0; c < count; ++c) sum[c] += weight * float(from[c]);
  }
  for (int c = 0; c < count; ++c)
    y[size_t(at.y) * channels + channel + c] = T(sum[c]);
}

// entries: the flat places (q, j) ordered by row; starts (N + 1) their rows' parts.
// sizes: first row, J, channels.
template <typename T>
void interpolate_transposed(
    const device T* dy,
    const device int* entries,
    const device int* starts,
    const device float* weights,
    const constant int* sizes,
    device T* dx,
    uint2 at) {
  const int corners = sizes[1], channels = sizes[2], channel = 4 * int(at.x);
  const int count = min(4, channels - channel);
  const size_t row = size_t(sizes[0]) + at.y;
  float4 sum = float4(0);
  for (size_t e = size_t(starts[row]); e < size_t(starts[row + 1]); ++e) {
    const size_t entry = size_t(entries[e]);
    const float weight = weights[entry];
    const device T* from = dy + entry / corners * channels + channel;
    for (int c = 0; c < count; ++c) sum[c] += weight * float(from[c]);
  }
  for (int c = 0; c < count; ++c)
    dx[size_t(at.y) * channels + channel + c] = T(sum[c]);
}

// sizes: first query, J, channels.
template <typename T>
void corner_products(
    const device T* x,
    const device T* dy,
    const device int* rows,
    const constant int* sizes,
    device float* products,
    uint2 at) {
  const int corners = sizes[1], channels = sizes[2];
  const size_t query = size_t(sizes[0]) + at.y;
  const int row = rows[query * corners + at.x];
  float sum = 0;
  if (row >= 0)
    for (int c = 0; c < channels; ++c)
      sum += float(x[size_t(row) * channels + c]) * float(dy[query * channels + c]);
  products[size_t(at.y) * corners + at.x] = sum;
}
