"""What the tests of the doctor share: a short list of layers, places, a report."""

from dataclasses import replace

import pytest
from places import leave_the_host

from metal import host
from mlx_lattice import devices
from mlx_lattice.inspect.doctor import (
    examine,
    features,
    layers,
    machine,
    proofs,
    timings,
)
from mlx_lattice.inspect.doctor.examine import Examination
from mlx_lattice.inspect.doctor.layers import Build, Layer, Scene
from mlx_lattice.problem import PASSES

PLENTY = 1e6  # seconds: no budget ends, however busy the machine is
SHELL = Scene("shell", 9)
SMALL = (
    Layer(SHELL, 16, 24, passes=PASSES, quick=True, published=0.5),
    Layer(SHELL, 16, 24, bits=4),
    Layer(SHELL, 16, 32, kind="inverse", dtype="float32", quick=True),
)


@pytest.fixture(autouse=True)
def nothing_kept(unforced, monkeypatch, tmp_path):
    # The command sets it; MLX reads it once, maybe here first.
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    monkeypatch.setattr(machine, "busy", lambda: None)  # the tests themselves are
    if not devices.metal_on_host():  # whose compiled kernels are kept there
        monkeypatch.setenv("MLX_LATTICE_CACHE", str(tmp_path / "cache"))
    yield
    layers.forget()
    proofs._kept.clear()


@pytest.fixture(name="place", params=("here", "metal host"))
def each_place(request, monkeypatch):
    """The device that MLX runs on, and Metal's kernels on the CPU."""
    if request.param == "metal host":
        host.require()
        with monkeypatch.context() as patched:
            patched.setenv("MLX_LATTICE_METAL", "host")
            patched.setenv("MLX_LATTICE_CACHE", "")
            yield examine.on_here()
        leave_the_host()
        return
    yield examine.on_here()


@pytest.fixture(name="small")
def short_list(monkeypatch):
    """A list that takes a second."""
    monkeypatch.setattr(layers, "LAYERS", SMALL)
    monkeypatch.setattr(layers, "BUILDS", (Build(SHELL, quick=True), Build(SHELL)))
    points = proofs.points
    monkeypatch.setattr(proofs, "points", lambda device: points(device)[:8])
    monkeypatch.setattr(features, "CHECKS", features.CHECKS[:2])


def told(points):
    return [(point, lambda: None) for point in points]


def a_report(**facts):
    found = Examination(quick=True, seconds=10).report
    row = timings.Row(
        layer="shell 64, 128 to 128, float16",
        pass_="forward",
        route="sorted_implicit_gemm",
        chosen=True,
        plan="Metal",
        rows=10,
        edges=100,
        ms=2.0,
        first_ms=9.0,
        runs=9,
        tflops=3.0,
        error=1e-4,
        good=True,
        roofline_ms=0.5,
        predicted=(0.83, 0.97),
        published_ms=1.572,
    )
    found.layers = [replace(row, **facts)]
    found.rates = [
        examine.rates.Rate("matmul float16, 8 x 8", 6.0, "TFLOP/s", 14.2),
    ]
    found.device = devices.profile("m3-max")
    return found
