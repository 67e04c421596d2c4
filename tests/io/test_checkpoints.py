"""Checkpoints of other libraries: files, layouts, names, mappings, reports."""

import json
import struct

import foreign_arrays as oracle
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import reference as ref
from foreign import Net, exported, numbers, offsets, randomised, scene
from mlx.utils import tree_flatten

from mlx_lattice import nn
from mlx_lattice.io import (
    LIBRARIES,
    CheckpointError,
    convert_weight,
    import_checkpoint,
    load_state,
)


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


TRANSPOSED = ("inverse", "tconv")


def golden() -> list:
    """(file, case) for each weight as a library was given it."""
    return [
        pair
        for pair in oracle.peer_cases()
        if pair.values[0] == "missing" or "w" in oracle.peer(*pair.values)
    ]


def native(file: str, case: dict) -> np.ndarray:
    # Paddle was given the canonical weight itself.
    return case["w_native"] if "w_native" in case else case["w"]


@pytest.mark.parametrize(("file", "name"), golden())
def test_golden_weight(file, name):
    """Every library's own weight becomes the canonical one, and gives its outputs."""
    case = oracle.peer(file, name)
    weight = convert_weight(
        mx.array(native(file, case)),
        file.removeprefix("peer_"),
        tuple(case["kernel"].tolist()),
        transposed=str(case["op"]) in TRANSPOSED,
        # The 1x1 case's output is that of the kernel as shaped.
        unit_as_shaped=True,
    )
    expected = oracle.library_weight(case["w"], "mlx")
    np.testing.assert_array_equal(np.array(weight), expected)

    sites = "dense" if case["same_set"] else oracle.OWN_SITES[file]
    if (file, name) in oracle.TARGET_SITES:
        sites = "target"
    coords, feats = oracle.apply(case, sites, mx.array(case["x"]), weight)
    order = ref.by_coordinates(coords, case["out_coords"])
    oracle.compare(ref.to_numpy(feats)[order], case["y"], None, "y")


@pytest.mark.parametrize("size", ((3, 3, 3), (2, 2, 2), (1, 3, 5), (2, 3, 1), (3, 3)))
@pytest.mark.parametrize("library", LIBRARIES)
def test_each_offset_lands_where_it_belongs(library, size):
    layout = LIBRARIES[library]
    volume = int(np.prod(size))
    first = {"always": True, "odd": volume % 2 == 1, "never": False}
    flat = np.array(numbers(volume, 4, 6))  # (K, C_in, C_out)
    for transposed in (False, True):
        axes = layout.transposed if transposed else layout.axes
        given = {
            "OkI": np.moveaxis(flat, -1, 0).reshape(6, *size, 4),
            "kIO": flat.reshape(*size, 4, 6),
            "kOI": flat.swapaxes(1, 2).reshape(*size, 6, 4),
            "KIO": flat,
            "KOI": flat.swapaxes(1, 2),
            "K1IO": flat[:, None],
        }[axes]
        weight = convert_weight(mx.array(given), library, size, transposed)
        assert weight.shape == (6, *size, 4)
        places = offsets(size, first[layout.first_fastest])
        for k, place in enumerate(places):
            at = np.array(weight)[(slice(None), *place)]
            np.testing.assert_array_equal(at, flat[k].T)


@pytest.mark.parametrize("library", ("minkowski", "torchsparse"))
def test_kernels_of_one_offset_may_lack_their_axis(library):
    weight = numbers(4, 6)
    expected = weight.T.reshape(6, 1, 1, 1, 4)
    assert mx.array_equal(convert_weight(weight, library, 1), expected)
    assert mx.array_equal(convert_weight(weight[None], library, 1), expected)


