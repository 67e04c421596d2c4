"""Scene: points, voxels, boxes and meshes on one interactive HTML page.

The page is k3d's viewer (WebGL) beside a legend that shows and hides its entries. It
contains the viewer and the data, so it needs no network. Needs the extra ``viz``.
``html_table`` writes the tables that notebooks show for tensors and relations.
"""

from __future__ import annotations

import base64
import colorsys
import html
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from .cache_files import atomic_write
from .checks import one_of, real_axes
from .distribution import install

# The most points that are drawn, and the most voxels that are drawn as cubes.
MOST_POINTS = 500_000
MOST_CUBES = 200_000
# For each upward axis: the (axis, sign) that point right, forward and up.
AXES = {
    "x": ((1, 1), (2, 1), (0, 1)),
    "y": ((2, 1), (0, 1), (1, 1)),
    "z": ((0, 1), (1, 1), (2, 1)),
    "-x": ((2, 1), (1, 1), (0, -1)),
    "-y": ((0, 1), (2, 1), (1, -1)),
    "-z": ((1, 1), (0, 1), (2, -1)),
}
# By suffix of a scene's file: the module, its package, and the extra that has it.
NEEDS = {".html": ("k3d", "k3d", "viz"), ".rrd": ("rerun", "rerun-sdk", "rerun")}
PLAIN = 110, 135, 175  # points without a label or a colour
UNKNOWN = 150, 150, 150  # points with a negative label
FIELD_OF_VIEW = 50.0

