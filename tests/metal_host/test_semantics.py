"""metal/host computes what Metal promises of lanes, vectors, rounding, matrices."""

import numpy as np
import pytest
from metal_checks import threads

from metal import host

host.require()

MODES = ("fast", "checked")
ORDERS = ("forward", "reverse", "random")
LANE = np.arange(32)
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


def bits(mask):
    """The int32 whose bit i is mask[i]."""
    value = sum(1 << i for i in range(32) if mask[i])
    return np.full(32, np.uint32(value).view(np.int32))


# name: (expression of x and the lane l, reference for the x of one simdgroup)
SIMD = {
    "sum": ("simd_sum(x)", lambda v: v.sum()),
    "min": ("simd_min(x)", lambda v: v.min()),
    "or": ("simd_or(x)", lambda v: np.bitwise_or.reduce(v)),
    "exclusive": ("simd_prefix_exclusive_sum(x)", lambda v: np.cumsum(v) - v),
    "shuffle": (
        "simd_shuffle(x, ushort((l * 7 + 3) & 31))",
        lambda v: v[(LANE * 7 + 3) & 31],
    ),
    "shuffle_xor": ("simd_shuffle_xor(x, 5)", lambda v: v[LANE ^ 5]),
    "up": ("simd_shuffle_up(x, 3)", lambda v: np.where(LANE > 2, np.roll(v, 3), v)),
    "rotate_up": ("simd_shuffle_rotate_up(x, 3)", lambda v: np.roll(v, 3)),
    "fill_up": (
        "simd_shuffle_and_fill_up(x, -l, 2)",
        lambda v: np.where(LANE > 1, np.roll(v, 2), -((LANE + 30) % 32)),
    ),
    "broadcast": ("simd_broadcast(x, 9)", lambda v: v[9]),
    "first": ("simd_broadcast_first(x)", lambda v: v[0]),
    "ballot": ("int(ulong(simd_ballot(x > 50)))", lambda v: bits(v > 50)),
    "votes": (
        "int(simd_any(x > 99)) * 2 + int(simd_all(x >= 0))",
        lambda v: 2 * (v > 99).any() + (v >= 0).all(),
    ),
    "is_first": ("int(simd_is_first())", lambda v: LANE == 0),
    "quad_sum": ("quad_sum(x)", lambda v: v.reshape(8, 4).sum(1).repeat(4)),
    # Lanes that take different branches form two collectives of their own.
    "divergent": (
        "(l % 3 == 0 ? int(simd_sum(1)) : int(simd_sum(100)))",
        lambda v: np.where(LANE % 3 == 0, 11, 2100),
    ),
}


@pytest.fixture(scope="module", params=MODES)
def simd_kernels(request):
    source = HEADER + "".join(
        f"[[kernel]] void k_{name}(const device int* a, device int* o, "
        "uint i [[thread_position_in_grid]], "
        "uint lane [[thread_index_in_simdgroup]]) "
        f"{{ int x = a[i]; int l = int(lane); o[i] = {expression}; }}\n"
        for name, (expression, _) in SIMD.items()
    )
    return host.compile_source(source, mode=request.param)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SIMD)
def test_simdgroup_functions(simd_kernels, name, order):
    a = np.random.default_rng(1).integers(0, 100, 96).astype(np.int32)
    out = np.empty_like(a)
    report = host.launch(
        simd_kernels[f"k_{name}"], [a, out], **threads(96), order=order, seed=5
    )
    assert not report.faults
    reference = SIMD[name][1]
    expected = [np.broadcast_to(reference(v), 32) for v in a.reshape(3, 32)]
    np.testing.assert_array_equal(out, np.concatenate(expected))


KERNELS = (
    HEADER
    + r"""
[[kernel]] void histogram(const device uint* a, device atomic_uint* count,
    device atomic_float* sum, device atomic_int* least,
    uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(count + (a[i] & 15), 1u, memory_order_relaxed);
  atomic_fetch_add_explicit(sum + (a[i] & 15), 0.5f, memory_order_relaxed);
  atomic_fetch_min_explicit(least, int(a[i]), memory_order_relaxed);
}
[[kernel]] void positions(device uint4* o, uint3 g [[thread_position_in_grid]],
    uint3 n [[threads_per_grid]], uint3 tp [[threads_per_threadgroup]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint ti [[thread_index_in_threadgroup]],
    ushort sg [[simdgroup_index_in_threadgroup]],
    ushort2 lp [[thread_position_in_threadgroup]]) {
  o[(g.z * n.y + g.y) * n.x + g.x] =
      uint4(tp.x * 100 + tp.y * 10 + tp.z, tg.x * 100 + tg.y * 10 + tg.z, ti,
            sg * 1000 + lp.y * 100 + lp.x);
}
[[kernel]] void vectors(const device float4* a, device float4* o,
    uint i [[thread_position_in_grid]]) {
  float4 v = a[i];
  v.xy = v.yx;
  v.zw += float2(1, 2);
  float3 c = cross(v.xyz, float3(1, 0, 0));
  float4 w = select(v, float4(0), v < 0.0f);
  w.x = dot(c, c);
  bool4 b = v > float4(0.5f);
  w.y = any(b) ? w.y : -1;
  half4 h = half4(half2(v.zw), half2(1));
  w.w = float(h.y);
  o[i] = max(w, float4(-5));
}
[[kernel]] void rounding(const device half* a, const device half* b, device half* o,
    device bfloat* p, device half* f, uint i [[thread_position_in_grid]]) {
  o[i] = a[i] * b[i] + a[i];
  bfloat x = bfloat(float(a[i])), y = bfloat(float(b[i]));
  p[i] = x * y + x;
  f[i] = fma(a[i], b[i], a[i]);
}
[[kernel]] void reversal(const device float* a, device float* o,
    uint t [[thread_index_in_threadgroup]], uint i [[thread_position_in_grid]]) {
  threadgroup float staged[64], doubled[64];
  staged[t] = a[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  doubled[t] = 2 * staged[63 - t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = doubled[t ^ 33];
}
template <typename T> [[kernel]] void multiply(const device T* a, const device T* b,
    device float* o) {
  simdgroup_matrix<T, 8, 8> x, y;
  simdgroup_matrix<float, 8, 8> sum(1.0f);
  simdgroup_load(x, a, 8);
  simdgroup_load(y, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(sum, x, y, sum);
  simdgroup_store(sum, o, 8);
}
"""
)
MULTIPLY = [(f"multiply_{t}", f"multiply<{t}>") for t in ("half", "bfloat", "float")]


