"""What the shells of mtlgemm should take on each Apple chip, beside its times.

    python benchmarks/shells.py [--chips NAME ...] [--markdown]

Nothing is timed: operations are counted over the shells' relations, and taken at rates
that others measured (apple_model.py). `mlx-lattice doctor` times the same layers on a
Mac.
"""

import argparse
from functools import cache

import mlx.core as mx
from apple_model import making_ms, number, predict_layer
from published_times import SHELL_SOURCE, SHELLS
from written import markdown

import mlx_lattice as ml
from mlx_lattice import devices
from mlx_lattice.inspect.doctor import shell as shell_coords
from mlx_lattice.inspect.trace import drawn

LETTERS = {
    "compute": "c",
    "memory": "m",
    "threadgroup memory": "t",
    "cache": "k",
    "integer": "i",
    "barrier": "b",
    "launch": "l",
}
CHIPS = ("m1", "m1-max", "m2-max", "m3-max", "m4", "m4-pro", "m4-max", "m5", "m5-max")


@cache
def relation(resolution):
    """The submanifold 3x3x3 relation of a shell."""
    manager = ml.CoordinateManager()
    key = manager.insert(shell_coords(resolution))
    return manager.submanifold_kernel_relation(key, kernel_size=3)


def predicted(shell, chip):
    """The Cost of a shell's forward pass on a chip, its Prediction, its map's ms."""
    device = devices.profile(chip)
    facts = shell.channels, shell.channels, ml.checks.DTYPES["float16"]
    # Tiles are those of the CPU's geometry; CUDA's order of rows is another.
    with mx.stream(mx.cpu):
        built = relation(shell.resolution)
        problem = ml.Problem.of("forward", built, *facts, layout="mlx")
        choice = ml.select(problem, device=device)
        counts = ml.inspect.explain.cost(problem, device, choice=choice, relation=built)
        found = predict_layer(problem, device, choice, built)
        return counts, found, making_ms(choice.plan, device)


def cell(found):
    """The range, and the letter of what bounds it."""
    return f"{found.range} {LETTERS[found.bound]}"


def row(shell, chips):
    """The texts of a shell's row."""
    found = [predicted(shell, chip) for chip in chips]
    counts = found[0][0]
    return (
        str(shell.resolution),
        f"{relation(shell.resolution).n_out:,}",
        str(shell.channels),
        f"{counts.useful_flops / 1e9:.2f}",
        f"{counts.done_over_useful:.2f}",
        f"{shell.masked_ms:g}",
        *(cell(prediction) for _, prediction, _ in found),
    )


def columns(chips):
    """The table's columns, (name, side) each."""
    facts = "shell", "rows", "channels", "GFLOP", "x done", "mtlgemm ms"
    return [(name, "right") for name in (*facts, *chips)]


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=CHIPS, choices=devices.PROFILES)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    rows = [row(shell, args.chips) for shell in SHELLS]
    if args.markdown:
        print(markdown([name for name, _ in columns(args.chips)], rows))
        return
    print(drawn(columns(args.chips), rows))
    bounds = ", ".join(f"{letter} {name}" for name, letter in LETTERS.items())
    print(f"ms, predicted, and what bounds it: {bounds}")
    for resolution in sorted({s.resolution for s in SHELLS}):
        shell = next(s for s in SHELLS if s.resolution == resolution)
        texts = []
        for chip in args.chips:
            slow, fast = predicted(shell, chip)[2]
            texts.append(f"{chip} {number(fast)} to {number(slow)}")
        print(f"kernel map of {resolution}: {', '.join(texts)}")
    print(f"mtlgemm: {SHELL_SOURCE}")


if __name__ == "__main__":
    main()
