"""Device profiles: from the names that Apple and NVIDIA give their chips."""

import pytest
from problems import problem

from mlx_lattice import devices
from mlx_lattice.routes import select

pytestmark = pytest.mark.usefixtures("portable_only", "unforced")


def metal(architecture="applegpu_g16s", name="Apple M4 Max", darwin="25.2.0"):
    info = {"architecture": architecture, "device_name": name}
    return devices.from_metal_info(info, darwin)


@pytest.mark.parametrize(
    "architecture, name, darwin, profile, accelerated",
    [
        ("applegpu_g13g", "Apple M1", "23.0.0", "m1", False),
        ("applegpu_g14s", "Apple M2 Max", "24.1.0", "m2-max", False),
        ("applegpu_g16s", "Apple M4 Max", "25.3.0", "m4-max", False),
        ("applegpu_g17d", "Apple M5 Ultra", "25.3.0", "m5-ultra", True),
        ("applegpu_g17s", "Apple M5 Max", "25.10.0", "m5-max", True),
        ("applegpu_g17s", "Apple M5 Max", "25.1.0", "m5-max", False),
        ("applegpu_g17s", "Apple M5 Max", "24.6.0", "m5-max", False),
        ("applegpu_g17p", "Apple A19 Pro", "25.2.0", "m5", False),
    ],
)
def test_metal_profiles(architecture, name, darwin, profile, accelerated):
    device = metal(architecture, name, darwin)
    assert (device.name, device.neural_accelerators) == (profile, accelerated)
    assert device.backend == "metal"


def test_the_gpu_of_a_virtual_machine_has_no_matrices():
    # What MLX says on a hosted runner of macOS 15.
    device = metal("air64_v27", "Apple Paravirtual device", "24.6.0")
    assert (device.backend, device.matrices) == ("metal", False)
    assert devices.profile("m1").matrices and metal().matrices


@pytest.mark.parametrize(
    "release, macos, accelerated",
    [
        ("25.2.0", "16.2", True),  # macOS 26.2, Python built against an older SDK
        ("25.2.0", "26.2", True),
        ("25.1.0", "16.1", False),
        ("24.6.0", "26.2", False),
    ],
)
def test_the_darwin_release_is_asked(monkeypatch, release, macos, accelerated):
    info = {"architecture": "applegpu_g17s", "device_name": "Apple M5 Max"}
    monkeypatch.setattr(devices.mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(devices.mx, "device_info", lambda device: info)
    monkeypatch.setattr(devices.platform, "release", lambda: release)
    monkeypatch.setattr(devices.platform, "mac_ver", lambda: (macos, ("",) * 3, ""))
    # The function behind the cache: what it finds here is of no real device.
    assert devices._gpu.__wrapped__().neural_accelerators == accelerated


@pytest.mark.parametrize(
    "info, darwin",
    [
        ({}, ""),
        ({"architecture": None, "device_name": None}, "25.2.0"),
        ({"architecture": "", "device_name": 7}, "not.a.version"),
        ({"architecture": ["g17s"], "device_name": {}}, ""),
        ({"architecture": "applegpu_g17s"}, "beta"),
    ],
)
def test_garbage_gives_a_profile_without_accelerators(info, darwin):
    device = devices.from_metal_info(info, darwin)
    assert device.backend == "metal" and not device.neural_accelerators
    assert select(problem(), device=device).route.name


@pytest.mark.parametrize(
    "name, profile",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "cuda"),
        ("", "cuda"),
    ],
)
def test_cuda_profiles(name, profile):
    assert devices.from_cuda_name(name).name == profile


def test_an_unknown_profile_is_named():
    with pytest.raises(ValueError, match="no device profile is named 'm9'.*m5-max"):
        select(problem(), device="m9")
