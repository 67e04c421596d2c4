"""The command mlx-lattice, and its options."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from . import convert, generate
from .backends.metal_host import HostMissing
from .convert import MODELS as MODELS
from .devices import PROFILES
from .distribution import NAME, __version__, install
from .dtypes import DTYPES
from .io.errors import shown
from .memory import MemoryLimitError
from .problem import FORWARD, PASSES, Problem
from .quantized import BITS
from .relation_form import KINDS

COLUMNS = "names of the columns of a .bin file, such as x,y,z,intensity,ring"
CODE = "Python file that defines the net's class, if it is your own; it is run"


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
    commands.add_parser("info", help="what runs here")

    doctor = commands.add_parser(
        "doctor", help="prove and time this machine's kernels; write a report"
    )
    doctor.add_argument(
        "--quick", action="store_true", help="take 30 seconds instead of five minutes"
    )
    doctor.add_argument(
        "--out", metavar="DIR", default=".", help="write doctor.json to this folder"
    )
    doctor.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="print two doctor.json side by side",
    )

    explain = commands.add_parser(
        "explain", help="which route a convolution takes on a device, and why"
    )
    explain.add_argument(
        "--kind",
        choices=KINDS,
        help="submanifold by default; forward with a stride, or with other rows",
    )
    explain.add_argument("--kernel", type=int, nargs="+", default=[3], metavar="SIZE")
    explain.add_argument("--stride", type=int, default=1)
    explain.add_argument(
        "--channels", type=int, nargs=2, required=True, metavar=("IN", "OUT")
    )
    explain.add_argument(
        "--rows",
        type=int,
        nargs="+",
        required=True,
        metavar="ROWS",
        help="rows, or input rows and output rows",
    )
    explain.add_argument("--edges", type=int)
    explain.add_argument("--groups", type=int, default=1)
    explain.add_argument("--bits", type=int, choices=BITS, help="packed weight")
    explain.add_argument("--dims", type=int, choices=(1, 2, 3, 4), default=3)
    explain.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    explain.add_argument(
        "--device", metavar="NAME", help=f"one of {', '.join(PROFILES)}"
    )
    explain.add_argument("--pass", dest="pass_", choices=PASSES, default=FORWARD)
    explain.add_argument("--only", metavar="ROUTE", help="force a route")

    convert.add_parser(commands)

    segment = commands.add_parser(
        "segment", help="a scan's points by class, in colour, and a picture"
    )
    segment.add_argument("scan", metavar="SCAN", help="a point-cloud file")
    segment.add_argument(
        "--model", metavar="FOLDER", help="a net's folder, or owner/name of one"
    )
    segment.add_argument("--revision", help="of owner/name: branch, tag or commit")
    segment.add_argument("--code", metavar="FILE.py", help=CODE)
    segment.add_argument(
        "--out", metavar="DIR", default="segmented", help="folder of what it writes"
    )
    segment.add_argument(
        "--fill", action="store_true", help="read zeros for what the scan lacks"
    )
    segment.add_argument("--columns", metavar="NAMES", default="", help=COLUMNS)
    segment.add_argument(
        "--up",
        metavar="AXIS",
        default="z",
        help="what is upwards in the picture: x, y, z, or --up=-y as cameras have it",
    )

    generate.add_parser(commands)

    detect = commands.add_parser(
        "detect", help="boxes in a scan: a table, files, and a picture from above"
    )
    detect.add_argument("scan", metavar="SCAN", help="a point-cloud file")
    detect.add_argument(
        "--model", metavar="FOLDER", help="a detector's folder, or owner/name of one"
    )
    detect.add_argument("--revision", help="of owner/name: branch, tag or commit")
    detect.add_argument("--code", metavar="FILE.py", help=CODE)
    detect.add_argument(
        "--out", metavar="DIR", default="detected", help="folder of what it writes"
    )
    detect.add_argument(
        "--score", type=float, help="least score of a box; by default the net's own"
    )
    detect.add_argument(
        "--centre",
        type=float,
        nargs=3,
        metavar=("X", "Y", "Z"),
        help="the scanner in the file's coordinates, if it is not at 0",
    )
    detect.add_argument(
        "--fill", action="store_true", help="read zeros for what the scan lacks"
    )
    detect.add_argument("--columns", metavar="NAMES", default="", help=COLUMNS)

    decode = commands.add_parser(
        "decode", help="TRELLIS.2's latents to a mesh with its texture, and a picture"
    )
    decode.add_argument("latents", metavar="LATENTS", help="a safetensors file")
    decode.add_argument(
        "--model", metavar="FOLDER", help="the shape decoder's, or owner/name of one"
    )
    decode.add_argument(
        "--texture-model", metavar="FOLDER", help="the texture decoder's, likewise"
    )
    decode.add_argument("--revision", help="of owner/name: branch, tag or commit")
    decode.add_argument("--code", metavar="FILE.py", help=CODE)
    decode.add_argument(
        "--out", metavar="FILE", default="asset.glb", help=".glb, .ply or .obj"
    )
    decode.add_argument("--element", type=int, default=0, help="of the batch")
    decode.add_argument(
        "--resolution", type=int, help="fine voxels along the box (a guess if absent)"
    )
    decode.add_argument(
        "--faces", type=int, default=200_000, help="triangles, at most (200000)"
    )
    decode.add_argument(
        "--texture-size", type=int, default=2048, help="texels of its sides (2048)"
    )
    decode.add_argument("--bits", type=int, choices=BITS, help="pack float weights")
    decode.add_argument("--memory", metavar="SIZE", help=generate.MEMORY)
    decode.add_argument("--trace", metavar="FILE", help="a page of what ran")

    demo = commands.add_parser("demo", help="a small net, from points to a report")
    demo.add_argument("--points", metavar="FILE", help="a point-cloud file")
    demo.add_argument("--out", metavar="DIR", help="folder of what it writes")
    demo.add_argument(
        "--scans",
        nargs="+",
        metavar="FILE",
        help="whose surfaces a net learns to tell apart, for the last table",
    )
    return whole


# What a person can mend: said in a sentence, without a traceback.
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
                sys.stdout.flush()  # here, where a pipe without a reader is caught
    except BrokenPipeError:
        _silence()
        return NO_READER


def _silence() -> None:
    """Let Python flush at its end what nobody reads."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(io.UnsupportedOperation):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _run(arguments: Sequence[str] | None) -> int:
    given = parser().parse_args(arguments)
    commands = {
        "info": _info,
        "doctor": _doctor,
        "explain": _explain,
        "convert": convert.run,
        "segment": _segment,
        "detect": _detect,
        "decode": _decode,
        "generate": generate.run,
        "demo": _demo,
    }
    try:
        code = commands[given.command](given)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after ^C
        print(f"mlx-lattice {given.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except WRONG as error:
        said = error
        if isinstance(error, FileNotFoundError) and error.filename:
            said = f"there is no file {error.filename}"
        elif isinstance(error, OSError) and error.filename and error.strerror:
            said = f"{shown(str(error.filename))}: {error.strerror.lower()}"
        print(f"mlx-lattice {given.command}: {said}", file=sys.stderr)
        return 2
    return code or 0


def _info(given: argparse.Namespace) -> None:
    from .inspect.backend_info import backend_info

    print(backend_info())


def _doctor(given: argparse.Namespace) -> int:
    from .inspect import doctor

    if given.compare:
        print(doctor.compare(*map(doctor.read, given.compare)))
        return 0
    return doctor.run(Path(given.out), quick=given.quick)


def _explain(given: argparse.Namespace) -> None:
    from .inspect.explain import explain

    size = given.kernel[0] if len(given.kernel) == 1 else given.kernel
    if len(given.kernel) not in (1, given.dims):
        raise ValueError(
            f"--kernel takes 1 or {given.dims} sizes; got {len(given.kernel)}"
        )
    if len(given.rows) > 2:
        raise ValueError(f"--rows takes 1 or 2 numbers; got {len(given.rows)}")
    positive = (*given.kernel, given.stride, given.groups)
    if min(positive) < 1 or min(*given.rows, given.edges or 0, 0) < 0:
        raise ValueError("sizes must be positive, and rows and edges 0 or more")
    problem = Problem.forward(
        kind=given.kind,
        kernel_size=size,
        stride=given.stride,
        c_in=given.channels[0],
        c_out=given.channels[1],
        n_in=given.rows[0],
        n_out=given.rows[-1],
        dtype=given.dtype,
        dims=given.dims,
        groups=given.groups,
        edges=given.edges,
        bits=given.bits,
    )
    print(explain(problem, device=given.device, pass_=given.pass_, only=given.only))


@contextmanager
def _extra(command: str, extra: str) -> Iterator[None]:
    """Say which extra to install where an import in the block fails."""
    try:
        yield
    except ImportError as error:
        if error.name is None:  # a sentence already
            raise
        raise ImportError(f"{command} needs {error.name}; {install(extra)}") from error


@contextmanager
def _net_of(
    given: argparse.Namespace, command: str, extra: str
) -> Iterator[ModuleType]:
    """Import the module of a command that takes a net's folder, and the net's code."""
    if given.code is not None:
        code = Path(given.code).resolve(strict=True)
        sys.path.insert(0, str(code.parent))
        import_module(code.stem)
    with _extra(command, extra):
        module = import_module(f".{command}", __package__)
        if given.model is None:
            raise ValueError(module.where_weights_are())
        yield module


def _segment(given: argparse.Namespace) -> None:
    with _net_of(given, "segment", "demo") as segment:
        segment.run(
            given.scan,
            given.model,
            given.out,
            columns=given.columns,
            fill=given.fill,
            revision=given.revision,
            up=given.up,
        )


def _detect(given: argparse.Namespace) -> None:
    with _net_of(given, "detect", "demo") as detect:
        detect.run(
            given.scan,
            given.model,
            given.out,
            columns=given.columns,
            score=given.score,
            centre=given.centre,
            fill=given.fill,
            revision=given.revision,
        )


def _decode(given: argparse.Namespace) -> None:
    with _net_of(given, "decode", "mesh") as decode:
        decode.run(
            given.latents,
            given.model,
            given.out,
            texture_model=given.texture_model,
            element=given.element,
            resolution=given.resolution,
            faces=given.faces,
            texture_size=given.texture_size,
            bits=given.bits,
            page=given.trace,
            revision=given.revision,
            memory=given.memory,
        )


def _demo(given: argparse.Namespace) -> None:
    options = {"out": given.out} if given.out else {}
    if given.points and given.scans:
        raise ValueError("--scans is for the digits' demo; --points has its own scan")
    with _extra("demo", "demo"):
        from . import demo

        if given.points:
            demo.run_points(given.points, **options)
        else:
            demo.run(**options, **({"scans": given.scans} if given.scans else {}))


if __name__ == "__main__":
    sys.exit(main())
