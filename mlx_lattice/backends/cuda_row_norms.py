"""Layer norm on CUDA: rows by threads of a warp, where MLX starts a block for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx

from ..devices import CUDA, current
from ..problem import FLOATS
from .dispatch_bounds import ceil_div
from .gpu_kernel import GpuKernel, Interface
from .norm_interfaces import numbers
from .norms_protocol import Activation

FILES = "alignment.cuh", "channels.cuh", "epilogue.cuh", "row_norms.cu"
THREADS, WARP = 256, 32
BLOCKS = 16  # of a multiprocessor, over which rows are walked
MOST_VECTORS = 4  # of a thread, in registers
FACE = Interface(
    "RowNorm",
    ("x", "weight", "bias", "norm_numbers"),
    ("y",),
    (("rows", "x_shape[0]"), ("channels", "x_shape[1]")),
)


class CudaRowNorms:
    """Each of (N, C) rows by itself, in one launch."""

    def takes(
        self, x: mx.array, weight: mx.array | None, bias: mx.array | None
    ) -> bool:
        """Whether the kernel normalises these rows, with parameters of one dtype."""
        each, channels = 16 // x.dtype.size, x.shape[-1]
        kinds = {a.dtype for a in (weight, bias) if a is not None}
        fits = channels % each == 0 and channels <= MOST_VECTORS * WARP * each
        fits = fits and x.dtype in FLOATS and x.ndim == 2
        return x.size > 0 and fits and len(kinds) < 2

    def layer_norm(
        self,
        x: mx.array,
        weight: mx.array | None,
        bias: mx.array | None,
        eps: float,
        act: Activation,
    ) -> mx.array:
        """Return rows normalised over their channels, in the dtype of x."""
        kind = next((a.dtype for a in (weight, bias) if a is not None), mx.float32)
        facts = x.shape, x.dtype, kind, weight is not None, bias is not None, act.kind
        given = [x, weight, bias, numbers(eps, 0.0, act.slope)]
        launch = _launcher(*facts, current().cores)
        return launch([a for a in given if a is not None])[0]


@lru_cache(maxsize=1024)
def _launcher(
    shape: tuple[int, int],
    dtype: mx.Dtype,
    kind: mx.Dtype,
    has_weight: bool,
    has_bias: bool,
    act: int,
    cores: int,
) -> Callable[[list[mx.array]], list[mx.array]]:
    each = 16 // dtype.size
    vectors = ceil_div(shape[1], each)
    lanes = min(WARP, 1 << (vectors - 1).bit_length())
    template = (
        ("T", dtype),
        ("EACH", each),
        ("LANES", lanes),
        ("VECTORS", ceil_div(vectors, lanes)),
        ("P", kind),
        ("ACT", act),
    )
    kernel = _kernel(template)
    blocks = min(ceil_div(shape[0] * lanes, THREADS), cores * BLOCKS)
    given = True, has_weight, has_bias, True
    return kernel.launcher(given, [(shape, dtype)], (blocks * THREADS,), (THREADS,))


@lru_cache(maxsize=256)
def _kernel(template: tuple) -> GpuKernel:
    return GpuKernel(CUDA, "layer_norm", FILES, FACE, template, threads=THREADS)
