"""CUDA's kernels on the CPU, as a place where suites run."""

from cuda_emulation import Emulator, emulated, emulating
from places import Place
from pytest import FixtureRequest, param


class EmulatedCuda(Place):
    """Runs CUDA's kernels; inputs of those of features begin anywhere if skewed."""

    name = "cuda emulated"

    def __init__(self, folder, skewed: bool = False):
        self.emulator = Emulator(folder, skewed)

    def inside(self, chip=""):
        return emulating(self.emulator)


# A parameter of fixtures, beside places.
EMULATED = param(EmulatedCuda, marks=emulated, id=EmulatedCuda.name)


def place_of(request: FixtureRequest) -> Place:
    """The place that a fixture's parameter means."""
    if request.param is EmulatedCuda:
        return EmulatedCuda(request.getfixturevalue("cuda_programs"))
    return request.param
