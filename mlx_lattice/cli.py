"""The command mlx-lattice: ``main`` parses the options and runs ``commands.NAME``."""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from .checks import DTYPES
from .commands import Result, UsageError, log, usage
from .commands.convert import MODELS
from .devices import PROFILES, HostMissing
from .distribution import NAME, __version__, install
from .io.checkpoints import LIBRARIES
from .io.safetensors import shown
from .memory import MemoryLimitError, parse_bytes
from .models.trellis2 import FORMS
from .problem import FORWARD, KINDS, PASSES, Problem
from .quantized import BITS, DEFAULT_GROUP_SIZE, GROUP_SIZES
from .routes.table import TABLE
from .scene import AXES

# The extra of the package that each command needs.
EXTRAS = {"segment": "demo", "evaluate": "demo", "detect": "demo", "decode": "mesh"}
EXTRAS |= {"demo": "demo", "view": "viz"}
# Options that all commands share; ``run`` does not take them.
SHARED = ("command", "as_json", "level", "print_completion")
SHELLS = ("bash", "zsh", "tcsh")


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence, and suggests a name."""

    words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options in the parser that knows the command's options."""
        self.words = sys.argv[1:] if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        known = [name for name in self._option_string_actions if len(name) > 2]
        if self._subparsers is not None:
            known += self._subparsers._group_actions[0].choices
        names = {name.lstrip("-"): name for name in known}
        for word in (word.partition("=")[0] for word in self.words):
            near = get_close_matches(word.lstrip("-"), names, 1)
            meant = names[near[0]] if near else ""
            if meant and word != meant and word[:1] == meant[:1]:
                message += f"; did you mean {meant} in place of {word}?"
                break
        if message.endswith("expected one argument"):
            message += "; if the value begins with a dash, write --option=value"
        self.exit(2, f"{self.prog}: {message}\n")


def _number(
    kind: type, least: float = -math.inf, most: float = math.inf
) -> Callable[[str], float]:
    """Return an argparse type: a finite number of a kind in a range."""

    def number(text: str) -> float:
        value = kind(text)
        if least <= value <= most and abs(value) != math.inf:
            return value
        wanted = "finite" if least == -math.inf else f"{least} or more"
        wanted = wanted if most == math.inf else f"{least} to {most}"
        raise argparse.ArgumentTypeError(f"must be {wanted}; got {text}")

    number.__name__ = kind.__name__  # argparse: invalid float value: 'a'
    return number


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _output(as_json: bool = False) -> argparse.ArgumentParser:
    """Return the options that set what a command prints.

    ``-q`` and ``-v`` stand before or after the command's name, so they have no default.
    """
    options = argparse.ArgumentParser(
        add_help=False, argument_default=argparse.SUPPRESS
    )
    add = options.add_argument_group("output").add_argument
    if as_json:
        text = "print the result as one JSON document, and nothing else, on stdout"
        add("--json", action="store_true", dest="as_json", default=False, help=text)
    level = {"action": "store_const", "dest": "level"}
    text = "show only results, warnings and errors: no notes, no progress bars"
    add("-q", "--quiet", **level, const="WARNING", help=text)
    text = "show details, and the traceback of an error"
    add("-v", "--verbose", **level, const="DEBUG", help=text)
    return options


def _rerun() -> argparse.ArgumentParser:
    """Return the option of the commands that write a scene."""
    options = argparse.ArgumentParser(add_help=False)
    text = "write a recording of Rerun beside the page, NAME.rrd (default: none)"
    options.add_argument("--rerun", action="store_true", help=text)
    return options


def _command(
    commands,
    name: str,
    text: str,
    example: str,
    *parents: argparse.ArgumentParser,
    as_json: bool = False,
) -> Callable:
    """Add a command, with an example in its help; return its ``add_argument``."""
    return commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  mlx-lattice {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[*parents, _output(as_json)],
    ).add_argument


