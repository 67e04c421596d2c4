"""Published nets as their own libraries ran them: weights, inputs and outputs."""

import json
from pathlib import Path

import foreign_arrays
import mlx.core as mx
import numpy as np
import pytest

NETS = foreign_arrays.FOLDER / "nets"


def case_of(name: str) -> tuple[dict[str, np.ndarray], dict]:
    """A case's arrays, and its configuration; the test is skipped where it is not."""
    path = NETS / f"{name}.npz"
    if not path.exists():
        pytest.skip("no shared/oracle/nets beside the checkout")
    with np.load(path) as file:
        case = dict(file)
    return case, json.loads(str(case["config"]))


def weights_of(name: str) -> Path:
    """The file of a case's weights."""
    return NETS / f"{name}.safetensors"


def difference(actual, expected) -> float:
    """The relative error of an array of the same shape."""
    expected = np.asarray(expected, np.float64)
    assert tuple(actual.shape) == expected.shape
    apart = np.array(mx.array(actual).astype(mx.float32), np.float64) - expected
    return float(np.linalg.norm(apart) / np.linalg.norm(expected))


def assert_close(actual, expected, within: float = 2e-5) -> None:
    """An array is within the error that the cases allow."""
    assert difference(actual, expected) <= within


def assert_gradients(found, expected, within: float) -> None:
    """Gradients of parameters are those whose sums a case holds.

    Of each it has the norm, and the product with numbers drawn in the order of names.
    """
    assert found.keys() == expected.keys()
    rng = np.random.RandomState(99)
    for name, (norm, product) in expected.items():
        gradient = np.array(found[name], np.float64)
        drawn = rng.standard_normal(gradient.shape)
        assert abs(np.linalg.norm(gradient) - norm) <= within * norm, name
        limit = within * norm * np.linalg.norm(drawn)
        assert abs((gradient * drawn).sum() - product) <= limit, name
