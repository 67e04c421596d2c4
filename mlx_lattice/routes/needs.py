"""Needs: small named predicates of the route table, whose text is the explanation.

They know the facts that they are given and nothing else: a Choice asks them again for
its reasons, long after. In tables of thresholds "*" is the default of other chips.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

from .. import devices
from ..backends.cuda import thresholds as cuda_thresholds
from ..backends.metal.tiles import FILLING_ROWS, GROUPS
from ..devices import CPU, CUDA, METAL, Device, entry
from ..problem import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Problem

# Fewest rows for which a route pays, by (route, pass); see ANY_ROWS. Values for Metal
# come from counts of executed operations.
ROWS = {
    # They come after sorted_implicit_gemm in the table: unsorted tiles execute 1.6 to
    # 2.2 times the useful operations, sorted ones 1.11 to 1.14.
    ("dense_channel", "forward"): {"*": 256},
    ("dense_channel", "input_grad"): {"*": 256},
    ("cout16", "forward"): {"*": 512},
    ("sorted_implicit_gemm", "forward"): FILLING_ROWS,
    ("sorted_implicit_gemm", "input_grad"): FILLING_ROWS,
    ("grouped_gemm", "weight_grad"): {"*": 1},
    ("tensor_ops", "forward"): FILLING_ROWS,
    ("tensor_ops", "input_grad"): FILLING_ROWS,
    ("tensor_ops", "weight_grad"): {"*": 1024},
    ("quantized_sorted", "forward"): FILLING_ROWS,
    ("quantized_tensor_ops", "forward"): FILLING_ROWS,
}

# Fewest channels of the narrower side for which tiles run any number of rows. The other
# route reads W[k] for each row: 200 rows of 256 channels take it 1.2 ms on an H200.
ANY_ROWS = {
    ("sorted_implicit_gemm", "forward"): {"*": 32, "h100": 8, "h200": 8},
    ("sorted_implicit_gemm", "input_grad"): {"*": 32, "h100": 8, "h200": 8},
    ("tensor_ops", "forward"): {"*": 32},
    ("tensor_ops", "input_grad"): {"*": 32},
    ("quantized_sorted", "forward"): {"*": 32},
    ("quantized_tensor_ops", "forward"): {"*": 32},
}

# CPU: multiply-adds that cost as much as a step from one group of an edge to the next.
GROUP_PRODUCTS = 640

# Most channels of a group for which im2col beats a matmul for each offset.
IM2COL_CHANNELS = {"*": 4, "cpu": 8}

# Most bytes of the im2col matrix in explicit GEMM.
IM2COL_BYTES = {"*": 1 << 30, "cpu": 1 << 29}

# Fewest kernel offsets for which one dispatch beats one for each offset.
GROUPED_OFFSETS = {"*": 8, "cpu": 64}

# ROWS on CUDA. On an H200 300 rows of 4 channels take 7 us without tiles and 9 us with
# tiles; with 8 channels they take 8 us and 5 us.
CUDA_ROWS = {
    ("sorted_implicit_gemm", "forward"): {"*": 1024},
    ("sorted_implicit_gemm", "input_grad"): {"*": 1024},
    # Over sorted rows; below it grouped_gemm serves, over edges.
    ("sorted_implicit_gemm", "weight_grad"): {"*": 1 << 14},
    ("quantized_sorted", "forward"): {"*": 256},
}


# A need returns None where it holds, else the sentence that explains the refusal.
Need = Callable[[Problem, Device], str | None]


def of_kernels(need: Need) -> Need:
    """Mark a need that is about the backend's own kernels: without them it holds."""
    need.of_kernels = True
    return need


def accelerate() -> bool:
    """Whether MLX's CPU matmul runs on Apple's Accelerate."""
    return platform.system() == "Darwin"


def pointwise_kernel(p: Problem, device: Device) -> str | None:
    """Require a kernel with one offset, zero, that keeps the rows."""
    if p.pointwise:
        return None
    return f"the kernel is {p.kernel} ({p.kind}), not 1x1x1 on the input's own rows"


_COPIED = "half rows are copied first, since MLX's matmul may refuse where they begin"


@of_kernels
def no_tiles(p: Problem, device: Device) -> str | None:
    """Refuse if CUDA's tiles read half rows that MLX's matmul would copy.

    It refuses half rows that begin off 16 bytes, and where rows begin is not known when
    a layer is called.
    """
    if device.family not in cuda_thresholds.HOPPER or p.dtype == "float32":
        return None
    if p.pass_ == WEIGHT_GRAD:
        return f"{_COPIED}; tiles of edges read them where they are"
    tiles = rows_at_least("sorted_implicit_gemm")
    # Padding summed channels copies rows too; padding others copies weights alone.
    if p.channels[0] % 8 or tiles(p, device):
        return None
    return f"{_COPIED}; sorted_implicit_gemm reads them where they are"


