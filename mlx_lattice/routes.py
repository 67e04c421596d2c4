"""The route table, and select(): the one place that decides which kernel runs.

The first admissible row of a pass wins; the last row of every pass is always
admissible. A row says on which backends MLX operations (``ready``) or compiled kernels
(``native``, ``partly``) run it: on the others it is declared, explained and never
selected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from . import backends, devices, measure
from .choice import Choice, Route, RouteError
from .devices import CPU, CUDA, METAL, Device
from .needs import (
    c_out_is,
    c_out_multiple_of,
    channels_in,
    dense_weight,
    depthwise_groups,
    determinism_waived,
    few_channels,
    float16_only,
    float32_only,
    half_types,
    im2col_fits,
    many_offsets,
    neighbour_table,
    neural_accelerators,
    one_group,
    packed_weight,
    pointwise_kernel,
    reference_blas,
    rows_at_least,
    volume_at_least,
)
from .problem import FORWARD, INPUT_GRAD, PASSES, WEIGHT_GRAD, Problem

_EVERY = (METAL, CUDA, CPU)
_GPU = (METAL, CUDA)

# THE TABLE. Order is preference.
TABLE: tuple[Route, ...] = (
    Route(
        "native_pointwise",
        PASSES,
        on=(CPU,),
        needs=(pointwise_kernel, dense_weight, one_group),
        ready=(),
        view="none",
        idea="one matmul by the extension; MLX's own runs on a reference BLAS on Linux",
        pays=(reference_blas,),
        native=(CPU,),
    ),
    Route(
        "pointwise",
        PASSES,
        on=_EVERY,
        needs=(pointwise_kernel, dense_weight),
        ready=_EVERY,
        view="none",
        idea="one matmul over the rows, coordinates kept",
    ),
    Route(
        "quantized_pointwise",
        (FORWARD,),
        on=_EVERY,
        needs=(packed_weight, pointwise_kernel, one_group),
        ready=_EVERY,
        view="none",
        idea="one matmul with packed weights, coordinates kept",
        native=(CPU,),
    ),
    Route(
        "quantized_tensor_ops",
        (FORWARD,),
        on=(METAL,),
        needs=(
            packed_weight,
            one_group,
            neural_accelerators,
            half_types,
            neighbour_table,
        ),
        ready=(),
        view="sorted",
        idea="packed weights dequantised into TensorOps tiles",
        pays=(rows_at_least("quantized_tensor_ops"),),
        native=(METAL,),
    ),
    Route(
        "quantized_sorted",
        (FORWARD,),
        on=_EVERY,
        needs=(
            packed_weight,
            one_group,
            neighbour_table,
        ),
        ready=(),
        view="sorted",
        idea="packed weights dequantised into mask-sorted tiles",
        pays=(rows_at_least("quantized_sorted"),),
        native=(METAL, CUDA, CPU),
    ),
    Route(
        "quantized_traversal",
        (FORWARD,),
        on=_EVERY,
        needs=(packed_weight,),
        ready=(),
        view="output_csr",
        idea="packed weights, one thread a row and channel group",
        native=(METAL, CUDA, CPU),
    ),
    Route(
        "tensor_ops",
        PASSES,
        on=(METAL,),
        needs=(
            dense_weight,
            neural_accelerators,
            half_types,
            one_group,
            neighbour_table,
        ),
        ready=(),
        view="sorted",
        idea="mask-sorted tiles through Metal 4 TensorOps",
        pays=(rows_at_least("tensor_ops"),),
        native=(METAL,),
        grad_view="kernel_csr",
    ),
    Route(
        "blocked_gather_gemm",
        PASSES,
        on=(CPU,),
        needs=(dense_weight, neighbour_table),
        ready=(),
        view="out_in",
        idea="output-stationary tiles, edges compacted an offset, SIMD kernel",
        native=(CPU,),
        grad_view="edges",
    ),
    Route(
        "sorted_implicit_gemm",
        PASSES,
        on=_GPU,
        needs=(
            dense_weight,
            one_group,
            neighbour_table,
        ),
        ready=(),
        view="sorted",
        idea="matrix tiles over mask-sorted rows, float32 accumulation",
        pays=(rows_at_least("sorted_implicit_gemm"),),
        native=(METAL, CUDA),
        grad_view="kernel_csr",
    ),
    Route(
        "cout16",
        (FORWARD, WEIGHT_GRAD),
        on=(METAL,),
        needs=(
            dense_weight,
            one_group,
            neighbour_table,
            c_out_is(16),
        ),
        ready=(),
        view="out_in",
        idea="16 output channels held in registers",
        pays=(
            volume_at_least(16),
            rows_at_least("cout16"),
        ),
        native=(METAL,),
        grad_view="kernel_csr",
    ),
    Route(
        "dense_channel",
        PASSES,
        on=(METAL,),
        needs=(
            dense_weight,
            one_group,
            neighbour_table,
            channels_in(16, 32, 64),
        ),
        ready=(),
        view="out_in",
        idea="channel counts fixed at compile time, weights in threadgroup memory",
        pays=(
            volume_at_least(16),
            rows_at_least("dense_channel"),
        ),
        native=(METAL,),
        grad_view="kernel_csr",
    ),
    Route(
        "vec4",
        (FORWARD,),
        on=(METAL,),
        needs=(
            dense_weight,
            float32_only,
            one_group,
            neighbour_table,
            c_out_multiple_of(4),
        ),
        ready=(),
        view="out_in",
        idea="float4 accumulators",
        native=(METAL,),
    ),
    Route(
        "fp16_gather",
        (FORWARD, INPUT_GRAD),
        on=(METAL,),
        needs=(dense_weight, float16_only, one_group, neighbour_table),
        ready=(),
        view="out_in",
        idea="half features gathered, no atomics",
        native=(METAL,),
    ),
    Route(
        "fp32_atomic",
        (FORWARD, INPUT_GRAD),
        on=(METAL,),
        needs=(dense_weight, float32_only, one_group, determinism_waived),
        ready=(),
        view="edges",
        idea="one thread an edge, float atomics",
        native=(METAL,),
    ),
    Route(
        "depthwise",
        PASSES,
        on=_GPU,
        needs=(dense_weight, depthwise_groups, neighbour_table),
        ready=(),
        view="out_in",
        idea="a group a channel: no sum over channels, memory-bound",
        native=_GPU,
        grad_view="kernel_csr",
    ),
    Route(
        "explicit_gemm",
        PASSES,
        on=_EVERY,
        needs=(dense_weight, one_group, neighbour_table, im2col_fits),
        ready=_EVERY,
        view="out_in",
        idea="im2col: one gather, one matmul",
        pays=(few_channels,),
    ),
    # MLX operations are left out on CUDA: relation_traversal takes one launch there for
    # what would be dozens.
    Route(
        "grouped_gemm",
        (WEIGHT_GRAD, FORWARD, INPUT_GRAD),
        on=_EVERY,
        needs=(dense_weight, one_group),
        ready=(METAL, CPU),
        view="edges",
        idea="all offsets in one launch over the kernel-major edges",
        pays=(many_offsets,),
        native=(CPU,),
        partly=((METAL, WEIGHT_GRAD), (CUDA, WEIGHT_GRAD)),
    ),
    Route(
        "relation_traversal",
        PASSES,
        on=_EVERY,
        needs=(dense_weight,),
        ready=(),
        view="output_csr",
        idea="one thread a row and channel group walks its edges; the native floor",
        native=(METAL, CUDA, CPU),
        grad_view="kernel_csr",
    ),
    Route(
        "gather_gemm_scatter",
        PASSES,
        on=_EVERY,
        needs=(),
        ready=_EVERY,
        view="edges",
        idea="gather, matmul and add an offset, in MLX operations; the portable floor",
    ),
)

NAMES = tuple(route.name for route in TABLE)

_forced: ContextVar[dict[str, str] | None] = ContextVar("forced", default=None)


def parse_only(text: str) -> dict[str, str]:
    """Read "vec4" or "forward=vec4,input_grad=fp16_gather" as {pass: route}.

    A bare name stands for every pass that the route has.

    Raises:
        RouteError: a route or pass does not exist, or a route lacks the pass.
    """
    forced = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        pass_, _, name = part.rpartition("=")
        route = named(name)
        if pass_ and pass_ not in route.passes:
            raise RouteError(
                f"{name} has no {pass_ if pass_ in PASSES else repr(pass_)} pass; "
                f"it has {', '.join(route.passes)}"
            )
        for each in (pass_,) if pass_ else route.passes:
            forced[each] = name
    return forced


def named(name: str) -> Route:
    """Return the row of a route's name, or raise with the names there are."""
    for route in TABLE:
        if route.name == name:
            return route
    raise RouteError(f"no route is named {name!r}; there are {', '.join(NAMES)}")


