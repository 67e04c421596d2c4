"""Runs Metal kernels on the CPU, with Metal's semantics. See README.md.

A testing device for source checkouts; no wheel contains it.
"""

from .compile import Entry, compile_source
from .launch import launch
from .lazy import (
    HostKernel,
    Recording,
    install,
    metal_kernel,
    recording,
    run,
    uninstall,
)
from .lint import lint
from .report import Counts, Fault, KernelFault, Report, Traffic
from .source import Source
from .toolchain import CompileError, ToolMissing, missing, require

__all__ = [
    "CompileError",
    "Counts",
    "Entry",
    "Fault",
    "HostKernel",
    "KernelFault",
    "Recording",
    "Report",
    "Source",
    "ToolMissing",
    "Traffic",
    "compile_source",
    "install",
    "launch",
    "lint",
    "metal_kernel",
    "missing",
    "recording",
    "require",
    "run",
    "uninstall",
]
