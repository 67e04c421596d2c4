"""Each fault, planted in a kernel, is found, named and placed."""

import numpy as np
import pytest
from metal_checks import threads

from metal import host

host.require()

# Line 3 of the source is the body.
KERNEL = (
    "#include <metal_stdlib>\n"
    "using namespace metal; [[kernel]] void f(const device float* a, device float* o, "
    "uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]], "
    "uint l [[thread_index_in_simdgroup]], uint g [[threadgroup_position_in_grid]]) {\n"
)
COPY = "o[i] = a[i]; "
STAGE = "threadgroup float s[64]; s[t] = a[i]; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "


def run(body, mode="checked", grid=64, threadgroup=64, **options):
    entry = host.compile_source(KERNEL + body + "\n}", name="planted", mode=mode)["f"]
    out = np.empty(64, np.float32)
    options = {"order": "random", "seed": 1} | options
    return host.launch(
        entry, [np.ones(64, np.float32), out], **threads(grid, threadgroup), **options
    )


def one_fault(report, kind, line=3):
    """The fault of that kind, which must stand on the planted line."""
    found = [f for f in report.faults if f.kind == kind]
    assert found, f"{kind} was not reported, but: {list(map(str, report.faults))}"
    assert found[0].kernel == "f"
    assert found[0].place == (f"planted.metal:{line}" if line else "")
    return found[0]


ADD = (
    "device atomic_float* n = (device atomic_float*)o; "
    "atomic_fetch_add_explicit(n, 1.0f, memory_order_relaxed);"
)
RIGHT = {
    "a barrier between write and read": f"{STAGE}{BARRIER}o[i] = s[63 - t];",
    "a simdgroup_barrier inside a simdgroup": (
        f"{STAGE}simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[t ^ 1];"
    ),
    "device memory exchanged across a device barrier": (
        f"{COPY}threadgroup_barrier(mem_flags::mem_device); float x = o[63 - t]; "
        "threadgroup_barrier(mem_flags::mem_device); o[i] = x;"
    ),
    "an atomic behind a device barrier": (
        f"{COPY}threadgroup_barrier(mem_flags::mem_device); {ADD}"
    ),
    "collectives in divergent flow": "o[i] = l < 5 ? simd_sum(a[i]) : simd_max(a[i]);",
    "atomics of many threads on one word": (
        "threadgroup atomic_uint n; if (t == 0) "
        "atomic_store_explicit(&n, 0u, memory_order_relaxed); "
        f"{BARRIER}atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed); {BARRIER}"
        "o[i] = atomic_load_explicit(&n, memory_order_relaxed);"
    ),
}


