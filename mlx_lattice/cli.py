"""The command mlx-lattice: its options, and which module runs each command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from .checks import DTYPES
from .commands.convert import MODELS
from .devices import PROFILES, HostMissing
from .distribution import NAME, __version__, install
from .io.safetensors import shown
from .memory import MemoryLimitError
from .models.trellis2 import FORMS
from .problem import FORWARD, KINDS, PASSES, Problem
from .quantized import BITS, DEFAULT_GROUP_SIZE, GROUP_SIZES

# Extras that commands need. These commands take a folder of a net.
EXTRAS = {"segment": "demo", "evaluate": "demo", "detect": "demo", "decode": "mesh"}


class _Parser(argparse.ArgumentParser):
    """Reports an error in one sentence, with exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    whole = _Parser(prog="mlx-lattice", description="Sparse convolution for MLX.")
    version = f"{NAME} {__version__}"
    whole.add_argument("--version", action="version", version=version)
    commands = whole.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="show the backends and settings of this machine")
    _add_doctor(commands)
    _add_explain(commands)
    _add_convert(commands)
    _add_models(commands)
    _add_nets(commands)
    _add_run(commands)
    demo = commands.add_parser("demo", help="train a small net and write a report")
    demo.add_argument("--out", metavar="DIR", help="folder to write to")
    return whole


def _add_doctor(commands) -> None:
    doctor = commands.add_parser(
        "doctor", help="prove and time this machine's kernels; write a report"
    )
    add = doctor.add_argument
    add("--quick", action="store_true", help="take 30 seconds instead of five minutes")
    add("--out", metavar="DIR", default=".", help="write doctor.json to this folder")


def _add_explain(commands) -> None:
    explain = commands.add_parser(
        "explain", help="show which route a convolution takes on a device, and why"
    )
    add, numbers = explain.add_argument, {"type": int, "required": True}
    add("--kind", choices=KINDS, help="submanifold; forward if rows or stride change")
    add("--kernel", type=int, nargs="+", default=[3], metavar="SIZE", help="extents")
    add("--stride", type=int, default=1, help="stride (1)")
    add("--channels", **numbers, nargs=2, metavar=("IN", "OUT"), help="channels")
    add("--rows", **numbers, nargs="+", help="rows, or input rows and output rows")
    add("--edges", type=int, help="edges of the kernel map")
    add("--groups", type=int, default=1, help="groups of channels (1)")
    add("--bits", type=int, choices=BITS, help="bits of a packed weight")
    add("--dims", type=int, choices=(1, 2, 3, 4), default=3, help="spatial axes (3)")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="dtype of features")
    add("--device", metavar="NAME", help=f"one of {', '.join(PROFILES)}")
    add("--pass", dest="pass_", choices=PASSES, default=FORWARD, help="pass")
    add("--only", metavar="ROUTE", help="force a route")


def _add_convert(commands) -> None:
    convert = commands.add_parser(
        "convert", help="write another library's checkpoint as one of this library"
    )
    add, flag = convert.add_argument, {"action": "store_true"}
    add("source", metavar="SOURCE", help=".safetensors, .pt, .pth")
    add("target", metavar="TARGET", help=".safetensors, or a folder of the net")
    add("--library", required=True, help="library of SOURCE: one of io.LIBRARIES")
    add("--model", choices=MODELS, help="net that SOURCE is for")
    add("--config", metavar="FILE", help="JSON published with SOURCE; says the net")
    add("--channels", type=int, nargs=2, metavar=("IN", "CLASSES"), help="of the net")
    add("--plan", help="channel plan of a minkunet: A, B, C or D")
    add("--width", type=float, help="factor of all channels")
    add("--trimmed", **flag, default=None, help="leave out cells as torchsparse 2.1")
    add("--about", metavar="NAME", help="voxels and classes: one of models.PUBLISHED")
    add(
        "--legacy",
        action=argparse.BooleanOptionalAction,
        help="ptv3-m1 was trained with Pointcept 1.5.1 or older; by default as --about",
    )
    add("--mapping", metavar="FILE", help="JSON object: prefix to another, or to null")
    add("--entry", metavar="KEY", help="entry of SOURCE with the weights")
    add("--bits", type=int, choices=BITS, help="pack the weights")
    add(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=DEFAULT_GROUP_SIZE,
        help="input channels that share a scale",
    )
    add("--unit-as-shaped", **flag, help="take spconv's 1x1x1 kernels as their shape")


def _add_models(commands) -> None:
    says = "list published weights; print one; write it as a folder of the net"
    add = commands.add_parser("models", help=says).add_argument
    add("name", metavar="NAME", nargs="?", help="of models.list(); all if left out")
    add("--out", metavar="DIR", help="download the weights; write their folder here")
    paths = {"metavar": "FILE", "nargs": "+"}
    add("--path", **paths, help="files that were downloaded by hand")
    add("--cached", action="store_true", help="use no network")


