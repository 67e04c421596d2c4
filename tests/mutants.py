"""Kernels with a planted fault on Metal's emulator, and a machine that knows none."""

import json
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import cases
import mlx.core as mx
import numpy as np
import pytest
from places import MetalHost

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.backends.gpu import contraction as gpu_contraction
from mlx_lattice.backends.gpu import kernel as gpu_kernel
from mlx_lattice.devices import METAL
from mlx_lattice.routes import proof

HALF, FLOAT = mx.float16, mx.float32
# Another lane has the row: what TensorOps' layout is nobody promises.
LANES = (
    "tensor_ops",
    "row((lane / 4 & 4) | (lane / 2 & 3))",
    "row((lane / 4 & 4) | (lane & 3))",
)
COORDS = cases.geometry("surface", 3, 1500, 0)
METAL_HOST = MetalHost()


def forget():
    """Drop kernels, plans and what is known of a machine, as a new process would."""
    gpu_contraction.interned.cache_clear()
    ml.settings.note_change()
    proof._results.cache_clear()
    proof.machine_of.cache_clear()


@contextmanager
def a_new_machine(folder):
    """Have kernels prove themselves, of which nothing is known; keep it in a folder."""
    forget()
    try:
        with ml.cache(folder), ml.proof():
            yield folder
    finally:
        forget()


@pytest.fixture(autouse=True, name="folder")
def new_folder(tmp_path):
    """Nothing is known of the kernels."""
    with a_new_machine(tmp_path) as made:
        yield made


@contextmanager
def on_metal(*mutations, chip=""):
    """Run on Metal's emulator, with texts of files replaced: (file, old, new)."""
    source = gpu_kernel.source

    def mutated(backend, file):
        text = source(backend, file)
        for name, old, new in mutations:
            if backend == METAL and file == f"{name}.metal":
                assert text.count(old) == 1, f"{file} has {text.count(old)} of {old}"
                text = text.replace(old, new)
        return text

    with ExitStack() as stack:
        stack.enter_context(METAL_HOST.inside(chip))
        stack.enter_context(patch.object(gpu_kernel, "source", mutated))
        forget()
        try:
            yield
        finally:
            forget()


def layers(dtype, c_in=24, c_out=40, **options):
    """Features, a layer, and what it makes of them by MLX operations."""
    mx.random.seed(0)
    coords = mx.array(COORDS)
    x = ml.SparseTensor(coords, mx.random.normal((len(COORDS), c_in)).astype(dtype))
    layer = nn.SubmConv3d(c_in, c_out, 3, **options)
    layer.set_dtype(dtype)
    with ml.backends.portable_only(), mx.stream(mx.cpu):
        plain = ml.SparseTensor(coords, x.feats.astype(mx.float32))
        twin = nn.SubmConv3d(c_in, c_out, 3, **options)
        twin.update(layer.parameters())
        twin.set_dtype(mx.float32)
        wanted = twin(plain).feats
        mx.eval(wanted)
    return x, layer, np.array(wanted)


def assert_right(y, wanted, dtype):
    y = np.array(y.astype(mx.float32))
    most = 1e-5 if dtype == mx.float32 else 2e-3
    assert np.linalg.norm(y - wanted) <= most * np.linalg.norm(wanted)


def kept(folder) -> dict:
    """What the file of the machine says, {kernel: why it is refused}."""
    (file,) = (folder / "proofs").iterdir()
    return dict(json.loads(file.read_text())["entries"].values())