def dense_weight(p: Problem, device: Device) -> str | None:
    """Require weights that are not packed. Gradients dequantise packed weights."""
    if p.integer:
        return "features are int8"
    packed = p.bits and p.pass_ == FORWARD
    return f"the weight is packed int{p.bits}" if packed else None


def packed_weight(p: Problem, device: Device) -> str | None:
    """Require int4 or int8 weights."""
    if p.integer:
        return "features are int8"
    return None if p.bits else f"the weight is {p.dtype}, not packed"


def packed_or_integers(p: Problem, device: Device) -> str | None:
    """Require packed weights, or int8 features on Apple GPUs without matrices of
    integers.
    """
    if not p.integer or device.backend != METAL:
        return packed_weight(p, device)
    if device.neural_accelerators:
        return "features are int8, which neural accelerators multiply"
    return one_scale(p, device)


def int8_features(p: Problem, device: Device) -> str | None:
    """Require int8 features, whose weights are integers."""
    return None if p.integer else f"features are {p.dtype}, not int8"


def one_scale(p: Problem, device: Device) -> str | None:
    """Require one scale for all rows of int8 features."""
    if p.integer is None or not p.integer.row_scales:
        return None
    return "every row has a scale of its own: offsets cannot be summed in int32"


def dtype_is(dtype: str) -> Need:
    """Require features of one dtype."""

    def need(p: Problem, device: Device) -> str | None:
        return None if p.dtype == dtype else f"features are {p.dtype}, not {dtype}"

    return need


def half_types(p: Problem, device: Device) -> str | None:
    """Require float16 or bfloat16 features."""
    if p.dtype != "float32":
        return None
    return "features are float32, which neural accelerators would round"


def one_group(p: Problem, device: Device) -> str | None:
    """Require an ungrouped convolution."""
    return None if p.groups == 1 else f"groups = {p.groups}, not 1"


def depthwise_groups(p: Problem, device: Device) -> str | None:
    """Require a group for each input channel."""
    if p.groups > 1 and p.groups == p.c_in:
        return None
    return f"groups = {p.groups}, not one of each of {p.c_in} input channels"


def expands_groups(p: Problem, device: Device) -> bool:
    """Return whether a grouped pass takes less time as a dense one."""
    if p.groups == 1 or p.integer or (p.bits and p.pass_ == FORWARD):
        return False
    if p.pointwise:
        return True
    width, each = p.c_in // p.groups, p.c_out // p.groups
    if device.backend == CPU:
        products, step = p.c_in * p.c_out, GROUP_PRODUCTS
        is_depthwise = width == each == 1
        return not is_depthwise and p.groups * (step + width * each) > step + products
    if width == 1 and p.table:
        return False
    if device.backend == CUDA:
        return True
    # A thread has four channels of y, or 4 x 4 of dW: of fewer it wastes the rest.
    is_grad = p.pass_ == WEIGHT_GRAD
    filled = min(each if p.pass_ != INPUT_GRAD else width, 4) / 4
    filled *= min(width, 4) / 4 if is_grad else 1
    kind = "float32" if p.dtype == "float32" else "half"
    if kind == "half" and device.neural_accelerators:
        kind = "accelerated"
    return p.groups * filled < GROUPS[kind][is_grad]


def expands_edges(p: Problem, device: Device) -> bool:
    """Return the same for routes over edges, of which a GPU's tiles have dW alone."""
    is_own = device.backend == CPU or _by_tiles_of_edges(p, device)
    return is_own and expands_groups(p, device)


def expands_on_cpu(p: Problem, device: Device) -> bool:
    """Return the same for routes that walk edges by groups on a GPU."""
    return device.backend == CPU and expands_groups(p, device)


def neighbour_table(p: Problem, device: Device) -> str | None:
    """Require a relation with a neighbour table."""
    if p.table:
        return None
    return "several edges share an output row and offset: there is no neighbour table"


def weight_grad_of_sorted_rows(p: Problem, device: Device) -> str | None:
    """For weight gradients, require a CUDA tile of dW over sorted rows."""
    if p.pass_ != WEIGHT_GRAD or device.backend != CUDA:
        return None
    if device.family not in cuda_thresholds.HOPPER:
        return f"{device.name} has no wgmma, by which dW is summed over sorted rows"
    if p.dtype == "float32":
        return "features are float32; dW over sorted rows takes 16 bits"
    most = cuda_thresholds.SORTED_GRAD_CHANNELS
    if p.c_in <= most:
        return None
    return f"C_in = {p.c_in} is above {most}, the rows of a tile of dW"


def determinism_waived(p: Problem, device: Device) -> str | None:
    """Require ``ml.waive_determinism()``."""
    if not p.deterministic:
        return None
    return "its float atomics are not deterministic, and determinism is not waived"


