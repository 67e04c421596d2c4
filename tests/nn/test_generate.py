"""TRELLIS.2's generator: stages joined by their rules, its folder, its command."""

import importlib
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

import mlx_lattice as ml
from mlx_lattice import cli, models
from mlx_lattice.models import trellis2
from mlx_lattice.models.trellis2.transformer import trellis2 as described

TOKENS, LATENT = 12, 8
FLOW = {"model_channels": 16, "cond_channels": TOKENS, "num_blocks": 1, "num_heads": 2}
FLOW |= {"pe_mode": "rope", "share_mod": True, "qk_rms_norm": True}
MEANS = tuple(0.1 * i for i in range(LATENT)), tuple(1 + 0.1 * i for i in range(LATENT))
GUIDED = {"steps": 2, "rescale_t": 3.0, "guidance_strength": 4.0}
GUIDED |= {"guidance_interval": [0.5, 1.0], "guidance_rescale": 0.5}
STAGES = ("sparse_structure", "shape_slat", "tex_slat")
CONFIG = {
    f"{name}_sampler": {
        "name": "FlowEulerGuidanceIntervalSampler",
        "args": {"sigma_min": 1e-5},
        "params": GUIDED,
    }
    for name in STAGES
}
CONFIG |= {
    f"{name}_normalization": dict(zip(("mean", "std"), MEANS, strict=True))
    for name in STAGES[1:]
}
CONFIG["default_pipeline_type"] = "512"
# Of each net its published name, its class and its arguments.
NETS = {
    "sparse_structure_flow_model": (
        "SparseStructureFlowModel",
        FLOW | {"resolution": 2, "in_channels": 4, "out_channels": 4},
    ),
    "sparse_structure_decoder": (
        "SparseStructureDecoder",
        {"latent_channels": 4, "channels": [8, 8, 8], "num_res_blocks": 0}
        | {"out_channels": 1, "num_res_blocks_middle": 1},
    ),
    "shape_slat_decoder": (
        "FlexiDualGridVaeDecoder",
        {"resolution": 256, "model_channels": [8] * 5, "latent_channels": LATENT}
        | {"num_blocks": [1, 0, 0, 0, 0], "use_fp16": True},
    ),
}
NETS["tex_slat_decoder"] = (
    "SparseUnetVaeDecoder",
    NETS["shape_slat_decoder"][1] | {"out_channels": 6, "pred_subdiv": False},
)
del NETS["tex_slat_decoder"][1]["resolution"]
for size in (512, 1024):
    sizes = {"resolution": 32, "in_channels": LATENT, "out_channels": LATENT}
    sizes |= {"dtype": "bfloat16"} if size == 1024 else {}
    NETS[f"shape_slat_flow_model_{size}"] = "SLatFlowModel", FLOW | sizes
    sizes = sizes | {"in_channels": 2 * LATENT}
    NETS[f"tex_slat_flow_model_{size}"] = "ElasticSLatFlowModel", FLOW | sizes


def made(name):
    """A net of random weights, none of them zero; few cells of a structure."""
    kind, arguments = NETS[name]
    kind, arguments = described({"name": kind, "args": arguments})
    net = getattr(models, kind)(**arguments)
    noise = lambda p: p + (0.3 * mx.random.normal(p.shape)).astype(p.dtype)  # noqa: E731
    net.update(tree_map(noise, net.parameters()))
    if name == "sparse_structure_decoder":
        logits = mx.sort(net(mx.random.normal((1, 4, 2, 2, 2))).flatten())
        last = net.out_layer[2]
        last.bias = last.bias - logits[-40]
    return net


@pytest.fixture(autouse=True)
def _small_grids(monkeypatch):
    """Structures of 8 cells an axis in place of 32."""
    for name in ("512", "1024_cascade"):
        form = trellis2.FORMS[name]._replace(structure=8)
        monkeypatch.setitem(trellis2.FORMS, name, form)


