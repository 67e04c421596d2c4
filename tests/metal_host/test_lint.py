"""Lint refuses what Metal's compiler refuses, and passes what it takes."""

import mlx.core as mx
import pytest
from metal_checks import kernel, sized

from metal import host

host.require()

HEADER = """#include <metal_stdlib>
using namespace metal;
struct Pair { float x; int y; };
METAL_FUNC void sum4(const device float* p, thread float* q) {
  for (int i = 0; i < 4; i++) q[i] += p[i];
}
METAL_FUNC void first(threadgroup float* p) { p[0] = 1; }
template <typename T, typename P>
METAL_FUNC T get(P p, int i) { return static_cast<T>(p[i]); }
"""
KERNEL = """[[kernel]] void f(
    const device float* a [[buffer(0)]], constant int& n [[buffer(1)]],
    const constant float* c [[buffer(2)]], device float* o [[buffer(3)]],
    device atomic_int* at [[buffer(4)]], uint i [[thread_position_in_grid]],
    uint l [[thread_index_in_simdgroup]]) {
  threadgroup float s[64]; float r[4] = {0, 0, 0, 0};
  %s
}
"""
BODY_LINE = 16
LOAD = "float4 v = *(const device float4*)(a + 4 * i); "
RELAXED = "memory_order_relaxed"

CLEAN = {
    "address spaces": "sum4(a, r); first(s); o[i] = r[0] + s[0] + c[1] + n;",
    "vectors": f"{LOAD}v.xy = v.yx * 2.0f; v += float4(v.wzyx); half4 h = half4(v); "
    "*(device float4*)(o) = v + float4(1); o[1] = dot(v, float4(h));",
    "bfloat": "bfloat b = bfloat(a[i]); b += 1.0f; o[i] = b * b + max(b, b);",
    "atomics": f"int e = 0; atomic_fetch_add_explicit(at, 1, {RELAXED}); "
    f"atomic_compare_exchange_weak_explicit(at, &e, 1, {RELAXED}, {RELAXED});",
}
REFUSED = {
    "a device pointer for a threadgroup one": ("first(o);", "no matching function"),
    "a local pointer of the wrong space": (
        "const device float* p = s;",
        "cannot initialize",
    ),
    "a write to constant memory": ("n = 3;", "read-only"),
    "float to bfloat by itself": ("bfloat b = a[i];", "no viable conversion"),
    "the minimum of a float atomic": (
        f"threadgroup atomic_float q; atomic_fetch_min_explicit(&q, 1.0f, {RELAXED});",
        "no matching function",
    ),
    "a lambda": ("auto g = [&](int j) { return j; }; o[i] = g(1);", "lambda"),
    "a structured binding": ("auto [x, y] = Pair{1, 2}; o[i] = x + y;", "C++17"),
    "a double": ("double d = 1; o[i] = float(d);", "double is not in Metal"),
    "a static variable": ("static int x = 1; o[i] = x;", "in constant memory"),
    "a sum over 64 bits": ("o[i] = float(simd_sum(ulong(i)));", "32 bits a lane"),
    "a fence": (
        "atomic_thread_fence(mem_flags::mem_device, memory_order_relaxed);",
        "atomic_thread_fence needs Metal 3.2",
    ),
}
UNPLACED = {
    "a pointer parameter": "METAL_FUNC float g(float* p) { return p[0]; }",
    "a reference parameter": "METAL_FUNC void g(float& p) { p = 1; }",
    "a pointer member": "struct S { float* p; };",
}


def test_clean():
    kernels = [KERNEL.replace("f(", f"f{i}(", 1) for i in range(len(CLEAN))]
    pairs = zip(kernels, CLEAN.values(), strict=True)
    assert host.lint(HEADER + "".join(kernel % body for kernel, body in pairs)) == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    body, reason = REFUSED[name]
    errors = host.lint(HEADER + KERNEL % body, name="planted")
    assert any(reason in e for e in errors), errors
    assert errors[0].startswith(f"planted.metal:{BODY_LINE}:")


@pytest.mark.parametrize("name", UNPLACED)
def test_pointers_without_an_address_space(name):
    errors = host.lint(HEADER + UNPLACED[name] + "\n" + KERNEL % "o[i] = 1;")
    assert "kernel.metal:10: error: 'p' has no address space" in errors[0]


FORBIDDEN = {
    "constexpr int LIMIT = 3;": "'LIMIT' must be in constant memory",
    "struct S { static constexpr int N = 3; };": "'N' must be in constant memory",
    "METAL_FUNC int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }": (
        "'f' calls itself"
    ),
    "METAL_FUNC int g(int n); METAL_FUNC int f(int n) { return g(n); } "
    "METAL_FUNC int g(int n) { return f(n); }": "calls itself",
    "METAL_FUNC void stage() { threadgroup float q[4]; q[0] = 1; }": (
        "threadgroup memory outside of a kernel"
    ),
    "#include <metal_tensor>": "metal_tensor needs Metal 4.0",
}
ALLOWED = (
    "constant constexpr int LIMIT = 3;",
    "struct S { static constant constexpr int N = 3; enum { M = 4 }; };",
    "template <int N> METAL_FUNC int f(int n) { return f<N - 1>(n); } "
    "template <> METAL_FUNC int f<0>(int n) { return n; } "
    "METAL_FUNC int g(int n) { return f<3>(n); }",
    "METAL_FUNC int f(int n) { return n; } "
    "METAL_FUNC float f(float n) { return f(int(n)); }",
    "// a double, goto and <metal_tensor> in a comment",
)


@pytest.mark.parametrize("text", FORBIDDEN)
def test_what_metal_forbids_of_cpp(text):
    errors = host.lint(HEADER + text + "\n" + KERNEL % "o[i] = 1;")
    assert any(FORBIDDEN[text] in e and ".metal:10:" in e for e in errors), errors


def test_what_metal_allows_of_cpp():
    texts = (f"namespace own{i} {{ {text}\n}}\n" for i, text in enumerate(ALLOWED))
    assert host.lint(HEADER + "".join(texts) + KERNEL % "o[i] = 1;") == []


def test_generated_sources():
    def launch(body):
        return kernel("f", "a", body)(
            inputs=[mx.ones((64,))],
            template=[("T", mx.float16), ("N", 4)],
            **sized(64, 64, (64,), mx.float32),
        )

    body = "uint i = thread_position_in_grid.x; T x[N]; x[i % N] = T(a[i]); "
    body += "o[i] = x[i % N] + a_shape[0] + ceildiv(int(i), 3);"
    _, report = host.run(launch, body)
    assert host.lint(report.source) == []
    _, report = host.run(launch, body + " device float* p = (device float*)(a); ")
    assert host.lint(report.source) == []
    _, report = host.run(launch, body + " thread float* p = (thread float*)a; ")
    assert len(host.lint(report.source)) == 1
