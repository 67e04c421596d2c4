"""The work of the matrix routes on Metal: counted on metal/host, and modelled.

A patch of each scene runs on ``metal/host`` with all checks, in all three passes; the
tile model must give the same matrix operations, feature, weight and table bytes,
threadgroup memory, the bytes through it, loads of matrices and barriers, or the
script stops. What only execution counts (integer arithmetic, bytes asked of lines)
is recorded with them. The model then counts whole scenes and
wider layers: operations over useful ones, device bytes as the GPU kernel asks for them
and through a cache (least recently used, 8 MB, 128-byte lines, threadgroups one after
another) over compulsory ones, beside what explicit GEMM would move, and the time that
``apple_model.py`` predicts with these counts. Nothing is timed. All rows of a scene up
to 100 thousand are counted; a larger one is a sheet, of which a window of 200 thousand
rows is counted and scaled: whole lines across the sheet, so that regions of rows and
their neighbours are those of the whole.

The shells that mtlgemm timed and MLX's sorts come first: the time, what bounds it, and
how many simdgroups a core holds.

Up to 64 channels a second line has the rows in their own order: dense_channel, cout16.
Where bytes through the cache are above 1.5 times the compulsory ones, a second line has
the order of tiles that moves the fewest of those tried, and its predicted time.

    python benchmarks/metal_counts.py [--scene FOLDER] [--quick]

FOLDER may hold ``gpu_scenes.npz`` with coordinates W1 and ``cpu_scenes.py`` with
``surface_coords``; a surface is made where it does not. Results are written to
``benchmarks/results/metal_counts.jsonl``.
"""

import argparse
import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import published_times
import tile_model
from launch_counts import Launch
from shells import relation as shell
from tile_model import Conv, Grad, OwnOrder
from tile_steps import sort_passes
from tile_times import bounded, on_chip, span, steps_of

import mlx_lattice as ml
from metal import host
from mlx_lattice import devices, routes
from mlx_lattice.backends.metal import tiles as metal_thresholds

RESULTS = Path(__file__).parent / "results" / "metal_counts.jsonl"
DEVICES = ("m1", "m2-max", "m4-max", "m5-max")
PASSES = ("forward", "input_grad", "weight_grad")
EXECUTED = ((16, 16), (32, 32), (64, 64), (64, 128), (256, 128), (32, 1024))
# Scene, rows, channels: MinkUNet's layers, then those of TRELLIS.2's decoders.
SURFACE, W1 = "thin surface", "W1"
LEVELS = ((2_400_000, 128), (800_000, 256), (97_000, 512), (40_000, 1024))
UNET = (16, 32, 64, 128, 256)
PROBLEMS = [(s, 100_000, c, c) for s in (SURFACE, W1) for c in UNET]
PROBLEMS += [(W1, 100_000, c, c) for c in (512, 1024)]
PROBLEMS += [(SURFACE, n, c, m * c) for n, c in LEVELS for m in (1, 4)]
REGIONS = (7168, 2048)
LARGE, WINDOW = 100_000, 200_000
# Counts of Steps, as metal/host calls them.
STEPS = {
    "loads": "matrix_loads",
    "barriers": "barriers",
    "written": "threadgroup_written_bytes",
    "read": "threadgroup_read_bytes",
}
SHELL_CHIPS = ("m1", "m2-pro", "m3-max", "m4-pro", "m5-max")
SORTED = (15_192, 64_160, 1_000_000)
GOAL = 1.5


def surface(rows):
    """About `rows` voxels of an undulating sheet, in lexicographic order."""
    side = int(np.sqrt(rows))
    x, y = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    wave = 2 * np.pi / side
    height = side * (0.06 * np.sin(3 * wave * x + 1) * np.cos(2 * wave * y))
    height += side * 0.03 * np.sin(5 * wave * (x + y))
    return np.stack([x, y, np.round(height)], -1).reshape(-1, 3)