# A box's corners in units of half its extents, and the lines between them: twelve
# edges, and one from the middle of the box to its front.
CORNERS = [[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]
CORNERS += [[0, 0, 0], [1, 0, 0]]
EDGES = [(a, b) for a in range(8) for b in range(a, 8) if a ^ b in (1, 2, 4)] + [(8, 9)]


def hue(index: int) -> tuple[int, int, int]:
    """Return the colour of an unnamed class: hues a golden section apart."""
    level = (0.9, 0.65)[index // 12 % 2]
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1, 0.65, level)
    return round(255 * red), round(255 * green), round(255 * blue)


@dataclass
class _Part:
    """The objects of one entry of the legend."""

    kind: str  # "Points", "Voxels", "Boxes" or "Meshes"
    name: str
    colour: tuple[int, int, int] | None
    count: int
    arrays: dict[str, Any] = field(repr=False)


class Scene:
    """Points, voxels, boxes and meshes, as an interactive page.

    Every method that adds something returns the scene. A notebook shows a scene that is
    the last value of a cell. Arrays are NumPy's, MLX's or lists.

    Args:
        title: the page's title, such as the name of the scan.
        note: a line below the title, such as the name of the net.
        up: the upward axis: "x", "y", "z", or one of them with a minus.

    Examples:
        >>> points = np.random.default_rng(0).uniform(size=(1000, 3))
        >>> scene = ml.Scene("a cube").points(points, labels=points[:, 2] > 0.5)
        >>> scene.boxes([[0.5, 0.5, 0.5, 1, 1, 1, 0]], scores=[0.9])
        Scene('a cube', points: 1,000, boxes: 1)
        >>> path = scene.save("cube.html")
    """

    def __init__(self, title: str = "scene", note: str = "", *, up: str = "z"):
        self.title: str = str(title)
        self.note: str = str(note)
        self.up: str = one_of(up, tuple(AXES), "up")
        self._parts: list[_Part] = []

    def points(
        self,
        points: Any,
        *,
        labels: Any = None,
        colours: Any = None,
        classes: Sequence[str] = (),
        palette: Sequence[Sequence[int]] = (),
    ) -> Scene:
        """Add points, coloured by label or by their own colours.

        With labels and colours, the page can switch between both. Points that are not
        finite are left out. At most 500 000 points are drawn, evenly spaced in their
        order.

        Args:
            points: (P, 3) float.
            labels: (P,) integers. A negative label is drawn in grey.
            colours: (P, 3), floats from 0 to 1 or integers from 0 to 255.
            classes: the names of the labels; by default "class 0" and so on.
            palette: red, green and blue of each label, as ``colours``; by default
                distinct hues.

        Raises:
            ValueError: an array has another shape, or a colour is out of range.
        """
        import numpy as np

        points = _rows(points, 3, "points").astype(np.float32)
        labels, colours = _labels(labels, points), _colours(colours, points)
        keep = np.flatnonzero(np.isfinite(points).all(axis=1))
        if len(keep) > MOST_POINTS:
            keep = keep[np.linspace(0, len(keep) - 1, MOST_POINTS).astype(np.int64)]
            self._say(f"{MOST_POINTS:,} of {len(points):,} points are drawn")
        size = _spacing(points[keep])
        for name, colour, rows in _groups(labels, keep, classes, palette):
            own = None if colours is None else colours[rows]
            if own is not None and labels is None:
                colour = None
            arrays = {"points": points[rows], "colours": own, "size": size}
            self._parts.append(_Part("Points", name, colour, len(rows), arrays))
        return self

    def voxels(
        self,
        coords: Any,
        *,
        size: float | Sequence[float] = 1.0,
        labels: Any = None,
        colours: Any = None,
        classes: Sequence[str] = (),
        palette: Sequence[Sequence[int]] = (),
    ) -> Scene:
        """Add voxels as cubes; more than 200 000 voxels are drawn as points.

        Args:
            coords: (N, 3) integers; voxel (0, 0, 0) reaches from 0 to ``size``.
            size: edge of a voxel, one value or one for each axis.
            labels, colours, classes, palette: as for ``points``, one per voxel.

        Raises:
            ValueError: an array has another shape, or a colour is out of range.
        """
        import numpy as np

        coords = _rows(coords, 3, "coords")
        if coords.size and coords.dtype.kind not in "iu":
            raise ValueError(
                f"coords must be integers; got {coords.dtype}. Make voxels of points "
                "with ml.SparseTensor.from_points, and call show()"
            )
        coords, size = coords.astype(np.int64), real_axes(size, 3, "size")
        if len(coords) > MOST_CUBES:
            self._say(f"{len(coords):,} voxels are drawn as points")
            facts = {"labels": labels, "colours": colours}
            facts |= {"classes": classes, "palette": palette}
            return self.points((coords + 0.5) * np.array(size), **facts)
        labels, colours = _labels(labels, coords), _colours(colours, coords)
        every = np.arange(len(coords))
        for name, colour, rows in _groups(labels, every, classes, palette):
            corners, cells = _sides(coords[rows])
            arrays: dict[str, Any] = {"corners": np.float32(corners * np.array(size))}
            if labels is None and colours is not None:
                colour, arrays["colours"] = None, colours[rows][cells]
            self._parts.append(_Part("Voxels", name, colour, len(rows), arrays))
        return self

    def boxes(
        self,
        boxes: Any,
        *,
        scores: Any = None,
        labels: Any = None,
        classes: Sequence[str] = (),
        palette: Sequence[Sequence[int]] = (),
    ) -> Scene:
        """Add boxes as lines, with their scores; a line points to a box's front.

        Args:
            boxes: (M, 7 or more) float: centre x, y, z, extents dx, dy, dz, and the
                angle from x towards y, as ``ops.box_corners`` takes them.
            scores: (M,) numbers that are written above the boxes.
            labels: (M,) integers, the classes of the boxes.
            classes, palette: as for ``points``.

        Raises:
            ValueError: an array has another shape.
        """
        import numpy as np

        boxes = _rows(boxes, 7, "boxes", more=True).astype(np.float64)
        labels = _labels(labels, boxes)
        scores = None if scores is None else _numbers(scores)
        if scores is not None and scores.shape != (len(boxes),):
            raise ValueError(
                f"scores must have shape ({len(boxes)},), one for each box; got "
                f"{scores.shape}"
            )
        every = np.arange(len(boxes))
        for name, colour, rows in _groups(labels, every, classes, palette):
            arrays = {
                "boxes": boxes[rows],
                "corners": _corners(boxes[rows]).astype(np.float32),
                "scores": None if scores is None else scores[rows],
            }
            self._parts.append(_Part("Boxes", name, colour, len(rows), arrays))
        return self

    def mesh(self, glb: bytes | str | Path, name: str = "mesh") -> Scene:
        """Add a mesh with its materials.

        Args:
            glb: a binary glTF file: its path or its bytes; y is upwards in the file.
            name: its entry in the legend.

        Raises:
            ValueError: the bytes are not binary glTF.
        """
        data = glb if isinstance(glb, bytes) else Path(glb).read_bytes()
        if data[:4] != b"glTF":
            raise ValueError(f"{name} is not a binary glTF (.glb) file")
        self._parts.append(_Part("Meshes", name, None, 1, {"glb": data}))
        return self

    def _say(self, text: str) -> None:
        self.note = "; ".join(filter(None, (self.note, text)))

    def html(self) -> str:
        """Return the page as HTML.

        Raises:
            ImportError: k3d is not installed.
        """
        check_scene("scene.html")
        import k3d

        static = resources.files("k3d").joinpath("static")
        shown = [(part, _drawn(part, k3d)) for part in self._parts]
        drawn = sum(part.count for part in self._parts if part.kind == "Points")
        plot = k3d.plot(
            antialias=int(drawn < 100_000),  # it halves the speed without a GPU
            menu_visibility=False,
            camera_auto_fit=False,
            camera_mode="orbit",
            camera_fov=FIELD_OF_VIEW,
            camera=_camera([o for _, objects in shown for o in objects], self.up),
        )
        for _, objects in shown:
            for each in objects:
                plot += each
        page = resources.files(__package__).joinpath("scene.html")
        return Template(page.read_text(encoding="utf-8")).substitute(
            title=html.escape(self.title),
            note=html.escape(self.note),
            panel=_panel(shown),
            fflate=static.joinpath("fflate.js").read_text(encoding="utf-8"),
            k3d=_viewer(static.joinpath("standalone.js")),
            data=base64.b64encode(plot.get_binary_snapshot(6)).decode(),
        )

    def save(self, *paths: str | Path) -> Path:
        """Write the page (``.html``) or a recording of Rerun (``.rrd``).

        Args:
            *paths: the files; a recording needs the extra ``rerun``.

        Returns:
            The path of the first file.

        Raises:
            ImportError: k3d, or rerun-sdk, is not installed.
            ValueError: a path has another suffix.
        """
        check_scene(*paths)
        for path in map(Path, paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as draft:
                if path.suffix == ".rrd":
                    self._record(draft)
                else:
                    draft.write_text(self.html(), encoding="utf-8")
        return Path(paths[0])

    def _record(self, path: Path) -> None:
        import rerun

        recording = rerun.RecordingStream("mlx_lattice")
        recording.save(path)
        for part in self._parts:
            name = f"{part.kind.lower()}/{part.name}"
            recording.log(name, _logged(part, rerun), static=True)
        recording.disconnect()

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for part in self._parts:
            counts[part.kind] = counts.get(part.kind, 0) + part.count
        parts = [f"{kind.lower()}: {count:,}" for kind, count in counts.items()]
        return f"Scene({self.title!r}, {', '.join(parts) or 'empty'})"

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html())}" style="width: 100%; '
            'height: 600px; border: 0" title="scene"></iframe>'
        )


