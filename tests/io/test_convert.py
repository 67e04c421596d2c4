"""mlx-lattice convert: another library's checkpoint as safetensors of this one."""

import json
import re
import subprocess
import sys

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from foreign import minkunet_state, randomised, scene
from foreign_decoder import COUNTS, LATENT, OUT, WIDTHS, latents, published
from foreign_nets import filled, spvnas_shapes
from mlx.utils import tree_flatten
from published_cases import assert_close, case_of, weights_of

import mlx_lattice as ml
from mlx_lattice import cli, io, models, nn
from mlx_lattice.commands.convert import Net


def test_the_command(tmp_path, capsys):
    source = randomised(models.MinkUNet14(3, 5, "B"))
    given, out = tmp_path / "me.safetensors", tmp_path / "ours.safetensors"
    mx.save_safetensors(str(given), minkunet_state(source))
    command = ["convert", str(given), str(out), "--library", "minkowski"]
    model = ["--model", "minkunet14", "--plan", "B", "--channels", "3", "5"]

    assert cli.main([*command, *model]) == 0
    assert "parameters matched, 0 tensors left over" in capsys.readouterr().out
    again = models.MinkUNet14(3, 5, "B").load_weights(str(out)).eval()
    assert mx.array_equal(again(scene(3)).feats, source(scene(3)).feats)
    out.unlink()

    for arguments, sentence in (
        (command, "name the model"),
        ([*command, *model[:2]], "--model minkunet14 needs --channels"),
        ([*command, *model[:-1], "6"], "final.kernel (128, 5) -> head.weight (6, 1"),
        ([*command[:2], str(tmp_path / "a.txt"), *command[3:]], "in .safetensors"),
        (["convert", str(given), str(given), *command[3:]], "must be two files"),
        (["convert", "no.pt", *command[2:]], "no.pt"),
        ([*command[:-1], "torch"], "library must be one of"),
        ([*command, "--mapping", str(given)], "is not a JSON object of names"),
        ([*command, *model, "--width", "2"], "--width is not for --model minkunet14"),
        ([*command, "--bits", "8"], "--bits needs --model"),
    ):
        assert cli.main(arguments) == 2
        assert sentence in capsys.readouterr().err
        assert not out.exists()

    partial = [*command, *model[:-1], "6", "--partial", "--bits", "8"]
    assert cli.main(partial) == 0
    assert "mismatched  final.kernel" in capsys.readouterr().out
    written = mx.load(str(out))
    assert not any(name.startswith("head") for name in written)
    assert written["encoder.3.down.conv.weight"].dtype == mx.uint32
    assert {"encoder.3.down.conv.scales", "encoder.3.down.conv.biases"} < set(written)
    names = tmp_path / "names.json"
    names.write_text('{"conv0p1s1": "stem"}')
    state = {"conv0p1s1.weight": mx.zeros((2, 3, 3, 3, 1))}
    mx.save_safetensors(str(given), state)
    command[-1] = "spconv"
    assert cli.main([*command, "--mapping", str(names)]) == 0
    assert list(mx.load(str(out))) == ["stem.weight"]

    kernel = mx.random.normal((3, 1, 1, 1, 2))
    mx.save_safetensors(str(given), {"proj.weight": kernel})
    assert cli.main(command) == 0
    flat = kernel.reshape(2, 3).T.reshape(kernel.shape)
    assert mx.array_equal(mx.load(str(out))["proj.weight"], flat)
    assert cli.main([*command, "--unit-as-shaped"]) == 0
    assert mx.array_equal(mx.load(str(out))["proj.weight"], kernel)


def decoder(monkeypatch, dtype=mx.float32):
    """A small one of TRELLIS.2's, which --model trellis2-shape then means."""
    plan = {
        "model_channels": WIDTHS,
        "latent_channels": LATENT,
        "num_blocks": COUNTS,
    }
    kind = Net("SparseVAEDecoder", (), {"out_channels": OUT, **plan})
    monkeypatch.setitem(cli.MODELS, "trellis2-shape", kind)
    return models.SparseVAEDecoder(OUT, **plan, dtype=dtype)


def half_state():
    """What the published decoders hold: stages in half, norms in float32."""
    state = filled(published(WIDTHS, COUNTS, LATENT, OUT))
    return {
        n: a.astype(mx.float16) if n.startswith("blocks") and "norm" not in n else a
        for n, a in state.items()
    }