def parser() -> argparse.ArgumentParser:
    """Return the parser of mlx-lattice and all its commands."""
    whole = _Parser(
        prog="mlx-lattice",
        description="Sparse convolution for MLX: label scans, find boxes, make "
        "meshes,\nconvert checkpoints, and show what runs on this machine.",
        epilog="example:\n  mlx-lattice segment scan.ply --model spunet\n\n"
        "mlx-lattice COMMAND --help lists a command's options.\n"
        "Exit codes: 0 success, 1 failure, 2 wrong usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_output()],
    )
    add, version = whole.add_argument, f"{NAME} {__version__}"
    text = "print the version and exit"
    add("--version", action="version", version=version, help=text)
    text = f"print the script that completes commands in a shell: {', '.join(SHELLS)}"
    add("--print-completion", choices=SHELLS, metavar="SHELL", help=text)
    commands = whole.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", parser_class=_Parser
    )
    _add_nets(commands)
    _add_view(commands)
    _add_models(commands)
    _add_convert(commands)
    _add_run(commands)
    text = "show the backends, routes and settings of this machine"
    _command(commands, "info", text, "info", as_json=True)
    _add_doctor(commands)
    _add_explain(commands)
    text = "compare the routes and times of saved traces, layer by layer"
    example = "compare before.json after.json --out compared.html"
    add = _command(commands, "compare", text, example, as_json=True)
    text = "reference trace, a .json file from Trace.save"
    add("first", metavar="TRACE", help=text)
    add("others", metavar="TRACE", nargs="+", help="traces of the same net to compare")
    add("--out", metavar="FILE", help="write a page, .html (default: only the table)")
    text = "train a small net on digits and write a report of its layers"
    add = _command(commands, "demo", text, "demo --out demo")
    text = "folder for run.html and the weights (default: %(default)s)"
    add("--out", metavar="DIR", default="demo", help=text)
    return whole


def _add_doctor(commands) -> None:
    text = "check and time this machine's kernels, and write a report"
    add = _command(
        commands, "doctor", text, "doctor --quick --out report", as_json=True
    )
    text = "take 30 seconds (default: five minutes)"
    add("--quick", action="store_true", help=text)
    text = "folder for doctor.json (default: this folder)"
    add("--out", metavar="DIR", default=".", help=text)


def _add_explain(commands) -> None:
    text = "show which route a convolution takes on a device, and why"
    example = "explain --channels 64 64 --rows 500000 --dtype float16 --device m5-max"
    add = _command(commands, "explain", text, example, as_json=True)
    text = "kind of the kernel map (default: submanifold, or forward if rows or stride "
    add("--kind", choices=KINDS, help=text + "change)")
    positive = {"type": _number(int, 1)}
    text = "extents of the kernel in voxels: one, or one for each axis (default: 3)"
    add("--kernel", **positive, nargs="+", default=[3], metavar="SIZE", help=text)
    text = "stride in voxels (default: %(default)s)"
    add("--stride", **positive, default=1, help=text)
    text = "input and output channels"
    pair = {"nargs": 2, "metavar": ("IN", "OUT")}
    add("--channels", **positive, required=True, **pair, help=text)
    text = "rows of the tensor, or input rows and output rows"
    add("--rows", type=_number(int, 0), required=True, nargs="+", help=text)
    text = "edges of the kernel map (default: not counted, so no cost is shown)"
    add("--edges", type=_number(int, 0), help=text)
    text = "groups of channels (default: %(default)s)"
    add("--groups", **positive, default=1, help=text)
    text = "bits of a packed weight (default: the weight is float)"
    add("--bits", type=int, choices=BITS, help=text)
    text = "spatial axes (default: %(default)s)"
    add("--dims", type=int, choices=(1, 2, 3, 4), default=3, help=text)
    text = "dtype of the features (default: %(default)s)"
    add("--dtype", choices=tuple(DTYPES), default="float32", help=text)
    text = f"one of {', '.join(PROFILES)} (default: this machine's)"
    named = {"type": str.lower, "choices": tuple(PROFILES), "metavar": "NAME"}
    add("--device", **named, help=text)
    text = "pass of the convolution (default: %(default)s)"
    add("--pass", dest="pass_", choices=PASSES, default=FORWARD, help=text)
    routes = tuple(route.name for route in TABLE)
    text = "force a route, such as vec4 (default: choose one)"
    add("--only", metavar="ROUTE", choices=routes, help=text)


