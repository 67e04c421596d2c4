"""What Metal 3.1 (macOS 14) refuses and clang's C++ for OpenCL takes, for lint.py.

Two sources: the tokens of the kernel, for names and headers that came later, and
clang's own warnings, for C++ later than Metal's. Kernels with TensorOps are Metal 4.
"""

from __future__ import annotations

import re

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_LATER = {
    r"metal_(?:tensor|cooperative_tensor)\b|MetalPerformancePrimitives": "4.0",
    r"\b(?:mpp|tensor_ops|cooperative_tensor|tensor_inline|dextents)\b": "4.0",
    r"\bmetal_logging\b|\bos_log\w*|\bcoherent\b": "3.2",
    r"\batomic_thread_fence\b|\bthread_scope_\w+": "3.2",
    r"\bmemory_order_(?:acquire|release|acq_rel|seq_cst)\b": "3.2",
    r"\batomic_compare_exchange_strong\w*": None,
    r"\bdouble\b": None,
    r"\bgoto\b": None,
    r"\bthread_local\b": None,
    r"\blong\s+long\b": None,
    r"\bstd::\w+": None,
}
# MLX compiles `if constexpr` for macOS 14 in kernels of its own: a C++17 extension.
_WARNING = re.compile(
    r"^(\S+?:\d+):\d+: warning: (?!constexpr if)(.*) "
    r"\[-W(?:pre-c\+\+17-compat|c\+\+98-compat)\]$"
)

WARNINGS = ("-Wpre-c++17-compat", "-Wc++98-compat")


def in_tokens(source: str, name: str, tensor_ops: bool = False) -> list[str]:
    """Names and headers that Metal 3.1, or 4.0 of TensorOps, does not have."""
    found = []
    for number, line in enumerate(without_comments(source).splitlines(), 1):
        for pattern, version in _LATER.items():
            if tensor_ops and version:
                continue
            if used := re.search(pattern, line):
                since = f"needs Metal {version}" if version else "is not in Metal"
                found.append(f"{name}.metal:{number}: error: {used.group()} {since}")
    return found


def without_comments(source: str) -> str:
    """Blanks comments and strings; every place stays where it was."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)


def in_warnings(messages: str) -> list[str]:
    """C++ later than Metal's: C++17 but for what MLX relies on, and lambdas."""
    found = []
    for line in messages.splitlines():
        warning = _WARNING.match(line)
        if not warning or "lint_headers" in line:
            continue
        later = "pre-c++17" in line or "lambda" in line
        if later:
            found.append(f"{warning[1]}: error: not in Metal 3.1: {warning[2]}")
    return found
