"""benchmarks/unmodified.py: its references against dense PyTorch, and a run of it."""

import json
import sys
from pathlib import Path

import pytest
from torch_scenes import close, picked, scene, spread, torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "unmodified.jsonl"
EXTENTS = 7, 8, 6


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def naive(benchmarks, monkeypatch):
    """The naive spconv.pytorch."""
    import naive_sparse

    monkeypatch.setattr(naive_sparse, "_maps", {})
    return naive_sparse.modules("spconv")["spconv.pytorch"]


def dense(layer, features, indices):
    """A layer's weight on the dense grid, at every place."""
    weight = layer.weight.permute(0, 4, 1, 2, 3)
    return torch.nn.functional.conv3d(
        spread(features, indices, EXTENTS), weight, layer.bias, layer.stride,
        layer.padding, layer.dilation,
    )  # fmt: skip


@pytest.mark.parametrize(("kernel", "dilation"), ((3, 1), (3, 2), ((1, 3, 5), 1)))
def test_a_naive_submanifold_layer_is_the_dense_one(naive, kernel, dilation):
    features, indices = scene(EXTENTS)
    layer = naive.SubMConv3d(5, 4, kernel, dilation=dilation)
    x = naive.SparseConvTensor(features, indices, EXTENTS, 2)
    layer.padding = tuple(
        k // 2 * d for k, d in zip(layer.kernel_size, layer.dilation, strict=True)
    )
    close(layer(x).features, picked(dense(layer, features, indices), indices))


@pytest.mark.parametrize(("kernel", "stride", "padding"), ((2, 2, 0), (3, 2, 1)))
def test_naive_strided_layers_are_the_dense_ones(naive, kernel, stride, padding):
    features, indices = scene(EXTENTS)
    down = naive.SparseConv3d(5, 4, kernel, stride, padding, indice_key="a", bias=False)
    up = naive.SparseInverseConv3d(4, 3, kernel, "a", bias=False)
    y = down(naive.SparseConvTensor(features, indices, EXTENTS, 2))
    grid = dense(down, features, indices)
    close(y.features, picked(grid, y.indices))
    close(y.dense(), grid)
    z = up(y)
    full = torch.nn.functional.conv_transpose3d(
        grid, up.weight.permute(4, 0, 1, 2, 3), None, stride, padding,
        [(n + 2 * padding - kernel) % stride for n in EXTENTS],
    )  # fmt: skip
    close(z.features, picked(full, indices))


def test_naive_attention_is_that_of_pytorch(benchmarks):
    import naive_sparse

    q, k, v = torch.randn(3, 12, 2, 8)
    ends = torch.tensor([0, 5, 12])
    y = naive_sparse.flash_attn_varlen_func(q, k, v, ends, ends)
    for rows in (slice(0, 5), slice(5, 12)):
        parts = (each[rows].transpose(0, 1) for each in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts)
        close(y[rows], expected.transpose(0, 1))


NET = """
import spconv.pytorch as spconv
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, indice_key="a"), nn.BatchNorm1d(8), nn.ReLU(),
            spconv.SparseConv3d(8, 8, 2, 2, indice_key="b"),
            spconv.SparseInverseConv3d(8, 4, 2, indice_key="b"),
        )

    def forward(self, x):
        return self.layers(x).features
"""


def test_a_checkout_is_measured_and_its_modules_are_removed(benchmarks, tmp_path):
    import unmodified
    from unmodified_nets import Net, _sparse
    from unmodified_nets import scene as drawn

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.py").write_text(NET)

    def build(load):
        net = load("models.small").Net()
        return net, lambda s: [net(_sparse(s))], drawn(300, 4)

    net = Net("small", "owner/name", "0", ("spconv",), build, "")
    row = unmodified.measure(net, tmp_path)
    assert row["gradients"] == 9 and row["rows"] == 600
    assert row["error"] < 1e-5 and row["gradient_error"] < 1e-4
    assert not {"spconv", "models.small"} & set(sys.modules)
    assert "small" in unmodified.table([row])


def test_the_page_has_the_table_of_the_results(benchmarks):
    import unmodified

    rows = [json.loads(line) for line in RESULTS.open()]
    assert len(rows) == len(unmodified.NETS) >= 20
    assert unmodified.table(rows) in (ROOT / "docs" / "unmodified.md").read_text()
    assert {"spconv", "flex_gemm", "MinkowskiEngine", "torchsparse"} <= {
        name for row in rows for name in row["libraries"].split()
    }
