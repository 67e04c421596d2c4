"""Processes that share a batch compute what one computes with the whole."""

from pathlib import Path

import mlx.core as mx
import mlx.nn
import pytest
import shares
from mlx.utils import tree_flatten
from processes import NCCL, RING, launch, needs, on_the_cpu_alone

from mlx_lattice import models, nn

pytestmark = on_the_cpu_alone
BACKENDS = [pytest.param(b, marks=needs(b), id=b) for b in (RING, NCCL)]


@pytest.fixture(scope="module", params=BACKENDS)
def found(request, tmp_path_factory) -> list[dict[str, mx.array]]:
    """The results of each of two processes."""
    folder = tmp_path_factory.mktemp(request.param)
    launch(Path(shares.__file__), folder, folder=folder, backend=request.param)
    return [mx.load(str(folder / f"{rank}.safetensors")) for rank in (0, 1)]


def close(found: mx.array, expected: mx.array, tolerance: float) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    scale = max(1e-6, float(mx.linalg.norm(expected.flatten())))
    error = float(mx.linalg.norm((found - expected).flatten()))
    assert error <= tolerance * scale, error / scale


@pytest.mark.parametrize("counts", shares.SHARES, ids=str)
def test_a_sync_batch_norm_is_the_batch_norm_of_all_rows(found, counts):
    """First and second gradients are those of the sum of the processes' losses."""
    norm = nn.BatchNorm(shares.CHANNELS)
    norm.weight, norm.bias = shares.scale_and_shift()
    expected = shares.norm_results(norm, *shares.rows_of(counts))
    for name, value in expected.items():
        parts = [part[f"norm {counts} {name}"] for part in found]
        if name in ("y", "dx", "ddx"):
            parts = [mx.concatenate(parts)]
        for part in parts:
            # A single row has no spread: its gradients are rounding errors alone.
            close(part, value, 2e-5 if sum(counts) > 2 else 2e-3)


def test_processes_exchange_in_one_order_where_their_graphs_differ(found):
    """A branch is longer on one process, and the other one on the other process."""
    norms = [nn.BatchNorm(shares.CHANNELS) for _ in range(2)]
    for norm in norms:
        norm.weight, norm.bias = shares.scale_and_shift()
    x = shares.rows_of((6, 6))[0]
    expected = shares.branch_results(x, 0, norms)["dx"]
    close(mx.concatenate([part["branches dx"] for part in found]), expected, 2e-5)


@pytest.mark.parametrize("name", shares.NETS)
def test_a_net_trains_on_two_processes_as_on_one(found, name):
    """With its BatchNorms converted, for shares of any length and under compile."""
    one = mx.distributed.init()
    expected = shares.net_results(shares.small_net(), range(0, 4), one)
    for key, value in expected.items():
        close(found[0][f"net {name} {key}"], value, 2e-4)
        assert mx.array_equal(*(part[f"net {name} {key}"] for part in found)), key


@pytest.mark.parametrize("size", shares.SIZES)
def test_gradients_are_averaged_in_buckets_of_any_size(found, size):
    """Dtypes are kept, and a mean of half values is finite where their sum is not."""
    for name, value in tree_flatten(shares.GRADIENTS):
        if value.size:
            for part in found:
                mean = value * 1.5
                assert mx.array_equal(part[f"averages {size} {name}"], mean), name


def test_every_batch_norm_is_converted():
    """Parameters, statistics, mode, what is frozen and the names are kept."""
    net = models.MinkUNet14(2, 3)
    net.stem.layers[0].norm.running_mean = mx.arange(32.0)
    net.encoder[0].freeze()
    net.decoder[0].eval()
    norms = [k for k, m in net.named_modules() if isinstance(m, nn.BatchNorm)]
    before = dict(tree_flatten(net.parameters()))
    trainable = dict(tree_flatten(net.trainable_parameters())).keys()
    training = {name: module.training for name, module in net.named_modules()}
    assert nn.convert_sync_batchnorm(net) is net
    modules = dict(net.named_modules())
    assert {k for k, m in modules.items() if type(m) is nn.SyncBatchNorm} == set(norms)
    assert not any(type(m) is nn.BatchNorm for m in modules.values())
    after = dict(tree_flatten(net.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
    assert dict(tree_flatten(net.trainable_parameters())).keys() == trainable
    assert {name: module.training for name, module in modules.items()} == training


def test_a_norm_that_a_net_has_twice_is_converted_to_one():
    norm = nn.BatchNorm(4, momentum=0.3, eps=1e-3, affine=False)
    net = nn.convert_sync_batchnorm(nn.Sequential(norm, nn.ReLU(), norm))
    first, _, last = net.layers
    assert first is last and "weight" not in first
    assert (first.momentum, first.eps) == (0.3, 1e-3)
    assert nn.convert_sync_batchnorm(net).layers[0] is first
    assert type(nn.convert_sync_batchnorm(mlx.nn.BatchNorm(4))) is nn.SyncBatchNorm
