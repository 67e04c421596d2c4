"""Checkpoints of other libraries: layouts of weights, and whole models."""

import foreign_arrays as oracle
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from foreign import Net, exported, numbers, offsets, randomised, scene

from mlx_lattice.io import (
    LIBRARIES,
    CheckpointError,
    convert_weight,
    import_checkpoint,
)

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


@pytest.mark.parametrize("size", ((1,), (1, 1), (1, 1, 1)))
def test_spconv_s_kernels_of_one_offset_are_read_as_they_are_multiplied(size):
    kernel, x = numbers(6, *size, 4), numbers(9, 4)
    weight = convert_weight(kernel, "spconv", size)
    assert weight.shape == kernel.shape
    assert mx.allclose(x @ weight.reshape(6, 4).T, x @ kernel.reshape(4, 6), atol=1e-5)
    shaped = convert_weight(kernel, "spconv", size, unit_as_shaped=True)
    assert mx.array_equal(shaped, kernel)
    for library in ("trellis2", "flexgemm"):
        assert mx.array_equal(convert_weight(kernel, library, size), kernel)


@pytest.mark.parametrize(
    ("shape", "library", "size", "sentence"),
    (
        ((27, 4, 6), "spconv", 3, r"3x3x3 kernel of spconv has the shape \(C_out, 3, "),
        ((6, 3, 3, 3, 4), "minkowski", 3, r"\(27, C_in, C_out\); got \(6, 3, 3, 3, 4"),
        ((27, 4, 6), "minkowski", 2, r"2x2x2 kernel of minkowski has .*\(8, C_in"),
        ((4, 6), "ocnn", 1, r"\(1, C_in, C_out\)"),
        ((4, 6), "minkowski", 3, r"got \(4, 6\)"),
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