def _add_run(commands) -> None:
    run = commands.add_parser(
        "run",
        help="run a script of PyTorch with this package in place of CUDA libraries",
        epilog="example: mlx-lattice run --as spconv,flash_attn train.py --epochs 3",
    )
    add, names = run.add_argument, "of spconv, flex_gemm, flash_attn, MinkowskiEngine, "
    names += "torchsparse, torchsparse==1.4; several with commas"
    add("--as", dest="libraries", required=True, metavar="NAMES", help=names)
    add("--replace", action="store_true", help="hide libraries that are installed")
    add("-m", dest="is_module", action="store_true", help="run a module by its name")
    add("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    rest = "the script's own arguments"
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help=rest)


def _add_nets(commands) -> None:
    """Add the commands that run a net, which share options."""
    net, some, own, scan, points, tiles, mesh = (
        argparse.ArgumentParser(add_help=False) for _ in range(7)
    )
    says = "folder of the net, or owner/name on a hub; the docs list published weights"
    for parent in (net, some):  # evaluate can do without a net
        add = parent.add_argument
        add("--model", required=parent is net, metavar="FOLDER", help=says)
        add("--revision", help="branch, tag or commit of owner/name")
    says = "import this Python file, which defines the class of your own net"
    own.add_argument("--code", metavar="FILE.py", help=says)
    scan.add_argument("scan", metavar="SCAN", help="a point-cloud file")
    add = points.add_argument
    add(
        "--fill", action="store_true", help="read zeros for attributes that are missing"
    )
    add("--columns", metavar="NAMES", default="", help="of .bin, as x,y,z,_,intensity")
    add = tiles.add_argument
    says = "run the net on tiles with this edge, in the unit of the scan (metres)"
    add("--tile", type=float, metavar="EDGE", help=says)
    says = "width of the strip that neighbouring tiles share (a fifth of --tile)"
    add("--overlap", type=float, metavar="WIDTH", help=says)
    says = "sum the probabilities of this many turned, scaled, mirrored views (1)"
    add("--votes", type=int, default=1, metavar="VIEWS", help=says)
    add("--up", metavar="AXIS", default="z", help="upward axis: x, y, z, or --up=-y")
    add = mesh.add_argument
    add("--faces", type=int, default=200_000, help="triangles, at most (200000)")
    add("--texture-size", type=int, default=2048, help="texels of its sides (2048)")
    add("--memory", metavar="SIZE", help="keep the nets below this, such as 8GB")

    says = (
        "label a scan's points by class: a copy of the file, or colours and a picture"
    )
    parents = [scan, points, net, own, tiles]
    add = commands.add_parser("segment", parents=parents, help=says).add_argument
    says = "folder for a coloured .ply and a picture; or .las, .laz, .ply or .npz file"
    add("--out", metavar="PLACE", default="segmented", help=says)

    says = "print IoU and accuracy of each class: a net's, or of a file's labels"
    parents = [points, some, own, tiles]
    add = commands.add_parser("evaluate", parents=parents, help=says).add_argument
    add("scans", metavar="SCAN", nargs="+", help="point-cloud files with labels")
    says = "files with labels to compare, one for each SCAN; in place of --model"
    add("--predicted", nargs="+", metavar="FILE", default=(), help=says)
    says = "dimension of SCAN with the labels, if it has another name than usual"
    add("--labels", metavar="NAME", default="", help=says)
    says = "leave out points with these labels, beside negative ones"
    add("--ignore", type=int, nargs="+", default=(), metavar="LABEL", help=says)
    says = "print JSON in place of a table"
    add("--json", action="store_true", dest="as_json", help=says)

    says = "find boxes in a scan: a table, files, and a picture from above"
    add = commands.add_parser(
        "detect", parents=[scan, points, net, own], help=says
    ).add_argument
    add("--out", metavar="DIR", default="detected", help="folder to write to")
    add("--score", type=float, help="least score of a box; by default the net's own")
    place = {"type": float, "nargs": 3, "metavar": ("X", "Y", "Z")}
    add("--centre", **place, help="the scanner in the file's coordinates, if not at 0")

    says = "decode TRELLIS.2's latents to a mesh with its texture, and a picture"
    add = commands.add_parser("decode", parents=[net, mesh], help=says).add_argument
    add("latents", metavar="LATENTS", help="a safetensors file")
    add("--texture-model", metavar="FOLDER", help="folder of the texture decoder")
    add("--out", metavar="FILE", default="asset.glb", help=".glb, .ply or .obj")
    add("--element", type=int, default=0, help="batch element (0)")
    add("--resolution", type=int, help="fine voxels along the box; by default a guess")

    says = "make TRELLIS.2's latents of an image's tokens, and a mesh"
    add = commands.add_parser("generate", parents=[mesh], help=says).add_argument
    tokens = ".safetensors with cond_512 and cond_1024, (B, M, C) each"
    add("--image-tokens", metavar="FILE", required=True, help=tokens)
    says = "TRELLIS.2's, with pipeline.json and ckpts; docs/trellis2.md says where from"
    add("--model", required=True, metavar="FOLDER", help=says)
    out = ".glb, .ply or .obj with latents beside it, or .safetensors of them alone"
    add("--out", metavar="FILE", default="asset.glb", help=out)
    add("--type", choices=FORMS, help="by default pipeline.json's")
    add("--seed", type=int, default=42, help="seed of the noise (42)")
    add("--steps", type=int, help="steps of every stage")
    add("--guidance", type=float, help="strength, of every stage")
    add("--no-texture", action="store_true", help="make the shape's latents alone")
    rows = "rows above which a cascade lowers its resolution (49152)"
    add("--max-tokens", type=int, default=49152, help=rows)
    add("--dtype", choices=DTYPES, help="dtype of the flow models' blocks")