def scene(name, folder, rows):
    """(N, 3) coordinates of a scene, or None where there are none."""
    if name == W1:
        file = folder / "gpu_scenes.npz" if folder else None
        return np.load(file)["W1"] if file and file.exists() else None
    if rows > LARGE:
        return surface(rows)[:WINDOW]
    made = folder / "cpu_scenes.py" if folder else None
    if made is None or not made.exists():
        return surface(rows)
    spec = importlib.util.spec_from_file_location("cpu_scenes", made)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.surface_coords(rows)[:, 1:]


def relation(coords):
    """The submanifold 3x3x3 relation of (N, 3) coordinates."""
    coords = np.concatenate([np.zeros((len(coords), 1)), coords], axis=1)
    coords = coords[np.lexsort(coords.T[::-1])].astype(np.int32)
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(coords))
    return manager.submanifold_kernel_relation(key, kernel_size=3)


def models(built, scale=1.0):
    """The model of each pass over a relation, or a window of a larger one."""
    every = Conv(built, False, scale), Conv(built.T, True, scale), Grad(built, scale)
    return dict(zip(PASSES, every, strict=True))


def execute(built, modelled, c_in, c_out):
    """Execute every pass on metal/host, and compare the models with its counts."""
    x = mx.ones((built.n_in, c_in), dtype=mx.float16)
    dy = mx.ones((built.n_out, c_out), dtype=mx.float16)
    w = mx.ones((built.volume, c_in, c_out), dtype=mx.float16)
    calls = {
        "forward": (c_in, c_out, built, x, w),
        "input_grad": (c_out, c_in, built.T, dy, w),
        "weight_grad": (c_in, c_out, built, x, dy),
    }
    counted = {}
    for pass_, (c_x, c_y, *arrays) in calls.items():
        model = on_chip(modelled[pass_])
        tensor, by_edges = model is not modelled[pass_], pass_ == "weight_grad"
        name = "grouped_gemm" if by_edges else "sorted_implicit_gemm"
        route = routes.named("tensor_ops" if tensor else name)
        problem = ml.Problem.of(pass_, built, c_in, c_out, mx.float16)
        high = patch.dict(metal_thresholds.TENSOR_FILLING, {"*": 0})
        with patch.dict(metal_thresholds.FILLING, {tile_model.chip().name: 1}), high:
            plan = route.planner(devices.METAL, pass_)(problem, tile_model.chip())
            report = host.run(plan, *arrays, counted=True, order="forward")[1]
            memory = model.counts(c_x, c_y).memory
            expected = model.executed(c_x, c_y)
            steps = asdict(steps_of(model, c_x, c_y))
        expected |= {name: steps[name] for name in STEPS}
        rows = built.n_in if pass_ == "input_grad" else built.n_out
        counted[pass_] = agree(report, plan.gpu.symbol, expected, memory, rows)
    return counted


def agree(report, kernel, expected, memory, rows):
    """Stop unless a launch's counts are the model's; return what only it counts."""
    report.raise_faults()
    whole = next(r for r in report.launches if kernel in r.kernel)
    launch = whole.counts
    counted = {"matrix_flop": launch.matrix_flop}
    counted |= {name: getattr(launch, STEPS[name]) for name in STEPS}
    read = [b for b in expected if b not in counted]
    counted |= {b: launch.buffers[b].read_bytes for b in read}
    if counted != expected or launch.threadgroup_memory != memory:
        raise SystemExit(
            f"the model gives {expected} in {memory} bytes, the kernel did {counted} "
            f"in {launch.threadgroup_memory}"
        )
    moved = launch.device_read_bytes + launch.device_written_bytes
    facts = {"device_bytes": moved, "threadgroup_memory": memory}
    facts |= asdict(Launch.of(whole, rows))
    lines = {b: launch.buffers[b].asked_of_line for b in read}
    return facts | {"asked_of_line": lines}


def planned(model, c_x, c_y):
    """The counts of a pass as it is planned on each chip."""
    by_chip = {}
    for name in DEVICES:
        with tile_model.on(devices.profile(name)):
            by_chip[name] = on_chip(model).counts(c_x, c_y)
    return by_chip


