"""Lint refuses what compiles and is slow or wrong on a Mac: a planted fault of each."""

import functools
import re

import pytest

from metal import host

host.require()

HEADER = """#include <metal_stdlib>
using namespace metal;
"""
KERNEL = """
[[kernel]] void f(
    const device float* a [[buffer(0)]], device float* o [[buffer(1)]],
    constant int& n [[buffer(2)]], device atomic_ulong* at [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  %s
}
"""


def findings(text="", body="o[i] = 1;"):
    return host.lint(f"{HEADER}{text.rstrip()}{KERNEL % body}")


# Of a file: (clean, planted, what is said of it).
DECLARED = {
    "a function": (
        "METAL_FUNC int g(int n) { return n; }",
        "inline int g(int n) { return n; }",
        "'g' is not METAL_FUNC",
    ),
    "a method's address space": (
        "struct S { METAL_FUNC int g() thread { return 1; } };",
        "struct S { METAL_FUNC int g() { return 1; } };",
        "'g' names no address space",
    ),
    "a template of matrices": (
        "template <int N> struct S { simdgroup_matrix<half, 8, 8> m[N]; "
        "METAL_FUNC S() thread {} };",
        "template <int N> struct S { simdgroup_matrix<half, 8, 8> m[N]; };",
        "'S' holds matrices",
    ),
    "what a pointer returned is of": (
        "METAL_FUNC device int* g(device int* p) { return p; }",
        "METAL_FUNC int* g(device int* p);",
        "'g' returns no address space",
    ),
    "a loop that indexes a vector": (
        "METAL_FUNC float g(float4 v, int n) { float s = 0; "
        "for (int i = 0; i < 4; ++i) if (i < n) s += v[i]; return s; }",
        "METAL_FUNC float g(float4 v, int n) { float s = 0; "
        "for (int i = 0; i < n; ++i) s += v[i]; return s; }",
        "'v' is indexed by 'i'",
    ),
    "an index made in a loop": (
        "METAL_FUNC void g(thread float* v, const device int* p, int n) { "
        "for (int i = 0; i < n; ++i) for (int j = 0; j < 4; ++j) v[j] += p[i]; }",
        "METAL_FUNC void g(thread float* v, int n) { "
        "for (int i = 0; i < n; ++i) { const int j = i % 4; v[j] += 1; } }",
        "'v' is indexed by 'j'",
    ),
    "a pointer that walks": (
        "METAL_FUNC void g(thread float* v, device float* p, int n) { "
        "for (int i = 0; i < n; ++i) *v += *p++; }",
        "METAL_FUNC void g(thread float* v, int n) { "
        "for (int i = 0; i < n; ++i) *v++ = 1; }",
        "'v' is indexed by 'v'",
    ),
    "an index that a function gets": (
        "METAL_FUNC void h(thread float* v, int at) { v[at] = 1; } "
        "METAL_FUNC void g(thread float* v, int n) { for (int j = 0; j < n; ++j) "
        "for (int i = 0; i < 4; ++i) h(v, i); }",
        "METAL_FUNC void h(thread float* v, int at) { const int k = at; v[k] = 1; } "
        "METAL_FUNC void g(thread float* v, int n) { "
        "for (int j = 0; j < n; ++j) h(v, j); }",
        "is indexed by 'j'",
    ),
    "the address of an element": (
        "METAL_FUNC float g(float4 v) { thread float4* p = &v; return (*p)[1] + v.x; }",
        "METAL_FUNC float g(float4 v) { thread float* p = &v[1]; return *p; }",
        "the address is taken of an element of 'v'",
    ),
    "an element that a function writes": (
        "METAL_FUNC void h(thread float& x) { x = 1; } "
        "METAL_FUNC void g(thread float4& v) { float x; h(x); v.y = x; }",
        "METAL_FUNC void h(thread float& x) { x = 1; } "
        "METAL_FUNC void g(thread float4& v) { h(v.y); }",
        "a reference is made to an element of 'v'",
    ),
    "a reference to an element of bfloat": (
        "METAL_FUNC void g(thread bfloat4& v, bool b) { v[0] = b ? v[1] : v.y; "
        "v[2] += 1.0f; bfloat x = v.z; v.w = x + v[0] * v.y; v.xy = v.yx; }",
        "METAL_FUNC void h(thread bfloat& x) { x += 1.0f; } "
        "METAL_FUNC void g(thread bfloat4& v) { h(v[1]); }",
        "a reference is made to an element of 'v'",
    ),
    "a large array": (
        "METAL_FUNC void g() { float v[128]; v[0] = 1; }",
        "METAL_FUNC void g() { float v[8][17]; v[0][0] = 1; }",
        "'v' takes 544 bytes of a thread",
    ),
    "a constant under Metal's name": (
        "constant constexpr int LEVEL = 3;",
        "constant constexpr int coord = 3;",
        "'coord' is a name of metal::",
    ),
    "a variable under a keyword": (
        "METAL_FUNC int g(int corner) { return corner; }",
        "METAL_FUNC int g(int vertex) { return vertex; }",
        "'vertex' is a keyword",
    ),
}
# Of a kernel's body: (clean, planted, what is said of it).
WRITTEN = {
    "matrices of another size": (
        "simdgroup_matrix<float, 8, 8> m;",
        "simdgroup_matrix<float, 8, 4> m;",
        "simdgroup matrices are 8 x 8",
    ),
    "a pair as the elements of a matrix": (
        "simdgroup_float8x8 m; m.thread_elements()[0] = a[i]; "
        "m.thread_elements()[1] = m.thread_elements()[0];",
        "simdgroup_float8x8 m; m.thread_elements() = float2(a[i], a[i]);",
        "no viable overloaded '='",
    ),
    "atomic addition of 64 bits": (
        "atomic_max_explicit(at, 1ul, memory_order_relaxed);",
        "atomic_fetch_add_explicit(at, 1ul, memory_order_relaxed);",
        "no matching function for call to 'atomic_fetch_add_explicit'",
    ),
    "a sum of bools": (
        "o[i] = simd_sum(int(a[i] > 0)) + simd_sum(a[i]);",
        "o[i] = simd_sum(a[i] > 0);",
        "a bool is no number between lanes",
    ),
    "bits of floats between lanes": (
        "o[i] = simd_or(i);",
        "o[i] = simd_or(a[i]);",
        "takes integers",
    ),
    "threadgroup memory of 32 KB": (
        "threadgroup float4 s[2000]; threadgroup float t[192]; s[i].x = t[i] = 1;",
        "threadgroup float4 s[2000]; threadgroup float t[193]; s[i].x = t[i] = 1;",
        "32772 bytes of threadgroup memory; 32768 are the most",
    ),
    "a constructor in threadgroup memory": (
        "struct S { int n; }; threadgroup S s[4]; s[i].n = 1;",
        "struct S { int n; METAL_FUNC S() thread { n = 1; } }; "
        "threadgroup S s[4]; s[i].n = 1;",
        "'s' in threadgroup memory has a constructor",
    ),
    "a method of thread memory on device memory": (
        "struct S { int n; METAL_FUNC int g() device { return n; } }; "
        "o[i] = ((device S*)o)->g();",
        "struct S { int n; METAL_FUNC int g() { return n; } }; "
        "o[i] = ((device S*)o)->g();",
        "'g' is a method of thread memory, called on __global S *",
    ),
}


