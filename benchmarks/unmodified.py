"""Public PyTorch nets, unmodified, over mlx_lattice.compat: errors, gradients, times.

    python benchmarks/unmodified.py SOURCE... [--net NAME ...] [--out FILE]
    python benchmarks/unmodified.py --table FILE

A SOURCE is a folder with checkouts named OWNER+NAME, of the commits that
unmodified_nets.py and unmodified_minkowski.py name; OWNER+NAME@COMMIT for a second
commit, and torch-pointcloud for the unpacked wheel. Each net is built with random
weights and called twice: over ``mlx_lattice.compat``, and over the same library in
PyTorch alone (naive_sparse.py, naive_minkowski.py) in float64, with the same weights,
input and output gradient. ReLU is softplus in both, so that gradients do not depend on
which side of zero a value is rounded to. PyTorch alone in float32 is timed beside it,
without making its kernel maps, and its own error says what rounding costs. Times are
those of the processor. Needs the extra ``torch`` and ``pip install addict easydict
einops``; torch-pointcloud needs its own dependencies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import naive_minkowski
import naive_sparse
import numpy as np
import stand_ins
import torch
import unmodified_minkowski  # noqa: F401  adds its nets
from torch.overrides import TorchFunctionMode
from unmodified_nets import NETS, Forward, Load, Net, Scene
from written import write_line

from mlx_lattice import compat


class Smooth(TorchFunctionMode):
    """Computes softplus in the place of ReLU, whose gradient jumps at zero.

    A feature within rounding of zero would make gradients differ by more than an error
    of a layer does.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in RELU:
            return torch.nn.functional.softplus(args[0], beta=4)
        return function(*args, **kwargs or {})


HERE = Path(__file__).resolve().parent
RELU = (
    torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_,
    torch.nn.functional.relu,
)  # fmt: skip


class Doubled(TorchFunctionMode):
    """Computes in float64 whatever floating dtype a net asks for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            function = torch.Tensor.double
        args = [_doubled(each) for each in args]
        kwargs = {name: _doubled(each) for name, each in (kwargs or {}).items()}
        return function(*args, **kwargs)


def _doubled(value):
    is_float = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_float else value


@contextlib.contextmanager
def imported(net: Net, folder: Path, naive: bool) -> Iterator[Load]:
    """Let a checkout be imported, with its libraries; remove its modules at the end."""
    ours = [each for each in net.libraries
            if not naive or each in naive_minkowski.LIBRARIES]  # fmt: skip
    compat.install(*ours)
    names = naive_sparse.modules(*(set(net.libraries) - set(ours)))
    names |= stand_ins.modules(*net.stand_ins)
    for package in net.bare:
        names[package] = ModuleType(package)
        names[package].__path__ = [str(folder / package.replace(".", "/"))]
    before = set(sys.modules)
    sys.modules.update(names)
    paths = list(sys.path)
    # This folder's own files, such as layers.py, must not hide a checkout's.
    sys.path[:] = [str(folder), *(p for p in paths if Path(p).resolve() != HERE)]
    importlib.invalidate_caches()
    try:
        with naive_minkowski.patched(*ours if naive else ()):
            yield importlib.import_module
    finally:
        sys.path[:] = paths
        tops = {each.stem for each in folder.iterdir()}
        for name in set(sys.modules) - before | names.keys():
            if name in names or name.partition(".")[0] in tops:
                sys.modules.pop(name, None)
        compat.uninstall(*ours)


def draw_weights(net: torch.nn.Module) -> None:
    """Give parameters that are constant, such as a zeroed last layer, random values."""
    generator = torch.Generator().manual_seed(3)
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.numel() > 1 and parameter.std() == 0:
            parameter.data += 0.1 * noise
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


class Step:
    """One forward and backward pass: outputs, gradients by name, and seconds."""

    def __init__(self, net: torch.nn.Module, forward: Forward, scene: Scene):
        torch.manual_seed(1)  # nets that shuffle do it by PyTorch's generator
        net.zero_grad()
        start = time.process_time()
        with Smooth():
            outputs = list(forward(scene))
        middle = time.process_time()
        random = np.random.default_rng(2)
        loss = sum(
            (y * torch.from_numpy(random.standard_normal(y.shape)).to(y.dtype)).sum()
            for y in outputs
        )
        before = time.process_time()
        loss.backward()
        self.forward_s = middle - start
        self.backward_s = time.process_time() - before
        self.outputs = [y.detach() for y in outputs]
        named = {"input": scene.x} | dict(net.named_parameters())
        self.gradients = {n: p.grad.clone() for n, p in named.items()
                          if p.grad is not None}  # fmt: skip


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference over the largest value of the reference."""
    if value.shape != reference.shape:
        raise ValueError(f"{tuple(value.shape)} is not {tuple(reference.shape)}")
    if not value.numel():
        return 0.0
    largest = max(reference.abs().max().item(), 1e-300)
    return (value.double() - reference).abs().max().item() / largest


