"""Results of spconv 2.3.8 itself (``shared/oracle``), by the same calls."""

import numpy as np
import pytest
from foreign_arrays import FOLDER, arrays, needs_folder, peer
from torch_scenes import close, torch

from mlx_lattice.compat.spconv import pytorch as spconv

FILE = "peer_spconv"
HERE = FOLDER.is_dir()
CASES = {k.split("/")[0] for k in arrays(FILE) if "/" in k} if HERE else set()
# The case of a kernel of one reads its weight as (out, in); the module of spconv, as
# (in, out): test_spconv.py has that.
CASES.discard("subm_k1")


def ordered(coords, wanted):
    """For each wanted row its place in other rows."""
    places = {tuple(row): i for i, row in enumerate(coords.tolist())}
    assert len(places) == len(wanted)
    return torch.tensor([places[tuple(row)] for row in wanted.tolist()])


@needs_folder
@pytest.mark.parametrize("name", sorted(CASES))
def test_values_and_gradients(name):
    case = peer(FILE, name)
    sizes = {
        long: case[short].tolist()
        for long, short in (
            ("kernel_size", "kernel"),
            ("stride", "stride"),
            ("padding", "pad"),
            ("dilation", "dilation"),
        )
    }
    shape = case["spatial_shape"].tolist()
    batch = int(case["coords"][:, 0].max()) + 1
    features = torch.from_numpy(case["x"]).requires_grad_()
    rows, kind = torch.from_numpy(case["in_coords"]), str(case["op"])
    c_in = features.shape[1]
    if "w_native" not in case:
        layer = spconv.SparseMaxPool3d(**sizes)
    else:
        native = torch.from_numpy(case["w_native"])
        options = {"bias": False}
        if kind == "inverse":
            sizes = {"kernel_size": sizes["kernel_size"], "indice_key": "k"} | {
                "down": sizes
            }
        down = sizes.pop("down", None)
        names = {"subm": "SubMConv3d", "conv": "SparseConv3d"}
        names |= {"inverse": "SparseInverseConv3d", "tconv": "SparseConvTranspose3d"}
        layer = getattr(spconv, names[kind])(c_in, len(native), **sizes, **options)
        layer.load_state_dict({"weight": native})
    if kind == "inverse":
        batch = int(case["out_coords"][:, 0].max()) + 1
        fine = torch.from_numpy(case["out_coords"])
        x = spconv.SparseConvTensor(torch.zeros(len(fine), 1), fine, shape, batch)
        x = spconv.SparseConv3d(1, 1, **down, indice_key="k")(x)
        x = x.replace_feature(features[ordered(rows, x.indices)])
    else:
        x = spconv.SparseConvTensor(features, rows, shape, batch)
    y = layer(x)
    place = ordered(y.indices, torch.from_numpy(case["out_coords"]))
    result = y.features[place]
    close(result, torch.from_numpy(case["y"]))
    result.backward(torch.from_numpy(case["dy"]))
    close(features.grad, torch.from_numpy(case["dx"]))
    if "w_native" in case:
        expected = np.moveaxis(case["dw"], -1, 0)  # (k..., in, out) to (out, k..., in)
        close(layer.weight.grad, torch.from_numpy(np.ascontiguousarray(expected)))
