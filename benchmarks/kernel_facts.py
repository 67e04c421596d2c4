"""Counts what Metal's kernels do besides multiplying, for predictions.

    python benchmarks/kernel_facts.py [--all]

Every kernel of a contraction that some chip plans runs over a small shell on
``metal/host`` in counted mode; its registers are estimated from what clang makes of it
(``metal/host/pressure.py``). The results are kept in
``benchmarks/kernel_facts.json``. Kernels whose text was counted before are
left out, unless all are asked for. Nothing is timed.
"""

import argparse
import json
from contextlib import contextmanager
from dataclasses import astuple
from unittest.mock import patch

import mlx.core as mx
from apple_model import FACTS, PRODUCT, KernelFacts, digest, kernel_key

import mlx_lattice as ml
from metal import host
from metal.host import pressure
from mlx_lattice import devices
from mlx_lattice.backends.metal import tiles as metal_thresholds
from mlx_lattice.inspect.doctor import shell
from mlx_lattice.problem import FORWARD, INPUT_GRAD, PASSES, WEIGHT_GRAD, IntegerFacts
from mlx_lattice.routes.selection import candidates

CHIPS = "m1", "m3", "m3-max", "m5", "m5-max"
DTYPES, CHANNELS = ("float16", "bfloat16", "float32"), (16, 32, 64, 128)
RESOLUTION = 12


def relation():
    """The submanifold 3x3x3 relation of a small shell."""
    manager = ml.CoordinateManager()
    key = manager.insert(shell(RESOLUTION))
    return manager.submanifold_kernel_relation(key, kernel_size=3)


def problems(built):
    """Problems whose plans have every kernel of a contraction."""
    for pass_ in PASSES:
        for dtype in DTYPES:
            for channels in CHANNELS:
                facts = [{}, {"groups": channels}]
                if pass_ == FORWARD and channels >= 32:
                    facts += [{"bits": bits, "group_size": 32} for bits in (4, 8)]
                    facts += [{"bits": 8, "integer": IntegerFacts()}]
                for each in facts:
                    both = channels, channels, ml.checks.DTYPES[dtype]
                    layout = {} if each.get("bits") else {"layout": "mlx"}
                    yield ml.Problem.of(pass_, built, *both, **layout, **each)


def plans(built):
    """(key, plan) of each kernel that some chip plans, once."""
    seen = set()
    for problem in problems(built):
        for plan in planned(problem):
            if plan.gpu is None or (key := kernel_key(plan.gpu)) in seen:
                continue
            seen.add(key)
            yield key, plan


def planned(problem):
    """The plan of each route on each chip; so few rows do not make simdgroups high."""
    for device in map(devices.profile, CHIPS):
        for route in candidates(problem, device):
            yield route.plan(problem, device)
            for rows in (64, 32) * route.name.endswith("tensor_ops"):
                with height_of(rows):
                    yield route.plan(problem, device)


@contextmanager
def height_of(rows):
    """Plan inside the block with TensorOps' simdgroups of so many rows."""
    enough = {h: 0 if h <= rows else 1 << 30 for h in metal_thresholds.SHARED_ROWS}
    filling = dict.fromkeys(metal_thresholds.TENSOR_FILLING, 0)
    with (
        patch.dict(metal_thresholds.SHARED_ROWS, enough),
        patch.dict(metal_thresholds.TENSOR_FILLING, filling),
    ):
        yield


def arrays(plan, built):
    """The relation of a plan's pass, and what it multiplies."""
    p, dtype = plan.problem, ml.checks.DTYPES[plan.problem.dtype]
    x = mx.ones((p.n_in, p.c_in), dtype=dtype)
    dy = mx.ones((p.n_out, p.c_out), dtype=dtype)
    if p.pass_ == WEIGHT_GRAD:
        return built, x, dy
    shape = p.volume, p.c_in // p.groups, p.c_out
    w = mx.ones(shape, dtype=dtype)
    if p.integer:
        x, w = x.astype(mx.int8), ml.integer_weight(w)
        return built, x, w, mx.ones((p.c_out,))
    if p.bits:
        w = ml.quantize_weight(w, bits=p.bits, group_size=p.group_size)
    else:
        w = w.transpose(2, 0, 1)
    return (built.T, dy, w) if p.pass_ == INPUT_GRAD else (built, x, w)


def counted(plan, built):
    """The KernelFacts of a plan's kernel."""
    report = host.run(plan, *arrays(plan, built), counted=True, order="forward")[1]
    report.raise_faults()
    name = f"lattice_{plan.gpu.symbol}_"
    launches = [r for r in report.launches if name in r.kernel + "_"]
    products = max(1, plan.multiply_adds(built)) / PRODUCT

    def staged(c):
        return c.threadgroup_read_bytes + c.threadgroup_written_bytes

    def a_product(value):
        return round(sum(value(r.counts) for r in launches) / products, 4)

    return KernelFacts(
        memory=launches[0].counts.threadgroup_memory,
        registers=pressure.registers(launches[0].source),
        threads=plan.threadgroup[0] * plan.threadgroup[1],
        staged=a_product(staged),
        loads=a_product(lambda c: c.matrix_loads),
        barriers=a_product(lambda c: c.barriers),
        divisions32=a_product(lambda c: c.divisions32),
        divisions64=a_product(lambda c: c.divisions64),
        multiplications32=a_product(lambda c: c.multiplications32),
        multiplications64=a_product(lambda c: c.multiplications64),
        read=a_product(lambda c: c.device_read_bytes),
        lines=a_product(lambda c: sum(b.read_lines for b in c.buffers.values())),
    )


def write(found):
    """Put facts into the file, a line each."""
    lines = (f"{json.dumps(k)}: {json.dumps(found[k])}" for k in sorted(found))
    FACTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    """Count what is not known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="count all of them again")
    args = parser.parse_args()
    if reason := host.missing():
        raise SystemExit(reason)
    built = relation()
    kept = json.loads(FACTS.read_text()) if FACTS.exists() and not args.all else {}
    found = {}
    for key, plan in plans(built):
        text = digest(plan.gpu.files)
        if kept.get(key, [""])[0] != text:
            kept[key] = [text, *astuple(counted(plan, built))]
            print(key, *kept[key], flush=True)
            write(kept)
        found[key] = kept[key]
    write(found)
    print(f"{len(found)} kernels in {FACTS}")


if __name__ == "__main__":
    main()