def test_trellis2_s_decoder(tmp_path, capsys, monkeypatch):
    """Dtypes stay as they are; with spconv behind it, names are one module deeper."""
    net, state = decoder(monkeypatch, mx.float16), half_state()
    given, out = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    command = ["convert", str(given), str(out), "--model", "trellis2-shape"]
    deeper = {
        n.replace(".conv.", ".conv.conv.").replace("conv1.", "conv1.conv."): a
        for n, a in state.items()
    }
    assert deeper.keys() != state.keys()
    for library, names in (("flexgemm", state), ("trellis2", deeper)):
        mx.save_safetensors(str(given), names)
        assert cli.main([*command, "--library", library]) == 0
        assert "parameters matched, 0 tensors left over" in capsys.readouterr().out
        held = mx.load(str(out))
        assert held.keys() == state.keys()
        for name, value in held.items():
            assert value.dtype == state[name].dtype
            assert mx.array_equal(value, state[name]).item()
    expected = net.load_weights(list(state.items()))(latents()).feats
    again = net.load_weights(str(out))
    assert mx.array_equal(again(latents()).feats, expected).item()
    command += ["--library", "trellis2", "--channels", "3", "5"]
    assert cli.main(command) == 2
    assert "--channels is not for --model trellis2-shape" in capsys.readouterr().err