@pytest.mark.parametrize(
    ("shape", "library", "size", "sentence"),
    (
        ((27, 4, 6), "spconv", 3, r"3x3x3 kernel of spconv has the shape \(C_out, 3, "),
        ((27, 4, 6), "minkowski", 2, r"2x2x2 kernel of minkowski has .*\(8, C_in"),
        ((4, 6), "ocnn", 1, r"\(1, C_in, C_out\)"),
        ((27, 2, 4, 6), "sparseconvnet", 3, r"\(27, 1, C_in, C_out\)"),
        ((27, 4, 6), "torch", 3, r"library must be one of spconv, .*; got 'torch'"),
    ),
)
def test_wrong_shapes_are_refused(shape, library, size, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        convert_weight(mx.zeros(shape), library, size)


# Models


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_from_each_library(library):
    source, x = randomised(Net()), scene(3)
    model = Net().eval()
    report = import_checkpoint(exported(source, library), model, library)
    assert report.complete and len(report.matched) == 11, report
    assert report.ignored == (next(n for n in report.ignored if "tracked" in n),)
    assert mx.array_equal(model(x).feats, source(x).feats)
    assert mx.array_equal(
        model.body.layers[1].running_var, source.body.layers[1].running_var
    )


def linear_head() -> dict[str, mx.array]:
    return {"cls.0.weight": numbers(5, 4), "cls.0.bias": numbers(5)}


def test_a_linear_layer_may_become_a_pointwise_convolution():
    state = linear_head()
    for library in LIBRARIES:
        head, weight = nn.SubmConv3d(4, 5, 1), state["cls.0.weight"]
        kept = {**state, "cls.0.weight": weight.T if library == "paddle" else weight}
        import_checkpoint(kept, head, library, {"cls.0": ""})
        assert mx.array_equal(head.weight, weight.reshape(5, 1, 1, 1, 4)), library
    for library, shape in (("minkowski", (4, 5)), ("spconv", (5, 1, 1, 1, 4))):
        kernel, leaf = numbers(*shape), LIBRARIES[library].leaf
        linear = nn.Linear(4, 5, bias=False)
        import_checkpoint({f"a.{leaf}": kernel}, linear, library, {"a": ""})
        assert mx.array_equal(linear.weight, kernel.reshape(4, 5).T)


# Layer, and whether spconv's layer of that kind multiplies its kernel as a flat matrix.
UNITS = (
    (lambda: nn.SubmConv3d(4, 5, 1), True),
    (lambda: nn.SubmConv2d(4, 5, 1), True),
    (lambda: nn.Conv3d(4, 5, 1), True),
    (lambda: nn.ConvTranspose3d(4, 5, 1, 1), True),
    (lambda: nn.Conv3d(4, 5, 1, 2), False),
    (lambda: nn.Conv3d(4, 5, 1, (1, 1, 2)), False),
    (lambda: nn.ConvTranspose3d(4, 5, 1, 2), False),
)


@pytest.mark.parametrize(("make", "flat"), UNITS)
def test_spconv_s_kernels_of_one_offset(make, flat):
    layer = make()
    kernel = numbers(*layer.weight.shape)
    state = {"weight": kernel, "bias": mx.zeros(5)}
    import_checkpoint(state, layer, "spconv")
    expected = kernel.reshape(4, 5).T.reshape(kernel.shape) if flat else kernel
    assert mx.array_equal(layer.weight, expected)
    import_checkpoint(state, layer, "spconv", unit_as_shaped=True)
    assert mx.array_equal(layer.weight, kernel)


def test_paddle_s_linear_layers_are_the_other_way_round():
    """Paddle keeps (C_in, C_out); square ones would be wrong without a word."""
    weight = numbers(4, 4)
    for layer in (nn.Linear(4, 4, bias=False), nn.SubmConv3d(4, 4, 1, bias=False)):
        import_checkpoint({"weight": weight}, layer, "paddle")
        assert mx.array_equal(layer.weight.reshape(4, 4), weight.T)
    table = mlx.nn.Embedding(4, 4)
    import_checkpoint({"weight": weight}, table, "paddle")
    assert mx.array_equal(table.weight, weight)
    norm = nn.BatchNorm(4)
    leaves = ("weight", "bias", "_mean", "_variance")
    state = {leaf: numbers(4) * i for i, leaf in enumerate(leaves)}
    assert import_checkpoint(state, norm, "paddle").complete
    assert mx.array_equal(norm.running_var, state["_variance"])
    assert mx.array_equal(norm.running_mean, state["_mean"])


def test_sparseconvnet_has_linear_layers_of_two_kinds():
    """NetworkInNetwork keeps (C_in, C_out), PyTorch's Linear (C_out, C_in)."""
    for make in (nn.Linear, lambda a, b, **o: nn.SubmConv3d(a, b, 1, **o)):
        for weight in (nin := numbers(4, 5), nin.T):
            layer = make(4, 5, bias=False)
            import_checkpoint({"weight": weight}, layer, "sparseconvnet")
            assert mx.array_equal(layer.weight.reshape(5, 4), nin.T)
        square, layer = numbers(4, 4), make(4, 4, bias=False)
        with pytest.raises(CheckpointError, match=r"w\[None, None\] of the first, w.T"):
            import_checkpoint({"weight": square}, layer, "sparseconvnet")
        import_checkpoint({"weight": square[None, None]}, layer, "sparseconvnet")
        assert mx.array_equal(layer.weight.reshape(4, 4), square.T)


def test_minkowskiengine_s_depthwise_kernels():
    kernel = numbers(27, 6)  # (K, C), the first axis fastest
    layer = nn.SubmConv3d(6, 6, 3, groups=6, bias=False)
    import_checkpoint({"kernel": kernel}, layer, "minkowski")
    assert layer.weight.shape == (6, 3, 3, 3, 1)
    for k, place in enumerate(offsets((3, 3, 3), True)):
        assert mx.array_equal(layer.weight[(slice(None), *place)][:, 0], kernel[k])


def test_versions_of_a_library_by_name():
    weight = numbers(3, 1, 2, 4, 6)  # spconv 1: kernel, C_in, C_out
    converted = convert_weight(weight, "spconv1", (3, 1, 2))
    assert mx.array_equal(converted, mx.moveaxis(weight, -1, 0))
    with pytest.raises(CheckpointError, match="has the shape"):
        convert_weight(weight, "spconv", (3, 1, 2))
    for size, axes in ((5, (3, 0, 1, 2, 4)), (3, (0, 1, 2, 3, 4))):
        # spconv 2.1 has (kernel, C_out, C_in) where there are more than 32 offsets.
        shape = (size, size, size, 6, 4) if size == 5 else (6, size, size, size, 4)
        weight = numbers(*shape)
        converted = convert_weight(weight, "spconv2.1", size)
        assert mx.array_equal(converted, weight.transpose(axes))
    weight = numbers(2, 3, 4, 6, 5)  # spconv 2.0: kernel, C_out, C_in
    converted = convert_weight(weight, "spconv2.0", (2, 3, 4))
    assert mx.array_equal(converted, mx.moveaxis(weight, -2, 0))
    unit, x = numbers(1, 1, 1, 6, 4), numbers(9, 4)
    converted = convert_weight(unit, "spconv2.0", 1)  # x @ its memory as (C_in, C_out)
    assert mx.allclose(x @ converted.reshape(6, 4).T, x @ unit.reshape(4, 6), atol=1e-5)
    state = {"weight": numbers(6, 1, 1, 1, 4), "bias": numbers(6)}
    state["_max_num_voxels_during_training"] = mx.array([5])
    report = import_checkpoint(state, nn.SubmConv3d(4, 6, 1), "spconv")
    assert report.complete and len(report.ignored) == 1
    for kernel, size in ((numbers(27, 4, 6), 3), (numbers(8, 4, 6), 2)):
        older, newer = (
            convert_weight(kernel, f"torchsparse{version}", size)
            for version in ("", "2.1")
        )
        assert mx.array_equal(older, newer)


def test_mappings():
    state = {
        "backbone.a.weight": numbers(5, 4),
        "backbone.a.bias": numbers(5),
        "backbone.b.weight": numbers(2, 5),
        "backbone.b.bias": numbers(2),
        "ema.a.weight": numbers(5, 4),
    }

    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))

    prefixes = {"backbone.a": "layers.0", "backbone.b": "1", "ema": None}
    report = import_checkpoint(state, model(), "spconv", prefixes)
    assert report.complete and report.ignored == ("ema.a.weight",)

    def function(name):
        _, layer, leaf = name.split(".")
        return None if name.startswith("ema") else f"{'ab'.index(layer)}.{leaf}"

    assert import_checkpoint(state, model(), "spconv", function).complete
    both = {"backbone.a": "0", "backbone.b": "1", "ema.a": "0"}
    with pytest.raises(CheckpointError, match="ema.a.weight are both meant for layers"):
        import_checkpoint(state, model(), "spconv", both)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