def check_scene(*paths: str | Path) -> None:
    """Raise unless a scene can be saved to paths; call it before the work."""
    for path in map(Path, paths):
        if path.suffix not in NEEDS:
            raise ValueError(f"the file must be .html or .rrd; got {path.name!r}")
        module, package, extra = NEEDS[path.suffix]
        if find_spec(module) is None:
            raise ImportError(f"a scene needs {package}; {install(extra)}")


def html_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> str:
    """Return a title and rows of values as an HTML table, as notebooks show it."""

    def line(values: Sequence, tag: str) -> str:
        cells = "".join(f"<{tag}>{html.escape(str(v))}</{tag}>" for v in values)
        return f"<tr>{cells}</tr>"

    head = f"<thead>{line(columns, 'th')}</thead>" if columns else ""
    body = "".join(line(row, "td") for row in rows)
    title = f"<p><b>{html.escape(title)}</b></p>"
    return f"{title}<table>{head}<tbody>{body}</tbody></table>"


# Arrays


def _numbers(values: Any) -> Any:
    import numpy as np

    if hasattr(values, "itemsize") and not hasattr(values, "__array_interface__"):
        values = values.tolist() if values.itemsize == 2 else values  # bfloat16
    return np.asarray(values)


def _rows(values: Any, width: int, name: str, more: bool = False) -> Any:
    """Return an array of rows with so many columns, or more, or raise."""
    if hasattr(values, "feats"):
        raise TypeError(f"{name} must be an array; got a tensor. Show it with x.show()")
    array = _numbers(values)
    if array.size == 0:
        array = array.reshape(0, width)
    wide = array.ndim == 2 and array.shape[1] >= width
    if not wide or (array.shape[1] > width and not more):
        raise ValueError(
            f"{name} must have shape (N, {width}{' or more' * more}); got {array.shape}"
        )
    return array


