"""Arrays that other libraries made, and how to reproduce them with this one."""

from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import reference as ref

import mlx_lattice as ml
from mlx_lattice import ops

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "oracle"

needs_folder = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="no shared/oracle beside the checkout"
)

# What the output sites of a library are, where they are not those of dense conv3d.
OWN_SITES = {
    "peer_minkowski": "cell",
    "peer_ocnn": "cell",
    "peer_sparseconvnet": "reach",
    "peer_torchsparse": "reach",
}
# torchsparse drops sites outside the bounding box of its input: a target set here.
TARGET_SITES = {
    ("peer_torchsparse", "conv_k3s2p1_c16"),
    ("peer_torchsparse", "conv_k4s2p1"),
}

POOLS = {
    "maxpool": ("max_pool3d", {}),
    "pool_max": ("max_pool3d", {}),
    "pool_maxpos": ("max_pool3d", {}),
    "pool_sum": ("sum_pool3d", {}),
    "pool_avg": ("avg_pool3d", {"count": "active"}),
    "pool_avgvol": ("avg_pool3d", {"count": "volume"}),
}

FACTS = ("op", "kernel", "stride", "pad", "dilation", "spatial_shape")


@cache
def arrays(file: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{file}.npz") as stored:
        return dict(stored)


def names(pattern: str) -> list:
    """The files that match, or one skipped entry that says what is missing."""
    found = sorted(path.stem for path in FOLDER.glob(pattern))
    return found or [_missing(pattern)]


def _missing(pattern: str):
    reason = (
        f"no {pattern} in shared/oracle beside the checkout: the arrays made by other "
        "libraries are not part of the repository"
    )
    return pytest.param("missing", marks=pytest.mark.skip(reason=reason))


def peer_cases() -> list:
    """(file, case) for each case of each library."""
    pairs = [
        (file, case)
        for file in sorted(path.stem for path in FOLDER.glob("peer_*.npz"))
        for case in sorted({k.split("/")[0] for k in arrays(file) if "/" in k})
    ]
    if not pairs:
        missing = _missing("peer_*.npz")
        return [pytest.param("missing", "missing", marks=missing.marks)]
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}") for pair in pairs]


def peer(file: str, case: str) -> dict[str, np.ndarray]:
    """One case of a library; its pooling cases take their facts from the dense one."""
    prefix = f"{case}/"
    stored = arrays(file)
    found = {
        k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)
    }
    if "op" not in found:
        dense = arrays(f"dense_{case}")
        found |= {name: dense[name] for name in FACTS} | {"same_set": np.array(True)}
    return found | {"coords": found["in_coords"]}


def spec(case: dict) -> dict:
    facts = {"kernel_size": "kernel", "stride": "stride", "dilation": "dilation"}
    return {name: tuple(case[key].tolist()) for name, key in facts.items()}


def tensor(case: dict, feats: mx.array, *, grid: bool, stride: int = 1):
    shape = tuple(case["spatial_shape"].tolist()) if grid else None
    return ml.SparseTensor(
        mx.array(case["coords"]), feats, stride=stride, spatial_shape=shape
    )


def apply(case: dict, sites: str, feats, weight=None, bias=None):
    """(coords, feats) of the case's operation; `sites` says which output rows."""
    op, how = str(case["op"]), spec(case)
    padding = tuple(case["pad"].tolist())
    if op in POOLS:
        name, count = POOLS[op]
        x = tensor(case, feats, grid=True)
        y = getattr(ops, name)(x, **how, padding=padding, support="reach", **count)
    elif op == "subm":
        x = tensor(case, feats, grid=True)
        if any(n % 2 == 0 for n in how["kernel_size"]):
            # An even kernel's default is {0, 1}; {-1, 0} is a matter of offsets.
            offsets = ref.kernel_offsets(how["kernel_size"], 3, padding=padding)
            relation = x.manager.submanifold_kernel_relation(
                x.key, offsets=offsets.tolist()
            )
            weight = weight if weight.ndim == 3 else flat(weight)
            y = x.replace(feats=ops.sparse_conv(x.feats, weight, relation, bias))
        else:
            del how["stride"]
            y = ops.subm_conv3d(x, weight, bias, **how)
    elif op == "inverse":
        x = tensor(case, feats, grid=False, stride=2)
        fine = mx.array(case["out_coords"])
        y = ops.conv_transpose3d(
            x, weight, bias, **how, padding=padding, coordinates=fine
        )
    elif op == "tconv":
        x = tensor(case, feats, grid=sites == "dense", stride=how["stride"][0])
        y = ops.generative_conv_transpose3d(x, weight, bias, **how, padding=padding)
    elif sites == "dense":
        x = tensor(case, feats, grid=True)
        y = ops.conv3d(x, weight, bias, **how, padding=padding, support="reach")
    elif sites == "reach":
        x = tensor(case, feats, grid=False)
        y = ops.conv3d(x, weight, bias, **how, padding=padding, support="reach")
    elif sites == "cell":  # and centred, whatever the padding of the dense case
        x = tensor(case, feats, grid=False)
        y = ops.conv3d(x, weight, bias, **how)
    else:
        x = tensor(case, feats, grid=False)
        target = mx.array(case["out_coords"])
        y = ops.conv3d(x, weight, bias, **how, padding=padding, coordinates=target)
    return y.coords, y.feats


def flat(weight: mx.array) -> mx.array:
    """(C_out, k0, k1, k2, C_in) to (K, C_in, C_out)."""
    return mx.moveaxis(weight, 0, -1).reshape(-1, weight.shape[-1], weight.shape[0])


def library_weight(canonical: np.ndarray, layout: str) -> np.ndarray:
    """[k0, k1, k2, C_in, C_out] in either layout that the operations take."""
    if layout == "mlx":
        return np.ascontiguousarray(np.moveaxis(canonical, -1, 0))
    return canonical.reshape(-1, *canonical.shape[-2:])


def check(case: dict, sites: str, layout: str, *, ordered: bool = False) -> None:
    """Outputs and every gradient that the file holds."""
    given = {"feats": mx.array(case["x"])}
    if "w" in case:
        given["weight"] = mx.array(library_weight(case["w"], layout))
    if "bias" in case:
        given["bias"] = mx.array(case["bias"])

    coords, feats = apply(case, sites, **given)
    order = ref.by_coordinates(coords, case["out_coords"])
    if ordered:
        np.testing.assert_array_equal(np.array(coords), case["out_coords"])
    tolerance = float(case["tol"]) if "tol" in case else None
    compare(ref.to_numpy(feats)[order], case["y"], tolerance, "y")
    if "dy" not in case:
        return

    dy = np.empty_like(case["dy"])
    dy[order] = case["dy"]

    def loss(arguments: dict) -> mx.array:
        return (apply(case, sites, **arguments)[1] * mx.array(dy)).sum()

    grads = mx.grad(loss)(given)
    compare(grads["feats"], case["dx"], tolerance, "dx")
    if "dw" in case:
        expected = library_weight(case["dw"], layout)
        compare(grads["weight"], expected, tolerance, "dw")
    if "db" in case:
        compare(grads["bias"], case["db"], tolerance, "db")


def compare(actual, expected, tolerance: float | None, what: str) -> None:
    """The library's own tolerance, or the rounding of a printed vector."""
    if tolerance is None:
        ref.assert_close(actual, expected, "float32", what)
    else:
        np.testing.assert_allclose(
            ref.to_numpy(actual), expected, atol=tolerance, err_msg=what
        )
