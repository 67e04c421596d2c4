"""The CPU's convolutions, through the public API, beside NumPy's matmul.

The yardstick is NumPy's float32 matmul of 2048 x 2048 on the same threads, timed
before every few timed calls: a ratio is the median of (useful rate / yardstick of that
moment), so that it holds where a machine's speed changes. Useful operations are 2 x
edges x C_in x C_out, three times that with the backward pass. Beside it is the best
peer (of spconv, SparseConvNet and PyTorch gather-matmul-scatter), as a ratio to its own
yardstick on an idle machine; a relation, which has no rate, is compared in
milliseconds scaled by the yardsticks.

    make bench-cpu
    OPENBLAS_NUM_THREADS=1 MLX_LATTICE_THREADS=1 python benchmarks/cpu.py --cpu-time

The second form is for machines that others load: processor time of one thread.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import scenes

import mlx_lattice as ml
from mlx_lattice import backends, devices, ops

PEER_YARDSTICK = 190.0  # GFLOP/s of the peers' machine
RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"


@dataclass(frozen=True)
class Case:
    """A convolution over a surface, and the best peer's milliseconds (or None)."""

    name: str
    rows: int
    kind: str
    c_in: int
    c_out: int
    kernel: dict
    relation: float | None = None
    forward: float | None = None
    training: float | None = None


SUBM, POINT = {"kernel_size": 3}, {"kernel_size": 1}
DOWN2 = {"kernel_size": 2, "stride": 2}
DOWN3 = {"kernel_size": 3, "stride": 2, "padding": 1, "support": "reach"}
W1, W2 = 50_000, 200_000
CASES = (
    Case("W1 submanifold 3", W1, "subm", 32, 32, SUBM, 16, 22.7, 69.5),
    Case("W1 submanifold 3", W1, "subm", 64, 64, SUBM, 17.5, 60.3, 177),
    Case("W1 submanifold 3", W1, "subm", 128, 128, SUBM),
    *(Case("W1 pointwise", W1, "subm", c, c, POINT) for c in (64, 128, 256)),
    Case("W2 submanifold 3", W2, "subm", 32, 32, SUBM, 110, 123, 318),
    Case("W1 strided 2/2", W1, "conv", 32, 64, DOWN2, 4.7, 3.0, 10.3),
    Case("W2 strided 2/2", W2, "conv", 32, 64, DOWN2, 20, 17.3, 50),
    Case("W1 strided 3/2 p1", W1, "conv", 32, 64, DOWN3, 10, 9.5, 31),
    Case("W1 inverse 2/2", W1, "inverse", 64, 32, DOWN2, 4.4, 4.3, 10.7),
    Case("W1 generative 2/2", W1, "generative", 32, 32, DOWN2, 38, 35.7, 85),
)
OPERATIONS = {
    "subm": (ops.subm_conv3d, "submanifold_kernel_relation"),
    "conv": (ops.conv3d, "kernel_relation"),
    "inverse": (ops.conv_transpose3d, "transposed_kernel_relation"),
    "generative": (ops.generative_conv_transpose3d, "generative_relation"),
}


@cache
def coords(rows: int) -> mx.array:
    """A scene's voxels, made once."""
    return mx.array(scenes.surface(rows))


# Int8 features with weights of so many bits: a layer in a chain that never leaves int8.
INTEGERS = {"w8a8": 8, "w4a8": 4}


