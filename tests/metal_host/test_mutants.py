"""An implicit GEMM runs right; every bug planted in it is reported.

The kernel has what real ones have: gathered rows staged in threadgroup memory, barriers
between rounds, simdgroup matrices, guards at the edges.
"""

import mlx.core as mx
import numpy as np
import pytest
from metal_checks import kernel, sized

from metal import host

host.require()

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
KERNEL = """
  constexpr int ROWS = 64, LDA = C_IN + 8, LDB = C_OUT + 8;
  threadgroup half staged_x[ROWS * LDA];
  threadgroup half staged_w[C_IN * LDB];
  threadgroup int rows[ROWS];
  uint t = thread_index_in_threadgroup, sg = simdgroup_index_in_threadgroup;
  const int n = table_shape[0], kernel_volume = table_shape[1];
  const int row0 = threadgroup_position_in_grid.x * ROWS, own0 = row0 + int(sg) * 16;
  simdgroup_matrix<float, 8, 8> sum[2][C_OUT / 8];
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < C_OUT / 8; j++)
      sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int k = 0; k < kernel_volume; k++) {
    for (uint r = t; r < ROWS; r += 128)
      rows[r] = row0 + int(r) < n ? table[(row0 + r) * kernel_volume + k] : -1;
    BARRIER
    for (uint e = t; e < ROWS * C_IN / 4; e += 128) {
      uint r = e / (C_IN / 4), c = e % (C_IN / 4) * 4;
      half4 v = half4(0);
      if (rows[r] >= 0) v = *(const device half4*)(x + size_t(rows[r]) * C_IN + c);
      *(threadgroup half4*)(staged_x + r * LDA + c) = v;
    }
    for (uint e = t; e < C_IN * C_OUT / 4; e += 128) {
      uint r = e / (C_OUT / 4), c = e % (C_OUT / 4) * 4;
      *(threadgroup half4*)(staged_w + r * LDB + c) =
          *(const device half4*)(w + (size_t(k) * C_IN + r) * C_OUT + c);
    }
    BARRIER
    for (int kk = 0; kk < C_IN; kk += 8) {
      simdgroup_matrix<half, 8, 8> a[2], b[C_OUT / 8];
      for (int i = 0; i < 2; i++)
        simdgroup_load(a[i], staged_x + (sg * 16 + 8 * i) * LDA + kk, LDA);
      for (int j = 0; j < C_OUT / 8; j++)
        simdgroup_load(b[j], staged_w + kk * LDB + 8 * j, LDB);
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < C_OUT / 8; j++)
          simdgroup_multiply_accumulate(sum[i][j], a[i], b[j], sum[i][j]);
    }
    BARRIER
  }
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < C_OUT / 8; j++)
      if (own0 + 8 * i < n)
        simdgroup_store(sum[i][j], y + size_t(own0 + 8 * i) * C_OUT + 8 * j, C_OUT);
""".replace("BARRIER", BARRIER)


def replaced(old, new, nth=0):
    parts = KERNEL.split(old)
    assert len(parts) > nth + 1, f"the kernel has no {old!r} number {nth}"
    return old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])


MUTANTS = {
    "barrier 1 removed": replaced(BARRIER, "", 0),
    "barrier 2 removed": replaced(BARRIER, "", 1),
    "barrier 2 of the simdgroup only": replaced(
        BARRIER, BARRIER.replace("threadgroup_b", "simdgroup_b"), 1
    ),
    "barrier 2 over device memory only": replaced(
        BARRIER, BARRIER.replace("mem_threadgroup", "mem_device"), 1
    ),
    "no guard on the rows read": replaced("row0 + int(r) < n ?", "true ?"),
    "absent neighbours read": replaced("rows[r] >= 0", "rows[r] >= -1"),
    "no guard on the rows written": replaced("own0 + 8 * i < n", "true"),
    "too little threadgroup memory": replaced("ROWS * LDA", "ROWS * C_IN"),
    "the wrong leading dimension": replaced("8 * j, LDB", "8 * j, LDB - 8"),
    "a simdgroup that leaves early": replaced(
        "for (int k = 0", "if (own0 >= n) return;\n  for (int k = 0"
    ),
    "matrix operations in some lanes": replaced(
        "for (int kk", "if (thread_index_in_simdgroup < 31) for (int kk"
    ),
    "half of the weights not staged": replaced("C_IN * C_OUT / 4", "C_IN * C_OUT / 8"),
}

N, INPUTS, VOLUME, CHANNELS = 200, 150, 5, 32


def convolve(source, checked=True, seed=0):
    """Runs the kernel; gives its error and its report."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((INPUTS, CHANNELS)).astype(np.float16)
    w = rng.standard_normal((VOLUME, CHANNELS, CHANNELS)).astype(np.float16)
    table = rng.integers(-1, INPUTS, (N, VOLUME)).astype(np.int32)
    header = "#include <metal_simdgroup_matrix>\n"
    (y,), report = host.run(
        kernel("implicit_gemm", "x w table", source, "y", header=header),
        inputs=[mx.array(x), mx.array(w), mx.array(table)],
        template=[("C_IN", CHANNELS), ("C_OUT", CHANNELS)],
        **sized((N + 63) // 64 * 128, 128, (N, CHANNELS), mx.float32),
        checked=checked,
        seed=seed,
    )
    padded = np.concatenate([x, np.zeros((1, CHANNELS))]).astype(np.float64)
    exact = np.einsum("nki,kio->no", padded[table], w.astype(np.float64))
    return np.abs(np.array(y) - exact).max(), report


@pytest.mark.parametrize("checked", [False, True])
def test_the_kernel_is_right(checked):
    for seed in range(3):
        error, report = convolve(KERNEL, checked, seed)
        assert report.faults == ()
        assert error < 1e-3
    groups = (N + 63) // 64
    assert report.counts.barriers == groups * VOLUME * 3
    assert report.counts.matrix_flop == 2 * groups * 64 * VOLUME * CHANNELS**2


def test_the_barrier_that_orders_nothing_may_go():
    # The first barrier of the next round stands before all that the third protects.
    for seed in range(3):
        error, report = convolve(replaced(BARRIER, "", 2), seed=seed)
        assert report.faults == ()
        assert error < 1e-3


def test_traffic_is_what_the_kernel_should_move():
    _, report = convolve(KERNEL)
    buffers, groups = report.counts.buffers, (N + 63) // 64
    assert buffers["w"].read_bytes == groups * VOLUME * CHANNELS**2 * 2
    assert buffers["table"].read_bytes == N * VOLUME * 4
    assert buffers["y"].written_bytes == N * CHANNELS * 4
    assert buffers["y"].distinct_written_bytes == N * CHANNELS * 4


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name):
    _, report = convolve(MUTANTS[name])
    assert report.faults
    assert all(f.place for f in report.faults if f.kind != "output not written")


def test_the_kernel_is_clean_metal():
    _, report = convolve(KERNEL)
    assert host.lint(report.source) == []
