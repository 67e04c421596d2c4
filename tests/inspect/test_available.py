"""backend_info() says that a backend is available only where its kernels run."""

from contextlib import nullcontext

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import cli, devices, distribution, ops
from mlx_lattice.registry import serving


def small() -> list:
    """A small convolution's values, computed."""
    coords = mx.array([[0, 0, 0, 0], [0, 0, 0, 1]], dtype=mx.int32)
    x = ml.SparseTensor(coords, mx.ones((2, 2)))
    return ops.subm_conv3d(x, mx.ones((4, 3, 3, 3, 2))).feats.tolist()


@pytest.fixture
def installed(monkeypatch):
    """The package as a wheel has it: in no checkout."""
    monkeypatch.setattr(distribution, "checkout", lambda: None)
    monkeypatch.setattr(devices, "checkout", lambda: None)
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_METAL", None)
    devices.install_host.cache_clear()


@pytest.mark.parametrize("how", ("variable", "block"))
def test_metal_on_the_host_of_a_wheel(how, installed, monkeypatch):
    if how == "variable":
        monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_METAL", "host")
    with ml.metal("host") if how == "block" else nullcontext():
        info = ml.backend_info()
        with pytest.raises(RuntimeError) as raised:
            small()
    assert info.backends["metal"] == (False, str(raised.value))
    assert "in the project's checkout only" in str(raised.value)
    assert all(names == () for names in info.routes.values())
    assert "forward      no route can run" in str(info)


def test_the_command_says_so_in_a_sentence(installed, monkeypatch, capsys):
    monkeypatch.setitem(ml.settings.environment, "MLX_LATTICE_METAL", "host")
    line = "explain --channels 8 8 --rows 9"
    assert cli.main(line.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("mlx-lattice explain: MLX_LATTICE_METAL=host runs")
    assert cli.main(["info"]) == 0
    assert "metal        not available: MLX_LATTICE_METAL" in capsys.readouterr().out


def test_metal_on_the_host_without_its_compiler(monkeypatch):
    from metal import host

    monkeypatch.setattr(host, "missing", lambda: "clang is not there")
    with ml.metal("host"):
        there, text = ml.backend_info().backends["metal"]
    assert not there and "clang is not there" in text


def test_what_is_said_to_be_available_runs():
    info = ml.backend_info()
    here = info.device.backend
    assert small() == [[4.0] * 4] * 2
    assert info.backends[here][0] == (serving() == here)


def test_an_older_gpu_runs_operations_of_mlx(monkeypatch):
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "compute_capability", lambda: (7, 5))
    devices._old_gpu.cache_clear()
    try:
        why = "the GPU has compute capability 7.5; the kernels need 8.0"
        assert devices.absence("cuda") == devices.missing("cuda") == why
        assert not devices.serves("cuda")
        problem = ml.Problem.forward(c_in=64, c_out=64, n_in=50_000, dtype="float16")
        told = str(ml.explain(problem, device="cuda"))
        assert f"its cuda kernels: {why}" in told
        assert ml.select(problem, device="cuda").plan.backend == "mlx"
    finally:
        devices._old_gpu.cache_clear()


def test_how_to_get_the_extension_fits_what_is_wrong(installed, monkeypatch):
    """A wheel is built anew by name; another MLX is answered by MLX's version."""

    class Built:
        built_for = staticmethod(lambda: "0.1.2")

    def load(result):
        def import_module(name):
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(devices.importlib, "import_module", import_module)
        return devices._load()

    _, why, repair = load(ImportError("No module named x"))
    name = distribution.NAME
    assert why == "it is not installed"
    assert repair.startswith("with a C++ compiler at hand run: pip install ")
    assert repair.endswith(f"--no-binary {name} {name}")
    _, why, repair = load(Built)
    assert why == f"it was built for MLX 0.1.2, this is {mx.__version__}"
    assert repair.startswith('run: pip install "mlx') and '==0.1.2"' in repair
    assert name not in repair