def _labels(labels: Any, rows: Any) -> Any:
    import numpy as np

    if labels is None:
        return None
    array = _numbers(labels)
    if array.shape != (len(rows),) or array.dtype.kind not in "iub":
        scores = ". Pass scores.argmax(axis=1)" if array.ndim == 2 else ""
        raise ValueError(
            f"labels must be integers of shape ({len(rows)},), one for each row; got "
            f"{array.dtype} of shape {array.shape}{scores}"
        )
    return array.astype(np.int64)


def _colours(colours: Any, rows: Any, name: str = "colours") -> Any:
    """Return (N, 3) uint8 colours, or None."""
    import numpy as np

    if colours is None:
        return None
    array = _rows(colours, 3, name)
    floats = array.dtype.kind == "f"
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be numbers; got {array.dtype}")
    if len(array) != len(rows):
        raise ValueError(
            f"{name} must have shape ({len(rows)}, 3), one for each row; got "
            f"{array.shape}"
        )
    if array.size and not (array.min() >= 0 and array.max() <= (1 if floats else 255)):
        raise ValueError(
            f"{name} must be floats from 0 to 1 or integers from 0 to 255; got values "
            f"from {array.min():g} to {array.max():g}"
        )
    return (array * 255 + 0.5 if floats else array).astype(np.uint8)


def _groups(labels, rows, classes, palette) -> Iterator[tuple]:
    """Yield the name, colour and rows of each label, in the order of the labels."""
    import numpy as np

    if labels is None:
        if len(rows):
            yield "all", PLAIN, rows
        return
    if isinstance(classes, str):
        raise TypeError(f"classes must be a list of names; got {classes!r}")
    palette = _colours(palette, palette, "palette").tolist()
    order = rows[np.argsort(labels[rows], kind="stable")]
    found, first = np.unique(labels[order], return_index=True)
    parts = np.split(order, first[1:]) if len(found) else []
    for label, part in zip(found.tolist(), parts, strict=True):
        name = classes[label] if 0 <= label < len(classes) else f"class {label}"
        colour = palette[label] if 0 <= label < len(palette) else hue(label)
        if label < 0:
            name, colour = "no class", UNKNOWN
        yield str(name), tuple(colour), part


def _spacing(points: Any) -> float:
    """Return a diameter at which neighbouring points of a surface about touch."""
    import numpy as np

    if not len(points):
        return 1.0
    low, high = np.percentile(points, (5, 95), axis=0)
    whole = float(np.linalg.norm(high - low)) or 1.0
    return whole * min(2 / len(points) ** 0.5, 1 / 150)