def _add_convert(commands) -> None:
    text = "write another library's checkpoint as a file or folder of this library"
    example = (
        "convert model_best.pth spunet --library spconv --model spunet --channels 6 20"
    )
    add, flag = _command(commands, "convert", text, example), {"action": "store_true"}
    add("source", metavar="SOURCE", help="checkpoint: .safetensors, .pt or .pth")
    text = "a .safetensors file, or a folder for models.from_pretrained"
    add("target", metavar="TARGET", help=text)
    text = f"library that wrote SOURCE: one of {', '.join(LIBRARIES)}"
    add("--library", required=True, choices=LIBRARIES, metavar="LIBRARY", help=text)
    text = f"net of SOURCE (default: from --config): one of {', '.join(MODELS)}"
    add("--model", choices=MODELS, metavar="NET", help=text)
    text = "JSON configuration published with SOURCE (default: from --model)"
    add("--config", metavar="FILE", help=text)
    text = "input channels and classes of the net (default: from --config)"
    add("--channels", type=int, nargs=2, metavar=("IN", "CLASSES"), help=text)
    text = "channel plan of a minkunet: A, B, C or D (default: the class's own)"
    add("--plan", help=text)
    text = "multiply all channel counts by this factor (default: 1)"
    add("--width", type=float, help=text)
    text = "leave out border voxels as torchsparse 2.1 does (default: keep them)"
    add("--trimmed", **flag, default=None, help=text)
    text = "store voxels and classes of this name in models.PUBLISHED (default: none)"
    add("--about", metavar="NAME", help=text)
    add(
        "--legacy",
        action=argparse.BooleanOptionalAction,
        help="load ptv3-m1 weights of Pointcept 1.5.1 or older (default: as --about)",
    )
    text = "JSON object that replaces prefixes of names, or drops them by null"
    add("--mapping", metavar="FILE", help=f"{text} (default: keep names)")
    text = "entry of SOURCE that holds the weights (default: search for it)"
    add("--entry", metavar="KEY", help=text)
    text = "pack the weights to this many bits (default: keep their dtype)"
    add("--bits", type=int, choices=BITS, help=text)
    text = "input channels that share a scale, with --bits (default: %(default)s)"
    group = {"choices": GROUP_SIZES, "default": DEFAULT_GROUP_SIZE}
    add("--group-size", type=int, **group, help=text)
    text = "read spconv's 1x1x1 kernels as saved (default: as spconv uses them)"
    add("--unit-as-shaped", **flag, help=text)


def _add_models(commands) -> None:
    text = "list published weights, describe one, or write its folder"
    example = "models spunet.scannet20.pointcept --out spunet"
    add = _command(commands, "models", text, example, as_json=True)
    text = "name of published weights (default: list all names)"
    add("name", metavar="NAME", nargs="?", help=text)
    text = "download the weights and write their folder here (default: describe them)"
    add("--out", metavar="DIR", help=text)
    text = "files that you downloaded yourself (default: download them)"
    add("--path", metavar="FILE", nargs="+", help=text)
    text = "use only cached files, without a network (default: download)"
    add("--cached", action="store_true", help=text)


def _add_view(commands) -> None:
    text = "write a page with points, voxels or a mesh that you can turn"
    example = "view segmented/scan.ply --open"
    add = _command(commands, "view", text, example, _rerun(), as_json=True)
    text = "points (.ply, .las, ...), a mesh (.glb, .obj, .ply, .stl, .off), or arrays "
    text += "of a tensor: coords and others (.safetensors, .npz)"
    add("file", metavar="FILE", help=text)
    text = "page to write (default: NAME.html in this folder)"
    add("--out", metavar="FILE.html", help=text)
    text = "open the page in the browser (default: print its path)"
    add("--open", action="store_true", dest="opens", help=text)
    text = "attribute that colours points by class (default: %(default)s, if present)"
    add("--labels", metavar="NAME", default="labels", help=text)
    text = "columns of a .bin file, such as x,y,z,_,intensity (default: guess)"
    add("--columns", metavar="NAMES", default="", help=text)
    text = "batch element of a tensor (default: %(default)s)"
    add("--element", type=_number(int, 0), default=0, help=text)
    text = "upward axis: x, y, z, -x, -y or -z, written --up=-y (default: %(default)s)"
    add("--up", metavar="AXIS", choices=tuple(AXES), default="z", help=text)


