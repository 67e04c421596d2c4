"""What lint says of a small kernel."""

from metal import host

HEADER = """#include <metal_stdlib>
using namespace metal;
"""
KERNEL = """
[[kernel]] void f(
    const device float* a [[buffer(0)]], device float* o [[buffer(1)]],
    constant int& n [[buffer(2)]], device atomic_ulong* at [[buffer(3)]],
    uint i [[thread_position_in_grid]]) {
  %s
}
"""


def findings(text="", body="o[i] = 1;"):
    return host.lint(f"{HEADER}{text.rstrip()}{KERNEL % body}")
