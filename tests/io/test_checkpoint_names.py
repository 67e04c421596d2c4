"""Checkpoints of other libraries: names, mappings, and the report of what matched."""

import mlx.core as mx
import mlx.nn
import pytest
from foreign import Net, exported, minkunet_state, numbers, offsets, randomised
from mlx.utils import tree_flatten

from mlx_lattice import models, nn
from mlx_lattice.io import (
    LIBRARIES,
    CheckpointError,
    convert_weight,
    import_checkpoint,
)
from mlx_lattice.io.checkpoints import Renamer, convert_state


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
    with pytest.raises(CheckpointError, match="which is the layout of spconv1, "):
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
    with pytest.raises(CheckpointError, match="large kernels in another order"):
        convert_state({}, "spconv2.1")
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
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 5)), nn.Linear(5, 2))
    deeper = {"backbone.a": "0.0", "backbone.b": "1", "ema": None}
    assert import_checkpoint(state, nested, "spconv", deeper).complete


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


PLAIN = {
    "0.weight": numbers(5, 4),
    "0.bias": numbers(5),
    "1.weight": numbers(2, 5),
    "1.bias": numbers(2),
}


@pytest.mark.parametrize(
    "mapping",
    (
        {"backbone_3d.*": "*"},
        {"backbone_3d": ""},
        {"*": None, "backbone_3d.*": "*"},
        {"backbone_3d.*.weight": "*.weight", "backbone_3d.*.bias": "layers.*.bias"},
    ),
)
def test_patterns(mapping):
    state = {f"backbone_3d.{name}": array for name, array in PLAIN.items()}
    assert import_checkpoint(state, layers(), "spconv", mapping).complete


def test_a_star_stands_for_one_part_and_at_the_end_for_the_rest():
    names = ["enc.0.conv.weight", "enc.1.conv.weight", "enc.0.norm.bias", "head.b"]
    renamer = Renamer({"enc.*.conv": "e.*.c", "enc.*": "rest.*", "nothing": ""}, names)
    assert [renamer(name) for name in names] == [
        "e.0.c.weight",
        "e.1.c.weight",
        "rest.0.norm.bias",
        "head.b",
    ]
    assert renamer.idle == ("nothing",)
    with pytest.raises(ValueError, match="both must have as many"):
        Renamer({"a.*": "b"}, names)
    with pytest.raises(TypeError, match="a dict of prefixes or a function"):
        Renamer(["a"], names)


def test_functions_and_dicts_see_the_same_names():
    state = {f"module.net.{name}": array for name, array in PLAIN.items()}
    seen = []

    def function(name):
        seen.append(name)
        return name.removeprefix("net.")

    assert import_checkpoint(state, layers(), "spconv", function).complete
    assert seen == [f"net.{name}" for name in PLAIN]
    assert import_checkpoint(state, layers(), "spconv", {"net": ""}).complete


def test_a_prefix_that_matches_nothing_is_reported():
    names = {"backbone": "", "head.*": None}
    report = import_checkpoint(PLAIN, layers(), "spconv", names)
    assert report.complete and report.idle == ("backbone", "head.*")
    text = str(report)
    assert "mapping     'backbone' matches no name" in text
    assert "mapping     'head.*' matches no name" in text


@pytest.mark.parametrize("library", ("spconv", "minkowski"))
def test_a_mismatch_suggests_the_common_prefix(library):
    state = {f"model.net.{name}": array for name, array in PLAIN.items()}
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(state | {"other.x": numbers(3)}, layers(), library)
    assert (
        "hint        4 of 5 left over fit without 'model.net': "
        "mapping={'model.net': ''}" in str(caught.value)
    )
    report = import_checkpoint(
        state, layers(), library, mapping={"model.net": ""}, strict=True
    )
    assert report.complete and not report.hint
    wrapped = mlx.nn.Module()
    wrapped.body = layers()
    with pytest.raises(CheckpointError, match=r"fit with 'body.*mapping=\{'': 'body'"):
        import_checkpoint(
            {f"layers.{name}": array for name, array in PLAIN.items()}, wrapped, library
        )
    published = minkunet_state(models.MinkUNet14(3, 5))
    prefixed = {f"seg.{name}": array for name, array in published.items()}
    with pytest.raises(CheckpointError, match=r"mapping=\{'seg': ''\}"):
        import_checkpoint(prefixed, models.MinkUNet14(3, 5), "minkowski")


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


def test_the_model_keeps_its_dtype():
    state = {"weight": numbers(5, 4).astype(mx.bfloat16), "bias": numbers(5)}
    model = nn.Linear(4, 5)
    model.set_dtype(mx.float16)
    import_checkpoint(state, model, "spconv")
    assert model.weight.dtype == mx.float16 and model.bias.dtype == mx.float16
