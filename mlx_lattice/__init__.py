"""Sparse convolution for MLX."""

from . import models, nn, ops, routes
from .backend import BackendInfo, backend_info
from .contraction import conv, weight_grad
from .coordinate_set import CoordinateKey
from .coordinates import CoordinateManager
from .cost import Cost
from .inspect import Explanation, VerificationError, explain, verify
from .kernel import KernelSpec
from .measure import cache, tune
from .problem import Problem
from .relation import Relation
from .routes import Choice, Route, RouteError, select
from .tensor import SparseTensor
from .trace import Trace, trace

__all__ = [
    "BackendInfo",
    "Choice",
    "CoordinateKey",
    "CoordinateManager",
    "Cost",
    "Explanation",
    "KernelSpec",
    "Problem",
    "Relation",
    "Route",
    "RouteError",
    "SparseTensor",
    "Trace",
    "VerificationError",
    "backend_info",
    "cache",
    "conv",
    "explain",
    "models",
    "nn",
    "ops",
    "routes",
    "select",
    "trace",
    "tune",
    "verify",
    "weight_grad",
]
