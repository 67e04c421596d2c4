"""Plant one fault at a time in the package; each must make its tests fail.

    python tests/mutation/run.py [FAULT...]

One fault for each family of code that has one home. It takes some five minutes, and
writes into the checkout while it runs; files are restored however it ends. Faults of
Metal kernels are planted by ``tests/mutants.py``, in the suite itself.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """A text of a file that stands there once, another in its place, and tests."""

    file: str
    right: str
    wrong: str
    tests: str


FAULTS = {
    "norms": Fault(
        "ops/norms.py",
        "row_sum(mx.square(x - mean)) / rows",
        "row_sum(mx.square(x - mean)) / (rows - 1)",
        "nn/test_norms.py",
    ),
    "epilogues": Fault(
        "epilogue.py",
        "y = y - mean",
        "y = y + mean",
        "ops/test_channel_norms.py",
    ),
    "attention": Fault(
        "ops/attention.py",
        '("window", window, shift)',
        '("window", window, 0)',
        "ops/test_attention.py",
    ),
    "reductions": Fault(
        "reductions.py",
        "return sum_over(_shares(dy, divisors), back(), lambda: table)",
        "return sum_over(dy, back(), lambda: table)",
        "ops/test_pooling.py",
    ),
    "quantisation": Fault(
        "quantized.py",
        "mx.round((w - biases) / steps), 0, 2**bits - 1",
        "mx.floor((w - biases) / steps), 0, 2**bits - 1",
        "routes/test_quantized.py",
    ),
    "int8 features": Fault(
        "int8.py",
        "_rounded(values, scale / mx.maximum(to, TINY))",
        "_rounded(values, mx.maximum(to, TINY) / scale)",
        "nn/test_integer_nn.py",
    ),
    "geometry": Fault(
        "geometry/lattice.py",
        "return ((wide - remainder) // by).astype(a.dtype)",
        "return ((wide + remainder) // by).astype(a.dtype)",
        "geometry/test_builders.py",
    ),
    "routes": Fault(
        "routes/selection.py",
        "if not error <= tolerance:",
        "if error > tolerance:",
        "routes/test_tuning.py",
    ),
    "files": Fault(
        "io/checkpoints.py",
        "inputs = 0 if isinstance(module, DENSE_TRANSPOSED) else 1",
        "inputs = 1",
        "io/test_detectors.py",
    ),
    "detection": Fault(
        "models/detection/backbones.py",
        "points, cells = points[inside_rows], cells[inside_rows]",
        "points, cells = points[: len(inside_rows)], cells[inside_rows]",
        "nn/test_recipe.py",
    ),
    "names": Fault(
        "tensor.py",
        "    if x.dims != dims:",
        "    if x.dims < dims:",
        "ops/test_refusals.py",
    ),
}


def passes(tests: str) -> bool:
    """Whether a file of tests passes."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", f"tests/{tests}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode not in (0, 1):
        sys.exit(run.stdout + run.stderr)
    return run.returncode == 0


def survives(fault: Fault) -> bool:
    """Whether the tests pass although the fault is there."""
    path = ROOT / "mlx_lattice" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        sys.exit(f"{fault.file} has {text.count(fault.right)} of {fault.right!r}")
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        return passes(fault.tests)
    finally:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    """Run the faults that are named, by default all."""
    survivors = []
    for name in sys.argv[1:] or FAULTS:
        fault = FAULTS[name]
        if not passes(fault.tests):
            sys.exit(f"tests/{fault.tests} fails without a fault")
        if survives(fault):
            survivors.append(name)
        print(f"{name}: {'SURVIVES' if name in survivors else 'killed'}", flush=True)
    sys.exit(f"tests miss {', '.join(survivors)}" if survivors else None)


if __name__ == "__main__":
    main()
