"""mlx-lattice convert: another library's checkpoint as safetensors of this one."""

import json
import re

import mlx.core as mx
import mlx.nn
import pytest
from foreign import minkunet_state, randomised, scene
from foreign_decoder import COUNTS, LATENT, OUT, WIDTHS, latents, published
from foreign_nets import filled
from mlx.utils import tree_flatten

from mlx_lattice import cli, models, nn
from mlx_lattice.commands.convert import Net


def test_the_command(tmp_path, capsys):
    source = randomised(models.MinkUNet14(3, 5, "B"))
    given, out = tmp_path / "me.safetensors", tmp_path / "ours.safetensors"
    mx.save_safetensors(str(given), minkunet_state(source))
    command = ["convert", str(given), str(out), "--library", "minkowski"]
    model = ["--model", "minkunet14", "--plan", "B", "--channels", "3", "5"]

    assert cli.main([*command, *model]) == 0
    assert "parameters matched, 0 tensors left over" in capsys.readouterr().err
    again = models.MinkUNet14(3, 5, "B").load_weights(str(out)).eval()
    assert mx.array_equal(again(scene(3)).feats, source(scene(3)).feats)
    out.unlink()

    for arguments, sentence in (
        (command, "name the net with --model or --config"),
        ([*command, *model[:2]], "--model minkunet14 needs --channels"),
        ([*command, *model[:-1], "6"], "final.kernel (128, 5) -> head.weight (6, 1"),
        ([*command[:2], str(tmp_path / "a.txt"), *command[3:]], "a .safetensors file"),
        (["convert", str(given), str(given), *command[3:]], "must be two files"),
        (["convert", "no.pt", *command[2:], *model], "no.pt"),
        ([*command[:-1], "torch"], "invalid choice: 'torch'"),
        (
            [*command, *model, "--mapping", str(given)],
            "must be a JSON object that maps names",
        ),
        ([*command, *model, "--width", "2"], "--model minkunet14 takes no --width"),
    ):
        assert cli.main(arguments) in (1, 2)
        assert sentence in capsys.readouterr().err
        assert not out.exists()

    assert cli.main([*command, *model, "--bits", "8"]) == 0
    written = mx.load(str(out))
    assert written["encoder.3.down.conv.weight"].dtype == mx.uint32
    assert {"encoder.3.down.conv.scales", "encoder.3.down.conv.biases"} < set(written)
    names = tmp_path / "names.json"
    names.write_text('{"net": ""}')
    prefixed = {f"net.{n}": a for n, a in minkunet_state(source).items()}
    mx.save_safetensors(str(given), prefixed)
    assert cli.main([*command, *model, "--mapping", str(names)]) == 0
    assert "parameters matched, 0 tensors left over" in capsys.readouterr().err


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
        assert "parameters matched, 0 tensors left over" in capsys.readouterr().err
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
    assert "--model trellis2-shape takes no --channels" in capsys.readouterr().err


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
    assert "parameters matched, 0 tensors left over" in capsys.readouterr().err
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
        assert cli.main(command) in (1, 2)
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("bits", (None, "8"))
def test_a_folder_for_from_pretrained(bits, tmp_path, capsys):
    source = randomised(models.MinkUNet14(3, 20, "B"))
    given, out = tmp_path / "me.safetensors", tmp_path / "net"
    mx.save_safetensors(str(given), minkunet_state(source))
    command = ["convert", str(given), str(out), "--library", "minkowski"]
    whole = [*command, "--model", "minkunet14", "--plan", "B", "--channels", "3", "20"]
    whole += ["--bits", bits, "--group-size", "32"] if bits else []
    assert cli.main([*whole, "--about", "minkunet-scannet"]) == 0
    assert f'models.from_pretrained("{out}")' in capsys.readouterr().err
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
        ([*whole, "--about", "me"], "must be one of spunet-scannet, "),
        ([*whole[:2], f"{out}.pt", *whole[3:]], "must be a .safetensors file or a f"),
    ):
        assert cli.main(line) == 2
        assert sentence in capsys.readouterr().err
    state = minkunet_state(source) if not bits else mx.load(str(given))
    del state["final.bias"]
    mx.save_safetensors(str(given), state)
    assert cli.main(whole) == 1
    assert "missing" in capsys.readouterr().err


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
    for options, legacy in (([], True), (["--no-legacy"], False)):
        assert cli.main([*line.split(), "--about", "ptv3-scannet", *options]) == 0
        assert ("legacy blocks" in capsys.readouterr().err) == legacy
        read = models.from_pretrained(out)
        assert read.legacy == legacy and read.recipe().colour_range == (-1.0, 1.0)


def test_a_folder_of_the_checkpoint_stays(tmp_path, capsys):
    """A folder's weights are replaced whole, and the checkpoint may be among them."""
    source = randomised(models.MinkUNet14(3, 5, "B"))
    given = tmp_path / "model_best.safetensors"
    mx.save_safetensors(str(given), minkunet_state(source))
    (tmp_path / "config.json").write_text("{}")
    command = ["convert", str(given), str(tmp_path), "--library", "minkowski"]
    command += ["--model", "minkunet14", "--plan", "B", "--channels", "3", "5"]
    assert cli.main(command) == 1
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
    assert re.search(f"--about spunet-scannet has {said}", capsys.readouterr().err)
