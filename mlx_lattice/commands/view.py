"""The command view: a file of points, voxels or a mesh as a page that can be turned."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..cache_files import check_writable
from ..distribution import install
from ..io.points import READERS, PointCloud, read_points
from ..io.safetensors import SafetensorsState, listed
from ..scene import Scene, check_scene
from ..tensor import SparseTensor
from . import Result, UsageError, log
from .segment import scan_colours

MESHES = (".glb", ".obj", ".stl", ".off")


def run(
    file: str | Path,
    out: str | Path | None = None,
    *,
    columns: str = "",
    labels: str = "labels",
    element: int = 0,
    up: str = "z",
    rerun: bool = False,
    opens: bool = False,
) -> Result:
    """Write a page that shows a file, by default ``NAME.html`` in this folder.

    Args:
        file: points that ``read_points`` reads, a mesh, or the arrays of a tensor
            (``coords`` and others, in ``.safetensors`` or ``.npz``).
        out: the page.
        columns: as for ``read_points``.
        labels: the attribute that colours points by class, if the file has it.
        element: the batch element of a tensor.
        up: the upward axis of points and tensors.
        rerun: whether to write a recording of Rerun beside the page.
        opens: whether to open the page in the browser.

    Returns:
        A line about the page.

    Raises:
        ImportError: k3d, or a reader of the format, is not installed.
        ValueError: the file holds nothing to show, or its suffix is not known.
    """
    file = Path(file)
    page = Path(f"{file.stem}.html") if out is None else Path(out)
    if page.suffix != ".html":
        raise UsageError(f"--out must end in .html; got {page}")
    files = (page, page.with_suffix(".rrd")) if rerun else (page,)
    check_scene(*files)
    check_writable(*files, read=[file])
    scene = scene_of(file, columns, labels, element, up)
    scene.save(*files)
    log.info(f"wrote {scene!r} to {', '.join(map(str, files))}")
    if opens:
        webbrowser.open(page.resolve().as_uri())
    return Result(str(page), {"files": [str(path) for path in files]})


def scene_of(
    file: Path,
    columns: str = "",
    labels: str = "labels",
    element: int = 0,
    up: str = "z",
) -> Scene:
    """Return the scene of a file; arguments are those of ``run``."""
    kind = file.suffix.lower()
    if kind in MESHES or (kind == ".ply" and _has_faces(file)):
        return Scene(file.name).mesh(_glb(file), file.stem)
    if (arrays := _arrays(file)) is not None:
        return _tensor_scene(file, arrays, element, up)
    if kind not in READERS:
        known = ", ".join((*READERS, *MESHES, ".safetensors"))
        raise ValueError(f"{file.name}: view shows {known}; got {kind or 'no suffix'}")
    cloud = read_points(file, columns)
    if not len(cloud):
        raise ValueError(f"{file} holds no points")
    return _points_scene(file, cloud, labels, up)


def _points_scene(file: Path, cloud: PointCloud, labels: str, up: str) -> Scene:
    """Return a scene of points, by class if they have labels."""
    colours = scan_colours(cloud)
    found = cloud.attributes.get(labels)
    if found is None and labels != "labels":
        raise ValueError(
            f"{file.name} has no attribute {labels}; it has "
            f"{listed(cloud.attributes, 'none')}"
        )
    note, palette = f"{len(cloud):,} points", []
    if found is not None:
        found = found.astype(np.int64)
        palette = _palette(found, cloud.attributes.get("colours"))
    if cloud.dropped:
        note += f"; {cloud.dropped:,} points are left out, since they are not finite"
    facts = {"colours": colours, "labels": found, "palette": palette}
    return Scene(file.name, note, up=up).points(cloud.points, **facts)


def _palette(labels: np.ndarray, colours: np.ndarray | None) -> list:
    """Return the colour of each label, if all points of a label have one colour.

    The command ``segment`` writes such files.
    """
    known = labels >= 0
    if colours is None or colours.dtype != np.uint8 or not known.any():
        return []
    first = np.zeros((labels[known].max() + 1, 3), np.uint8)
    first[labels[known]] = colours[known]
    return first.tolist() if (first[labels[known]] == colours[known]).all() else []


def _arrays(file: Path) -> dict[str, mx.array] | None:
    """Return a file's arrays of a tensor; None if it holds anything else."""
    if file.suffix.lower() == ".safetensors":
        state = SafetensorsState(file)
        if "coords" not in state:
            raise ValueError(
                f"{file.name} must hold coords, (N, 1 + D) int32, and features; it has "
                f"{listed(sorted(state), 'no arrays')}"
            )
        return {name: state.read(name) for name in sorted(state)}
    if file.suffix.lower() == ".npz" and file.is_file():
        with np.load(file, allow_pickle=False) as stored:
            if "coords" in stored.files:
                return {name: mx.array(stored[name]) for name in stored.files}
    return None


def _tensor_scene(file: Path, arrays: dict[str, mx.array], element: int, up) -> Scene:
    """Return a scene of the voxels of a tensor, or of latents."""
    coords = arrays.pop("coords")
    labels = next((arrays.pop(n) for n in ("labels", "label") if n in arrays), None)
    rows = len(coords) if coords.ndim else 0
    wide = [a for a in arrays.values() if a.ndim == 2 and len(a) == rows]
    feats = arrays.get("feats", wide[0] if wide else mx.ones((rows, 1)))
    x = SparseTensor(coords, feats)
    return x.show(labels=labels, element=element, title=file.name, up=up)


def _has_faces(file: Path) -> bool:
    """Return whether a PLY file has triangles."""
    with file.open("rb") as stream:
        header = stream.read(1 << 14).partition(b"end_header")[0].split(b"\n")
    faces = [line.split() for line in header if line.startswith(b"element face")]
    return bool(faces) and faces[0][-1] != b"0"


def _glb(file: Path) -> bytes:
    """Return a mesh file as binary glTF, with y upwards."""
    if file.suffix.lower() == ".glb":
        return file.read_bytes()
    try:
        import trimesh
    except ImportError as error:
        raise ImportError(
            f"view needs trimesh for {file.suffix} files; {install('mesh')}"
        ) from error
    shape = trimesh.load(file, force="mesh")
    if not len(getattr(shape, "faces", ())):
        raise ValueError(f"{file.name} has no triangles")
    shape.apply_transform([[1, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1]])
    return shape.export(file_type="glb")
