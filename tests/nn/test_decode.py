"""From a dual grid to a file: clean-up, textures, GLB, and the command decode."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import cli, models, ops
from mlx_lattice.ops import DualGrid

pytest.importorskip("k3d", reason="the extra mesh is not installed")
pytest.importorskip("trimesh", reason="the extra mesh is not installed")
pytest.importorskip("xatlas", reason="the extra mesh is not installed")
pytest.importorskip("fast_simplification", reason="the extra mesh is not installed")

import trimesh
from scipy.spatial import cKDTree
from shapes import ball, surface, torus

from mlx_lattice import mesh
from mlx_lattice.mesh import asset_of, surface_of


def bumpy(n):
    """A ball with waves on it: closed, of genus 0."""
    centre, radius = n / 2 + 0.2, 0.3 * n

    def f(*p):
        at = [v - centre for v in p]
        angle = np.arctan2(at[1], at[0])
        length = np.sqrt(sum(v**2 for v in at))
        return length - radius * (1 + 0.08 * np.sin(5 * angle) * (1 - (at[2] / n) ** 2))

    return f


def dual(f, n):
    """The dual grid of a signed distance, and materials by place on its voxels."""
    coords, vertices, flags, _ = surface(f, n)
    x = ml.SparseTensor(mx.array(coords), mx.array(vertices.astype(np.float32)))
    at = (coords[:, 1:] + 0.5) / n
    values = np.concatenate([at, at[:, :1], at[:, 1:2], np.ones_like(at[:, :1])], 1)
    return DualGrid(x, mx.array(flags)), x.replace(mx.array(values.astype(np.float32)))


def with_faults(s):
    """The same surface with floaters, a hole, degenerate and turned triangles."""
    rng = np.random.default_rng(0)
    turned = rng.random(len(s.faces)) < 0.3
    faces = np.where(turned[:, None], s.faces[:, ::-1], s.faces)
    around = np.linalg.norm(s.vertices - s.vertices[0], axis=1) < 0.06
    faces = faces[~around[faces].any(axis=1)]
    small = 0.01 * np.eye(4)[:, :3] + 0.45
    tetrahedron = np.array([[0, 1, 2], [0, 3, 1], [0, 2, 3], [1, 3, 2]])
    faces = np.concatenate(
        [faces, faces[:3], [[5, 5, 6]], tetrahedron + len(s.vertices)]
    )
    return mesh.Surface(np.concatenate([s.vertices, small]), faces)


def test_a_surface_is_made_whole():
    grid, _ = dual(torus(40, 12.0, 5.0), 40)
    good = surface_of(grid, 40, faces=None)
    volume = 2 * np.pi**2 * 12.0 * 5.0**2 / 40**3
    assert good.is_closed and good.is_oriented
    assert abs(good.volume / volume - 1) < 0.02
    bad = with_faults(good)
    assert not bad.is_closed and not bad.is_oriented
    clean = bad.cleaned().without_floaters().oriented()
    assert not clean.is_closed and clean.is_oriented
    assert clean.components.max() == 0
    whole = clean.filled()
    assert whole.is_closed and whole.is_oriented
    assert abs(whole.volume / good.volume - 1) < 0.02
    edges = len(whole.faces) * 3 // 2
    assert len(whole.vertices) - edges + len(whole.faces) == 0  # genus 1
    assert len(clean.filled(sides=3).faces) == len(clean.faces)
    few = whole.simplified(1000)
    assert len(few.faces) <= 1000 and few.oriented().is_oriented
    assert abs(few.volume / good.volume - 1) < 0.02
    length = np.linalg.norm(few.vertex_normals(), axis=1)
    np.testing.assert_allclose(length, 1)
    area = trimesh.Trimesh(whole.vertices, whole.faces).area
    assert whole.area == pytest.approx(area)


@pytest.mark.parametrize("suffix", ("glb", "ply", "obj"))
def test_a_known_shape_in_a_file(tmp_path, suffix):
    n = 40
    grid, materials = dual(bumpy(n), n)
    wanted = surface_of(grid, n, faces=None)
    made, texture = asset_of(grid, materials, n, texture_size=256, faces=4000)
    path = tmp_path / f"shape.{suffix}"
    mesh.save(path, made, texture)
    read = trimesh.load(path, force="mesh", process=False)
    points = np.asarray(read.vertices)
    if suffix == "glb":
        points = points @ np.array([[1, 0, 0], [0, 0, 1], [0, -1, 0]])
    found = mesh.Surface(points, np.asarray(read.faces))
    assert found.volume == pytest.approx(wanted.volume, rel=0.01)
    one, two = cKDTree(wanted.vertices), cKDTree(found.vertices)
    apart = max(one.query(found.vertices)[0].max(), two.query(wanted.vertices)[0].max())
    assert apart < 2 / n  # between vertices: an edge and a half
    # Colours go by place: the texture says where its texel lies.
    size = len(texture.colour)
    at = np.clip((texture.places * (1, -1) + (0, 1)) * size, 0, size - 1).astype(int)
    colours = texture.colour[at[:, 1], at[:, 0], :3] / 255
    places = made.vertices[texture.vertices] + 0.5
    assert np.abs(colours - places).max() < 0.06
    assert not texture.is_clear


def glb(path):
    """The JSON of a GLB, and its bytes."""
    data = path.read_bytes()
    magic, version, length = struct.unpack("<4sII", data[:12])
    assert (magic, version, length) == (b"glTF", 2, len(data))
    size, kind = struct.unpack("<I4s", data[12:20])
    assert kind == b"JSON"
    return json.loads(data[20 : 20 + size])


def folders(tmp_path, bits=None):
    """Folders of small decoders, whose shape has every cell and crosses every edge."""
    sizes = dict(model_channels=(32, 32), latent_channels=8, num_blocks=(1, 0))
    shape = models.SparseVAEDecoder(**sizes)
    texture = models.SparseVAEDecoder(6, **sizes, pred_subdiv=False)
    shape.blocks[0][-1].to_subdiv.bias = mx.full((8,), 9.0)
    shape.output_layer.bias = mx.array([0.0, 0, 0, 9, 9, 9, 0])
    paths = []
    for net, name in ((shape, "shape"), (texture, "texture")):
        net.save_pretrained(tmp_path / name)
        paths.append(str(tmp_path / name))
    coords = np.argwhere(np.ones((2, 2, 2)))
    coords = np.concatenate(
        [np.pad(coords, ((0, 0), (1, 0)), constant_values=b) for b in (0, 1)]
    )
    latents = {
        "coords": mx.array(coords.astype(np.int32)),
        "shape": mx.random.normal((len(coords), 8)),
        "texture": mx.random.normal((len(coords), 8)),
    }
    mx.save_safetensors(str(tmp_path / "latents.safetensors"), latents)
    return str(tmp_path / "latents.safetensors"), *paths


def test_the_command(tmp_path, capsys):
    latents, shape, texture = folders(tmp_path)
    out = tmp_path / "made" / "asset.glb"
    given = ["decode", latents, "--model", shape, "--texture-model", texture]
    given += ["--out", str(out), "--texture-size", "128"]
    given += ["--element", "1", "--memory", "4GB"]
    assert cli.main(given) == 0
    said = capsys.readouterr().err
    assert "8 latents -> 64 voxels of 1/4" in said and f"wrote {out}" in said
    scene = glb(out)
    material = scene["materials"][0]["pbrMetallicRoughness"]
    assert {"baseColorTexture", "metallicRoughnessTexture"} <= material.keys()
    assert {"POSITION", "NORMAL", "TEXCOORD_0"} <= scene["meshes"][0]["primitives"][0][
        "attributes"
    ].keys()
    assert (tmp_path / "made" / "asset-views.png").stat().st_size > 1000
    assert "64 voxels of 1/4" in (tmp_path / "made" / "asset.html").read_text()
    plain = ["decode", latents, "--model", shape, "--out", str(tmp_path / "a.ply")]
    assert cli.main(plain) == 0
    assert "a texture" not in capsys.readouterr().err


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    latents, shape, texture = folders(tmp_path)
    many = {f"blocks.{i}.{'w' * 500}": mx.zeros((1,)) for i in range(3000)}
    mx.save_safetensors(str(tmp_path / "many.safetensors"), many)
    dead = models.SparseVAEDecoder.from_pretrained(shape)
    dead.blocks[0][-1].to_subdiv.bias = mx.full((8,), -99.0)
    dead.save_pretrained(tmp_path / "dead")
    flat = models.SparseVAEDecoder.from_pretrained(shape)
    flat.output_layer.bias = mx.full((7,), -99.0)
    flat.save_pretrained(tmp_path / "flat")
    out = ["--out", str(tmp_path / "a.glb")]
    many = str(tmp_path / "many.safetensors")
    for given, text in (
        ([latents, "--model", shape, "--out", "a.stl"], "must end in one of .glb"),
        ([many, "--model", shape, *out], "and 2,992 more"),
        ([latents, "--model", texture, *out], "has 6 output channels"),
        ([latents, "--model", shape, "--element", "7", *out], "no batch element 7"),
        ([latents, "--model", str(tmp_path / "dead"), *out], "no voxel is left"),
        ([latents, "--model", str(tmp_path / "flat"), *out], "has no triangles"),
        ([latents, "--model", shape, "--resolution", "0", *out], "must be 1 or more"),
        # Before the net is read, which is not there.
        (
            [latents, "--model", "none", "--faces", "3", *out],
            "--faces: must be 4 or more",
        ),
        ([latents, "--model", shape, "--memory", "9kB", *out], "least limit that"),
    ):
        assert cli.main(["decode", *given]) in (1, 2), given
        error = capsys.readouterr().err
        assert text in error and "Traceback" not in error and len(error) < 2000


def test_bad_surfaces():
    for vertices, faces, said in (
        (np.full((3, 3), np.nan), [[0, 1, 2]], "vertices must be finite"),
        (np.zeros((3, 3)), [[0, 1, 3]], "faces must name vertices 0 to 2"),
        (np.zeros((3, 3)), [[0, 1]], r"faces must be \(N, 3\)"),
    ):
        with pytest.raises(ValueError, match=said):
            mesh.Surface(vertices, faces)
    grid, materials = dual(ball(8, 3.0), 8)
    with pytest.raises(ValueError, match="size must be from 16"):
        asset_of(grid, materials, 8, texture_size=4)
    with pytest.raises(ValueError, match="materials are 6 channels"):
        asset_of(grid, materials.replace(materials.feats[:, :5]), 8)
    with pytest.raises(ValueError, match="share must be from 0 to 1"):
        surface_of(grid, 8, floaters=2)
    pair = ops.batch([grid.vertices] * 2)
    two = DualGrid(pair, mx.concatenate([grid.intersected] * 2))
    with pytest.raises(ValueError, match="of one batch element; got 2"):
        surface_of(two, 8)
    at = -grid.vertices.coords[:, 1:].astype(mx.float32)  # all in one point
    with pytest.raises(ValueError, match="none of .* triangles is left: they have no"):
        surface_of(grid._replace(vertices=grid.vertices.replace(at)), 8)
    empty = mesh.Surface(np.zeros((0, 3)), np.zeros((0, 3)))
    assert empty.cleaned().without_floaters().volume == 0
    assert mesh.rendered(empty, size=32).min() == 255
