"""mlx-lattice convert: another library's checkpoint as safetensors of this one."""

import mlx.core as mx
import mlx.nn
import pytest
from foreign import minkunet_state
from foreign_decoder import COUNTS, LATENT, OUT, WIDTHS, latents, published
from foreign_nets import filled, spvnas_shapes
from mlx.utils import tree_flatten
from test_checkpoints import randomised, scene

from mlx_lattice import cli, io, models


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
        (["convert", "a.pt", "no/a.safetensors", *command[3:]], "is no folder no"),
        (["convert", "no.pt", *command[2:]], "no.pt"),
        (
            ["convert", "no.pt", str(out), "--library", "torch"],
            "library must be one of",
        ),
        ([*command, "--mapping", str(given)], "is no JSON object of names"),
        ([*command, *model, "--width", "2"], "--width is not for --model minkunet14"),
        ([*command, "--plan", "A"], "--plan needs --model"),
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


@pytest.mark.parametrize("name", ("minkunet-torchsparse", "spvcnn"))
def test_the_command_knows_spvnas_s_nets(name, tmp_path, capsys):
    net = getattr(models, cli.MODELS[name][0])(4, 5, width=0.25)
    shapes = spvnas_shapes([int(0.25 * c) for c in models.spvcnn.PLANES], 4, 5)
    given, out = tmp_path / "spvnas.safetensors", tmp_path / "ours.safetensors"
    state = filled(shapes)
    mx.save_safetensors(str(given), state)
    line = f"convert {given} {out} --library torchsparse --model {name}"
    assert cli.main([*line.split(), "--channels", "4", "5", "--width", "0.25"]) == 0
    assert "parameters matched, 0 tensors left over" in capsys.readouterr().out
    io.import_checkpoint(state, net, "torchsparse")
    expected, held = dict(tree_flatten(net.parameters())), mx.load(str(out))
    assert held.keys() == expected.keys()
    for parameter, value in held.items():
        assert mx.array_equal(value, expected[parameter]).item(), parameter


def decoder(monkeypatch, dtype=mx.float32):
    """A small one of TRELLIS.2's, which --model trellis2-shape then means."""
    plan = {
        "model_channels": WIDTHS,
        "latent_channels": LATENT,
        "num_blocks": COUNTS,
    }
    kind = ("SparseVAEDecoder", (), {"out_channels": OUT, **plan})
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
    for library, names in (
        ("trellis2", state),
        ("flexgemm", state),
        ("trellis2", deeper),
        ("spconv", deeper),
    ):
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


def test_packed(tmp_path, capsys, monkeypatch):
    """--bits packs what keep_float does not keep; names tell which layers those are."""
    net = decoder(monkeypatch, mx.float16)
    given, out = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    mx.save_safetensors(str(given), half_state())
    command = ["convert", str(given), str(out), "--library", "trellis2"]
    command += ["--model", "trellis2-shape", "--bits", "8", "--group-size", "32"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "int8 in groups of 32; kept in float:" in text
    assert 'blocks.0.1.to_subdiv: "to_subdiv" in its path' in text
    held = mx.load(str(out))
    assert held["blocks.0.0.conv.weight"].dtype == mx.uint32
    mlx.nn.quantize(net, 32, 8, class_predicate=lambda p, _: f"{p}.scales" in held)
    net.load_weights(str(out), strict=True)
    expected = decoder(monkeypatch, mx.float16).load_weights(list(half_state().items()))
    x = latents()
    wanted, cells = expected(x, return_subdivisions=True)
    y = net(x, subdivisions=cells)  # packing may flip a logit that is close to zero
    assert mx.array_equal(y.coords, wanted.coords).item()
    error = mx.linalg.norm(y.feats - wanted.feats) / mx.linalg.norm(wanted.feats)
    assert 0 < error.item() < 0.05


def test_the_published_decoders_are_asked_for_whole(tmp_path, capsys):
    """Of 474 million parameters nothing is evaluated before the report."""
    given = tmp_path / "theirs.safetensors"
    mx.save_safetensors(str(given), filled(published(WIDTHS, COUNTS, LATENT, OUT)))
    command = ["convert", str(given), str(tmp_path / "o.safetensors")]
    for model in ("trellis2-shape", "trellis2-texture"):
        assert cli.main([*command, "--library", "trellis2", "--model", model]) == 2
        assert "from_latent.weight (16, 4) -> from_latent.weight (1024, 32)" in (
            capsys.readouterr().err
        )