def joined(texts: dict[str, str]) -> str:
    """Texts as one, each on line 1 of a file of its own, with its own structs S, M."""
    parts = [HEADER]
    for at, text in enumerate(texts.values()):
        text = re.sub(r"\b([SM])\b", rf"\1_case{at}", text).replace("OWN", f"case{at}")
        parts.append(f'#line 1 "case{at}.metal"\n{text}\n')
    return "".join(parts)


def by_case(texts: dict[str, str]) -> dict[str, list[str]]:
    """Lint texts at once; return the findings of each by name."""
    errors, own = host.lint(joined(texts)), {}
    for at, name in enumerate(texts):
        place = f"case{at}.metal:1: error: "
        mine = [error for error in errors if error.startswith(place)]
        own[name] = [error.replace(f"_case{at}", "") for error in mine]
    return own


def declarations(which: int) -> dict[str, str]:
    """Each in a namespace, but for the names that are wrong outside of one only."""
    return {
        name: case[which]
        if "Metal's name" in name
        else f"namespace OWN {{{case[which]}}}"
        for name, case in DECLARED.items()
    }


def bodies(which: int) -> dict[str, str]:
    kernel = " ".join(KERNEL.split()).replace("void f(", "void OWN(")
    return {n: kernel.replace("%s", c[which]) for n, c in WRITTEN.items()}