def _sides(cells: Any) -> tuple[Any, Any]:
    """Return the sides of cells that no other cell covers.

    Returns:
        The (4 F, 3) corners of the F sides, and the (4 F,) row of each corner's cell.
    """
    import numpy as np

    low = cells.min(axis=0, initial=0) - 1
    _, wide, high = cells.max(axis=0, initial=0) - low + 2

    def keys(places):
        x, y, z = (places - low).T
        return (x * wide + y) * high + z

    taken, corners, rows = keys(cells), [], []
    for axis in range(3):
        out, one, two = np.eye(3, dtype=np.int64)[[axis, axis - 2, axis - 1]]
        for side in (0, 1):
            free = np.flatnonzero(~np.isin(keys(cells + (2 * side - 1) * out), taken))
            at = cells[free] + side * out
            turn = (one, one + two, two) if side else (two, one + two, one)
            corners.append(np.stack([at, *(at + step for step in turn)], axis=1))
            rows.append(np.repeat(free, 4))
    return np.concatenate(corners).reshape(-1, 3), np.concatenate(rows)


def _faces(corners: Any) -> Any:
    """Return two triangles for every four corners."""
    import numpy as np

    first = np.arange(0, len(corners), 4, dtype=np.uint32)[:, None]
    return (first + np.array([0, 1, 2, 0, 2, 3], np.uint32)).reshape(-1, 3)


def _corners(boxes: Any) -> Any:
    """Return (M, 10, 3): the corners of boxes, their middles and their fronts."""
    import numpy as np

    local = 0.5 * np.array(CORNERS) * boxes[:, None, 3:6]
    cosine, sine = np.cos(boxes[:, 6:7]), np.sin(boxes[:, 6:7])
    x, y, z = np.moveaxis(local, 2, 0)
    turned = np.stack([x * cosine - y * sine, x * sine + y * cosine, z], axis=2)
    return turned + boxes[:, None, :3]


# The page


@cache
def _viewer(script: Any) -> str:
    """Return k3d's script, compressed, as text."""
    return base64.b64encode(zlib.compress(script.read_bytes(), 6)).decode()


def _packed(colour: Any) -> Any:
    """Return red, green and blue as one integer, as k3d takes them."""
    import numpy as np

    return np.asarray(colour, np.uint32) @ np.array([65536, 256, 1], np.uint32)


def _drawn(part: _Part, k3d: Any) -> list[Any]:
    """Return k3d's objects for a part."""
    import numpy as np

    arrays, own = part.arrays, part.arrays.get("colours")
    facts = {"name": part.name}
    if part.colour is not None:
        facts["color"] = int(_packed(part.colour))
    elif own is not None:
        facts["colors"] = _packed(own)
    if part.kind == "Points":
        if part.colour is not None and own is not None:
            facts["custom_data"] = {"own": _packed(own)}
        size = {"point_size": arrays["size"], "shader": "flat"}
        return [k3d.points(arrays["points"], **size, **facts)]
    if part.kind == "Voxels":
        corners = arrays["corners"]
        return [k3d.mesh(corners, _faces(corners), flat_shading=True, **facts)]
    if part.kind == "Boxes":
        corners, scores = arrays["corners"], arrays["scores"]
        first = 10 * np.arange(len(corners), dtype=np.uint32)[:, None, None]
        lines = first + np.array(EDGES, np.uint32)
        width = 0.03 * float(np.median(arrays["boxes"][:, 3:6].min(axis=1))) or 0.01
        style = {"indices_type": "segment", "width": width, "shader": "mesh"}
        objects = [
            k3d.lines(corners.reshape(-1, 3), lines.reshape(-1, 2), **style, **facts)
        ]
        if scores is not None:
            top = corners[:, :8].mean(axis=1)
            top[:, 2] = corners[:, :8, 2].max(axis=1)
            text = [f"{score:.2f}" for score in scores]
            style = {"is_html": True, "reference_point": "cb", "size": 0.75}
            objects.append(k3d.text(text, top.ravel(), **style, **facts))
        return objects
    return list(k3d.glb(arrays["glb"]))