def rooflines(by_chip):
    """Milliseconds at the peaks of each chip: the least ones, and explicit GEMM's."""
    times = {}
    for name, counts in by_chip.items():
        device = devices.profile(name)
        # Simdgroup matrices have the SIMD rate, TensorOps that of the accelerators.
        rate, bandwidth = device.half_tflops * 1e9, device.bandwidth * 1e6
        times[name] = {
            "roofline_ms": max(counts.useful / rate, counts.compulsory / bandwidth),
            "explicit_ms": max(counts.useful / rate, counts.explicit / bandwidth),
        }
    return times


def ratios(counts):
    """Operations over useful ones, and bytes over compulsory ones."""
    base = counts.compulsory
    return {
        "done_over_useful": counts.done / counts.useful,
        "tensor_ops_done_over_useful": counts.coarse / counts.useful,
        "asked_over_compulsory": sum(counts.asked.values()) / base,
        "cached_over_compulsory": counts.moved / base,
        "copied_over_compulsory": counts.copied / base,
        "explicit_over_compulsory": counts.explicit / base,
    }


def show(label, by_chip, bounds):
    """Print one line of the table, another where M5 plans otherwise."""
    times = "".join(
        f"  {span(bounds[name]):16} ({found['roofline_ms']:8.2f})"
        for name, found in rooflines(by_chip).items()
    )
    first, last = by_chip[DEVICES[0]], by_chip[DEVICES[-1]]
    for counts in (first, last)[: 1 + (last.plan != first.plan)]:
        r = ratios(counts)
        print(
            f"{label:44} {r['done_over_useful']:5.2f}"
            f" {r['tensor_ops_done_over_useful']:5.2f}"
            f" {r['asked_over_compulsory']:6.1f} {r['cached_over_compulsory']:6.2f}"
            f" {r['copied_over_compulsory']:5.2f} {r['explicit_over_compulsory']:6.2f}"
            f" {counts.memory:6}{times}  {counts.plan}",
            flush=True,
        )
        label, times = "  on " + DEVICES[-1], " " * len(times)


def described(by_chip, bounds):
    """The facts in the results: counts of the first chip, of M5 where they differ."""
    first, last = by_chip[DEVICES[0]], by_chip[DEVICES[-1]]
    row = {**ratios(first), **asdict(first), **rooflines(by_chip)}
    if last.plan != first.plan:
        row[DEVICES[-1]] |= {**ratios(last), **asdict(last)}
    for chip, found in bounds.items():
        row[chip] |= found
    return row


def shells(record):
    """The shells on each chip beside mtlgemm's times."""
    print(
        "\nshells, forward: ms, what bounds it, cycles of threadgroup memory for one of"
    )
    print("multiplying, simdgroups a core; mtlgemm's on an M3 Max (inferred)")
    for resolution, channels, masked, _ in published_times.SHELLS:
        built = shell(resolution)
        by_chip = bounded(Conv(built), channels, channels, SHELL_CHIPS)
        print(
            f"{resolution:4} {built.n_out:6} rows, {channels:4}: mtlgemm {masked:6.3f}"
        )
        for name, facts in by_chip.items():
            print(
                f"  {name:8} {span(facts):18} {facts['slow_ms'] / masked:5.2f} of "
                f"theirs  {facts['threadgroup_cycles']:5.2f} {facts['simdgroups']:3}",
                flush=True,
            )
        record(
            shell=resolution, rows=built.n_out, channels=channels,
            mtlgemm_ms=masked, chips=by_chip,
        )  # fmt: skip


def sorts(record):
    """What MLX's argsorts of a relation's rows take."""
    print("\norder of tiles: passes and MB of MLX's argsort, for 8 and 27 offsets,")
    print("and of two sorts of 8 bytes a row, by mask and then by region")
    region = tile_model.region_rows()
    for rows in SORTED:
        few, many = (sort_passes(rows, size, region) for size in (2, 4))
        passes, moved = sort_passes(rows, 8)
        two = 2 * passes, 2 * moved
        shown = (f"{p:3} {b / 1e6:7.1f}" for p, b in (few, many, two))
        print(f"{rows:9} rows: " + "".join(shown))
        record(sorted=rows, uint16=few, uint32=many, two_of_int64=two)


