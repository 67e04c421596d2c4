"""Memory is measured here: what tests before have left is freed first."""

import gc

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True, scope="module")
def _freed():
    """Nothing that a later collection would free."""
    gc.collect()
    mx.synchronize()
