"""TRELLIS.2: published checkpoints and samplers give their results.

Reads `shared/oracle/nets` beside the checkout: weights, inputs and outputs.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from differences import assert_slope
from foreign_nets import filled
from mlx.utils import tree_flatten
from published_cases import assert_close, assert_gradients, case_of, weights_of

import mlx_lattice as ml
from mlx_lattice import cli, models
from mlx_lattice.io import import_checkpoint
from mlx_lattice.models import trellis2
from mlx_lattice.models.trellis2.transformer import trellis2 as described

NAMES = {
    "shape": "FlexiDualGridVaeDecoder",
    "texture": "SparseUnetVaeDecoder",
    "encoder": "SparseUnetVaeEncoder",
    "slat_flow": "SLatFlowModel",
    "ss_flow": "SparseStructureFlowModel",
    "ss_decoder": "SparseStructureDecoder",
}
# What a case's configuration says beside the net's arguments.
APART = ("sampler", "pool")


def imported(name, **options):
    """The net with its published weights, the case's arrays, and what is apart."""
    case, config = case_of(f"trellis2_{name}")
    apart = {key: config.pop(key) for key in APART if key in config}
    kind, arguments = described({"name": NAMES[name], "args": config})
    net = getattr(models, kind)(**(arguments | options)).eval()
    path = weights_of(f"trellis2_{name}")
    report = import_checkpoint(path, net, "trellis2")
    tables = ("rope_phases",) if name == "ss_flow" else ()
    assert report.complete and report.ignored == tables
    return net, case, apart


def array(case, *names):
    found = [mx.array(case[name]) for name in names]
    return found[0] if len(names) == 1 else found


def tensor(case):
    return ml.SparseTensor(*array(case, "coords", "feats"))


def order_of(rows):
    return np.lexsort(rows.T[::-1])


def same_rows(actual, rows):
    """The order in which the published rows are those of the library."""
    order = order_of(rows)
    assert np.array_equal(np.array(actual), rows[order])
    return order


def test_the_shape_decoder():
    net, case, _ = imported("shape")
    x = tensor(case)
    y, cells = net(x, return_subdivisions=True)
    order = same_rows(y.coords, case["out/coords"])
    assert_close(y.feats, case["out/h"][order])
    for at, found in enumerate(cells):
        rows = case[f"mid/sub{at}/coords"]
        # The case's first rows are the input's, in their order.
        order = same_rows(found.coords, rows) if at else slice(None)
        assert_close(found.feats, case[f"mid/sub{at}/logits"][order])
    for times in (1, 2):
        same_rows(net.upsample(x, times), case[f"out/upsample{times}"])
    assert np.array_equal(np.array(net.upsample(x, 0)), case["coords"])
    with pytest.raises(ValueError, match="0 to 2; got 3"):
        net.upsample(x, 3)


@pytest.mark.parametrize("margin", (0.0, 0.3))
def test_the_margin_of_vertices(margin, tmp_path):
    """The configuration's ``voxel_margin``, from convert to vertices."""
    case, config = case_of("trellis2_shape")
    config |= {"voxel_margin": margin}
    told, folder = tmp_path / "net.json", tmp_path / "net"
    told.write_text(json.dumps({"name": NAMES["shape"], "args": config}))
    line = f"convert {weights_of('trellis2_shape')} {folder} --library trellis2"
    assert cli.main([*line.split(), "--config", str(told)]) == 0
    net = models.from_pretrained(folder)
    assert net.voxel_margin == margin
    vertices = models.dual_grid(net(tensor(case)), net.voxel_margin).vertices
    order = same_rows(vertices.coords, case["out/coords"])
    logits = case["out/h"][order][:, :3]
    assert_close(vertices.feats, (1 + 2 * margin) / (1 + np.exp(-logits)) - margin)


