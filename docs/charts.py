"""Draw the chart of speed from the result files, light and dark.

    python docs/charts.py [FOLDER]

writes speed-light.png and speed-dark.png into docs/images, or into FOLDER; each says in
its metadata which figures it shows, which a test compares with the files.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Page, text, lines, ours, ours with the backward pass, others.
SCHEMES = {
    "light": ("#ffffff", "#16191f", "#d5d9e0", "#2463d4", "#b4570a", "#9aa2ae"),
    "dark": ("#0d1117", "#e8ebf0", "#333a45", "#5b93f5", "#f0a35e", "#6b7482"),
}
PASSES = ("forward", "training")


def rows(name: str) -> list[dict]:
    """Return the lines of a result file."""
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def layers() -> list[tuple[str, int, float]]:
    """Return (pass, channels, times as fast as the fastest peer) of H200 layers."""
    return [
        (row["case"], row["channels"], row["times_faster"])
        for row in rows("gpu-h200")
        if row["case"] in PASSES and "times_faster" in row
    ]


def nets_on_a_gpu(count: int = 100_000) -> dict[str, dict]:
    """Return the newest row of MinkUNet34 for each step, on one H200, in half.

    Of the scans that the others' times are of, not of generated ones.
    """
    return {
        row["step"]: row
        for row in rows("nets-h200")
        if row["net"] == "minkunet34"
        and row["rows"] == count
        and not row.keys() & {"scenes", "bits"}
    }


def peers_on_a_gpu(step: str, count: int = 100_000) -> float | None:
    """Return the least GPU ms of MinkUNet34 by other libraries, None of no figure."""
    found = [
        row["gpu_ms"]
        for row in rows("nets-peers-h200")
        if (row["net"], row["rows"], row["step"]) == ("minkunet34", count, step)
    ]
    return min(found, default=None)


def nets_on_a_cpu() -> dict[tuple[str, str], float]:
    """Return wall ms of MinkUNet18 by (library, step); not of the other chip."""
    names = {"spconv": "spconv", "gather": "PyTorch gather-matmul-scatter"}
    return {
        (names.get(row.get("library"), "mlx_lattice"), row["step"]): row["wall_ms"]
        for row in rows("nets-cpu")
        if row["net"] == "minkunet18" and "wall_ms" in row and "chip" not in row
    }


def shown() -> dict:
    """Return all that the chart shows, as plain values."""
    gpu = {
        step: (row["gpu_ms"], peers_on_a_gpu(step))
        for step, row in nets_on_a_gpu().items()
    }
    cpu = [[*key, ms] for key, ms in nets_on_a_cpu().items()]
    return {"layers": layers(), "gpu": gpu, "cpu": cpu}


def digest() -> str:
    """Return what the pictures have in their metadata: a hash of what they show."""
    return hashlib.sha256(json.dumps(shown()).encode()).hexdigest()[:16]


def bars(axes, groups: dict[str, list[tuple[str, float]]], colours, unit: str) -> None:
    """Draw groups of horizontal bars, each with its value; the first is ours."""
    y, ticks = 0.0, []
    most = max(value for group in groups.values() for _, value in group)
    for name, group in groups.items():
        top = y
        for label, value in group:
            axes.barh(y, value, 0.82, color=colours[label])
            axes.text(value + most * 0.02, y, f"{value:.2g} {unit}", va="center")
            y += 1
        ticks.append(((top + y - 1) / 2, name))
        y += 0.6
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_xlim(0, most * 1.3)
    axes.set_xticks([])
    axes.invert_yaxis()
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def draw(path: Path, scheme: str) -> None:
    """Draw the chart in one scheme."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    page, text, line, ours, backward, others = SCHEMES[scheme]
    plain = {key: text for key in ("text.color", "axes.labelcolor", "xtick.color")} | {
        "ytick.color": text,
        "axes.edgecolor": line,
        "axes.facecolor": page,
    }
    with matplotlib.rc_context(plain | {"font.size": 9.5, "axes.titlesize": 10.5}):
        figure, (first, second, third) = pyplot.subplots(
            1, 3, figsize=(12.6, 4.1), width_ratios=(1, 1.12, 1.12), facecolor=page
        )
        figure.set_layout_engine("constrained", wspace=0.05)

        channels = sorted({each for _, each, _ in layers()})
        for pass_, colour, move in zip(
            PASSES, (ours, backward), (-0.13, 0.13), strict=True
        ):
            found = [(c, v) for p, c, v in layers() if p == pass_]
            at = [channels.index(c) + move for c, _ in found]
            name = "forward" if pass_ == "forward" else "forward and backward"
            first.plot(at, [v for _, v in found], "o", color=colour, label=name)
        first.axhline(1, color=others, linestyle="--")
        first.text(-0.42, 1.02, "fastest other library", color=text, fontsize=8.5)
        first.set_xticks(range(len(channels)), [f"{c} ch." for c in channels])
        first.set_ylim(0.8, None)
        first.set_xlim(-0.5, len(channels) - 0.5)
        first.set_ylabel("times as fast")
        first.set_title("3x3x3 layers of 4 scenes\none H200, half")
        first.legend(frameon=False, labelcolor=text, loc="upper right", fontsize=8.5)
        for side in ("top", "right"):
            first.spines[side].set_visible(False)

        gpu, titles = nets_on_a_gpu(), {"anew": "new scan", "kept": "same scan"}
        colours = {"mlx_lattice": ours, "others": others}
        groups = {}
        for step in ("anew", "kept", "training"):
            groups[titles.get(step, step)] = [
                ("mlx_lattice", gpu[step]["gpu_ms"]),
                ("others", peers_on_a_gpu(step)),
            ]
        bars(second, groups, colours, "ms")
        second.set_title("MinkUNet34, 100 000 voxels\none H200, half, GPU time")
        names = {"mlx_lattice": "mlx_lattice", "others": "fastest of the others"}
        legend(second, colours, names, text)

        cpu = nets_on_a_cpu()
        libraries = list(dict.fromkeys(library for library, _ in cpu))
        colours = dict(zip(libraries, (ours, others, line), strict=True))
        groups = {
            name: [(each, cpu[each, step] / 1e3) for each in libraries]
            for step, name in (("kept", "same scan"), ("training", "training"))
        }
        bars(third, groups, colours, "s")
        third.set_title("MinkUNet18, 40 000 voxels\ntwo CPU cores, float32")
        legend(third, colours, {each: each for each in libraries}, text)
        figure.savefig(
            path, dpi=110, facecolor=page, metadata={"Source": digest()},
            pil_kwargs={"optimize": True},
        )  # fmt: skip
        pyplot.close(figure)


def legend(axes, colours, names, text: str) -> None:
    """Say what the colours of bars are, in the free corner."""
    marks = [axes.barh(0, 0, color=colours[each], label=names[each]) for each in names]
    axes.legend(
        handles=marks, frameon=False, labelcolor=text, loc="upper right", fontsize=8.5
    )


def main(folder: Path) -> None:
    """Write both pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in SCHEMES:
        draw(folder / f"speed-{scheme}.png", scheme)


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parent / "images")
