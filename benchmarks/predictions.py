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

This page predicts how long layers and whole decodes take on each Apple GPU. The library
has not been timed on an Apple GPU yet. If you have a Mac, run [the doctor](doctor.md)
and attach its `doctor.json` to an issue: measured times will replace this page.

`python benchmarks/predictions.py` writes the page. It divides the operations and bytes
of a plan by rates that others measured on these chips. `benchmarks/apple_model.py` has
the model and the sources of its rates.

The predicted time of a launch is the largest of its bounds: multiplication, memory,
threadgroup memory, caches, integer arithmetic or barriers. Each launch that waits for
another one adds up to 0.03 ms. `python benchmarks/kernel_facts.py` runs the kernels on
`metal/host` and counts their operations beside multiplications. The counts are in
`benchmarks/kernel_facts.json`. The model ignores register spills, laptops that
throttle, and chips with fewer cores than the largest one of their name.

## The shells

mtlgemm has the only published times of sparse convolution layers on Apple GPUs. They
are of 3x3x3 submanifold layers over hollow spheres in float16, include Python and
PyTorch, and exclude building the kernel map. The chip is an M3 Max by mtlgemm's rates,
though one of its commits names an M4 Pro.

The columns by chip are this library's predicted milliseconds. "x done" is the executed
operations over the useful ones. The letter is the bound:

| letter | bound |
|---|---|
| c | multiplication (compute) |
| m | memory |
| t | threadgroup memory |
| k | caches |
| i | integer arithmetic |
| b | barriers |
| l | less than MLX takes to evaluate one operation (0.055 to 0.07 ms) |

{shells}

## Whole decodes

Three ports of TRELLIS.2 to Macs report how long a decode takes and how many voxels it
makes. Their times are measured, and include the framework, kernel maps and copies. Our
times are predicted, for the shape decoder in float16, from latents to seven channels
for each voxel. They include convolutions, linear layers, kernel maps ("relations"), and
the bytes that norms, SiLU, skips and channel-to-space read and write ("passes"). Rows
and edges are those of the shell of 128, scaled to the number of voxels.

{ports}

Predicted seconds by chip for {millions:g} million voxels:

{chips}

## The chips

Public figures for the largest GPU of each name: cores, peak rates in float32 and in
half precision, and memory bandwidth. The two rates differ only on chips with neural
accelerators. The M4 Ultra and M5 Ultra are not announced; their figures are twice the
Max's.

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