def test_the_texture_decoder():
    net, case, _ = imported("texture")
    guides = [
        ml.SparseTensor(*array(case, f"guide{i}/coords", f"guide{i}/logits"))
        for i in range(2)
    ]
    y = net(tensor(case), subdivisions=guides)
    order = same_rows(y.coords, case["out/coords"])
    assert_close(y.feats, case["out/h"][order])
    assert_close(y.feats * 0.5 + 0.5, case["out/attributes"][order])
    with pytest.raises(ValueError, match="predicts no subdivisions"):
        net.upsample(tensor(case), 1)


def test_the_encoder():
    net, case, _ = imported("encoder")
    z, mean, log_variance = net(tensor(case), return_raw=True)
    order = same_rows(z.coords, case["out/coords"])
    assert_close(mean.feats, case["out/mean"][order])
    assert_close(log_variance.feats, case["out/logvar"][order])
    assert mx.array_equal(z.feats, mean.feats).item()
    drawn = net(tensor(case), sample_posterior=True)
    spread = (drawn.feats - mean.feats) * mx.exp(-0.5 * log_variance.feats)
    assert 0.8 < spread.std().item() < 1.2


def test_the_shape_encoder_reads_a_dual_grid():
    coords = mx.array([[0, 0, 0, 0], [0, 1, 0, 0]])
    vertices = ml.SparseTensor(coords, mx.array([[0.0, 0.5, 1.0], [0.25, 0.5, 0.5]]))
    crossed = ml.SparseTensor(coords[::-1], mx.array([[0.0, 0, 1], [1, 0, 0]]))
    x = trellis2.dual_grid_features(vertices, crossed)
    expected = [[-0.5, 0, 0.5, 0.5, -0.5, -0.5], [-0.25, 0, 0, -0.5, -0.5, 0.5]]
    assert x.feats.tolist() == expected


def of_slat(net, case, t=None):
    x, cond = tensor(case), mx.array(case["cond"])
    t = mx.array(case["t"]) if t is None else t
    return net(x, t, cond, cond_lengths=mx.array(case["cond_lengths"]))


def test_the_flow_of_latents():
    net, case, apart = imported("slat_flow")
    assert_close(of_slat(net, case).feats, case["out/y"])
    options = apart["sampler"]
    sampler = trellis2.SAMPLERS[options.pop("name")](options.pop("sigma_min"))
    x, cond, lengths = tensor(case), *array(case, "cond", "cond_lengths")
    options |= {"neg_cond": mx.zeros_like(cond), "cond_lengths": lengths}
    done = sampler.sample(net, x, cond, keep=False, **options)
    assert_close(done.samples.feats, case["out/samples"])
    assert done.pred_x_t == done.pred_x_0 == []


def test_tokens_as_a_tensor_and_shape_beside():
    """Tokens may be a tensor; concat_cond's channels follow, its rows in any order."""
    net, case, _ = imported("slat_flow")
    x, cond = tensor(case), mx.array(case["cond"])
    batch, length, _ = cond.shape
    at = [mx.repeat(mx.arange(batch), length), mx.tile(mx.arange(length), batch)]
    where = mx.stack([*at, 0 * at[0], 0 * at[0]], axis=1).astype(mx.int32)
    tokens = ml.SparseTensor(where, cond.reshape(batch * length, -1))
    y = net(x, mx.array(case["t"]), tokens)
    assert_close(y.feats, case["out/y"])
    few = x.replace(x.feats[:, :3])
    rest = ml.SparseTensor(x.coords[::-1], x.feats[::-1, 3:])
    assert_close(net(few, mx.array(case["t"]), tokens, rest).feats, case["out/y"])
    with pytest.raises(ValueError, match="reads 8 channels, of x and concat_cond; got"):
        net(few, mx.array(case["t"]), tokens)
    with pytest.raises(ValueError, match=r"or \(2,\), one for each batch element"):
        net(x, mx.array([1.0, 2.0, 3.0]), tokens)