@pytest.fixture(scope="module", params=MODES)
def kernels(request):
    return host.compile_source(KERNELS, mode=request.param, instances=MULTIPLY)


def launch(entry, buffers, **options):
    report = host.launch(entry, buffers, **options)
    assert not report.faults
    return report


def test_atomics(kernels):
    a = np.random.default_rng(2).integers(0, 1000, 5000).astype(np.uint32)
    count, total = np.zeros(16, np.uint32), np.zeros(16, np.float32)
    least = np.array([10**6], np.int32)
    entry = kernels["histogram"]
    report = launch(
        entry,
        [a, count, total, least],
        **threads(5000, 128),
        order="random",
        initialised=True,
    )
    expected = np.bincount(a & 15, minlength=16)
    np.testing.assert_array_equal(count, expected)
    np.testing.assert_array_equal(total, expected / 2)
    assert least[0] == a.min()
    assert report.counts.device_atomics == 15000
    if entry.mode == "checked":
        assert report.counts.buffers["count"].atomics == 5000
        assert report.counts.buffers["a"].read_bytes >= 20000
        assert report.counts.buffers["a"].distinct_read_bytes == 20000


def test_positions_in_smaller_groups_at_the_edges(kernels):
    out = np.zeros((3, 5, 37, 4), np.uint32)
    launch(kernels["positions"], [out], grid=(37, 5, 3), threadgroup=(16, 4, 2))
    assert out[0, 0, 0].tolist() == [1642, 0, 0, 0]
    assert out[2, 4, 36].tolist() == [511, 211, 4, 4]
    assert out[1, 3, 15].tolist() == [1642, 0, 127, 3315]


def test_vectors_and_swizzles(kernels):
    a = np.random.default_rng(3).standard_normal((64, 4)).astype(np.float32)
    out = np.empty_like(a)
    launch(kernels["vectors"], [a, out], **threads(64, 32))
    v = a[:, [1, 0, 2, 3]] + np.array([0, 0, 1, 2], np.float32)
    w = np.where(v < 0, 0, v)
    w[:, 0] = v[:, 2] ** 2 + v[:, 1] ** 2
    w[:, 1] = np.where((v > 0.5).any(1), w[:, 1], -1)
    w[:, 3] = v[:, 3].astype(np.float16)
    np.testing.assert_allclose(out, np.maximum(w, -5), rtol=1e-6)


def to_bfloat(x):
    """float32 rounded to the nearest bfloat16, kept as float32."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16 << 16).view(np.float32)


def test_half_and_bfloat_round_after_every_operation(kernels):
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((2, 4096)).astype(np.float16)
    out, fused = np.empty_like(a), np.empty_like(a)
    brain = np.empty(4096, np.uint16)
    launch(kernels["rounding"], [a, b, out, brain, fused], **threads(4096, 256))
    np.testing.assert_array_equal(out, a * b + a)
    exact = a.astype(np.float64) * b + a
    np.testing.assert_array_equal(fused, exact.astype(np.float16))
    assert (fused != out).any()
    x, y = to_bfloat(a.astype(np.float32)), to_bfloat(b.astype(np.float32))
    expected = to_bfloat(to_bfloat(x * y) + x).view(np.uint32) >> 16
    np.testing.assert_array_equal(brain, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_barriers_and_threadgroup_memory(kernels, order):
    a = np.arange(256, dtype=np.float32)
    out = np.empty_like(a)
    report = launch(kernels["reversal"], [a, out], **threads(256, 64), order=order)
    expected = 2 * a.reshape(4, 64)[:, ::-1][:, np.arange(64) ^ 33]
    np.testing.assert_array_equal(out, expected.ravel())
    assert report.counts.barriers == 8
    assert report.counts.barriers_per_threadgroup == 2
    assert report.counts.threadgroup_memory == 512


@pytest.mark.parametrize("dtype", ["half", "bfloat", "float"])
def test_simdgroup_matrix(kernels, dtype):
    a, b = np.random.default_rng(5).integers(-8, 8, (2, 8, 8)).astype(np.float32)
    stored = {
        "half": lambda x: x.astype(np.float16),
        "bfloat": lambda x: (x.view(np.uint32) >> 16).astype(np.uint16),
        "float": lambda x: x,
    }[dtype]
    out = np.empty((8, 8), np.float32)
    report = launch(
        kernels[f"multiply_{dtype}"], [stored(a), stored(b), out], **threads(32)
    )
    np.testing.assert_array_equal(out, a @ b.T + np.eye(8))
    assert report.counts.matrix_multiplies == 1
    assert report.counts.matrix_flop == 2 * 8**3