def errors(step: Step, reference: Step) -> tuple[float, float]:
    """Return the largest error of an output, and of a gradient.

    Gradients that are zero by definition, such as that of a bias before batch
    normalization, are left out: they are rounding alone.
    """
    pairs = zip(step.outputs, reference.outputs, strict=True)
    if step.gradients.keys() != reference.gradients.keys():
        raise ValueError("gradients reach other parameters")
    sizes = {name: g.abs().max().item() for name, g in reference.gradients.items()}
    floor = 1e-9 * max(sizes.values())
    of_gradients = max(error(g, reference.gradients[name])
                       for name, g in step.gradients.items()
                       if sizes[name] > floor)  # fmt: skip
    return max(error(*pair) for pair in pairs), of_gradients


def in_float64(module: torch.nn.Module, forward: Forward, scene: Scene) -> Step:
    """Run one step in float64, and return the net to float32."""
    module.double()
    fixed = [each for each in module.modules()
             if isinstance(getattr(each, "dtype", None), torch.dtype)]  # fmt: skip
    kept = [each.dtype for each in fixed]
    for each in fixed:
        each.dtype = torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        with Doubled():
            return Step(module, forward, scene.copy(torch.float64))
    finally:
        torch.set_default_dtype(torch.float32)
        module.float()
        for each, dtype in zip(fixed, kept, strict=True):
            each.dtype = dtype


def measure(net: Net, folder: Path) -> dict:
    """Run one net over compat and in PyTorch alone, and return a row of results."""
    with imported(net, folder, naive=False) as load:
        torch.manual_seed(0)
        module, forward, scene = net.build(load)
        draw_weights(module)
        state = {name: each.clone() for name, each in module.state_dict().items()}
        Step(module, forward, scene.copy(torch.float32))
        module.load_state_dict(state)
        ours = Step(module, forward, scene.copy(torch.float32))
    with imported(net, folder, naive=True) as load:
        torch.manual_seed(0)
        module, forward, scene = net.build(load)
        draw_weights(module)
        module.load_state_dict(state)
        exact = in_float64(module, forward, scene)  # makes the kernel maps
        module.load_state_dict(state)
        naive = Step(module, forward, scene.copy(torch.float32))
    output_error, gradient_error = errors(ours, exact)
    naive_error, naive_gradient_error = errors(naive, exact)
    return {
        "net": net.name,
        "repository": net.repository,
        "commit": net.commit,
        "libraries": " ".join(net.libraries),
        "stand_ins": " ".join(net.stand_ins),
        "half": net.half,
        "rows": len(scene.rows),
        "parameters": sum(p.numel() for p in module.parameters()),
        "gradients": len(ours.gradients),
        "error": output_error,
        "gradient_error": gradient_error,
        "torch_error": naive_error,
        "torch_gradient_error": naive_gradient_error,
        "forward_ms": round(ours.forward_s * 1e3, 1),
        "backward_ms": round(ours.backward_s * 1e3, 1),
        "torch_forward_ms": round(naive.forward_s * 1e3, 1),
        "torch_backward_ms": round(naive.backward_s * 1e3, 1),
    }


def table(rows: Sequence[dict]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| net | library | rows | output error | gradient error | ms | PyTorch ms "
        "| stand-ins |",
        "| --- | --- | --: | --: | --: | --: | --: | --- |",
    ]
    for row in rows:
        address = f"https://github.com/{row['repository']}/tree/{row['commit']}"
        if "/" not in row["repository"]:
            address = f"https://pypi.org/project/{row['repository']}/{row['commit']}"
        name = f"[{row['net']}]({address})"
        lines.append(
            f"| {name}{', ' + row['half'] if row['half'] else ''} "
            f"| {row['libraries'].replace(' ', ', ')} | {row['rows']} "
            f"| {_pair(row, 'error')} | {_pair(row, 'gradient_error')} "
            f"| {row['forward_ms']:.0f} + {row['backward_ms']:.0f} "
            f"| {row['torch_forward_ms']:.0f} + {row['torch_backward_ms']:.0f} "
            f"| {row['stand_ins'].replace(' ', ', ')} |"
        )
    return "\n".join(lines)


def _pair(row: dict, name: str) -> str:
    return f"{row[name]:.0e} ({row[f'torch_{name}']:.0e})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, metavar="SOURCE",
                        help="folder with checkouts named OWNER+NAME")  # fmt: skip
    parser.add_argument("--net", action="append", metavar="NAME",
                        help="run only nets whose name contains NAME")  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON lines are added to this file")
    parser.add_argument("--table", type=Path, metavar="FILE",
                        help="print the table of a file of results")  # fmt: skip
    options = parser.parse_args(argv)
    if options.table:
        print(table([json.loads(line) for line in options.table.open()]))
        return 0
    failed = 0
    for net in NETS:
        if options.net and not any(each in net.name for each in options.net):
            continue
        folders = [each.resolve() / net.folder for each in options.sources]
        folder = next((each for each in folders if each.is_dir()), None)
        if folder is None:
            print(f"{net.name}: no {net.folder} in a source", file=sys.stderr)
            failed += 1
            continue
        try:
            write_line(measure(net, folder), options.out)
        except Exception:
            print(f"{net.name}:", file=sys.stderr)
            traceback.print_exc()
            failed += 1
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
