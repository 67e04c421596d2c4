"""Sparse convolution for MLX: the public names of the package.

A layer (``nn``) gets a ``Relation``, the kernel map, from the ``CoordinateManager`` of
its input. ``contraction.conv`` then runs it on the route that ``routes`` selects.
"""

# Imported first: it warns if another package overwrote files that are imported below.
from .distribution import __version__ as __version__

# isort: split
from typing import TYPE_CHECKING

from . import models, nn, ops, optimizers, routes
from .cache_files import cache
from .checks import LatticeWarning
from .compiled import Compiled, compile
from .contraction import conv, weight_grad
from .coordinate_set import CoordinateKey
from .coordinates import CoordinateManager
from .devices import metal
from .inspect.compare import Comparison, compare
from .inspect.doctor import BackendInfo, backend_info
from .inspect.explain import (
    AttentionExplanation,
    Cost,
    Explanation,
    VerificationError,
    explain,
    explain_attention,
    verify,
)
from .inspect.summary import Summary, summary
from .inspect.trace import Trace, trace
from .int8 import IntegerTensor, integer_conv
from .kernel_spec import KernelSpec
from .memory import MemoryLimitError, memory_limit
from .nn.calibrate import Calibration, calibrate
from .prepare import Preparation, prepare
from .problem import Problem
from .quantized import (
    IntegerWeight,
    QuantizedWeight,
    dequantize_weight,
    integer_weight,
    quantize_weight,
)
from .relation import Relation
from .routes.proof import proof
from .routes.selection import Choice, Route, RouteError, select, tune, waive_determinism
from .scene import Scene
from .settings import precision
from .tensor import SparseTensor, VoxelizedPoints, unknown_name

__all__ = [
    "AttentionExplanation",
    "BackendInfo",
    "Calibration",
    "Comparison",
    "Compiled",
    "Choice",
    "CoordinateKey",
    "CoordinateManager",
    "Cost",
    "Explanation",
    "IntegerTensor",
    "IntegerWeight",
    "KernelSpec",
    "LatticeWarning",
    "MemoryLimitError",
    "Preparation",
    "Problem",
    "QuantizedWeight",
    "Relation",
    "Route",
    "RouteError",
    "Scene",
    "SparseTensor",
    "Summary",
    "Trace",
    "VerificationError",
    "VoxelizedPoints",
    "backend_info",
    "cache",
    "calibrate",
    "compare",
    "compile",
    "conv",
    "dequantize_weight",
    "explain",
    "explain_attention",
    "memory_limit",
    "models",
    "integer_conv",
    "integer_weight",
    "metal",
    "nn",
    "ops",
    "optimizers",
    "precision",
    "prepare",
    "proof",
    "quantize_weight",
    "routes",
    "select",
    "summary",
    "trace",
    "tune",
    "verify",
    "waive_determinism",
    "weight_grad",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # type checkers find mistyped names

    def __getattr__(name: str) -> None:
        unknown_name(name, __name__)
