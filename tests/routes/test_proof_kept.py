"""What kernels proved to be is kept on disk, by machine and text, and survives all."""

import os
import warnings

import mlx.core as mx
import pytest
from metal_checks import host
from mutants import (  # noqa: F401 (a fixture)
    FLOAT,
    HALF,
    LANES,
    assert_right,
    forget,
    kept,
    layers,
    new_folder,
    on_metal,
)

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.routes import proof
from mlx_lattice.routes.proof import Trial

host.require()


def test_a_second_process_reads_what_the_first_found(folder, monkeypatch):
    x, layer, wanted = layers(HALF)
    with on_metal(LANES), pytest.warns(ml.LatticeWarning, match="is refused"):
        mx.eval(layer(x).feats)
    before = kept(folder)
    assert None in before.values()  # the row that served
    monkeypatch.setattr(proof, "check", None)  # nothing is tried again
    with on_metal(LANES), warnings.catch_warnings():
        warnings.simplefilter("error")
        again = ml.SparseTensor(x.coords, x.feats)
        assert_right(layer(again).feats, wanted, HALF)
    assert kept(folder) == before


def test_another_text_proves_itself_anew():
    x, layer, wanted = layers(HALF)
    with on_metal(LANES), pytest.warns(ml.LatticeWarning, match="is refused"):
        mx.eval(layer(x).feats)
    with on_metal():
        again = ml.SparseTensor(x.coords, x.feats)
        assert_right(layer(again).feats, wanted, HALF)
        assert ml.explain(again, layer).choice.route.name == "tensor_ops"


def test_another_machine_proves_itself_anew(folder, monkeypatch):
    x, layer, _ = layers(HALF)
    with on_metal(LANES), pytest.warns(ml.LatticeWarning, match="is refused"):
        mx.eval(layer(x).feats)
    monkeypatch.setattr(mx, "__version__", "0.99.0")
    with on_metal():
        assert ml.explain(x, layer).choice.route.name == "tensor_ops"
    assert len(list((folder / "proofs").iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    with ml.cache(tmp_path / "file"), on_metal():
        x, layer, wanted = layers(FLOAT)
        with pytest.warns(ml.LatticeWarning, match="last for this process") as caught:
            assert_right(layer(x).feats, wanted, FLOAT)
            mx.eval(nn.SubmConv3d(24, 100, 3)(x).feats)  # another tile
        assert len(caught) == 1
        assert len(proof.current().kernels) > 1


def dead(*_):
    raise RuntimeError("the device is gone")


def test_a_device_that_is_dead_before_says_nothing_of_a_kernel(monkeypatch, folder):
    x, layer, _ = layers(FLOAT)
    with on_metal():
        with monkeypatch.context() as patched:
            patched.setattr(proof, "_wait", dead)
            with pytest.raises(RuntimeError, match="the device is gone"):
                mx.eval(layer(x).feats)
        assert proof.current().kernels == ()
        mx.eval(layer(x).feats)


def test_a_kernel_that_kills_the_device_is_refused_from_then_on(monkeypatch, folder):
    x, layer, wanted = layers(FLOAT)
    with on_metal():
        with monkeypatch.context() as patched:
            waits = iter((lambda: None, dead))
            patched.setattr(proof, "_wait", lambda: next(waits)())
            patched.setattr(Trial, "run", dead)
            with pytest.raises(proof.DeviceLost, match="Start the process again"):
                mx.eval(layer(x).feats)
        forget()
        assert_right(layer(x).feats, wanted, FLOAT)
        reason = dict(ml.explain(x, layer).choice.rejected)["sorted_implicit_gemm"]
        assert "the device is gone" in reason


def ended_inside(plan):
    """Let a process end while it tries a kernel."""
    child = os.fork()
    if child == 0:
        proof.check = lambda *_: os._exit(9)
        proof.prove(plan, True)
    os.waitpid(child, 0)


def test_a_kernel_that_ends_two_processes_is_refused_in_the_third(folder, monkeypatch):
    """As a GPU's fault does on Metal. One may have been killed for another reason."""
    x, layer, wanted = layers(FLOAT)
    with on_metal():
        with ml.proof(False):
            plan = ml.explain(x, layer).choice.plan
        ended_inside(plan)
        with monkeypatch.context() as patched:  # what ends as it should is not counted
            patched.setattr(proof, "check", dead)
            with pytest.raises(RuntimeError, match="the device is gone"):
                mx.eval(layer(x).feats)
        ended_inside(plan)
        with pytest.warns(
            ml.LatticeWarning, match="2 processes ended while it was tried"
        ):
            assert_right(layer(x).feats, wanted, FLOAT)
        assert len(kept(folder)) == 1