def _add_run(commands) -> None:
    text = "run a PyTorch script with this package in place of CUDA libraries"
    example = "run --as spconv,flash_attn train.py --epochs 3"
    add = _command(commands, "run", text, example)
    text = "libraries to stand in for, separated by commas: spconv, flex_gemm, "
    text += "flash_attn, MinkowskiEngine, torchsparse, torchsparse==1.4"
    names = {"dest": "libraries", "type": _names, "metavar": "NAMES"}
    add("--as", required=True, **names, help=text)
    text = "replace installed libraries too (default: stop with an error)"
    add("--replace", action="store_true", help=text)
    add("-m", dest="is_module", action="store_true", help="run a module by its name")
    add("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    text = "the script's own arguments"
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help=text)


def _add_nets(commands) -> None:
    """Add the commands that run a net, which share options."""
    net, some, own, scan, points, tiles, mesh = (
        argparse.ArgumentParser(add_help=False) for _ in range(7)
    )
    text = "folder of the net, or owner/name on Hugging Face"
    for parent in (net, some):  # evaluate can do without a net
        add = parent.add_argument
        add("--model", required=parent is net, metavar="FOLDER", help=text)
        more = "branch, tag or commit of owner/name (default: its main branch)"
        add("--revision", help=more)
    text = "import this Python file, which defines the class of your own net "
    text += "(default: a net of this package)"
    own.add_argument("--code", metavar="FILE.py", help=text)
    text = "a point-cloud file: .ply, .pcd, .las, .laz, .bin, .npy, .npz, .csv, ..."
    scan.add_argument("scan", metavar="SCAN", help=text)
    add = points.add_argument
    text = "use zeros for missing attributes (default: stop with an error)"
    add("--fill", action="store_true", help=text)
    text = "columns of a .bin file, such as x,y,z,_,intensity (default: guess)"
    add("--columns", metavar="NAMES", default="", help=text)
    add = tiles.add_argument
    text = "edge of a tile, in the scan's unit, mostly metres "
    text += "(default: the whole scan at once)"
    add("--tile", type=_number(float, 0), metavar="EDGE", help=text)
    text = "width of the strip that neighbouring tiles share (default: a fifth of EDGE)"
    add("--overlap", type=_number(float, 0), metavar="WIDTH", help=text)
    text = "number of turned, scaled and mirrored views to sum, 1 to 24 "
    text += "(default: %(default)s)"
    add("--votes", type=_number(int, 1, 24), default=1, metavar="VIEWS", help=text)
    text = "upward axis: x, y, z, -x, -y or -z, written --up=-y (default: %(default)s)"
    add("--up", metavar="AXIS", choices=tuple(AXES), default="z", help=text)
    add = mesh.add_argument
    text = "maximum number of triangles (default: %(default)s)"
    add("--faces", type=_number(int, 4), default=200_000, help=text)
    text = "edge of the texture in texels (default: %(default)s)"
    add("--texture-size", type=_number(int, 16, 16384), default=2048, help=text)
    text = "keep the nets below this much memory, such as 8GB (default: no limit)"
    add("--memory", type=_memory, metavar="SIZE", help=text)

    text = "label a scan's points by class, and write points, a picture and a page"
    example = "segment scan.ply --model spunet --out segmented"
    parents = (scan, points, net, own, tiles, _rerun())
    add = _command(commands, "segment", text, example, *parents, as_json=True)
    text = "folder for NAME.ply, .png and .html; or a .las, .laz, .ply or .npz file, a "
    text += "copy of the scan with labels (default: %(default)s)"
    add("--out", metavar="PLACE", default="segmented", help=text)

    text = "print IoU and accuracy of each class, for a net or a labelled file"
    example = "evaluate scan.laz --predicted labelled.laz --ignore 0"
    parents = (points, some, own, tiles)
    add = _command(commands, "evaluate", text, example, *parents, as_json=True)
    add("scans", metavar="SCAN", nargs="+", help="point-cloud files with labels")
    text = "files with labels to compare, one for each SCAN (default: run --model)"
    add("--predicted", nargs="+", metavar="FILE", default=(), help=text)
    text = "dimension of SCAN with the labels (default: label, labels, class, ...)"
    add("--labels", metavar="NAME", default="", help=text)
    text = "leave out points with these labels (default: negative labels only)"
    add("--ignore", type=int, nargs="+", default=(), metavar="LABEL", help=text)

    text = "find boxes in a scan, and write a table, a picture and a page"
    example = "detect sweep.bin --model voxelnext --score 0.3 --out detected"
    parents = (scan, points, net, own, _rerun())
    add = _command(commands, "detect", text, example, *parents, as_json=True)
    text = "folder for NAME.csv, .json, .png and .html (default: %(default)s)"
    add("--out", metavar="DIR", default="detected", help=text)
    text = "minimum score of a box, 0 to 1 (default: the net's)"
    add("--score", type=_number(float, 0, 1), help=text)
    text = "position of the scanner in the file's coordinates (default: 0 0 0)"
    place = {"type": _number(float), "nargs": 3, "metavar": ("X", "Y", "Z")}
    add("--centre", **place, help=text)

    text = "decode TRELLIS.2's latents to a mesh with its texture, a picture and a page"
    example = "decode latents.safetensors --model shape --out asset.glb"
    add = _command(commands, "decode", text, example, net, mesh, _rerun())
    text = "a .safetensors file with coords, shape and, for a texture, texture"
    add("latents", metavar="LATENTS", help=text)
    text = "folder of the texture decoder (default: no texture)"
    add("--texture-model", metavar="FOLDER", help=text)
    text = "file to write: .glb, .ply or .obj (default: %(default)s)"
    add("--out", metavar="FILE", default="asset.glb", help=text)
    text = "batch element to decode (default: %(default)s)"
    add("--element", type=_number(int, 0), default=0, help=text)
    text = "number of fine voxels along an edge of the box (default: from LATENTS)"
    add("--resolution", type=_number(int, 1), help=text)

    text = "make a mesh and its latents from an image's tokens, by TRELLIS.2"
    example = "generate --image-tokens tokens.safetensors --model TRELLIS.2-4B"
    add = _command(commands, "generate", text, example, mesh)
    text = ".safetensors with cond_512 and cond_1024, (B, M, C) each"
    add("--image-tokens", metavar="FILE", required=True, help=text)
    text = "folder with TRELLIS.2's pipeline.json and ckpts"
    add("--model", required=True, metavar="FOLDER", help=text)
    text = "mesh (.glb, .ply, .obj) with latents beside it, or .safetensors for "
    text += "latents alone (default: %(default)s)"
    add("--out", metavar="FILE", default="asset.glb", help=text)
    add("--type", choices=FORMS, help="pipeline to run (default: pipeline.json's)")
    text = "seed of the noise (default: %(default)s)"
    add("--seed", type=int, default=42, help=text)
    text = "steps of each stage (default: pipeline.json's)"
    add("--steps", type=_number(int, 1), help=text)
    text = "guidance strength of each stage (default: pipeline.json's)"
    add("--guidance", type=_number(float), help=text)
    add("--no-texture", action="store_true", help="make the shape alone")
    text = "latents above which a cascade lowers its resolution (default: %(default)s)"
    add("--max-tokens", type=int, default=49152, help=text)
    text = "dtype of the flow models' blocks (default: the dtype in their file)"
    add("--dtype", choices=DTYPES, help=text)