@pytest.mark.parametrize("mode", ["fast", "checked"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_have_no_fault(name, mode):
    for order in ("forward", "random"):
        assert run(RIGHT[name], mode, order=order).faults == ()


STAGED = f"threadgroup float s[63]; if (t < 63) s[t] = 1; {BARRIER}o[i] = s[t];"
MATRIX = "simdgroup_float8x8 m(1.0f); "
# (body, kind of fault, a part of its message)
FAULTS = (
    (
        "o[i] = a[i + 1];",
        "device read out of bounds",
        "4 bytes at byte 256 of 'a', which has 256 bytes, thread (63, 0, 0) of "
        "threadgroup (0, 0, 0)",
    ),
    ("o[i + 1] = a[i];", "device write out of bounds", "byte 256 of 'o'"),
    ("o[i] += a[i];", "uninitialised device read", ""),
    (f"((device float*)a)[i] = 2; {COPY}", "write to an input", ""),
    (
        f"threadgroup float s[64]; if (t) s[t] = a[i]; {BARRIER}o[i] = s[t];",
        "uninitialised threadgroup read",
        "4 bytes at byte 0 of 's', thread (0, 0, 0)",
    ),
    (
        f"threadgroup float s[63]; s[t] = a[i]; {BARRIER}{COPY}",
        "threadgroup write out of bounds",
        "byte 252 of 's', which has 252 bytes",
    ),
    (STAGED, "threadgroup read out of bounds", ""),
    (
        f"threadgroup float s[8193]; s[t] = 1; {BARRIER}o[i] = s[t];",
        "too much threadgroup memory",
        "32772 bytes; Apple GPUs have 32768",
    ),
    (
        "float r[4] = {0, 1, 2, 3}; o[i] = r[(i >> 3) & 7];",
        "index outside of an array",
        "",
    ),
    ("float4 v = float4(1); o[i] = v[(i >> 3) & 7];", "index outside of an array", ""),
    # A lane has two elements of a matrix.
    (f"{MATRIX}o[i] = m.thread_elements()[2];", "index outside of an array", ""),
    (
        "if (i < 16) ((device float4*)o)[i] = *(const device float4*)(a + i);",
        "misaligned access",
        "",
    ),
)


@pytest.mark.parametrize(("body", "kind", "message"), FAULTS)
def test_faults_are_named_and_placed(body, kind, message):
    assert message in one_fault(run(body), kind).message


def test_a_fault_names_the_file_and_line_that_the_source_names():
    body = f'\n\n#line 31 "metal/conv.metal"\n{COPY}\no[i] += a[i + 64];'
    fault = run(body).faults[0]
    assert (fault.kind, fault.place) == ("device read out of bounds", "conv.metal:32")


def test_output_not_written():
    report = run("if (i != 17) o[i] = a[i];")
    fault = one_fault(report, "output not written", line=None)
    assert "4 of the 256 bytes of 'o', first byte 68" in fault.message


@pytest.mark.parametrize(
    "body",
    (
        "o[i & ~1u] = a[i]; o[i | 1u] = 0;",
        f"{COPY}o[i] = o[63 - i];",
        f"{COPY}if (i) o[i] = o[i - 1] + 1;",
        f"{COPY}{ADD}",
    ),
)
def test_device_races(body):
    assert any(
        f.kind.startswith("device ") and "race" in f.kind for f in run(body).faults
    )


def test_a_barrier_does_not_order_threadgroups():
    ordered = RIGHT["device memory exchanged across a device barrier"]
    kinds = {f.kind for f in run(ordered, threadgroup=32).faults}
    assert kinds & {"device read-after-write race", "device write-after-read race"}


THREADGROUP_RACES = {
    "no barrier before a matrix is loaded": (
        f"{STAGE}simdgroup_float8x8 m; simdgroup_load(m, s, 8); "
        "simdgroup_store(m, o, 8);"
    ),
    "no barrier": f"{STAGE}o[i] = s[63 - t];",
    "a simdgroup_barrier across simdgroups": (
        f"{STAGE}simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[63 - t];"
    ),
    "lanes trusted to run in step": f"{STAGE}o[i] = s[t ^ 1];",
    "no barrier before the next round": (
        f"threadgroup float s[64]; for (int k = 0; k < 2; k++) {{ s[t] = a[i]; "
        f"{BARRIER}o[i] = s[63 - t]; }}"
    ),
}


@pytest.mark.parametrize("name", THREADGROUP_RACES)
def test_threadgroup_races(name):
    for seed in range(3):
        report = run(THREADGROUP_RACES[name], seed=seed)
        races = [f for f in report.faults if "race" in f.kind]
        assert races, list(map(str, report.faults))
        assert races[0].kind.startswith("threadgroup ")
        assert races[0].place == "planted.metal:3"
        assert "'s'" in races[0].message


DIVERGENT = {
    "a return before the barrier": (
        f"if (i == 5) return; {BARRIER}{COPY}",
        "barrier divergence",
    ),
    "a barrier that few threads reach": (
        f"if (i < 5) {BARRIER}{COPY}",
        "barrier divergence",
    ),
    "a matrix operation in half a simdgroup": (
        "simdgroup_float8x8 m(1.0f); if (l < 16) simdgroup_multiply(m, m, m); "
        "o[i] = m.thread_elements()[0];",
        "divergent simdgroup operation",
    ),
    "a simdgroup_barrier in half a simdgroup": (
        "if (l < 16) simdgroup_barrier(mem_flags::mem_none); o[i] = simd_sum(a[i]);",
        "divergent simdgroup operation",
    ),
}


@pytest.mark.parametrize("mode", ["fast", "checked"])
@pytest.mark.parametrize("name", DIVERGENT)
def test_divergence(name, mode):
    body, kind = DIVERGENT[name]
    one_fault(run(body, mode), kind)


@pytest.mark.parametrize("mode", ["fast", "checked"])
def test_integer_division_by_zero(mode):
    one_fault(run("o[i] = 7 / (int(i) - 3);", mode), "integer division by zero")


def test_traps_of_a_fast_kernel_end_the_launch_only():
    body = "o[i] = a[i + (1u << 30)];"
    one_fault(run(body, "fast"), "memory access out of bounds")
    body = "((device float*)a)[i] = 1;"
    one_fault(run(body, "fast"), "memory access out of bounds")
    body = (
        "volatile float big[65536]; big[i] = a[i]; "
        "for (int k = 0; k < 65536; k += 512) big[k] = a[i]; o[i] = big[0] + big[i];"
    )
    assert run(body, "fast").faults[0].kind == "thread stack overflow"
    assert run(COPY, "fast").faults == ()


@pytest.mark.parametrize("mode", ["fast", "checked"])
def test_threadgroup_too_large(mode):
    report = run(COPY, mode, grid=2048, threadgroup=2048)
    fault = one_fault(report, "threadgroup too large", line=None)
    assert fault.message == "2048 x 1 x 1 threads; Metal allows 1024"


@pytest.mark.parametrize(
    "body",
    [
        "a[i] = 0;",
        "threadgroup atomic_float q; "
        "atomic_fetch_max_explicit(&q, 1.0f, memory_order_relaxed);",
        "threadgroup atomic<half> q; (void)q;",
        "o[i] = undeclared;",
    ],
)
def test_what_metal_does_not_have_does_not_compile(body):
    with pytest.raises(host.CompileError, match="planted.metal:3"):
        run(body)


def test_random_orders_differ_by_seed_and_repeat():
    # Each thread takes a ticket: the order in which threads ran.
    source = KERNEL.replace("device float* o", "device atomic_uint* o") + (
        "threadgroup atomic_uint n; if (i == 0) "
        "atomic_store_explicit(&n, 0u, memory_order_relaxed); "
        f"{BARRIER} atomic_store_explicit(o + i, "
        "atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed), "
        "memory_order_relaxed);\n}"
    )
    entry = host.compile_source(source)["f"]

    def tickets(**options):
        out = np.empty(64, np.uint32)
        a = np.ones(64, np.float32)
        report = host.launch(entry, [a, out], **threads(64), **options)
        assert report.faults == ()
        assert sorted(out) == list(range(64))
        return out.tolist()

    assert tickets(order="forward") == list(range(64))
    assert tickets(order="reverse") == list(range(64))[::-1]
    first = tickets(order="random", seed=1)
    assert first == tickets(order="random", seed=1)
    assert first != tickets(order="random", seed=2)
