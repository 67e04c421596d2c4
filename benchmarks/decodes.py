"""What TRELLIS.2's shape decoder should take on Apple chips, beside ports' times.

    python benchmarks/decodes.py [--markdown] [--million 1.6]

Ours is predicted by apple_model.py; theirs is measured. Nothing is
timed and no scene of a port's size is made: a closed shell gives rows and edges of the
finest level and of the one above, the levels above that are taken to be as that one is,
and rows are scaled to the voxels. Edges of a row, and what tiles execute for them, stay
as they are.
"""

import argparse
from dataclasses import dataclass
from functools import cache
from inspect import signature

from apple_model import MEMORY, making_ms, predict_layer
from written import markdown

import mlx_lattice as ml
from mlx_lattice import devices, models
from mlx_lattice.inspect.doctor import shell
from mlx_lattice.inspect.trace import drawn
from mlx_lattice.models.trellis2.transformer import CELLS

DTYPE, BYTES = "float16", 2
PARTS = "convolutions", "linear layers", "passes", "relations"


@dataclass(frozen=True)
class Port:
    """A decode that a port of TRELLIS.2 to Macs reports.

    Attributes:
        chip: name of the profile; of a family's largest GPU.
        voxels: fine ones, in millions.
        seconds: measured.
        name: of the port.
    """

    chip: str
    voxels: float
    seconds: float
    name: str


PORTS = (
    Port("m2-pro", 3.04, 63, "trellis2mlx (MLX)"),
    Port("m4-max", 1.9, 73, "trellis2mlx (MLX)"),
    Port("m5-max", 7.85, 19, "mlx-trellis2-swift (MLX, an M5-class chip)"),
)
CHIPS = (
    "m1", "m1-pro", "m1-max", "m2", "m2-pro", "m2-max", "m3", "m3-pro", "m3-max",
    "m4", "m4-pro", "m4-max", "m5", "m5-pro", "m5-max",
)  # fmt: skip


@cache
def sample():
    """The shell's submanifold 3x3x3 relations: of the finest level, and one above."""
    manager = ml.CoordinateManager()
    key = manager.insert(shell(128))
    above = manager.cells(key, (2, 2))
    made = manager.submanifold_kernel_relation
    rows = [len(manager[k]) for k in (key, *above)]
    return [made(k, kernel_size=3) for k in (key, above[0])], rows


def level_rows(voxels):
    """Rows of each stage, coarsest first, of so many fine voxels."""
    (finest, above, next_) = sample()[1]
    rows, ups = [voxels], len(stages()) - 1
    for up in range(ups):
        rows.append(rows[-1] * (above / finest if up == 0 else next_ / above))
    return [round(n) for n in reversed(rows)]


def default(name):
    """What the published shape decoder has for an argument."""
    return signature(models.SparseVAEDecoder).parameters[name].default


@cache
def stages():
    """(channels, ConvNeXt blocks) of each stage."""
    both = default("model_channels"), default("num_blocks")
    return tuple(zip(*both, strict=True))


@cache
def done_over_useful(chip, finest, c_in, c_out):
    """What tiles execute over what is useful, counted over the sample's relation."""
    relation = sample()[0][0 if finest else 1]
    facts = c_in, c_out, ml.checks.DTYPES[DTYPE]
    problem = ml.Problem.of("forward", relation, *facts, layout="mlx")
    device = devices.profile(chip)
    choice = ml.select(problem, device=device)
    found = ml.inspect.explain.cost(problem, device, choice=choice, relation=relation)
    return found.done_over_useful


def ends(predicted):
    """The two ends in seconds."""
    return predicted.fast_ms / 1e3, predicted.slow_ms / 1e3


def operations(problem):
    """The useful operations of a layer."""
    return 2 * problem.useful(problem.known_edges(None))


def convolution(chip, rows, finest, c_in, c_out):
    """Seconds of a 3x3x3 convolution, of its relation's making, and operations."""
    relation = sample()[0][0 if finest else 1]
    edges = round(relation.n_edges * rows / relation.n_out)
    problem = ml.Problem.forward(
        c_in=c_in, c_out=c_out, n_in=rows, edges=edges, dtype=DTYPE, layout="mlx",
        mirrored=True,
    )  # fmt: skip
    device = devices.profile(chip)
    choice = ml.select(problem, device=device)
    ratio = done_over_useful(chip, finest, c_in, c_out)
    found = predict_layer(problem, device, choice, done_over_useful=ratio)
    slow, fast = making_ms(choice.plan, device)
    return ends(found), (fast / 1e3, slow / 1e3), operations(problem)


