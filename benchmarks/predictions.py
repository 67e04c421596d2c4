"""Writes docs/predictions.md: what layers and decodes should take on Apple GPUs.

    python benchmarks/predictions.py

Nothing is timed. The model is ``apple_model.py``, the tables are those of ``shells.py``
and ``decodes.py``.
"""

from pathlib import Path

import decodes
import published_times as published
import shells
from written import markdown

from mlx_lattice import devices

PAGE = Path(__file__).parents[1] / "docs" / "predictions.md"
MILLIONS = 1.6

TEXT = """# Predicted times on Apple GPUs

This page is the output of a benchmark, written by `python benchmarks/predictions.py`.
This library has not been timed on an Apple GPU yet. The tables are arithmetic: the
operations and bytes of a plan, at rates that others measured on such chips. The model
and the sources of its rates are in `benchmarks/apple_model.py`. A `doctor.json` from
a Mac (see [the doctor](doctor.md)) replaces it.

The predicted time of a launch is the largest of its bounds: multiplying, memory,
threadgroup memory, caches, integer arithmetic or barriers. Each launch that waits for
another one adds up to 0.03 ms. `python benchmarks/kernel_facts.py` counts what a
kernel does beside its multiplications, on `metal/host`, and keeps the counts in
`benchmarks/kernel_facts.json`. The model does not know a compiler that spills
registers, a laptop that throttles, or a chip with fewer cores than the largest one of
its name.

## The shells

The only published times of sparse convolution layers on Apple GPUs are those of
mtlgemm: 3x3x3 submanifold layers over hollow spheres, float16, with the kernel map
built before. Its rates are those of an M3 Max, though one of its commits names an M4
Pro. The columns by chip are this library's predicted milliseconds, and the letter is
the bound: c multiplying (compute), m memory, t threadgroup memory, k caches, i
integers, b barriers, l less than MLX takes to evaluate one operation (0.055 to 0.07
ms). "x done" is the executed operations over the useful ones. The times of mtlgemm
include Python and PyTorch.

{shells}

## Whole decodes

Three ports of TRELLIS.2 to Macs report how long a decode takes and how many voxels it
makes. Their times are measured, and include framework, kernel maps and copies; ours
are predicted. The prediction is for the shape decoder in float16, from latents to
seven channels a voxel. It adds up convolutions, linear layers, kernel maps, and the
bytes that norms, SiLU, skips and channel-to-space read and write. Rows and edges are
those of the shell of 128, scaled to the number of voxels.

{ports}

The same by chip, for {millions:g} million voxels, in seconds:

{chips}

## The chips

Public figures for the largest GPU of each name: cores, peak rates in float32 and of
the half matrix units, and memory bandwidth. The rates in half and float32 differ only
on chips with neural accelerators. The M4 Ultra and M5 Ultra are not announced: two of
the Max.

{profiles}
"""


def profiles():
    """The table of chips."""
    rows = [
        (d.name, str(d.cores), f"{d.tflops:g}", f"{d.half_tflops:.3g}",
         f"{d.bandwidth:g}")
        for d in devices.PROFILES.values()
        if d.backend == devices.METAL
    ]  # fmt: skip
    return markdown(("chip", "GPU cores", "TFLOP/s", "half TFLOP/s", "GB/s"), rows)


def page():
    """The text of the page."""
    names = [name for name, _ in shells.columns(shells.CHIPS)]
    rows = [shells.row(shell, shells.CHIPS) for shell in published.SHELLS]
    ports = [decodes.port_row(port) for port in decodes.PORTS]
    return TEXT.format(
        shells=markdown(names, rows),
        ports=markdown(decodes.PORT_COLUMNS, ports),
        millions=MILLIONS,
        chips=markdown(*decodes.chip_table(MILLIONS)),
        profiles=profiles(),
    )


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