def _camera(objects: list[Any], up: str) -> list[float]:
    """Return the eye, the place it looks at and its upward direction."""
    import numpy as np

    places = [np.zeros((0, 3))]
    for each in objects:
        own = getattr(each, "vertices", getattr(each, "positions", ()))
        matrix = np.asarray(each.model_matrix, np.float64)
        own = np.reshape(own, (-1, 3))
        places.append(own @ matrix[:3, :3].T + matrix[:3, 3])
    every = np.concatenate(places)
    low, high = np.percentile(every if len(every) else np.eye(3), (2, 98), axis=0)
    right, forward, upward = (sign * np.eye(3)[axis] for axis, sign in AXES[up])
    to_eye = 0.4 * right - 0.7 * forward + 0.6 * upward
    distance = 0.55 * np.linalg.norm(high - low) / np.tan(np.radians(FIELD_OF_VIEW / 2))
    middle = (low + high) / 2
    return [*(middle + to_eye * max(distance, 1e-3)), *middle, *upward]


def _panel(shown: list[tuple[_Part, list[Any]]]) -> str:
    """Return the legend: a switch for each part, buttons, and the size of points."""
    text = ""
    for kind in dict.fromkeys(part.kind for part, _ in shown):
        group = [(part, objects) for part, objects in shown if part.kind == kind]
        text += f"<fieldset><legend>{kind}</legend>"
        for part, objects in group:
            ids = " ".join(str(each.id) for each in objects)
            mark = ""
            if part.colour is not None:
                mark = f'<i style="background: rgb{part.colour}"></i>'
            text += (
                f'<label><input type="checkbox" checked data-ids="{ids}">{mark}'
                f"<span>{html.escape(part.name)}</span>"
                f"<small>{part.count:,}</small></label>"
            )
        text += "</fieldset>"
    if len(shown) > 2:
        text += '<fieldset><button id="every">All</button> <button>None</button>'
        text += "</fieldset>"
    points = [part for part, _ in shown if part.kind == "Points"]
    if points:
        text += '<fieldset><legend>Size of points</legend><label><input type="range" '
        text += 'id="size" min="-3" max="3" step="0.25" value="0"></label></fieldset>'
    if any(p.colour is not None and p.arrays["colours"] is not None for p in points):
        text += '<fieldset><label><input type="checkbox" id="own"><span>Colours of '
        text += "the scan</span></label></fieldset>"
    return text


def _logged(part: _Part, rr: Any) -> Any:
    """Return Rerun's archetype for a part."""
    arrays, colour = part.arrays, part.colour
    colours = arrays.get("colours") if colour is None else [colour]
    if part.kind == "Points":
        radius = arrays["size"] / 2
        return rr.Points3D(arrays["points"], colors=colours, radii=radius)
    if part.kind == "Boxes":
        boxes, scores = arrays["boxes"], arrays["scores"]
        labels = None if scores is None else [f"{score:.2f}" for score in scores]
        return rr.Boxes3D(
            centers=boxes[:, :3],
            sizes=boxes[:, 3:6],
            rotation_axis_angles=[
                rr.RotationAxisAngle((0, 0, 1), radians=angle) for angle in boxes[:, 6]
            ],
            colors=colours,
            labels=labels,
        )
    if part.kind == "Meshes":
        return rr.Asset3D(contents=arrays["glb"], media_type="model/gltf-binary")
    corners = arrays["corners"]
    return rr.Mesh3D(
        vertex_positions=corners,
        triangle_indices=_faces(corners),
        vertex_colors=colours if colour is None else [colour] * len(corners),
    )
