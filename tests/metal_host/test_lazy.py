"""Host kernels are nodes of MLX's graph: lazy, differentiable, compiled, recorded."""

import mlx.core as mx
import numpy as np
import pytest
from metal_checks import kernel, sized

from metal import host

host.require()


@pytest.fixture(params=["fast", "checked"])
def installed(request):
    host.install(checked=request.param == "checked", order="random", seed=3)
    yield
    host.uninstall()


PRODUCT = "uint i = thread_position_in_grid.x; T v = a[i] * b[i] * T(s); o[i] = v;"
ONES = mx.ones((64,))


def product(a, b, scale=1.0):
    """a * b * scale by a kernel without derivatives."""
    launch, size = (
        kernel("product", "a b s", PRODUCT),
        sized(a.size, 64, a.shape, a.dtype),
    )
    return launch(inputs=[a, b, scale], template=[("T", a.dtype)], **size)[0]


def shifted(a, shift):
    source = f"uint i = thread_position_in_grid.x;\no[i] = a[i + {shift}];"
    launch, size = kernel("shifted", "a", source), sized(a.size, 64, a.shape, a.dtype)
    return launch(inputs=[a], **size)[0]


@mx.custom_function
def times(a, b):
    # jvp descends into the forward function, and a kernel has none.
    return product(mx.stop_gradient(a), mx.stop_gradient(b))


@times.vjp
def times_vjp(primals, cotangent, _):
    a, b = primals
    return times(cotangent, b), times(a, cotangent)


@times.jvp
def times_jvp(primals, tangents):
    (a, b), (da, db) = primals, tangents
    terms = [times(da, b)] if da is not None else []
    terms += [times(a, db)] if db is not None else []
    return sum(terms)


def close(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(np.array(x), np.array(y), rtol=1e-4, atol=1e-5)


def loss(multiply):
    return lambda a, b: (mx.sin(multiply(a, b)) * a).sum()


TRANSFORMS = {
    "grad": lambda f: mx.grad(f, (0, 1)),
    "grad of grad": lambda f: mx.grad(
        lambda a, b: (mx.grad(f, 0)(a, b) ** 2).sum(), (0, 1)
    ),
    "compile": lambda f: lambda a, b: [mx.compile(f)(a, b)],
    "jvp of grad": lambda f: lambda a, b: mx.jvp(mx.grad(f, 0), [a, b], [b, a])[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations(installed, name):
    a, b = mx.random.normal((2, 300), key=mx.random.key(0))
    transform = TRANSFORMS[name]
    close(transform(loss(times))(a, b), transform(loss(mx.multiply))(a, b))


@pytest.mark.parametrize("vector", ("float4", "packed_float4"))
def test_a_view_stands_where_it_does_on_the_gpu(vector):
    """Vectors need their own alignment, which a slice of an array may not have."""
    flat = mx.arange(20).astype(mx.float32)
    source = (
        "uint i = 4 * thread_position_in_grid.x; "
        f"*(device {vector}*)(o + i) = *(const device {vector}*)(a + i);"
    )
    copy, size = kernel(f"copy_{vector}", "a", source), sized(3, 3, (12,), mx.float32)
    for start in range(9):
        a = flat[start : start + 12]
        (y,), report = host.run(copy, inputs=[a], **size)
        assert mx.array_equal(y, a)
        wrong = vector == "float4" and start % 4
        kinds = {fault.kind for fault in report.faults}
        assert kinds == ({"misaligned access"} if wrong else set())


def test_strided_inputs(installed):
    source = (
        "uint i = thread_position_in_grid.x; int n = a_ndim; "
        "o[i] = a[elem_to_loc(i, a_shape, a_strides, n)];"
    )
    gather = kernel("gather", "a", source, ensure_row_contiguous=False)
    base = mx.arange(600.0).reshape(20, 30)
    for x in (base.T, base.T[::2, 3:], mx.broadcast_to(base[0], (4, 30))):
        (out,) = gather(inputs=[x], **sized(x.size, 64, x.shape, x.dtype))
        assert mx.array_equal(out, x)


def test_atomic_outputs_and_their_first_value(installed):
    source = (
        "uint t = thread_position_in_grid.x; "
        "atomic_fetch_add_explicit(&o[i[t]], v[t], memory_order_relaxed); "
        "atomic_fetch_add_explicit(&n[0], 1, memory_order_relaxed);"
    )
    index = mx.random.randint(0, 10, (500,), key=mx.random.key(2))
    value = mx.random.normal((500,), key=mx.random.key(3))
    out, count = kernel("scatter", "i v", source, "o n", atomic_outputs=True)(
        inputs=[index, value],
        grid=(500, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(10,), (1,)],
        output_dtypes=[mx.float32, mx.int32],
        init_value=7,
    )
    close([out], [mx.full((10,), 7.0).at[index].add(value)])
    assert count.item() == 507


def test_a_fault_surfaces_where_the_array_is_evaluated(installed):
    out = shifted(ONES, 1 << 28)
    sentence = r"shifted.*: .* out of bounds at .*\.metal:"
    with pytest.raises(RuntimeError, match=sentence):
        mx.eval(out)
    assert mx.arange(3).sum().item() == 3
    assert mx.array_equal(shifted(ONES, 0), ONES)


def test_building_the_graph_runs_nothing():
    with host.recording() as record:
        out = shifted(ONES, 0)
        assert record.report.counts.launches == 0
        mx.eval(out)
        assert record.report.counts.launches == 1


def test_run_reports_all_launches_and_their_faults():
    _, report = host.run(lambda: product(shifted(ONES, 1), shifted(ONES, 0)))
    assert [r.kernel.split("_")[2] for r in report.launches].count("shifted") == 2
    assert report.counts.launches == 3
    assert report.counts.threads == 3 * 64
    (fault,) = report.faults
    assert fault.kind == "device read out of bounds"
    assert fault.place.endswith(".metal:6")
    with pytest.raises(host.KernelFault, match="byte 256 of 'a'"):
        report.raise_faults()


def test_a_checked_recording_refuses_unchecked_launches():
    compiled = mx.compile(lambda a: shifted(a, 0))
    host.run(compiled, ONES, checked=False)
    with pytest.raises(RuntimeError, match="mx.compile traced it before"):
        host.run(compiled, ONES)


def test_metal_kernel_is_given_back():
    real = mx.fast.metal_kernel
    with host.recording():
        assert mx.fast.metal_kernel is host.metal_kernel
    assert mx.fast.metal_kernel is real
    host.install()
    assert mx.fast.metal_kernel is host.metal_kernel
    host.uninstall()
    assert mx.fast.metal_kernel is real


def test_a_wrong_call_raises_as_on_a_mac(installed):
    with pytest.raises(ValueError, match="order must be one of"):
        host.install(order="sideways")
    with pytest.raises(ValueError, match="[Ii]nput"):
        kernel("f", "a", "o[0] = a[0];")(inputs=[], **sized(1, 1, (1,), mx.float32))