@pytest.mark.parametrize("name", ("slat_flow", "ss_flow"))
def test_packed_tokens(name):
    """The images' tokens one after another, and how many each image has."""
    net, case, _ = imported(name)
    t, cond = array(case, "t", "cond")
    whole = [cond.shape[1]] * cond.shape[0]
    lengths = case["cond_lengths"].tolist() if name == "slat_flow" else whole
    packed = mx.concatenate([c[:n] for c, n in zip(cond, lengths, strict=True)])
    x = tensor(case) if name == "slat_flow" else mx.array(case["x"])
    y = net(x, t, packed, cond_lengths=mx.array(lengths))
    assert_close(getattr(y, "feats", y), case["out/y"])
    with pytest.raises(ValueError, match="must add up to the"):
        net(x, t, packed[1:], cond_lengths=mx.array(lengths))
    with pytest.raises(ValueError, match=r"of all sequences need their lengths"):
        net(x, t, packed)


def test_the_flow_of_structures():
    net, case, _ = imported("ss_flow")
    x, t, cond = array(case, "x", "t", "cond")
    for _ in range(2):  # the second time on the grid that is kept
        assert_close(net(x, t, cond), case["out/y"])
    one = net(x[:1], t[:1], cond[:1])
    assert_close(one, case["out/y"][:1])
    with pytest.raises(ValueError, match=r"\(B, 4, 5, 5, 5\); got \(2, 5, 5, 5, 4\)"):
        net(x.transpose(0, 2, 3, 4, 1), t, cond)