@contextmanager
def only(text: str) -> Iterator[None]:
    """Force routes within a ``with`` block; one that cannot run raises.

    Args:
        text: a route's name, for every pass that it has, or pairs such as
            "forward=vec4,weight_grad=grouped_gemm". The environment variable
            MLX_LATTICE_ROUTE takes the same.
    """
    token = _forced.set({**(_forced.get() or {}), **parse_only(text)})
    try:
        yield
    finally:
        _forced.reset(token)


def forced_route(pass_: str) -> str | None:
    """Return the route that a block or the environment forces for a pass."""
    inside = _forced.get()
    if inside is not None and pass_ in inside:
        return inside[pass_]
    text = os.environ.get("MLX_LATTICE_ROUTE", "")
    return parse_only(text).get(pass_) if text else None


def select(
    problem: Problem,
    *,
    device: str | Device | None = None,
    only: str | None = None,
) -> Choice:
    """Choose the route for a problem. Needs no device and runs nothing.

    Args:
        problem: the facts.
        device: a profile or its name ("m5-max", "h200", "cpu"); by default the one
            that MLX runs on.
        only: a route that must be taken; also by ``routes.only`` and by
            MLX_LATTICE_ROUTE.

    Raises:
        RouteError: the forced route is not admissible; the message has the reason.
    """
    device = devices.current() if device is None else devices.profile(device)
    forced = only or forced_route(problem.pass_)
    tuned = measure.enabled() and forced is None
    times = measure.measured(problem, device) if tuned else ()
    absent = backends.missing(device.backend)
    return _select(problem, device, forced, times, absent)