def linear(chip, rows, c_in, c_out):
    """Seconds of a linear layer, and operations."""
    facts = {"kernel_size": 1, "c_in": c_in, "c_out": c_out, "dtype": DTYPE}
    problem, device = ml.Problem.forward(n_in=rows, **facts), devices.profile(chip)
    choice = ml.select(problem, device=device)
    return ends(predict_layer(problem, device, choice)), operations(problem)


def passes(chip, elements):
    """Seconds of reading or writing so many elements."""
    rate = 1e9 * devices.profile(chip).bandwidth
    slow, fast = (BYTES * elements / (share * rate) for share in MEMORY)
    return fast, slow


class Decode:
    """The predicted time of a decode: what it is made of, by ``PARTS``."""

    def __init__(self, chip, voxels):
        self.chip, self.flops = chip, 0
        self.parts = {name: (0.0, 0.0) for name in PARTS}
        rows, plan = level_rows(voxels), stages()
        self._linear(rows[0], default("latent_channels"), plan[0][0])
        for at, (channels, blocks) in enumerate(plan):
            finest = at + 1 == len(plan)
            for _ in range(blocks):
                self._block(rows[at], channels, finest)
            if not finest:
                self._up(rows[at], rows[at + 1], channels, plan[at + 1][0], at)
        self._add("passes", passes(chip, 2 * rows[-1] * plan[-1][0]))
        self._linear(rows[-1], plan[-1][0], default("out_channels"))

    def _add(self, name, taken, flops=0):
        before = self.parts[name]
        self.parts[name] = tuple(map(sum, zip(before, taken, strict=True)))
        self.flops += flops

    def _linear(self, rows, c_in, c_out):
        self._add("linear layers", *linear(self.chip, rows, c_in, c_out))

    def _block(self, rows, channels, finest):
        taken, _, flops = convolution(self.chip, rows, finest, channels, channels)
        self._add("convolutions", taken, flops)
        self._linear(rows, channels, 4 * channels)
        self._linear(rows, 4 * channels, channels)
        # Norm, SiLU of the hidden channels, sum with the skip: read and written.
        self._add("passes", passes(self.chip, (2 + 8 + 3) * rows * channels))

    def _up(self, rows, fine_rows, channels, out, at):
        finest = at + 2 == len(stages())
        self._linear(rows, channels, CELLS)
        taken, made, flops = convolution(self.chip, rows, False, channels, CELLS * out)
        self._add("convolutions", taken, flops)
        if at == 0:  # relations of other levels are made by what runs on fine rows
            self._add("relations", made)
        taken, made, flops = convolution(self.chip, fine_rows, finest, out, out)
        self._add("convolutions", taken, flops)
        self._add("relations", made)
        # Norm and SiLU before each convolution; rows to their cells; the skip, which is
        # gathered and repeated, and its sum.
        eighth = channels // CELLS
        moved = 4 * rows * channels + 4 * fine_rows * out + 2 * fine_rows * out
        moved += fine_rows * (3 * eighth + out + 3 * out)
        self._add("passes", passes(self.chip, moved))

    @property
    def seconds(self):
        """Both ends of the range."""
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))


def span(pair):
    """A range in seconds."""
    digits = 2 if pair[1] < 1 else 1
    return " to ".join(f"{s:.{digits}f}" for s in pair)


def port_row(port):
    """The texts of a port's row."""
    decode = Decode(port.chip, port.voxels * 1e6)
    return (
        port.chip,
        f"{port.voxels:g}",
        port.name,
        f"{port.seconds:g}",
        span(decode.seconds),
        *(span(decode.parts[name]) for name in PARTS),
        f"{decode.flops / 1e12:.1f}",
    )


PORT_COLUMNS = (
    "chip", "million voxels", "port", "its measured s", "predicted s",
    *PARTS, "TFLOP",
)  # fmt: skip


def chip_table(million):
    """Names and the row of the table by chip, of so many million voxels."""
    spans = [span(Decode(chip, million * 1e6).seconds) for chip in CHIPS]
    return ("million voxels", *CHIPS), [(f"{million:g}", *spans)]


def main():
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million", type=float, default=1.6, help="voxels, by chip")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    ports = PORT_COLUMNS, [port_row(port) for port in PORTS]
    for names, rows in (ports, chip_table(args.million)):
        if args.markdown:
            print(markdown(names, rows) + "\n")
        else:
            print(drawn([(name, "right") for name in names], rows) + "\n")


if __name__ == "__main__":
    main()