@pytest.fixture(scope="module")
def nets():
    mx.random.seed(3)
    return {name: made(name) for name in NETS}


def tokens(sizes, images=1):
    return {
        size: mx.random.normal((images, size // 128, TOKENS), key=mx.random.key(size))
        for size in sizes
    }


def recipe():
    return trellis2.Recipe.of_config(CONFIG)


@pytest.mark.parametrize("form", ("512", "1024_cascade"))
def test_the_stages(nets, form):
    asked, steps = [], []

    def load(name):
        asked.append(name)
        return nets[name]

    pipeline = trellis2.Pipeline(load, recipe(), lambda *step: steps.append(step))
    given = tokens(trellis2.sizes_of(form))
    done = pipeline(given, form, seed=5)
    assert tuple(asked) == trellis2.nets_of(form)
    stages = ["structure", "shape", "texture"]
    stages.insert(1, "shape") if "cascade" in form else None
    assert steps == [(stage, i, 2) for stage in stages for i in (1, 2)]
    assert done.resolution == (1024 if "cascade" in form else 512)
    assert 0 < len(done.shape) < 5000
    assert done.texture.key == done.shape.key
    assert done.shape.channels == done.texture.channels == LATENT
    assert done.shape.dtype == mx.float32 and mx.isfinite(done.texture.feats).all()
    again = pipeline(given, form, seed=5, texture=False)
    assert again.texture is None
    assert mx.array_equal(again.shape.feats, done.shape.feats).item()
    other = pipeline(given, form, seed=6, texture=False)
    assert not mx.array_equal(other.shape.coords, done.shape.coords).item()


def test_the_stages_are_the_published_rules(nets):
    """One stage after another by the nets and samplers themselves."""
    given = tokens((512,))[512]
    pipeline = trellis2.Pipeline(nets.__getitem__, recipe())
    done = pipeline({512: given}, "512", seed=1)
    keys = mx.random.split(mx.random.key(1), 4)
    sampler = trellis2.FlowEulerGuidanceIntervalSampler(1e-5)

    def sample(name, noise, **more):
        how = GUIDED | {"neg_cond": mx.zeros_like(given)} | more
        return sampler.sample(nets[name], noise, given, **how).samples

    noise = mx.random.normal((1, 4, 2, 2, 2), key=keys[0])
    z = sample("sparse_structure_flow_model", noise)
    filled = np.argwhere(np.array(nets["sparse_structure_decoder"](z))[:, 0] > 0)
    assert np.array_equal(np.array(done.shape.coords), filled)
    mean, std = (mx.array(v) for v in MEANS)
    x = ml.SparseTensor(mx.array(filled.astype(np.int32)), mx.zeros((len(filled), 1)))
    noise = x.replace(mx.random.normal((len(x), LATENT), key=keys[1]))
    shape = sample("shape_slat_flow_model_512", noise)
    assert mx.allclose(done.shape.feats, shape.feats * std + mean, atol=1e-4).item()
    noise = x.replace(mx.random.normal((len(x), LATENT), key=keys[3]))
    colour = sample("tex_slat_flow_model_512", noise, concat_cond=shape)
    assert mx.allclose(done.texture.feats, colour.feats * std + mean, atol=1e-4).item()


def test_the_finer_cells_of_a_cascade(nets):
    pipeline = trellis2.Pipeline(nets.__getitem__, recipe())
    rows = mx.array([[0, 3, 30, 7], [0, 31, 0, 16], [1, 5, 5, 5]])
    x = ml.SparseTensor(rows, mx.random.normal((3, LATENT)))
    fine = np.array(nets["shape_slat_decoder"].upsample(x, 4))
    for resolution, most, reached in ((1536, 10**6, 1536), (1536, 2, 1024)):
        cells, found = pipeline.finer(x, resolution, most)
        places = (fine[:, 1:].astype(np.float32) + 0.5) / 512 * (reached // 16)
        expected = np.unique(np.c_[fine[:, :1], places.astype(np.int32)], axis=0)
        assert found == reached and cells.batch_size == 2
        assert np.array_equal(np.array(cells.coords), expected)
    few = pipeline.finer(x, 1536, len(pipeline.finer(x, 1536, 10**6)[0]))[1]
    assert few < 1536 and few % 128 == 0


def test_what_a_pipeline_refuses(nets):
    pipeline = trellis2.Pipeline(nets.__getitem__, recipe())
    right = tokens((512,))
    for given, form, more, said in (
        (right, "1024", {}, "at 512 and 1024 pixels; those at 1024 are missing"),
        (right, "2048", {}, "the form must be one of 512, 1024"),
        ({512: mx.zeros((3, 4))}, "512", {}, r"must be \(B, M, C\)"),
        ({512: mx.zeros((1, 3, 4))}, "512", {}, "reads tokens of 12 channels; got 4"),
        (right, "512", {"seed": -1}, "seed must be 0 or more; got -1"),
        (right, "512", {"seed": 2**64}, "seed must be below 2.64; got 184"),
        (right, "512", {"options": {"colour": {}}}, "options are by stage"),
        (
            *(right, "512", {"options": {"structure": {"rescale_t": 0}}}),
            "rescale_t above 0",
        ),
        (
            *(right, "512", {"options": {"structure": {"strength": 2}}}),
            "the structure's sampler: .*'strength'",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            pipeline(given, form, **more)
    empty = models.SparseStructureDecoder(1, 4, 0, (8,) * 3, 0)
    empty.out_layer[2].bias = mx.array([-1e3])
    load = dict(nets, sparse_structure_decoder=empty).__getitem__
    with pytest.raises(ValueError, match="no cell of the structure is occupied"):
        trellis2.Pipeline(load, recipe())(tokens((512,)))
    for wrong, said in (
        ({}, "must have sparse_structure_sampler with a name"),
        (CONFIG | {"tex_slat_sampler": {"name": "Heun"}}, "is a 'Heun'; there are"),
    ):
        with pytest.raises(ValueError, match=said):
            trellis2.Recipe.of_config(wrong)


# The command


@pytest.fixture(scope="module")
def folder(nets, tmp_path_factory):
    """Published files, the structure decoder from elsewhere, one net as a folder."""
    folder = tmp_path_factory.mktemp("trellis2")
    (folder / "ckpts").mkdir()
    held = {}
    for name, (kind, arguments) in NETS.items():
        path = folder / "ckpts" / name
        held[name] = f"ckpts/{name}"
        if name == "shape_slat_flow_model_512":
            nets[name].save_pretrained(path)
            continue
        state = dict(tree_flatten(nets[name].parameters()))
        if name == "sparse_structure_decoder":
            held[name] = f"someone/another/ckpts/{name}"
            state = {
                n: mx.moveaxis(a, -1, 1) if a.ndim == 5 else a for n, a in state.items()
            }
        text = json.dumps({"name": kind, "args": arguments})
        path.with_suffix(".json").write_text(text)
        mx.save_safetensors(f"{path}.safetensors", state)
    text = json.dumps({"name": "any", "args": CONFIG | {"models": held}})
    (folder / "pipeline.json").write_text(text)
    given = {f"cond_{size}": array for size, array in tokens((512, 1024)).items()}
    mx.save_safetensors(str(folder / "tokens.safetensors"), given)
    return folder


def command(folder, out, *more):
    given = str(folder / "tokens.safetensors")
    return cli.main(
        ["generate", "--image-tokens", given, "--model", str(folder)]
        + ["--out", str(out), *more]
    )


def test_the_command(nets, folder, tmp_path, capsys):
    out = tmp_path / "latents.safetensors"
    assert command(folder, out, "--seed", "5") == 0
    said = capsys.readouterr()
    assert f"wrote {out}: " in said.err
    held, about = mx.load(str(out), return_metadata=True)
    assert set(held) == {"coords", "shape", "texture"} and about["resolution"] == "512"
    given = tokens((512,))
    done = trellis2.Pipeline(nets.__getitem__, recipe())(given, seed=5)
    assert mx.array_equal(held["coords"], done.shape.coords).item()
    assert held["coords"].dtype == mx.int32
    for name, x in (("shape", done.shape), ("texture", done.texture)):
        assert mx.allclose(held[name], x.feats, atol=1e-5).item()


def test_options_of_the_command(folder, tmp_path, capsys):
    out = tmp_path / "latents.safetensors"
    more = ["--type", "1024_cascade", "--steps", "1", "--guidance", "1", "--no-texture"]
    more += ["--dtype", "float16"]
    assert command(folder, out, *more) == 0
    held, about = mx.load(str(out), return_metadata=True)
    assert set(held) == {"coords", "shape"} and about["resolution"] == "1024"
    assert held["coords"][:, 1:].max().item() < 64
    capsys.readouterr()


def test_a_mesh(folder, tmp_path, capsys):
    pytest.importorskip("xatlas", reason="the extra mesh is not installed")
    pytest.importorskip("fast_simplification", reason="the extra mesh is not installed")
    import trimesh

    out = tmp_path / "asset.glb"
    more = ["--faces", "500", "--texture-size", "64", "--memory", "4GB"]
    assert command(folder, out, *more) == 0
    said = capsys.readouterr().err
    assert f"wrote {tmp_path / 'asset.safetensors'}" in said and f"wrote {out}" in said
    (mesh,) = trimesh.load(out).geometry.values()
    assert len(mesh.faces) and np.abs(mesh.vertices).max() <= 0.6
    # The latents' file says the resolution, which its rows alone do not.
    from mlx_lattice.commands.decode import _latents

    rows, held, told = _latents(tmp_path / "asset.safetensors", 0, True)
    assert told == 512 and set(held) == {"shape", "texture"} and len(rows)


def test_what_the_command_refuses(folder, tmp_path, capsys):
    def said(*more, out="latents.safetensors", at=folder):
        assert command(at, tmp_path / out, *more) in (1, 2)
        return capsys.readouterr().err

    try:
        importlib.import_module("mlx_lattice.mesh")
        wrong = "must end in one of .glb, .ply, .obj"
    except ImportError as error:
        wrong = (
            f"generate: {error}, or write only the latents: --out latents.safetensors"
        )
    assert wrong in said(out="asset.stl")
    if wrong.startswith("must"):  # the extra is there
        assert "must be 4 or more" in said("--faces", "0", out="asset.glb")
    assert "must be 1 or more" in said("--steps", "0")
    assert "must be finite" in said("--guidance", "nan")
    assert "there is no folder" in said(out="none/latents.safetensors")
    given = folder / "tokens.safetensors"
    assert f"cannot write {given}: it is read, too" in said(out=given)
    path = folder / "ckpts" / "tex_slat_flow_model_512.json"
    text = path.read_text()
    path.unlink()
    assert "lacks tex_slat_flow_model_512 (ckpts/tex" in said()
    path.write_text(text.replace("ElasticSLatFlowModel", "SparseUnetVaeDecoder"))
    assert "SparseUnetVaeDecoder here has no argument" in said("--steps", "1")
    path.write_text(text)
    given = ["generate", "--image-tokens", "none.safetensors"]
    given += ["--out", str(tmp_path / "latents.safetensors")]
    assert cli.main([*given, "--model", str(folder)]) == 1
    assert "none.safetensors" in capsys.readouterr().err
    mx.save_safetensors(str(tmp_path / "t.safetensors"), {"cond": mx.zeros((1, 2, 3))})
    given[2] = str(tmp_path / "t.safetensors")
    assert cli.main([*given, "--model", str(folder)]) == 1
    assert "lacks cond_512, which --type 512 needs" in capsys.readouterr().err