class Layer:
    """A case's input, weight and cotangent of one dtype."""

    def __init__(self, case: Case, dtype: str):
        rng = np.random.default_rng(0)
        kind = mx.float32 if dtype in ("int8", *INTEGERS) else getattr(mx, dtype)
        self.case, (self.run, self.builder) = case, OPERATIONS[case.kind]
        fine = ml.SparseTensor(coords(case.rows), mx.zeros((case.rows, 1)))
        source = fine
        if case.kind == "inverse":  # from the coarse rows onto those they came from
            source = ops.sum_pool3d(fine, 2)
        self.sets = [source.coords] + ([fine.coords] if case.kind == "inverse" else [])

        def random(*shape):
            return mx.array(rng.standard_normal(shape), dtype=kind)

        self.x = source.replace(random(len(source), case.c_in))
        size = (case.kernel["kernel_size"],) * 3
        self.weight = random(case.c_out, *size, case.c_in) / case.c_in
        if dtype == "int8":
            self.weight = ml.quantize_weight(self.weight, bits=8, group_size=32)
        manager = self.x.manager
        keys = [self.x.key] + ([fine.key] if case.kind == "inverse" else [])
        relation = getattr(manager, self.builder)(*keys, **case.kernel)
        self.edges = relation.n_edges
        self.dy = random(relation.n_out, case.c_out)
        mx.eval(self.x.feats, self.dy)
        if dtype in INTEGERS:
            self.integers(INTEGERS[dtype], relation)
        self.forward()

    def integers(self, bits: int, relation: ml.Relation):
        """Take int8 features, with bias and ReLU to int8, in place of the module's."""
        values = ml.IntegerTensor.rounded(self.x, 0.03).values
        w = ml.integer_weight(self.weight, bits=bits)
        after = {
            "scale": w.scale * 0.03,
            "shift": self.dy[0],
            "out_inverse": mx.array([30.0]),
            "activation": "relu",
        }
        mx.eval(values, w.arrays, list(after.values())[:-1])

        def forward():
            mx.eval(ml.integer_conv(values, w, relation, **after))

        self.forward = forward

    @property
    def flop(self) -> int:
        """Useful operations of a forward pass."""
        return 2 * self.edges * self.case.c_in * self.case.c_out

    def relation(self):
        """Build the relation of new coordinates, checks included."""
        manager, *sets = ml.CoordinateManager(), *(mx.array(s) for s in self.sets)
        strides = (2, 1) if self.case.kind == "inverse" else (1,)
        keys = [manager.insert(s, n) for s, n in zip(sets, strides, strict=True)]
        mx.eval(getattr(manager, self.builder)(*keys, **self.case.kernel).out_in)

    def forward(self):
        """Run the layer over its cached relation."""
        y = self.run(self.x, self.weight, **self.case.kernel)
        mx.eval(y.feats)
        return y

    def training(self):
        """Run the layer and both of its gradients."""

        def layer(feats, weight):
            return self.run(self.x.replace(feats), weight, **self.case.kernel).feats

        mx.eval(mx.vjp(layer, [self.x.feats, self.weight], [self.dy]))