def leanest(model, c_x, c_y):
    """The plans that move the fewest bytes of those tried."""
    tried = []
    for region in REGIONS:
        with patch.dict(metal_thresholds.REGION_ROWS, {"*": region}):
            tried.append((planned(model, c_x, c_y), bounded(model, c_x, c_y, DEVICES)))
    return min(tried, key=lambda found: found[0][DEVICES[0]].moved)


def main():
    """Count every problem of every scene."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", type=Path, help="folder of the scenes")
    parser.add_argument("--patch", type=int, default=600, help="rows that are executed")
    parser.add_argument("--quick", action="store_true", help="up to 64 channels")
    args = parser.parse_args()
    if reason := host.missing():
        raise SystemExit(reason)
    RESULTS.parent.mkdir(exist_ok=True)
    problems = [p for p in PROBLEMS if not args.quick or p[2] <= 64]
    executed = [c for c in EXECUTED if not args.quick or max(c) <= 64]
    with RESULTS.open("w") as results:

        def record(**row):
            results.write(json.dumps(row) + "\n")
            results.flush()

        for name in (SURFACE, W1):
            coords = scene(name, args.scene, 100_000)
            if coords is None:
                continue
            coords = coords[np.lexsort(coords.T[::-1])][: args.patch]
            built = relation(coords)
            for c_in, c_out in executed[: None if name == SURFACE else 3]:
                by_chip = {}
                for chip in ("m1", "m5"):
                    with tile_model.on(devices.profile(chip)):
                        by_chip[chip] = execute(built, models(built), c_in, c_out)
                counted, others = by_chip.values()
                counted |= {"tensor_ops": others}
                record(scene=name, executed=True, c_in=c_in, c_out=c_out, **counted)
                print(f"{name} {c_in} to {c_out}: {built.n_out} rows ran as modelled")
        shells(record)
        sorts(record)
        print(
            "\nsubmanifold 3x3x3, float16, sorted_implicit_gemm, weight gradients "
            "grouped_gemm; m5-max: tensor_ops\n"
            "ops over useful: by 8 rows, by 16 (tensor_ops); bytes over compulsory: "
            "asked for, through 8 MB, copied where dispatches are joined (m1), "
            "explicit GEMM's\nbytes of threadgroup memory; ms as predicted, bound "
            "(roofline): " + ", ".join(DEVICES)
        )
        last, modelled = None, None
        for name, rows, c_in, c_out in problems:
            if (name, rows) != last:
                coords, last = scene(name, args.scene, rows), (name, rows)
                scale = rows / WINDOW if rows > LARGE else 1.0
                modelled = coords is not None and models(relation(coords), scale)
            if not modelled:
                continue
            for pass_, model in modelled.items():
                c_x, c_y = (c_out, c_in) if pass_ == "input_grad" else (c_in, c_out)
                by_chip = planned(model, c_x, c_y)
                bounds = bounded(model, c_x, c_y, DEVICES)
                facts = {"scene": name, "rows": rows, "counted": model.n}
                facts["edges"] = int(model.scale * model.edges)
                facts |= {"pass": pass_, "c_in": c_in, "c_out": c_out}
                show(f"{name} {rows} {pass_} {c_in} to {c_out}", by_chip, bounds)
                row = described(by_chip, bounds)
                counts = by_chip[DEVICES[0]]
                if counts.moved > GOAL * counts.compulsory and pass_ != "weight_grad":
                    other = leanest(model, c_x, c_y)
                    show("  fewest bytes", *other)
                    row["fewest_bytes"] = described(*other)
                record(**facts, executed=False, **row)
                if pass_ == "forward" and max(c_in, c_out) <= 64:
                    facts["route"], model = "dense_channel", OwnOrder(model.relation)
                    own = planned(model, c_in, c_out)
                    bounds = bounded(model, c_in, c_out, DEVICES, "dense_channel")
                    show("  rows in their own order", own, bounds)
                    record(**facts, executed=False, **described(own, bounds))


if __name__ == "__main__":
    main()