# Errors that the user can correct: one sentence, no traceback.
WRONG = ValueError, TypeError, ImportError, OSError, HostMissing, MemoryLimitError
FAILURE, USAGE = 1, 2
# Exit codes after a signal, as in shells: 128 plus its number.
INTERRUPTED, NO_READER = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0 is success, 1 a failure such as a broken file, 2 a wrong use of the options.
    """
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
    whole = parser()
    try:
        parsed = whole.parse_args(arguments)
    except SystemExit as end:
        return end.code
    name = f"mlx-lattice {parsed.command}"
    level = getattr(parsed, "level", "INFO")
    try:
        if parsed.print_completion:
            name = "mlx-lattice"
            print(completion(whole, parsed.print_completion))
        elif parsed.command is None:
            whole.print_help()
        else:
            with _messages(name, level):
                return _result(parsed)
        return 0
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after ^C
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except WRONG as error:
        message = error
        if isinstance(error, FileNotFoundError) and error.filename:
            message = f"there is no file {error.filename}"
        elif isinstance(error, OSError) and error.filename and error.strerror:
            message = f"{shown(str(error.filename))}: {error.strerror.lower()}"
        if level == "DEBUG" or _is_in(error, getattr(parsed, "code", None)):
            traceback.print_exc()
        print(f"{name}: {message}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) else FAILURE


def _is_in(error: Exception, code: str | None) -> bool:
    """Return whether an error comes from the user's own file."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return code is not None and os.path.realpath(code) in map(os.path.realpath, files)