PLAIN = {
    "0.weight": numbers(5, 4),
    "0.bias": numbers(5),
    "1.weight": numbers(2, 5),
    "1.bias": numbers(2),
}


def test_strict_reports_and_leaves_the_model_alone():
    state = exported(randomised(Net()), "minkowski")
    del state["up.kernel"]
    state["down.kernel"] = mx.zeros((27, 4, 6))
    state["body.1.bn.running_mean"] = mx.zeros((7,))
    state["extra.kernel"] = mx.zeros((8, 1, 2))
    model = Net()
    before = [bytes(memoryview(p)) for _, p in tree_flatten(model.parameters())]
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(state, model, "minkowski")
    after = [bytes(memoryview(p)) for _, p in tree_flatten(model.parameters())]
    assert before == after
    text = str(caught.value)
    for line in (
        "minkowski: 8 of 11 parameters matched, 1 tensors left over, 1 ignored",
        "mismatched  down.kernel (27, 4, 6) -> down.weight (6, 2, 2, 2, 4): a 2x2x2 "
        "kernel of minkowski has the shape (8, C_in, C_out); got (27, 4, 6)",
        "mismatched  body.1.bn.running_mean (7,) -> body.layers.1.running_mean (4,): "
        "becomes (7,)",
        "missing     up.weight (4, 2, 2, 2, 6)",
        "left over   extra.kernel (8, 1, 2)",
    ):
        assert line in text, text

    report = import_checkpoint(state, model, "minkowski", strict=False)
    assert not report.complete and len(report.matched) == 8
    assert mx.array_equal(model.down.bias, state["down.bias"][0])
