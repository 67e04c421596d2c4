"""Sparse convolution for MLX."""

from . import ops, routes
from .contraction import conv, weight_grad
from .coordinates import CoordinateKey, CoordinateManager
from .kernel import KernelSpec
from .problem import Problem
from .relation import Relation
from .routes import Choice, Route, RouteError, select
from .tensor import SparseTensor

__all__ = [
    "Choice",
    "CoordinateKey",
    "CoordinateManager",
    "KernelSpec",
    "Problem",
    "Relation",
    "Route",
    "RouteError",
    "SparseTensor",
    "conv",
    "ops",
    "routes",
    "select",
    "weight_grad",
]
