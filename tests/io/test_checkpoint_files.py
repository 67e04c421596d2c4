"""Checkpoints of other libraries: files, and conversions without a model."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest
from foreign import Net, exported, numbers, randomised, scene

from mlx_lattice import nn
from mlx_lattice.io import (
    LIBRARIES,
    CheckpointError,
    import_checkpoint,
    load_state,
)
from mlx_lattice.io.checkpoints import convert_state


def test_safetensors(tmp_path):
    path = tmp_path / "a.safetensors"
    mx.save_safetensors(str(path), {"w": mx.arange(6).reshape(2, 3)})
    assert load_state(path)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(CheckpointError, match="has no entries, so none called 'net'"):
        load_state(path, "net")
    path.write_bytes(b"\xff" * 8)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        load_state(path)


def test_safetensors_with_doubles(tmp_path):
    # MLX reads no such file; the others' bytes are read beside them.
    path, metadata = tmp_path / "a.safetensors", {"library": "mlx_lattice"}
    parts = {
        "d": ("F64", [2, 1], np.array([0.5, 1e-3], "<f8").tobytes()),
        "h": ("BF16", [2], b"\x80\x3f\x00\xc0"),
        "b": ("BOOL", [3], b"\x01\x00\x01"),
        "n": ("F64", [0, 4], b""),
        "s": ("I64", [], struct.pack("<q", -(2**40))),
    }
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, shape, held) in parts.items():
        ends = [len(data), len(data) + len(held)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends}
        data += held
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    state = load_state(path)
    assert state["d"].dtype == mx.float32 and state["d"].shape == (2, 1)
    assert state["d"].flatten().tolist() == [0.5, float(np.float32(1e-3))]
    assert state["h"].dtype == mx.bfloat16 and state["h"].tolist() == [1, -2]
    assert state["b"].tolist() == [True, False, True] and state["n"].shape == (0, 4)
    assert state["s"].item() == -(2**40)
    with pytest.raises(CheckpointError, match="its library is 'mlx_lattice'"):
        import_checkpoint(path, nn.Linear(1, 2), "spconv")


def test_other_files_are_refused(tmp_path):
    for suffix in (".safetensors", ".pt", ".pth", ".ckpt", ".bin"):
        with pytest.raises(FileNotFoundError):
            load_state(tmp_path / f"none{suffix}")
    with pytest.raises(CheckpointError, match="no reader for .h5; expected .safeten"):
        load_state(tmp_path / "a.h5")


def test_convert_without_a_model():
    state = exported(randomised(Net()), "spconv")
    converted = convert_state(state, "spconv", {"out": "head", "up": None})
    assert converted["down.weight"].shape == (6, 2, 2, 2, 4)
    assert "head.bias" in converted and "up.weight" not in converted
    assert not any("tracked" in name for name in converted)
    unit = {"proj.weight": numbers(6, 1, 1, 1, 4), "head.weight": numbers(5, 4)}
    flat = unit["proj.weight"].reshape(4, 6).T.reshape(6, 1, 1, 1, 4)
    for shaped, expected in ((False, flat), (True, unit["proj.weight"])):
        converted = convert_state(unit, "spconv", unit_as_shaped=shaped)
        assert mx.array_equal(converted["proj.weight"], expected)
        assert mx.array_equal(converted["head.weight"], unit["head.weight"])
    with pytest.raises(CheckpointError, match="one axis, .*: name the model"):
        convert_state({}, "minkowski")


def test_convert_with_the_sizes_of_kernels():
    """What is converted without a model loads into one, whatever the library."""
    source, x = randomised(Net()), scene(3)
    for library in LIBRARIES:
        state = exported(source, library)
        if library in ("ocnn", "spconv2.1"):
            with pytest.raises(CheckpointError, match="which no shape tells: name the"):
                convert_state(state, library, sizes=[3, 2])
            continue
        sizes = [2, (3, 1, 3)]
        if library == "sparseconvnet":
            state = {n: a for n, a in state.items() if not n.startswith("out")}
        converted = convert_state(state, library, sizes=sizes)
        model = Net().eval()
        report = import_checkpoint(converted, model, "mlx_lattice", strict=False)
        assert not report.mismatched and not report.unused, report
        if library != "sparseconvnet":
            assert report.complete
            assert mx.array_equal(model(x).feats, source(x).feats), library


def test_sizes_that_do_not_tell():
    state = {"a.kernel": numbers(9, 4, 6), "b.kernel": numbers(9, 4, 6)}
    with pytest.raises(CheckpointError, match="a.kernel: .* does not say its extents"):
        convert_state(state, "minkowski", sizes=[3])
    both = [(1, 3, 3), (3, 3, 1)]
    with pytest.raises(CheckpointError, match="does not say which of the sizes given"):
        convert_state(state, "minkowski", sizes=both)
    sizes = [*both, ("a*", (1, 3, 3)), ("b", (3, 3, 1))]
    converted = convert_state(state, "minkowski", sizes=sizes)
    assert converted["a.weight"].shape == (6, 1, 3, 3, 4)
    assert converted["b.weight"].shape == (6, 3, 3, 1, 4)
    with pytest.raises(CheckpointError, match="a.kernel: a 2x2x2 kernel of minkowski"):
        convert_state(state, "minkowski", sizes=[("a", 2), ("b", (3, 3))])
    with pytest.raises(ValueError, match="1 to 4 extents of 1 or more"):
        convert_state(state, "minkowski", sizes=[0])
    flat = convert_state({"kernel": numbers(4, 6)}, "torchsparse", sizes=[(3, 3)])
    assert flat["weight"].shape == (6, 1, 1, 4)
    twins = {"module.a.weight": numbers(2, 2), "module.b.weight": numbers(2, 2)}
    with pytest.raises(CheckpointError, match="two tensors become c.weight"):
        convert_state(twins, "spconv", {"a": "c", "b": "c"})


def test_what_convert_wrote_is_of_its_own_library(tmp_path):
    path = tmp_path / "a.safetensors"
    state = {"0.weight": numbers(4, 1, 1, 1, 4)}
    mx.save_safetensors(str(path), state, {"library": "mlx_lattice"})
    net = nn.Sequential(nn.SubmConv3d(4, 4, 1, bias=False))
    with pytest.raises(CheckpointError, match="its library is 'mlx_lattice', not 'spc"):
        import_checkpoint(path, net, "spconv")
    import_checkpoint(path, net, "mlx_lattice")
    assert mx.array_equal(net.layers[0].weight, state["0.weight"])
