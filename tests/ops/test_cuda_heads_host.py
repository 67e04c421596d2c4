"""CUDA's heads before attention, emulated on the CPU, against the oracle."""

import pytest
from cuda_emulation import emulated
from head_checks import SHAPES, Given
from places import Place

from mlx_lattice import registry

pytestmark = emulated


@pytest.fixture
def place(emulator, monkeypatch):
    """CUDA's kernels, emulated, as a place that checks of heads take."""
    here = Place()
    here.name, here.emulator = "cuda", emulator
    here.run = lambda call: {"": [call()]}
    monkeypatch.setattr(registry, "heads", lambda: registry.HEADS["cuda"])
    return here


@pytest.mark.parametrize("shape, dtype", SHAPES, ids=str)
def test_normalised_and_turned(place, shape, dtype):
    Given(shape, dtype).check(place, dtype)


@pytest.mark.parametrize("parts", (1, 3))
@pytest.mark.parametrize("scaled, turns", ((True, False), (False, True)))
def test_one_of_the_two(place, scaled, turns, parts):
    given = Given((40, 2, 32), "float16", parts, scaled, turns, "float16")
    given.check(place, "float16")
