"""Integer arithmetic of a kernel, and what becomes float, counted where it runs.

A counted kernel is compiled to LLVM's text first. Each block in it gets one call that
adds what the block divides, multiplies and converts from integer to float; then the
text is compiled on. What a constant makes a shift is not counted; division by another
constant is the multiplication that both compilers make of it, and a remainder is one
more.
"""

from __future__ import annotations

import re

COUNTER, COUNTS = "mtl_arithmetic", 5

_OPERATION = re.compile(
    r"= (mul|udiv|sdiv|urem|srem)(?: nuw| nsw| exact)* "
    r"(?:<(\d+) x i(\d+)>|i(\d+)) [^,]+, (-?\w+|\S+)"
)
_CONVERSION = re.compile(r"= (?:uitofp|sitofp)(?: nneg)? (?:<(\d+) x )?i\d+")
_TERMINATOR = re.compile(r"  (br|ret|switch|unreachable|indirectbr)\b")
# Functions that stand for all lanes of a simdgroup at once, and addresses of matrices,
# which the hardware makes.
_NOT_THE_KERNEL = ("PPvj", "matrix_offset")


def _power_of_two(text: str) -> bool:
    value = abs(int(text))
    return value & (value - 1) == 0


def counted(line: str) -> tuple[int, int, int, int, int] | None:
    """Return what an instruction does.

    32- and 64-bit divisions, then multiplications, then conversions from integer to
    float; None where it is none of them. Narrower types count as 32 bits.
    """
    if converted := _CONVERSION.search(line):
        return 0, 0, 0, 0, int(converted[1] or 1)
    found = _OPERATION.search(line)
    if not found:
        return None
    kind, lanes, vector, scalar, right = found.groups()
    constant = bool(re.fullmatch(r"-?\d+", right))
    if constant and _power_of_two(right):
        return None
    wide, times = int(vector or scalar) > 32, int(lanes or 1)
    divisions = multiplications = 0
    if kind == "mul":
        multiplications = times
    elif constant:
        multiplications = times * (2 if kind.endswith("rem") else 1)
    else:
        divisions = times
    both = divisions, multiplications
    each_width = (n for each in both for n in ((0, each) if wide else (each, 0)))
    return *each_width, 0


def instrument(text: str) -> str:
    """Return LLVM's text of a kernel with its counting calls."""
    out, sums, inside = [], [0] * COUNTS, False
    for line in text.splitlines():
        if line.startswith("define "):
            inside = not any(name in line for name in _NOT_THE_KERNEL)
            sums = [0] * COUNTS
        elif inside and _TERMINATOR.match(line):
            if any(sums):
                numbers = ", ".join(f"i32 {n}" for n in sums)
                out.append(f"  call void @{COUNTER}({numbers})")
            sums = [0] * COUNTS
        elif inside and (here := counted(line)):
            sums = [a + b for a, b in zip(sums, here, strict=True)]
        out.append(line)
    types = ", ".join(["i32"] * COUNTS)
    return "\n".join([*out, f"declare void @{COUNTER}({types})", ""])