def neural_accelerators(p: Problem, device: Device) -> str | None:
    """Require TensorOps on matrix hardware, which also multiply integers."""
    if device.neural_accelerators:
        return None
    return f"{device.name} has no neural accelerators (M5 or later, macOS 26.2)"


@of_kernels
def simdgroup_matrices(p: Problem, device: Device) -> str | None:
    """Require simdgroup matrices, which virtual GPUs lack."""
    if device.matrices:
        return None
    return "the GPU of a virtual machine has no simdgroup matrices"


def channels_in(*sizes: int) -> Need:
    """Require C_in and C_out among ``sizes``."""

    def need(p: Problem, device: Device) -> str | None:
        for name, channels in (("C_in", p.c_in), ("C_out", p.c_out)):
            if channels not in sizes:
                return f"{name} = {channels} is not one of {sizes}"
        return None

    return need


def c_out_is(channels: int) -> Need:
    """Require one C_out."""

    def need(p: Problem, device: Device) -> str | None:
        return None if p.c_out == channels else f"C_out = {p.c_out}, not {channels}"

    return need


def c_out_multiple_of(size: int) -> Need:
    """Require a C_out that divides into vectors of ``size``."""

    def need(p: Problem, device: Device) -> str | None:
        if p.c_out % size == 0:
            return None
        return f"C_out = {p.c_out} is not a multiple of {size}"

    return need


def volume_at_least(volume: int) -> Need:
    """Require kernels of at least ``volume`` offsets."""

    def need(p: Problem, device: Device) -> str | None:
        return None if p.volume >= volume else f"K = {p.volume} is below {volume}"

    return need


def rows_at_least(route: str) -> Need:
    """Require at least as many rows as the route's threshold."""

    def need(p: Problem, device: Device) -> str | None:
        is_grad, key = p.pass_ == INPUT_GRAD, (route, p.pass_)
        own = device.backend == CUDA and key in CUDA_ROWS
        least = entry((CUDA_ROWS if own else ROWS).get(key, {"*": 0}), device)
        if key in ANY_ROWS and min(p.c_in, p.c_out) >= entry(ANY_ROWS[key], device):
            least = 1
        rows = p.n_in if is_grad else p.n_out
        if rows >= least:
            return None
        return f"{'N_in' if is_grad else 'N_out'} = {rows:,} is below {least:,}"

    return need


def many_edges(p: Problem, device: Device) -> str | None:
    """For weight gradients, require so many edges a row that sorted rows pay."""
    edges = p.known_edges()
    if p.pass_ != WEIGHT_GRAD or edges is None:
        return None
    by_channels = cuda_thresholds.SORTED_GRAD_EDGES.items()
    least = next((each for most, each in by_channels if p.c_in <= most), 0)
    if edges >= least * p.n_out:
        return None
    return (
        f"{edges / p.n_out:.1f} edges a row are below {least}, with C_in = {p.c_in}: "
        "tiles of edges fit"
    )


def _by_tiles_of_edges(p: Problem, device: Device) -> bool:
    """Whether a GPU has own tiles for the pass, whatever MLX operations would cost."""
    return p.pass_ == WEIGHT_GRAD and device.backend != CPU


def few_channels(p: Problem, device: Device) -> str | None:
    """Require that one wide im2col matmul beats a short matmul for each offset."""
    if _by_tiles_of_edges(p, device):
        return "tiles of dW read the rows where they are, without a gathered matrix"
    most = devices.entry(IM2COL_CHANNELS, device)
    channels = p.c_out if p.pass_ == INPUT_GRAD else p.c_in
    if channels <= most:
        return None
    name = "C_out" if p.pass_ == INPUT_GRAD else "C_in"
    return f"{name} = {channels} is above {most}: a matmul an offset wastes less"


def im2col_fits(p: Problem, device: Device) -> str | None:
    """Require a gathered matrix within its memory bound."""
    size = p.im2col_bytes(device)
    most = devices.entry(IM2COL_BYTES, device)
    if size <= most:
        return None
    return (
        f"its gathered matrix would take {size / 1e9:.1f} GB; at most "
        f"{most / 1e9:.1f} GB are allowed"
    )


def many_offsets(p: Problem, device: Device) -> str | None:
    """Require that one dispatch over all offsets beats one for each offset."""
    if _by_tiles_of_edges(p, device):
        return None
    least = devices.entry(GROUPED_OFFSETS, device)
    if p.volume >= least:
        return None
    return f"K = {p.volume} is below {least}: a matmul an offset costs less"


def reference_blas(p: Problem, device: Device) -> str | None:
    """Require a reference BLAS behind MLX's CPU matmul: everywhere but macOS."""
    if not accelerate():
        return None
    return "MLX's own matmul runs on Accelerate here, which is faster"
