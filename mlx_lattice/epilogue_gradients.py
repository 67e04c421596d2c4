"""An epilogue's own derivatives, in the kernels of norms by channel.

An epilogue is a norm with fixed statistics: backward, one launch gives the gradients of
the sums and of a residual, and two more, if anybody asks, those of scale and shift.
Higher derivatives are the composed form's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import mlx.core as mx

from .backends import registry
from .backends.norms_protocol import ACTIVATIONS, NONE, Fit, Norms
from .epilogue import STATISTICS, EpilogueFacts, finished
from .transformations import Function, filled, several


@lru_cache(maxsize=256)
def finishing(epilogue: EpilogueFacts) -> Callable[..., mx.array]:
    """Return ``finished(sums, *arrays)`` with derivatives by kernels, where they are.

    Args:
        epilogue: its facts; arrays are those that it has, in order.
    """

    def composed(sums: mx.array, *arrays: mx.array) -> mx.array:
        return finished(sums, epilogue, *epilogue.named(arrays))

    def forward(sums: mx.array, *arrays: mx.array) -> mx.array:
        kernels = registry.norms() if sums.size else None
        if kernels is None:
            return composed(sums, *arrays)
        *channels, residual = epilogue.named(arrays)
        return kernels.normalize(sums, _fit(sums, epilogue, *channels), residual)

    def vjp(primals, dy, _):
        sums, *arrays = several(primals)
        kernels = registry.norms() if sums.size else None
        if kernels is None:
            return tuple(mx.vjp(composed, [sums, *arrays], [dy])[1])
        dy, sums = mx.contiguous(dy), mx.contiguous(sums)  # several launches read them
        given = dy, sums, *arrays
        found = {}
        for asked, back in backs:
            made = several(_back(back(kernels), composed, asked)(*given))
            found |= zip(asked, made, strict=True)
        return tuple([found[at] for at in range(1 + len(arrays))])

    places = dict(enumerate(epilogue.there, 1))

    def of(*names: str) -> tuple[int, ...]:
        return tuple([at for at, name in places.items() if name in names])

    # Apart: of what one gives all is computed, and statistics are seldom asked for.
    backs = [((0, *of("residual")), lambda kernels: _of_rows(kernels, epilogue))]
    for asked in filter(None, (of("shift", "scale"), of(*STATISTICS))):
        backs.append((asked, partial(_of_lines, epilogue=epilogue, asked=asked)))
    function = Function(forward)
    function.vjp(vjp)

    @function.jvp
    def jvp(at, by):
        at, by = several(at), several(by)
        return mx.jvp(composed, list(at), filled(at, by))[1][0]

    @function.vmap
    def vmap(inputs, axes):
        return mx.vmap(composed, tuple(several(axes)))(*several(inputs)), 0

    return function


def _back(back: Callable, composed: Callable, asked: Sequence[int]) -> Callable:
    """Return ``back(dy, sums, *arrays)``; its derivatives are the composed form's.

    ``asked``: of which arguments of ``composed`` it gives the gradients.
    """

    def again(dy, *arrays):
        found = mx.vjp(composed, list(arrays), [dy])[1]
        return tuple([found[at] for at in asked])

    function = Function(back)
    function.vjp(lambda at, by, _: tuple(mx.vjp(again, list(at), list(several(by)))[1]))
    function.jvp(lambda at, by: tuple(mx.jvp(again, list(at), filled(at, by))[1]))
    return function


def _of_rows(kernels: Norms, epilogue: EpilogueFacts) -> Callable:
    def back(dy, sums, *arrays):
        *channels, residual = epilogue.named(arrays)
        dx, g = kernels.gradient(dy, sums, _fit(sums, epilogue, *channels), residual)
        return dx if residual is None else (dx, g)

    return back


def _of_lines(
    kernels: Norms, epilogue: EpilogueFacts, asked: Sequence[int]
) -> Callable:
    def back(dy, sums, *arrays):
        *channels, residual = epilogue.named(arrays)
        fit = _fit(sums, epilogue, *channels)
        totals, _, dscale, dshift = kernels.gradient_sums(dy, sums, fit, residual)
        if epilogue.there[asked[0] - 1] not in STATISTICS:
            found = {"shift": dshift.reshape(-1), "scale": dscale.reshape(-1)}
        else:
            kind, scale = fit.mean.dtype, fit.weight
            inverse = mx.rsqrt(fit.var[0].astype(mx.float32) + fit.eps)
            each = inverse if scale is None else inverse * scale.astype(mx.float32)
            dmean, dvar = -each * totals[0, 0], -0.5 * each * inverse * totals[1, 0]
            found = {"mean": dmean.astype(kind), "var": dvar.astype(kind)}
        made = tuple([found[epilogue.there[at - 1]] for at in asked])
        return made if len(made) > 1 else made[0]

    return back


def _fit(sums: mx.array, epilogue: EpilogueFacts, shift, scale, mean, var) -> Fit:
    """Return an epilogue as what normalises channels."""
    eps = 0.0 if var is None else epilogue.eps
    mean = _line(sums.shape[1], 0.0, getattr(mx, epilogue.statistics), mean)
    var = _line(sums.shape[1], 1.0, getattr(mx, epilogue.statistics), var)
    act = ACTIVATIONS[epilogue.activation] if epilogue.activation else NONE
    return Fit(mean, var, scale, shift, eps, act)


def _line(channels: int, value: float, dtype: mx.Dtype, given: mx.array | None):
    if given is not None:
        return given.reshape(1, -1)
    return mx.full((1, channels), value, dtype=dtype)