def candidates(problem: Problem, device: Device) -> tuple[str, ...]:
    """Return the names of the routes that can run a problem, in table order."""
    able = (r for r in TABLE if r.refusal(problem, device, forced=True) is None)
    return tuple(route.name for route in able)


@lru_cache(maxsize=4096)
def _select(
    problem: Problem,
    device: Device,
    forced: str | None,
    times: measure.Times,
    absent: str | None,
) -> Choice:
    statuses = [(r, r.refusal(problem, device)) for r in TABLE]
    able = candidates(problem, device) if times else ()
    times = tuple(t for t in times if t[0] in able)
    if forced is not None:
        route = named(forced)
        if reason := route.refusal(problem, device, forced=True):
            raise RouteError(
                f"route {forced} was forced but cannot run the {problem.pass_} of "
                f"{problem} on {device.name}: {reason}"
            )
    elif times and times[0][1] is not None:
        route = named(times[0][0])
    else:
        route, times = next(r for r, reason in statuses if reason is None), ()
    code, inside = route.code(device.backend, problem.pass_), ()
    if code == backends.LANGUAGE[device.backend]:
        inside = backends.parameters(route.name, problem, device)
    at = TABLE.index(route)
    passed = "admissible; " + ("not measured" if times else "another route was forced")
    later = "admissible; comes later in the table"
    slower = {name: _measured_reason(name, times) for name, _ in times}
    return Choice(
        route,
        device,
        parameters=(("code", code), *inside),
        rejected=tuple(
            (r.name, slower.get(r.name) or reason or passed)
            for r, reason in statuses[:at]
        ),
        below=tuple(
            (r.name, slower.get(r.name) or reason or later)
            for r, reason in statuses[at + 1 :]
            if problem.pass_ in r.passes
        ),
        forced=forced is not None,
        measured=times,
    )


def _measured_reason(name: str, times: measure.Times) -> str:
    taken, (winner, best) = dict(times)[name], times[0]
    if taken is None:
        return "it failed, or did not give the floor's result, when it was measured"
    return f"measured at {taken:.3g} ms, {winner} at {best:.3g} ms"
