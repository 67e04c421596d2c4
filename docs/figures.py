"""Draw the pictures of the concepts page: real relations, as the library builds them.

    python docs/figures.py [FOLDER]

writes one SVG a picture into docs/images, or into FOLDER. The same code gives the same
bytes, which a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx

import mlx_lattice as ml

CELL, GAP = 34, 92
COLOURS = ("#2463d4", "#b4570a", "#7a3fc4", "#12927c", "#c0307a")
STYLE = """
:root { color-scheme: light dark }
.page { fill: #ffffff; stroke: #e3e6eb }
.cell { fill: #dfe8f8; stroke: #59616e }
.bare { fill: #f6f7f9; stroke: #b9bfc9; stroke-dasharray: 3 3 }
.hit { fill: #2463d4 } .waste { fill: #f3cfa6 } .skip { fill: #edeff3 }
.tile { fill: none; stroke: #16191f; stroke-width: 1.5 }
.dot { fill: #b4570a }
text { font: 12px ui-sans-serif, -apple-system, "Segoe UI", Arial, sans-serif;
  fill: #16191f; text-anchor: middle }
.note { fill: #59616e; font-size: 11px } .left { text-anchor: start }
.edge { stroke-width: 2; fill: none }
@media (prefers-color-scheme: dark) {
  .page { fill: #181c23; stroke: #2a303a }
  .cell { fill: #243450; stroke: #a3acba }
  .bare { fill: #181c23; stroke: #59616e }
  .hit { fill: #5b93f5 } .waste { fill: #7a5326 } .skip { fill: #252b35 }
  .tile { stroke: #e8ebf0 } .dot { fill: #f0a35e }
  text { fill: #e8ebf0 } .note { fill: #a3acba }
}
""".strip()


def picture(width: float, height: float, title: str, body: list[str]) -> str:
    """Return a whole SVG on a card of its own, light or dark as the reader's system."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" role="img">'
    )
    card = (
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1:g}" '
        f'height="{height - 1:g}" rx="10"/>'
    )
    lines = [head, f"<title>{title}</title>", f"<style>{STYLE}</style>", card]
    return "\n".join([*lines, *body, "</svg>", ""])


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle."""
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" '
        f'height="{height:g}"/>'
    )


def text(x: float, y: float, words: object, kind: str = "") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def lattice(cells: list[int], step: int, start: float, y: float, origin: int):
    """Return a row of labelled 1D cells, and the middle of each."""
    body, middles = [], []
    for cell in cells:
        x = start + (cell * step - origin) * CELL
        body += [
            box(x + 1, y, step * CELL - 2, CELL - 8, "cell"),
            text(x + step * CELL / 2, y + 17, cell),
        ]
        middles.append(x + step * CELL / 2)
    return body, middles


def one_dimension(relation: ml.Relation, steps: tuple[int, int], left: float = 74):
    """Return (body, width, height) of a relation between two 1D lattices.

    Args:
        relation: over coordinates of one axis, or over bare rows.
        steps: how wide an input and an output cell are drawn.
        left: room for the words.
    """
    sides = []
    for coords, rows in (
        (relation.in_coords, relation.n_in),
        (relation.out_coords, relation.n_out),
    ):
        sides.append(list(range(rows)) if coords is None else coords[:, 1].tolist())
    ends = [
        (cell * step, (cell + 1) * step)
        for cells, step in zip(sides, steps, strict=True)
        for cell in cells
    ]
    origin, last = min(a for a, _ in ends), max(b for _, b in ends)
    top, bottom = 22, 22 + GAP
    ins, above = lattice(sides[0], steps[0], left, top, origin)
    outs, below = lattice(sides[1], steps[1], left, bottom, origin)
    body = [
        text(14, top + 17, "input", "note left"),
        text(14, bottom + 17, "output", "note left"),
    ]
    for i, o, k in relation.edges.tolist():
        body.append(
            f'<path class="edge" stroke="{COLOURS[k % 5]}" '
            f'd="M{above[i]:g} {top + CELL - 8}L{below[o]:g} {bottom}"/>'
        )
    body += ins + outs
    for k in range(relation.volume):
        x = left + 84 * k
        name = relation.spec.offsets[k][0] if relation.spec else ""
        words = f"k = {k}" + (f": {name:+d}" if relation.spec else "")
        body += [
            f'<path class="edge" stroke="{COLOURS[k % 5]}" '
            f'd="M{x:g} {bottom + 52}h16"/>',
            text(x + 22, bottom + 56, words, "note left"),
        ]
    width = max(left + (last - origin) * CELL, left + 84 * relation.volume) + 20
    return body, width, bottom + 72


def row(cells: list[int]) -> mx.array:
    """Return (N, 2) coordinates of one batch element and one axis."""
    return mx.array([[0, cell] for cell in cells])


def relations() -> dict[str, tuple[ml.Relation, tuple[int, int]]]:
    """Return one relation of each kind, and the widths of its cells."""
    manager = ml.CoordinateManager()
    fine = manager.insert(row([0, 1, 3, 4, 7, 8]))
    apart = manager.insert(row([0, 3, 4, 9]))
    halved = manager.kernel_relation(fine, kernel_size=2, stride=2)
    coarse = halved.keys[1]
    few = manager.insert(row([0, 1, 3]), 2)
    forward = {"kernel_size": 3, "stride": 2}
    return {
        "submanifold": (manager.submanifold_kernel_relation(fine), (1, 1)),
        "forward-cell": (manager.kernel_relation(apart, **forward), (1, 2)),
        "forward-reach": (
            manager.kernel_relation(apart, **forward, support="reach"),
            (1, 2),
        ),
        "target": (
            manager.target_kernel_relation(fine, row([8, 2, 5, 0])),
            (1, 1),
        ),
        "transposed": (manager.transposed_kernel_relation(coarse), (2, 1)),
        "generative": (
            manager.generative_relation(few, kernel_size=3, stride=2),
            (2, 1),
        ),
        "general": (
            ml.Relation.from_edges(
                [0, 2, 2, 1, 4, 3], [1, 1, 0, 3, 2, 2], [0, 1, 0, 2, 1, 2], 5, 4, 3
            ),
            (1, 1),
        ),
    }


def transpose() -> str:
    """Return R beside R.T."""
    relation, (fine, coarse) = relations()["forward-cell"]
    first, width, height = one_dimension(relation, (fine, coarse))
    second, other, _ = one_dimension(relation.T, (coarse, fine))
    body = [
        text(width / 2, 16, "R"),
        *first,
        f'<g transform="translate({width:g} 0)">',
        text(other / 2, 16, "R.T"),
        *second,
        "</g>",
    ]
    return picture(width + other, height, "A relation and its transpose", body)


def points() -> str:
    """Return a cloud of points beside the voxels that it becomes."""
    size, unit = 0.25, 240
    cloud = [
        (0.06, 0.08), (0.17, 0.19), (0.31, 0.12), (0.36, 0.4), (0.47, 0.33),
        (0.6, 0.55), (0.66, 0.7), (0.71, 0.58), (0.86, 0.8), (-0.12, 0.3),
        (-0.2, 0.42),
    ]  # fmt: skip
    x = ml.SparseTensor.from_points(mx.array(cloud), voxel_size=size, reduce="sum")
    step = size * unit
    body = []
    for at, name in ((100, "points"), (460, "rows of (batch, x, y): points merged")):
        for i in range(-1, 4):
            for j in range(4):
                body.append(box(at + i * step, 40 + j * step, step, step, "bare"))
        body.append(text(at + 1.5 * step, 26, name))
    for a, b in cloud:
        body.append(
            f'<circle class="dot" cx="{100 + a * unit:g}" cy="{40 + b * unit:g}" '
            'r="4"/>'
        )
    for (batch, i, j), (count,) in zip(
        x.coords.tolist(), x.feats.tolist(), strict=True
    ):
        left, top = 460 + i * step, 40 + j * step
        body += [
            box(left, top, step, step, "cell"),
            text(left + step / 2, top + 26, f"({batch}, {i}, {j})"),
            text(left + step / 2, top + 44, f"{count:g}", "note"),
        ]
    return picture(736, 300, "From points to coordinates", body)


def surface() -> mx.array:
    """Return 2D cells of a circle: rows of many different neighbourhoods."""
    span = range(-13, 14)
    cells = [(0, i, j) for i in span for j in span if abs(i * i + j * j - 150) < 13]
    return mx.array(cells)


def tiles() -> str:
    """Return the neighbour table in two orders, cut into tiles of 16 rows."""
    manager = ml.CoordinateManager()
    relation = manager.submanifold_kernel_relation(manager.insert(surface()))
    ordered = relation.sorted
    edges, cell, body = relation.n_edges, 9, []
    panels = (("rows as they are", relation.out_in), ("Gray-sorted", ordered.table))
    for place, (name, table) in enumerate(panels):
        filled = [[entry >= 0 for entry in line] for line in table.tolist()]
        left, done = 40 + place * 250, 0
        marks = {"hit": "", "waste": "", "skip": ""}
        frames = []
        for start in range(0, len(filled), ordered.block):
            tile = filled[start : start + ordered.block]
            used = [any(line[k] for line in tile) for k in range(relation.volume)]
            done += len(tile) * sum(used)
            for r, line in enumerate(tile):
                for k, hit in enumerate(line):
                    kind = "hit" if hit else "waste" if used[k] else "skip"
                    y = 52 + (start + r) * cell
                    marks[kind] += f"M{left + 20 * k} {y}h19v{cell - 1}h-19"
            frames.append(
                box(
                    left - 2,
                    51 + start * cell,
                    20 * relation.volume + 3,
                    len(tile) * cell + 1,
                    "tile",
                )
            )
        body += [f'<path class="{kind}" d="{d}"/>' for kind, d in marks.items()]
        body += frames
        middle = left + 10 * relation.volume
        body += [
            text(middle, 24, name),
            text(middle, 41, f"{done} products for {edges} edges", "note"),
        ]
    bottom = 52 + relation.n_out * cell + 22
    for at, kind, name in (
        (40, "hit", "edge"),
        (130, "waste", "multiplied by zero"),
        (300, "skip", "skipped by the whole tile"),
    ):
        body += [
            box(at, bottom - 10, 14, 10, kind),
            text(at + 20, bottom, name, "note left"),
        ]
    return picture(510, bottom + 18, "Tiles of 16 rows before and after sorting", body)


def pictures() -> dict[str, str]:
    """Return every picture by the name of its file."""
    found = {"points.svg": points(), "transpose.svg": transpose(), "tiles.svg": tiles()}
    for name, (relation, steps) in relations().items():
        body, width, height = one_dimension(relation, steps)
        found[f"{name}.svg"] = picture(width, height, f"Relation: {name}", body)
    return found


def main(folder: Path) -> None:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (folder / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]) if sys.argv[1:] else Path(__file__).parent / "images")
