"""Functions of sparse tensors."""

from ..other_names import unknown_name
from . import (
    activation,
    attention,
    boxes,
    channels,
    conv,
    coordinates,
    dual_grid,
    groups,
    heads,
    interpolation,
    neighbours,
    norm,
    pool,
    sampling,
    sequences,
)
from .activation import *
from .attention import *
from .boxes import *
from .channels import *
from .conv import *
from .coordinates import *
from .dual_grid import *
from .groups import *
from .heads import *
from .interpolation import *
from .neighbours import *
from .norm import *
from .pool import *
from .sampling import *
from .sequences import *

__all__ = [
    *activation.__all__,
    *attention.__all__,
    *boxes.__all__,
    *channels.__all__,
    *conv.__all__,
    *coordinates.__all__,
    *dual_grid.__all__,
    *pool.__all__,
    *groups.__all__,
    *heads.__all__,
    *interpolation.__all__,
    *neighbours.__all__,
    *norm.__all__,
    *pool.__all__,
    *sampling.__all__,
    *sequences.__all__,
]


def __getattr__(name: str) -> None:
    unknown_name(name, __name__)
