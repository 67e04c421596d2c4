"""Sparse convolution for MLX."""

from . import models, nn, ops, routes
from .backend import BackendInfo, backend_info
from .calibrate import Calibration, calibrate
from .contraction import conv, weight_grad
from .coordinate_set import CoordinateKey
from .coordinates import CoordinateManager
from .cost import Cost
from .devices import metal
from .inspect import Explanation, VerificationError, explain, verify
from .kernel import KernelSpec
from .launch import waive_determinism
from .measure import cache, tune
from .problem import Problem
from .quantized import QuantizedWeight, dequantize_weight, quantize_weight
from .relation import Relation
from .routes import Choice, Route, RouteError, select
from .tensor import SparseTensor
from .trace import Trace, trace

__all__ = [
    "BackendInfo",
    "Calibration",
    "Choice",
    "CoordinateKey",
    "CoordinateManager",
    "Cost",
    "Explanation",
    "KernelSpec",
    "Problem",
    "QuantizedWeight",
    "Relation",
    "Route",
    "RouteError",
    "SparseTensor",
    "Trace",
    "VerificationError",
    "backend_info",
    "cache",
    "calibrate",
    "conv",
    "dequantize_weight",
    "explain",
    "models",
    "metal",
    "nn",
    "ops",
    "quantize_weight",
    "routes",
    "select",
    "trace",
    "tune",
    "verify",
    "waive_determinism",
    "weight_grad",
]
