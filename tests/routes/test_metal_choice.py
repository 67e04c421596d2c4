"""The route that a Choice names is the kernel that was launched on Metal."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from cases import features, in_grid
from metal_checks import host

import mlx_lattice as ml
from mlx_lattice import devices, routes

host.require()


@pytest.fixture(autouse=True)
def uninstalled():
    """Other tests look at MLX's own metal_kernel."""
    yield
    host.uninstall()
    devices.install_host.cache_clear()


def problem(dtype, channels, groups):
    coords = in_grid((6, 6, 6), 120, 0)
    x = features(len(coords), channels, 0).astype(np.float32)
    w = features(27 * channels // groups, channels, 1).reshape(27, -1, channels)
    t = ml.SparseTensor(mx.array(coords), mx.array(x).astype(dtype))
    relation = t.manager.submanifold_kernel_relation(t.key)
    return t.feats, mx.array(w.astype(np.float32)).astype(dtype), relation


BY_ENVIRONMENT = """
import mlx.core as mx
import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice import devices
print(ml.backend_info().device.backend)
devices.install_host()
from metal import host
x = ml.SparseTensor(mx.array([[0, 0, 0, 0], [0, 0, 0, 1]]), mx.ones((2, 3)))
with host.recording(checked=False) as record:
    mx.eval(nn.Conv3d(3, 4, 3)(x).feats)
print(*(launch.kernel for launch in record.report.launches))
"""


@pytest.mark.parametrize("value, backend", (("host", "metal"), ("", "cpu")))
def test_the_environment_makes_it_the_backend(value, backend):
    run = subprocess.run(
        [sys.executable, "-c", BY_ENVIRONMENT],
        env=os.environ | {"MLX_LATTICE_METAL": value},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    found, kernels = (run.stdout.splitlines() + ["", run.stderr])[:2]
    assert found == backend, run.stderr
    assert ("insert_candidates" in kernels) == (value == "host"), run.stderr
    assert ("lattice_vec4" in kernels) == (value == "host")


@pytest.mark.parametrize("value", ("gpu", "Host", "1"))
def test_other_values_of_the_environment_are_refused(value, monkeypatch):
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_METAL", value)
    with pytest.raises(ValueError, match=f"must be 'host' or empty; got '{value}'"):
        devices.current()
    with ml.metal("host"):  # a block says it first
        assert devices.metal_on_host()


def test_atomics_need_a_waiver():
    with ml.metal("host"), routes.only("forward=fp32_atomic"):
        x, w, relation = problem(mx.float32, 8, 1)
        with pytest.raises(ml.RouteError, match="determinism is not waived"):
            ml.conv(x, w, relation)