def test_the_decoder_of_structures():
    net, case, apart = imported("ss_decoder")
    y = net(mx.array(case["z"]))
    assert_close(y, case["out/y"])
    cells = trellis2.occupied(y)
    assert np.array_equal(np.array(cells.coords), case["out/coords"])
    assert cells.spatial_shape == (16, 16, 16) and cells.batch_size == 2
    coarse = trellis2.occupied(y, 16 // apart["pool"])
    assert np.array_equal(np.array(coarse.coords), case["out/coords_pooled"])
    assert len(trellis2.occupied(mx.zeros((2, 1, 4, 4, 4)))) == 0
    with pytest.raises(ValueError, match="a multiple of the resolution"):
        trellis2.occupied(y, 5)


@pytest.mark.parametrize("size", (8, 7), ids=("even", "odd"))
def test_the_encoder_of_structures(size, tmp_path):
    """Published names and layouts, by convert and of_config.

    `data/trellis2_ss_encoder.npz` is from microsoft/TRELLIS.2 at 5565d24, in float64.
    """
    with np.load(Path(__file__).parent / "data/trellis2_ss_encoder.npz") as file:
        case = {k.partition("/")[2]: file[k] for k in file if k.startswith(f"{size}/")}
    about = json.loads(str(case["about"]))
    state = filled(about["shapes"], 5)
    state = {k: v * 0.5 if v.ndim > 1 else v for k, v in state.items()}
    mx.save_safetensors(str(tmp_path / "a.safetensors"), state)
    told, args = tmp_path / "a.json", about["config"] | {"norm_type": "layer"}
    told.write_text(json.dumps({"name": "SparseStructureEncoder", "args": args}))
    line = f"convert {tmp_path / 'a.safetensors'} {tmp_path / 'net'} --config {told}"
    command = [*line.split(), "--library", "trellis2"]
    assert cli.main([*command, "--model", "trellis2-structure-encoder"]) == 0
    net = models.SparseStructureEncoder.from_pretrained(tmp_path / "net")
    x = mx.array(case["x"])
    z, mean, log_variance = net(x, return_raw=True)
    assert_close(mean, case["mean"], 1e-6)
    assert_close(log_variance, case["logvar"], 1e-6)
    assert mx.array_equal(z, mean) and mx.array_equal(net(x), z)

    def loss(parameters, x):
        net.update(parameters)
        return (mx.concatenate(net(x, return_raw=True)[1:], 1) * case["dy"]).sum()

    found, dx = mx.grad(loss, (0, 1))(net.trainable_parameters(), x)
    assert_close(dx, case["dx"], 5e-6)
    found = {  # published: (C_out, C_in, x, y, z)
        name: mx.moveaxis(value, -1, 1) if value.ndim == 5 else value
        for name, value in tree_flatten(found)
    }
    assert_gradients(found, about["grads"], 5e-6)
    drawn = net(x, sample_posterior=True)
    spread = (drawn - mean) * mx.exp(-0.5 * log_variance)
    assert 0.5 < spread.std().item() < 1.5
    with pytest.raises(ValueError, match=r"\(B, 1, X, Y, Z\); got \(2, 2, 2\)"):
        net(mx.zeros((2, 2, 2)))


def test_flags_of_a_published_net():
    """TRELLIS.2 hands on bool features: ``h.replace(h.feats > 0)``."""
    net, case, _ = imported("shape")
    y, cells = net(tensor(case), return_subdivisions=True)
    grid = models.dual_grid(y, net.voxel_margin)
    flags = y.replace(y.feats[:, 3:6] > 0)
    assert flags.dtype == mx.bool_
    for name in ("vertices", "faces"):
        wanted = getattr(ml.ops.dual_grid_mesh(grid), name)
        found = getattr(ml.ops.dual_grid_mesh(grid._replace(intersected=flags)), name)
        assert mx.array_equal(found, wanted)
    chosen = [c.replace(c.feats > 0) for c in cells]
    again = net(tensor(case), subdivisions=chosen)
    assert mx.array_equal(again.feats, y.feats)
    rows = ml.SparseTensor(y.coords[::-1], flags.feats[::-1], y.stride)
    read = trellis2.dual_grid_features(grid.vertices, rows)
    assert np.array_equal(read.feats[:, 3:], np.array(flags.feats) - 0.5)


# The samplers


def toys(case):
    """The velocity of the cases, of arrays and of tensors."""
    a = mx.array(case["a"])

    def of_array(x, t, cond):
        a5, cond = a[:, None, None, None], cond[..., None, None, None]
        return 0.6 * mx.sin(a5 * x + cond) + 0.3 * x * mx.cos(t / 300).reshape(
            -1, 1, 1, 1, 1
        )

    def of_tensor(x, t, cond):
        batch = x.coords[:, 0]
        waves = 0.6 * mx.sin(a * x.feats + cond[batch])
        return x.replace(waves + 0.3 * x.feats * mx.cos(t / 300)[batch][:, None])

    return {
        "dense": (of_array, mx.array(case["noise"]), lambda x: x),
        "sparse": (of_tensor, tensor(case), lambda x: x.feats),
    }


@pytest.mark.parametrize("kind", ("dense", "sparse"))
@pytest.mark.parametrize("run", ("plain", "cfg", "interval"))
def test_the_samplers(run, kind):
    case, config = case_of("sampler")
    options = config["runs"][run]
    sampler = trellis2.SAMPLERS[options.pop("name")](options.pop("sigma_min"))
    model, noise, feats = toys(case)[kind]
    cond, neg_cond = array(case, "cond", "neg_cond")
    if run != "plain":
        options["neg_cond"] = neg_cond
    steps = []
    done = sampler.sample(model, noise, cond, on_step=steps.append, **options)
    assert_close(feats(done.samples), case[f"out/{run}/{kind}/samples"])
    for name in ("pred_x_t", "pred_x_0"):
        found = mx.stack([feats(x) for x in getattr(done, name)])
        assert_close(found, case[f"out/{run}/{kind}/{name}"])
    assert steps == list(range(1, options["steps"] + 1))


def test_a_sampler_without_guidance_runs_the_model_once_a_step():
    times = []

    def model(x, t, cond):
        times.append(t.item())
        return x * cond

    sampler, noise = trellis2.FlowEulerGuidanceIntervalSampler(), mx.ones((1, 2))
    options = {"steps": 4, "guidance_interval": (0.5, 0.75), "neg_cond": 0.0}
    sampler.sample(model, noise, 1.0, guidance_strength=1, **options)
    assert times == [1000, 750, 500, 250]
    times.clear()
    sampler.sample(model, noise, 1.0, guidance_strength=2, **options)
    assert times == [1000, 750, 750, 500, 500, 250]
    with pytest.raises(ValueError, match="needs neg_cond"):
        trellis2.FlowEulerCfgSampler().sample(model, noise, 1.0, steps=1)
    with pytest.raises(ValueError, match="steps must be an int of 1 or more"):
        sampler.sample(model, noise, 1.0, steps=0)


# Precision, packing, folders


RUN = {
    "shape": lambda net, case: net(tensor(case), coordinates=ups(case)).feats,
    "encoder": lambda net, case: net(tensor(case)).feats,
    "slat_flow": lambda net, case: of_slat(net, case).feats,
    "ss_flow": lambda net, case: net(*array(case, "x", "t", "cond")),
    "ss_decoder": lambda net, case: net(mx.array(case["z"])),
}


def ups(case):
    """The fine rows of the case: in half a logit near zero may flip."""
    return [mx.array(case[name]) for name in ("out/upsample1", "out/coords")]


def norm_apart(a, b):
    return (mx.linalg.norm(a.flatten() - b.flatten()) / mx.linalg.norm(b)).item()


@pytest.mark.parametrize(
    ("name", "dtype"),
    (*((name, mx.float16) for name in RUN), ("slat_flow", mx.bfloat16)),
)
def test_half_precision(name, dtype):
    """The layers between the first and the last in half, the results float32."""
    net, case, _ = imported(name, dtype=dtype)
    half = {p.dtype for _, p in tree_flatten(net.parameters())}
    assert half == {dtype, mx.float32}
    y, exact = RUN[name](net, case), RUN[name](imported(name)[0], case)
    assert y.dtype == mx.float32
    assert 1e-6 < norm_apart(y, exact) < (1e-2 if dtype == mx.float16 else 6e-2)


@pytest.mark.parametrize("name", ("encoder", "slat_flow", "ss_flow", "ss_decoder"))
def test_convert_makes_a_folder(name, tmp_path, capsys):
    """By the published JSON; packed, but for dense convolutions, which have no twin."""
    net, case, _ = imported(name)
    config = case_of(f"trellis2_{name}")[1]
    config = {key: value for key, value in config.items() if key not in APART}
    told = tmp_path / "net.json"
    told.write_text(json.dumps({"name": NAMES[name], "args": config}))
    given = str(weights_of(f"trellis2_{name}"))
    command = ["convert", given, str(tmp_path / "net"), "--library", "trellis2"]
    command += ["--config", str(told), "--bits", "8", "--group-size", "32"]
    assert cli.main(command) == 0
    assert "0 tensors left over" in capsys.readouterr().err
    read = models.from_pretrained(tmp_path / "net")
    assert type(read) is type(net)
    packed = name != "ss_decoder"
    assert packed == any(
        n.endswith("scales") for n, _ in tree_flatten(read.parameters())
    )
    apart = norm_apart(RUN[name](read, case), RUN[name](net, case))
    assert (1e-4 < apart < 5e-2) if packed else apart == 0


@pytest.mark.parametrize("name", ("encoder", "slat_flow", "ss_flow", "ss_decoder"))
def test_gradients(name):
    net, case, _ = imported(name)
    if name == "encoder":
        case |= {key: case[key][:150] for key in ("coords", "feats")}
    elif name == "ss_decoder":
        case |= {"z": case["z"][:1, :, :2, :2, :2]}
    weight = mx.random.normal(RUN[name](net, case).shape)
    assert_slope(net, lambda net: (RUN[name](net, case) * weight).sum())
