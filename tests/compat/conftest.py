"""Seeds of PyTorch for tests of compat."""

import zlib

import pytest


@pytest.fixture(autouse=True)
def _torch_seeded(request):
    """Seed PyTorch by the test's name, if it is installed."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