class Clock:
    """Times calls, a few right after each look at the yardstick."""

    def __init__(self, clock: Callable[[], float], rounds: int):
        self.clock, self.rounds = clock, rounds
        self.a = np.random.default_rng(0).random((2048, 2048), np.float32)

    def seconds(self, call) -> float:
        """The time of one call."""
        start = self.clock()
        call()
        return self.clock() - start

    def yardstick(self) -> float:
        """NumPy's rate in GFLOP/s, and a pause: its threads spin for 0.1 s."""
        seconds = self.seconds(lambda: self.a @ self.a)
        time.sleep(0.2)
        return 2 * len(self.a) ** 3 / seconds / 1e9

    def pairs(self, call) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the call, and the yardstick before each."""
        seconds, rulers = [], []
        for _ in range(self.rounds):
            rulers.append(self.yardstick())
            call()  # the yardstick has evicted the caches
            times, end = [], time.perf_counter() + 0.1
            while len(times) < 3 or time.perf_counter() < end:
                times.append(self.seconds(call))
            seconds.append(np.median(times))
        return np.array(seconds), np.array(rulers)


@dataclass(frozen=True)
class Row:
    """One line of the table and of the results."""

    case: str
    what: str
    dtype: str
    c_in: int
    c_out: int
    edges: int
    ms: float
    gflops: float | None
    yardstick: float
    ratio: float | None
    peer_ratio: float | None
    times_peer: float | None
    threads: int
    isa: str
    clock: str
    scene: str
    mlx: str

    def __str__(self):
        name = f"{self.case} {self.c_in}->{self.c_out}"
        numbers = (self.ms, self.gflops, self.ratio, self.peer_ratio, self.times_peer)
        shown = zip(numbers, (".2f", ".1f", ".2f", ".2f", ".1f"), strict=True)
        cells = ("" if n is None else format(n, spec) for n, spec in shown)
        texts = "".join(f"{cell:>9}" for cell in cells)
        return f"{name:<27}{self.what:<10}{self.dtype:<9}{texts}"


HEADER = f"{'case':<27}{'what':<10}{'dtype':<9}" + "".join(
    f"{name:>9}" for name in ("ms", "GFLOP/s", "ratio", "peer", "x peer")
)


def measure(clock: Clock, layer: Layer, what: str, dtype: str, facts: dict) -> Row:
    """Time one thing that a layer does."""
    case = layer.case
    seconds, rulers = clock.pairs(getattr(layer, what))
    peer = getattr(case, what) if dtype == "float32" else None
    flop = {"relation": None, "forward": 1, "training": 3}[what]
    ratio = rate = peer_ratio = times = None
    if flop is not None:
        flop *= layer.flop
        rate = flop / np.median(seconds) / 1e9
        ratio = float(np.median(flop / seconds / 1e9 / rulers))
    if peer and flop:
        peer_ratio = flop / peer / 1e6 / PEER_YARDSTICK
        times = ratio / peer_ratio
    elif peer:
        times = peer / float(np.median(seconds * 1e3 * rulers / PEER_YARDSTICK))
    return Row(
        case.name,
        what,
        dtype,
        case.c_in,
        case.c_out,
        layer.edges,
        float(np.median(seconds)) * 1e3,
        rate,
        float(np.median(rulers)),
        ratio,
        peer_ratio,
        times,
        **facts,
    )


def reductions(clock: Clock, rows: int = W1, channels: int = 32) -> None:
    """Print pooling and its kin, compiled and in MLX operations."""
    feats = mx.random.normal((rows, channels))
    x = ml.SparseTensor(coords(rows), feats)
    points = x.coords.astype(mx.float32) + mx.array([0.0, 0.3, 0.3, 0.3])
    cases = {
        "max_pool3d 2/2": lambda f: ops.max_pool3d(x.replace(f)).feats,
        "avg_pool3d 3/1": lambda f: ops.avg_pool3d(x.replace(f), 3, 1).feats,
        "global_avg_pool": lambda f: ops.global_avg_pool(x.replace(f)),
        "interpolate": lambda f: ops.interpolate(x.replace(f), points),
    }
    print(f"\n{'forward + backward, ms':<27}{'compiled':>10}{'portable':>10}")
    for name, call in cases.items():
        dy = mx.ones_like(call(feats))

        def run(call=call, dy=dy):
            mx.eval(mx.vjp(call, [feats], [dy]))

        times = [np.median(clock.pairs(run)[0]) * 1e3]
        with backends.portable_only():
            times.append(np.median(clock.pairs(run)[0]) * 1e3)
        print(f"{name:<27}{times[0]:>10.2f}{times[1]:>10.2f}", flush=True)


def main():
    """Print the table and write a JSON line a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default="", help="only names that hold this")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "float16", "bfloat16", "int8", *INTEGERS],
    )
    parser.add_argument("--cpu-time", action="store_true", help="not wall time")
    parser.add_argument("--reductions", action="store_true", help="pooling too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    native = devices.extension
    threads = native.num_threads() if native else os.cpu_count()
    facts = {
        "threads": threads,
        "isa": native.isa() if native else "none: portable routes",
        "clock": "processor" if arguments.cpu_time else "wall",
        "scene": scenes.source(),
        "mlx": mx.__version__,
    }
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    print("ratio: useful rate / NumPy's matmul; peer: the best peer's, to its own\n")
    print(HEADER)
    now = time.process_time if arguments.cpu_time else time.perf_counter
    clock, rows = Clock(now, arguments.rounds), []
    for case in CASES:
        if arguments.cases not in case.name:
            continue
        for dtype in arguments.dtypes:
            layer = Layer(case, dtype)
            for what in ("relation", "forward", "training"):
                # Relations have no dtype; packed weights no gradient.
                if what == "relation" and dtype != "float32":
                    continue
                if what == "training" and dtype in ("int8", *INTEGERS):
                    continue
                rows.append(measure(clock, layer, what, dtype, facts))
                print(rows[-1], flush=True)
    if arguments.reductions:
        reductions(clock)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


if __name__ == "__main__":
    main()