@contextmanager
def _messages(name: str, level: str) -> Iterator[None]:
    """Write the log, and warnings without their place, to stderr inside the block."""
    handler, before = logging.StreamHandler(), log.level
    log.addHandler(handler)
    log.setLevel(level)

    def show(message, *_, **__) -> None:
        log.warning("%s: warning: %s", name, message)

    try:
        with warnings.catch_warnings():
            if name != "mlx-lattice run":  # its script shows warnings itself
                warnings.showwarning = show
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _result(parsed: argparse.Namespace) -> int:
    """Run a command, print its result and return its exit code."""
    as_json = getattr(parsed, "as_json", False)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        result = _call(parsed)
    if not isinstance(result, Result):
        return result if isinstance(result, int) else 0
    if as_json:
        print(json.dumps(result.document, indent=1, allow_nan=False, default=str))
    else:
        print(result.text)
    return result.code


def _call(parsed: argparse.Namespace) -> Any:
    """Call a command's function with its options."""
    name = parsed.command
    log.debug("%s %s, Python %s", NAME, __version__, sys.version.split()[0])
    if name in ("info", "explain"):
        return globals()[f"_{name}"](parsed)
    options = {k: v for k, v in vars(parsed).items() if k not in SHARED}
    with _extra(name, EXTRAS.get(name)):
        return import_module(f".commands.{name}", __package__).run(**options)


@contextmanager
def _extra(command: str, extra: str | None) -> Iterator[None]:
    """Say which extra to install if an import in the block fails."""
    try:
        yield
    except ImportError as error:
        if error.name is None or extra is None:  # says what to install
            raise
        needed = error.name.partition(".")[0]
        raise ImportError(f"{command} needs {needed}; {install(extra)}") from error


def completion(whole: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that completes the command in a shell, by shtab."""
    with _extra("shell completion", "completion"):
        import shtab
    commands = whole._subparsers._group_actions[0].choices.values()
    for action in (action for each in commands for action in each._actions):
        if action.metavar in ("DIR", "FOLDER"):
            action.complete = shtab.DIRECTORY
        elif action.metavar is not None and not action.choices:
            action.complete = shtab.FILE
    return shtab.complete(whole, shell)


def _info(parsed: argparse.Namespace) -> Result:
    from .inspect.doctor import backend_info

    info = backend_info()
    return Result(str(info), info.as_dict())


def _explain(parsed: argparse.Namespace) -> Result:
    from .inspect.explain import explain

    size = parsed.kernel[0] if len(parsed.kernel) == 1 else parsed.kernel
    if len(parsed.kernel) not in (1, parsed.dims):
        raise UsageError(
            f"--kernel takes 1 or {parsed.dims} sizes; got {len(parsed.kernel)}"
        )
    if len(parsed.rows) > 2:
        raise UsageError(f"--rows takes 1 or 2 numbers; got {len(parsed.rows)}")
    with usage():
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
    facts = {"device": parsed.device, "pass_": parsed.pass_, "only": parsed.only}
    explanation = explain(problem, **facts)
    return Result(str(explanation), explanation.as_dict())


if __name__ == "__main__":
    sys.exit(main())
