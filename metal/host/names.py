"""Names that are Metal's own, for lint.py.

Its keywords and macros name nothing else. What `metal::` has may be a local's name or a
parameter's; but kernels are `using namespace metal`, where a function, a class or a
constant of that name is ambiguous, or is called in the other's place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .tree import Node

_KEYWORDS = """
bfloat coherent constant device fragment half kernel object_data ray_data sampler thread
threadgroup threadgroup_imageblock vertex
"""
_MATH = """
abs absdiff acos acosh asin asinh atan atan2 atanh ceil clamp copysign cos cosh cospi
cross determinant distance distance_squared divide dot exp exp10 exp2 fabs faceforward
fdim floor fma fmax fmax3 fmedian3 fmin fmin3 fmod fract frexp ilogb ldexp length
length_squared log log10 log2 max max3 median3 min min3 mix modf nextafter normalize
pow powr reflect refract rint round rsqrt saturate sign sin sincos sinh sinpi
smoothstep sqrt step tan tanh tanpi transpose trunc
addsat clz ctz extract_bits hadd insert_bits mad24 madhi madsat mul24 mulhi popcount
reverse_bits rhadd rotate subsat
all any isfinite isinf isnan isnormal isordered isunordered select signbit
"""
_TYPES = """
array array_ref atomic atomic_bool atomic_float atomic_int atomic_uint atomic_ulong
bool_constant byte conditional conditional_t cooperative_tensor decay declval dextents
enable_if enable_if_t extents false_type imageblock integral_constant interpolant
is_arithmetic is_convertible is_empty is_floating_point is_integral is_pointer is_same
is_same_v is_signed is_unsigned make_signed make_unsigned matrix mem_flags memory_order
nullptr_t numeric_limits packed_vec patch_control_point ptrdiff_t raytracing
remove_addrspace_t remove_cv_t remove_reference simd_vote simdgroup_matrix size_t span
tensor thread_scope true_type uniform vec visible_function_table
access address bias border_color compare_func component coord filter gradient2d
gradient3d gradientcube level lod_options mip_filter min_lod_clamp sampler swizzle
depth2d depth2d_array depth2d_ms depthcube texture1d texture1d_array texture2d
texture2d_array texture2d_ms texture3d texture_buffer texturecube
"""
_ACTIONS = """
as_type atomic_thread_fence dfdx dfdy discard_fragment fwidth get_num_samples
make_filled_simdgroup_matrix make_uniform precise fast simdgroup_async_copy
simdgroup_barrier simdgroup_load simdgroup_multiply simdgroup_multiply_accumulate
simdgroup_store threadgroup_barrier
"""
# Limits of numbers, and constants by type: M_PI_F, HALF_EPSILON, INT_MAX.
_MACROS = re.compile(
    r"(?:M_\w+_[FH]|__(?:METAL|HAVE)_\w+"
    r"|(?:FLT|HALF|BFLT)_(?:DIG|EPSILON|MAX|MIN|RADIX|\w+_(?:DIG|EXP))"
    r"|(?:S?CHAR|UCHAR|U?SHRT|U?INT|U?LONG)_(?:MIN|MAX|BIT)"
    r"|MAX(?:FLOAT|HALF|BFLOAT)|HUGE_VAL[FH])"
)
KEYWORDS = frozenset(_KEYWORDS.split())
NAMES = frozenset(f"{_MATH} {_TYPES} {_ACTIONS}".split())
PREFIXES = ("atomic_", "memory_", "mem_", "quad_", "simd_", "simdgroup_", "thread_")
PREFIXES += ("pack_float_", "pack_half_", "unpack_snorm", "unpack_unorm")

_NAMESPACE_SCOPE = frozenset({"TranslationUnitDecl", "EnumDecl"})
_NOTHING = frozenset({"NamespaceDecl", "UsingDecl", "CXXConversionDecl"})


def in_names(tree: Node) -> Iterator[str]:
    """Yields declarations under names that Metal has."""
    for node in tree.walk():
        if not node.kind.endswith("Decl") or not node.name or node.implicit:
            continue
        if node.name in KEYWORDS:
            yield f"{node.place}: error: '{node.name}' is a keyword of Metal"
        if _MACROS.fullmatch(node.name):
            yield f"{node.place}: error: '{node.name}' is a macro of Metal"
        if node.kind in _NOTHING or node.parent is None:
            continue
        outside = node.parent.kind in _NAMESPACE_SCOPE
        outside = outside and not node.parent.fields.get("scopedEnumTag")
        outside = outside and node.function is None
        taken = node.name in NAMES or node.name.startswith(PREFIXES)
        if outside and taken:
            yield f"{node.place}: error: '{node.name}' is a name of metal::"
