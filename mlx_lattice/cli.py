"""The command mlx-lattice: info, explain and demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .devices import PROFILES
from .problem import DTYPES, FORWARD, PASSES
from .relation import KINDS


class _Parser(argparse.ArgumentParser):
    """Says what was wrong in one sentence, with exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    whole = _Parser(prog="mlx-lattice", description="Sparse convolution for MLX.")
    commands = whole.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what runs here")

    explain = commands.add_parser(
        "explain", help="which route a convolution takes on a device, and why"
    )
    explain.add_argument("--kind", choices=KINDS, default="submanifold")
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
    explain.add_argument("--bits", type=int, choices=(4, 8), help="packed weight")
    explain.add_argument("--dims", type=int, choices=(1, 2, 3, 4), default=3)
    explain.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    explain.add_argument(
        "--device", metavar="NAME", help=f"one of {', '.join(PROFILES)}"
    )
    explain.add_argument("--pass", dest="pass_", choices=PASSES, default=FORWARD)
    explain.add_argument("--only", metavar="ROUTE", help="force a route")

    demo = commands.add_parser("demo", help="a small net, from points to a report")
    demo.add_argument("--points", metavar="FILE", help="a point-cloud file")
    demo.add_argument("--out", metavar="DIR", help="folder of what it writes")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    given = parser().parse_args(arguments)
    run = {"info": _info, "explain": _explain, "demo": _demo}[given.command]
    try:
        run(given)
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"mlx-lattice {given.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _info(given: argparse.Namespace) -> None:
    from .backend import backend_info

    print(backend_info())


def _explain(given: argparse.Namespace) -> None:
    from .inspect import explain
    from .problem import Problem

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


def _demo(given: argparse.Namespace) -> None:
    try:
        from . import demo
    except ImportError as error:
        raise ImportError(
            f'the demo needs {error.name}; run: pip install "mlx-lattice[demo]"'
        ) from error
    options = {"out": given.out} if given.out else {}
    if given.points:
        demo.run_points(given.points, **options)
    else:
        demo.run(**options)


if __name__ == "__main__":
    sys.exit(main())
