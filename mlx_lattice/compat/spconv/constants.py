"""spconv.constants: settings that nets write or read.

Only ``SAVED_WEIGHT_LAYOUT`` has an effect. The others are of CUDA kernels: they can be
assigned, and are ignored.
"""

from __future__ import annotations

import os

PACKAGE_NAME = "spconv"
# The layout of weights in checkpoints that are loaded, if not that of spconv 2.2: KRSC
# (out, k..., in), RSKC (k..., out, in) of 2.0 and 2.1, or RSCK (k..., in, out) of 1.x.
SAVED_WEIGHT_LAYOUT = os.getenv("SPCONV_SAVED_WEIGHT_LAYOUT", "")
if SAVED_WEIGHT_LAYOUT not in ("", "KRSC", "RSKC", "RSCK"):
    raise ValueError(
        "SPCONV_SAVED_WEIGHT_LAYOUT must be KRSC, RSKC or RSCK; got "
        f"{SAVED_WEIGHT_LAYOUT!r}"
    )
ALL_WEIGHT_IS_KRSC = True
FILTER_HWIO = False

SPCONV_ALLOW_TF32 = False
SPCONV_BWD_SPLITK = [1, 2, 4, 8, 16, 32, 64]
SPCONV_CPP_GEMM = True
SPCONV_CPP_INDICE_PAIRS = True
SPCONV_CPP_INDICE_PAIRS_IGEMM = False
SPCONV_DEBUG_SAVE_PATH = ""
SPCONV_DEBUG_WEIGHT = False
SPCONV_DIRECT_TABLE_HASH_SIZE_SCALE = 1.1
SPCONV_DO_SORT = True
SPCONV_FX_TRACE_MODE = False
SPCONV_INT8_DEBUG = False
SPCONV_USE_DIRECT_TABLE = True
