"""Routes: the table, the choice of a row, and the launch of its plan."""

from ..problem import PASSES
from .choice import Choice, Route, RouteError
from .selection import forced_route, only, parse_only, select
from .table import NAMES, TABLE, named

__all__ = [
    "Choice",
    "NAMES",
    "PASSES",
    "Route",
    "RouteError",
    "TABLE",
    "forced_route",
    "named",
    "only",
    "parse_only",
    "select",
]