# Errors that the user can correct: one sentence, no traceback.
WRONG = ValueError, TypeError, ImportError, OSError, HostMissing, MemoryLimitError
# Exit codes of what a signal ends, as shells have them: 128 and its number.
INTERRUPTED, NO_READER = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # an error of a closed pipe is caught here
    except BrokenPipeError:
        _silence()
        return NO_READER


def _silence() -> None:
    """Redirect the streams, so that Python can flush them when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(io.UnsupportedOperation):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _run(arguments: Sequence[str] | None) -> int:
    parsed = parser().parse_args(arguments)
    try:
        return _call(parsed) or 0
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after ^C
        print(f"mlx-lattice {parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except WRONG as error:
        message = error
        if isinstance(error, FileNotFoundError) and error.filename:
            message = f"there is no file {error.filename}"
        elif isinstance(error, OSError) and error.filename and error.strerror:
            message = f"{shown(str(error.filename))}: {error.strerror.lower()}"
        print(f"mlx-lattice {parsed.command}: {message}", file=sys.stderr)
        return 2


def _call(parsed: argparse.Namespace) -> int | None:
    """Run a command's function, which takes its options."""
    if parsed.command in ("info", "doctor", "explain", "demo", "run"):
        name = "run_script" if parsed.command == "run" else parsed.command
        return globals()[f"_{name}"](parsed)
    options = {k: v for k, v in vars(parsed).items() if k != "command"}
    with _extra(parsed.command, EXTRAS.get(parsed.command)):
        module = import_module(f".commands.{parsed.command}", __package__)
        if parsed.command == "convert":
            return module.run(parsed)
        module.run(**options)


@contextmanager
def _extra(command: str, extra: str | None) -> Iterator[None]:
    """Say which extra to install if an import in the block fails."""
    try:
        yield
    except ImportError as error:
        if error.name is None or extra is None:  # a sentence already
            raise
        needed = error.name.partition(".")[0]
        raise ImportError(f"{command} needs {needed}; {install(extra)}") from error


def _info(parsed: argparse.Namespace) -> None:
    from .inspect.doctor import backend_info

    print(backend_info())


def _doctor(parsed: argparse.Namespace) -> int:
    from .commands import doctor

    return doctor.run(Path(parsed.out), quick=parsed.quick)


def _explain(parsed: argparse.Namespace) -> None:
    from .inspect.explain import explain

    size = parsed.kernel[0] if len(parsed.kernel) == 1 else parsed.kernel
    if len(parsed.kernel) not in (1, parsed.dims):
        raise ValueError(
            f"--kernel takes 1 or {parsed.dims} sizes; got {len(parsed.kernel)}"
        )
    if len(parsed.rows) > 2:
        raise ValueError(f"--rows takes 1 or 2 numbers; got {len(parsed.rows)}")
    positive = (*parsed.kernel, parsed.stride, parsed.groups)
    if min(positive) < 1 or min(*parsed.rows, parsed.edges or 0, 0) < 0:
        raise ValueError("sizes must be positive, and rows and edges 0 or more")
    problem = Problem.forward(
        kind=parsed.kind,
        kernel_size=size,
        stride=parsed.stride,
        c_in=parsed.channels[0],
        c_out=parsed.channels[1],
        n_in=parsed.rows[0],
        n_out=parsed.rows[-1],
        dtype=parsed.dtype,
        dims=parsed.dims,
        groups=parsed.groups,
        edges=parsed.edges,
        bits=parsed.bits,
    )
    print(explain(problem, device=parsed.device, pass_=parsed.pass_, only=parsed.only))


def _run_script(parsed: argparse.Namespace) -> int:
    from .commands import run

    libraries = [name for name in parsed.libraries.split(",") if name]
    options = {"replace": parsed.replace, "is_module": parsed.is_module}
    return run.run(parsed.script, parsed.arguments, libraries, **options)


def _demo(parsed: argparse.Namespace) -> None:
    options = {"out": parsed.out} if parsed.out else {}
    with _extra("demo", "demo"):
        from .commands import demo

        demo.run(**options)


if __name__ == "__main__":
    sys.exit(main())