@functools.cache
def planted() -> dict[str, list[str]]:
    return by_case(declarations(1)) | by_case(bodies(1))


@pytest.mark.parametrize("texts", (declarations(0), bodies(0)), ids=("file", "body"))
def test_clean(texts):
    assert host.lint(joined(texts)) == []


@pytest.mark.parametrize("name", DECLARED | WRITTEN)
def test_planted(name):
    reason = (DECLARED | WRITTEN)[name][2]
    assert any(reason in error for error in planted()[name]), planted()[name]


def test_keywords():
    words = {
        word: f"METAL_FUNC int OWN(int {word}) {{ return {word}; }}"
        for word in host.names.KEYWORDS
    }
    assert all(by_case(words).values())


def test_places_are_those_of_the_file():
    text = (
        '#line 7 "metal/x.metal"\n\n// a comment\ninline int g(\n    int n) {return n;}'
    )
    assert findings(text) == ["metal/x.metal:9: error: 'g' is not METAL_FUNC"]


@pytest.mark.parametrize("count", (30, 31))
def test_buffers(count):
    buffers = ", ".join(f"device int* b{i} [[buffer({i})]]" for i in range(1 + count))
    kernel = f"[[kernel]] void f({buffers}) {{ b0[0] = 1; }}"
    found = host.lint(HEADER + kernel)
    assert found == ([] if count == 30 else [
        "kernel.metal:3: error: 'f' has a buffer 31; 30 is the last"
    ])  # fmt: skip


# TensorOps

PLACE = re.compile(r"kernel\.metal:(\d+): error: ")
GUARD = '#if !__TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2\n#error "layout"\n#endif\n'
INCLUDE = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
TENSORS = """
  using namespace mpp::tensor_ops;
  constexpr auto descriptor = matmul2d_descriptor(
      16, 32, 16, false, false, true, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, metal::execution_simdgroup> product;
  auto left = product.get_left_input_cooperative_tensor<half, half, float>();
  auto right = product.get_right_input_cooperative_tensor<half, half, float>();
  auto sums = product.get_destination_cooperative_tensor<
      remove_addrspace_t<decltype(left)>, remove_addrspace_t<decltype(right)>, float>();
  for (int j = 0; j < 8; ++j) left[j] = half(a[j]);
  product.run(left, right, sums);
  o[i] = sums[0];
"""
PLANTED_TENSORS = {
    "an operand's type as decltype gives it": (
        "remove_addrspace_t<decltype(left)>",
        "decltype(left)",
        "take remove_addrspace_t",
    ),
    "a product of two types": (
        "right_input_cooperative_tensor<half, half",
        "right_input_cooperative_tensor<half, bfloat",
        "does not multiply these types",
    ),
    "a size that is not there": ("16, 32, 16", "16, 24, 16", "are 16 or 32"),
    "a loop over what a lane has": ("j < 8", "j < n", "'left' is indexed by 'j'"),
}


def test_tensor_ops():
    assert findings(INCLUDE + GUARD, TENSORS) == []


@pytest.mark.parametrize("name", PLANTED_TENSORS)
def test_faults_of_tensor_ops(name):
    old, new, reason = PLANTED_TENSORS[name]
    assert TENSORS.count(old) == 1
    errors = findings(INCLUDE + GUARD, TENSORS.replace(old, new))
    assert any(reason in e for e in errors) and PLACE.match(errors[0]), errors


def test_tensor_ops_of_another_layout():
    (error,) = findings(INCLUDE, TENSORS)
    assert "another layout" in error and error.startswith("kernel.metal:3:")
    with pytest.raises(host.CompileError, match="layout"):
        host.compile.preprocess(INCLUDE + GUARD, deployment_target=260199)