def test_what_is_written_without_a_model_loads(tmp_path, capsys):
    """Names are the checkpoint's, Sequentials without layers: the call is printed."""
    net = nn.Sequential(
        nn.Sequential(nn.SubmConv3d(4, 8, 3), nn.BatchNorm(8)), nn.SubmConv3d(8, 8, 1)
    )
    kernel = mx.random.normal((8, 1, 1, 1, 8))
    state = {
        "conv1.0.0.weight": mx.random.normal((8, 3, 3, 3, 4)),
        "conv1.0.0.bias": mx.random.normal((8,)),
        **{
            f"conv1.0.1.{leaf}": mx.random.uniform(shape=(8,))
            for leaf in ("weight", "bias", "running_mean", "running_var")
        },
        "conv1.0.1.num_batches_tracked": mx.array(3),
        "conv1.1.weight": kernel,
        "conv1.1.bias": mx.random.normal((8,)),
    }
    given, out = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    mx.save_safetensors(str(given), state)
    command = ["convert", str(given), str(out), "--library", "spconv"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "1 kernels of one offset were read as spconv multiplies them" in text
    assert f'io.import_checkpoint("{out}", model, "mlx_lattice")' in text
    wrapped = mlx.nn.Module()
    wrapped.conv1 = net
    assert io.import_checkpoint(out, wrapped, "mlx_lattice").complete
    flat = kernel.reshape(8, 8).T.reshape(kernel.shape)
    assert mx.array_equal(net.layers[1].weight, flat)
    assert mx.array_equal(net.layers[0].layers[0].weight, state["conv1.0.0.weight"])
    again = ["convert", str(out), str(tmp_path / "b.safetensors"), *command[3:]]
    assert cli.main(again) == 2
    assert "its library is 'mlx_lattice', not 'spconv'" in capsys.readouterr().err


def test_sizes_of_kernels_and_published_names(tmp_path, capsys):
    source = randomised(models.MinkUNet14(3, 5, "B"))
    given, out = tmp_path / "me.safetensors", tmp_path / "ours.safetensors"
    mx.save_safetensors(str(given), minkunet_state(source))
    command = ["convert", str(given), str(out), "--library", "minkowski", "--size"]
    assert cli.main([*command, "3"]) == 2
    assert "offsets of a kernel on one axis, which does not" in capsys.readouterr().err
    assert cli.main([*command, "3x"]) == 2
    assert "--size takes 3, 1x3x3 or NAME=3x3x3; got '3x'" in capsys.readouterr().err
    for sizes in (["3", "2", "5"], ["3x3x3", "conv0p1s1=5", "conv*s2*=2x2x2"]):
        if "3x3x3" in sizes:
            sizes.append("convtr*=2")
        assert cli.main([*command, *sizes]) == 0
        assert "arrays written to" in capsys.readouterr().out
        net = models.MinkUNet14(3, 5, "B").eval()
        assert io.import_checkpoint(out, net, "mlx_lattice").complete
        assert mx.array_equal(net(scene(3)).feats, source(scene(3)).feats)
    model = ["--model", "minkunet14", "--channels", "3", "5"]
    assert cli.main([*command, "3", *model]) == 2
    assert "--size is for conversions without a model" in capsys.readouterr().err


def test_published_configurations(tmp_path, capsys):
    """TRELLIS.2's names of a net and its arguments, SPVNAS's classes and width."""
    given, out = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    config = tmp_path / "config.json"
    blocks = ["SparseConvNeXtBlock3d"] * len(WIDTHS)
    arguments = {
        "resolution": 256,
        "model_channels": list(WIDTHS),
        "latent_channels": LATENT,
        "num_blocks": list(COUNTS),
        "block_type": blocks,
        "up_block_type": ["SparseResBlockC2S3d"] * (len(WIDTHS) - 1),
        "block_args": [{"use_checkpoint": False}] * len(WIDTHS),
        "use_fp16": True,
    }
    state = filled(published(WIDTHS, COUNTS, LATENT, OUT))
    mx.save_safetensors(str(given), state)
    command = ["convert", str(given), str(out), "--library", "trellis2"]
    command += ["--config", str(config)]
    config.write_text(
        json.dumps({"name": "FlexiDualGridVaeDecoder", "args": arguments})
    )
    assert cli.main(command) == 0
    assert "parameters matched, 0 tensors left over" in capsys.readouterr().out
    assert mx.load(str(out)).keys() == state.keys()
    assert cli.main([*command, "--bits", "8", "--group-size", "32"]) == 0
    assert "blocks.0.0.conv.scales" in mx.load(str(out))
    capsys.readouterr()
    other = {"name": "FlexiDualGridVaeDecoder", "args": arguments | {"depth": 2}}
    for text, sentence in (
        (json.dumps(other), "has no argument 'depth'"),
        ('{"name": "Net", "args": {}}', "the configuration is of 'Net'; expected"),
        ("[" * 100_000, "is not a JSON object"),
        ('{"name": ["x"], "args": {}}', "expected a name and args of"),
    ):
        config.write_text(text)
        assert cli.main(command) == 2
        assert sentence in capsys.readouterr().err

    shapes = spvnas_shapes([int(0.25 * c) for c in models.unets.PLANES], 4, 5)
    mx.save_safetensors(str(given), filled(shapes))
    line = f"convert {given} {out} --library torchsparse2.1 --model spvcnn --config"
    command = [*line.split(), str(config)]
    config.write_text('{"num_classes": 5, "cr": 0.25, "run_id": "x"}')
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "parameters matched, 0 tensors left over" in said
    assert f"not used of {config}: run_id\n" in said
    assert cli.main([*command, "--width", "0.5"]) == 2
    assert "--config says --channels and --width" in capsys.readouterr().err
    for told, sentence in (
        ({"num_classes": 5}, "cr is missing"),
        ({"num_classes": "five", "cr": 1}, "num_classes must be an int; got 'five'"),
        ({"num_classes": 5, "cr": 1, "pres": 0.05}, "have both pres and vres"),
        ({"num_classes": 5, "cr": 1, "trimmed": "no"}, "trimmed must be a bool; got"),
    ):
        config.write_text(json.dumps(told))
        assert cli.main(command) == 2
        assert sentence in capsys.readouterr().err


def spvnas_folder(tmp_path, name, told, *options):
    """Convert SPVNAS's oracle weights by a configuration; return the case and net."""
    published = "spvcnn" if name == "spvcnn" else "ts_minkunet"
    case, config = case_of(published)
    written = tmp_path / "net.config"
    written.write_text(json.dumps({k: config[k] for k in ("num_classes", "cr")} | told))
    line = f"convert {weights_of(published)} {tmp_path / 'net'} --library torchsparse"
    command = [*line.split(), "--model", name, "--config", str(written), *options]
    assert cli.main(command) == 0
    return case, models.from_pretrained(tmp_path / "net")


@pytest.mark.parametrize(
    ("pres", "vres", "about"),
    ((0.1, 0.1, ()), (0.125, 0.5, ("--about", "spvnas-semantic-kitti"))),
)
def test_spvnas_s_sizes_of_voxels(pres, vres, about, tmp_path, capsys):
    """Points are cells of ``pres``, voxels have the size ``vres``."""
    told = {"pres": pres, "vres": vres}
    case, net = spvnas_folder(tmp_path, "spvcnn", told, *about)
    assert "not used" not in capsys.readouterr().out
    coords, feats = mx.array(case["coords"]), mx.array(case["feats"])
    exact = case["out/y"]
    if pres != vres:  # SPVNAS's rule, at a size of 1
        plain = models.SPVCNN(4, 19, 1.0, 0.08)
        io.import_checkpoint(weights_of("spvcnn"), plain.eval(), "torchsparse")
        at = np.float32(case["coords"][:, 1:]) * pres / vres
        exact = np.array(plain(mx.array(at), feats, coords[:, 0]))
        assert np.linalg.norm(exact - case["out/y"]) > 0.1 * np.linalg.norm(exact)
    cells = coords[:, 1:].astype(mx.float32) * pres
    assert_close(net(cells, feats, coords[:, 0]), exact)
    x = ml.SparseTensor(coords, feats)
    assert_close(net.score_voxels(models.Voxels(x, None)), exact)
    far = ml.SparseTensor(coords + mx.array([0, *[2**22] * 3]), feats)
    assert_close(net.score_voxels(models.Voxels(far, None)), exact)
    assert net.about.voxels.voxel_size == pres
    assert len(net.about.classes) == (19 if about else 0)


@pytest.mark.parametrize("name", ("minkunet-torchsparse", "spvcnn"))
def test_trimmed_nets_of_torchsparse(name, tmp_path, capsys):
    """By the flag and by the configuration; other nets have no such thing."""
    for told, options in (({}, ["--trimmed"]), ({"trimmed": True}, [])):
        case, net = spvnas_folder(tmp_path, name, told, *options)
        assert net._arguments["trimmed"] is True
    _, net = spvnas_folder(tmp_path, name, {"trimmed": False})
    assert net._arguments["trimmed"] is False
    capsys.readouterr()
    line = f"convert {weights_of('ts_minkunet')} {tmp_path / 'x'} --library spconv"
    command = [*line.split(), "--model", "spunet"]
    assert cli.main([*command, "--channels", "4", "5", "--trimmed"]) == 2
    assert "--trimmed is not for --model spunet" in capsys.readouterr().err
    assert cli.main([*command, "--config", str(tmp_path / "net.config")]) == 2
    assert "--config is not for --model spunet" in capsys.readouterr().err


@pytest.mark.parametrize("bits", (None, "8"))
def test_a_folder_for_from_pretrained(bits, tmp_path, capsys):
    source = randomised(models.MinkUNet14(3, 20, "B"))
    given, out = tmp_path / "me.safetensors", tmp_path / "net"
    mx.save_safetensors(str(given), minkunet_state(source))
    command = ["convert", str(given), str(out), "--library", "minkowski"]
    whole = [*command, "--model", "minkunet14", "--plan", "B", "--channels", "3", "20"]
    whole += ["--bits", bits, "--group-size", "32"] if bits else []
    assert cli.main([*whole, "--about", "minkunet-scannet"]) == 0
    assert f'models.from_pretrained("{out}")' in capsys.readouterr().out
    assert {f.name for f in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    net = models.from_pretrained(out)
    assert net.about == models.PUBLISHED["minkunet-scannet"]
    if bits:
        mlx.nn.quantize(source, 32, 8, class_predicate=nn.keep_float())
    # On a GPU mx.quantize may round a scale otherwise than on the CPU.
    error = 1e-3 if bits and mx.cuda.is_available() else 0.0
    assert mx.allclose(net(scene(3)).feats, source(scene(3)).feats, error, 0.0)
    assert cli.main(whole) == 0  # in the place of the one that is there
    assert models.from_pretrained(out).about == models.About()
    capsys.readouterr()
    for line, sentence in (
        (command, "a folder is of a net: name it by --model or --config"),
        ([*whole, "--about", "me"], "must be one of spunet-scannet, "),
        ([*whole[:2], f"{out}.pt", *whole[3:]], "must end in .safetensors, or be a f"),
    ):
        assert cli.main(line) == 2
        assert sentence in capsys.readouterr().err
    state = minkunet_state(source) if not bits else mx.load(str(given))
    del state["final.bias"]
    mx.save_safetensors(str(given), state)
    assert cli.main([*whole, "--partial"]) == 2
    assert "a folder holds a whole net" in capsys.readouterr().err


def test_the_code_that_published_weights_were_trained_with(tmp_path, capsys):
    given, out = tmp_path / "ptv3.safetensors", tmp_path / "net"
    sizes = {"enc_depths": (1,), "enc_channels": (8,), "enc_num_head": (1,)}
    sizes |= {"enc_patch_size": (16,), "stride": ()}
    sizes |= {f"dec_{n}": () for n in ("depths", "channels", "num_head", "patch_size")}
    config = tmp_path / "config.json"
    backbone = {"type": "PT-v3m1", "in_channels": 6, **sizes}
    config.write_text(json.dumps({"num_classes": 20, "backbone": backbone}))
    net = models.PTv3(6, 20, **sizes)
    names = {n.replace(".layers.", "."): a for n, a in tree_flatten(net.parameters())}
    mx.save_safetensors(str(given), filled({n: a.shape for n, a in names.items()}))
    line = f"convert {given} {out} --library spconv --model ptv3-m1 --config {config}"
    for options, legacy, colours in (
        ([], True, (-1.0, 1.0)),
        (["--colour-range", "0", "1", "--no-legacy"], False, (0.0, 1.0)),
    ):
        assert cli.main([*line.split(), "--about", "ptv3-scannet", *options]) == 0
        assert ("legacy blocks" in capsys.readouterr().out) == legacy
        read = models.from_pretrained(out)
        assert read.legacy == legacy and read.recipe().colour_range == colours
    assert cli.main([*line.split(), "--colour-range", "0", "1"]) == 2
    assert "--colour-range needs --about" in capsys.readouterr().err


MEASURED = """
import pathlib, re, resource, sys
from mlx_lattice import cli
assert cli.main(sys.argv[1:]) == 0
status = pathlib.Path("/proc/self/status")
if status.exists():  # where getrusage counts the parent, from before the exec, as well
    print(int(re.search(r"VmHWM:\\s*(\\d+)", status.read_text())[1]) * 1024)
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(mx.cuda.is_available(), reason="CUDA's libraries alone take more")
@pytest.mark.parametrize("more", ([], ["--bits", "8"]), ids=("plain", "packed"))
def test_a_conversion_holds_little_more_than_the_larger_file(more, tmp_path):
    """At most 1.3 times the larger file, Python and MLX with it."""
    widths, counts = (256, 128, 128), (12, 15, 12)
    given, out = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    state = filled(published(widths, counts, LATENT, OUT))
    mx.save_safetensors(str(given), state)
    config = tmp_path / "config.json"
    arguments = {"model_channels": widths, "num_blocks": counts}
    arguments |= {"latent_channels": LATENT}
    config.write_text(
        json.dumps({"name": "FlexiDualGridVaeDecoder", "args": arguments})
    )
    command = ["convert", str(given), str(out), "--library", "trellis2"]
    command += ["--config", str(config), *more]
    line = [sys.executable, "-c", MEASURED, *command]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    larger = max(given.stat().st_size, out.stat().st_size)
    assert larger > 1.2e8
    assert int(done.stdout.split()[-1]) <= 1.3 * larger


def test_a_folder_of_the_checkpoint_stays(tmp_path, capsys):
    """A folder's weights are replaced whole, and the checkpoint may be among them."""
    source = randomised(models.MinkUNet14(3, 5, "B"))
    given = tmp_path / "model_best.safetensors"
    mx.save_safetensors(str(given), minkunet_state(source))
    (tmp_path / "config.json").write_text("{}")
    command = ["convert", str(given), str(tmp_path), "--library", "minkowski"]
    command += ["--model", "minkunet14", "--plan", "B", "--channels", "3", "5"]
    assert cli.main(command) == 2
    assert f"cannot write {given}: it is read, too" in capsys.readouterr().err
    assert given.exists() and (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    "channels, said", (("6 13", "20 classes, .* has 13:"), ("3 20", "6 input .* has 3"))
)
def test_what_is_published_is_of_the_net(channels, said, tmp_path, capsys):
    """Another net's classes would get these names, without a word."""
    source = str(tmp_path / "none.pth")
    command = ["convert", source, str(tmp_path / "net"), "--library", "spconv"]
    command += ["--model", "spunet", "--channels", *channels.split()]
    assert cli.main([*command, "--about", "spunet-scannet"]) == 2
    assert re.search(f"--about spunet-scannet is of {said}", capsys.readouterr().err)
