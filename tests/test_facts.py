"""Facts by which what is kept is found: equal ones are found in other processes too."""

import copy
import os
import pickle
import subprocess
import sys

import pytest

import mlx_lattice as ml
from mlx_lattice.epilogue import EpilogueFacts
from mlx_lattice.kernel_spec import KernelSpec

# Looks pickled values up among equal ones that the process made itself.
LOOK_UP = """
import pickle, sys
from test_facts import FACTS
for name, made in pickle.load(sys.stdin.buffer).items():
    assert made in {FACTS[name]()}, name
"""
PATHS = os.pathsep.join(sys.path)


def problem():
    after = EpilogueFacts(("shift", "residual"), "relu", "BatchNorm", 1e-5)
    facts = {"c_in": 4, "c_out": 8, "n_in": 10, "dtype": "float16", "epilogue": after}
    return ml.Problem.forward(**facts)


FACTS = {
    "KernelSpec": lambda: KernelSpec.of(3, kernel_size=3, padding=1),
    "EpilogueFacts": lambda: problem().epilogue,
    "Problem": problem,
    "a layer's Problem": lambda: problem().layer,
}


def used(name):
    """A value of which everything that it computes once was asked."""
    made = FACTS[name]()
    for each in dir(type(made)):
        if not callable(getattr(type(made), each)):
            getattr(made, each)
    assert hash(made) == hash(FACTS[name]())
    return made


def test_what_is_pickled_is_found_in_another_process():
    subprocess.run(
        [sys.executable, "-c", LOOK_UP],
        input=pickle.dumps({name: used(name) for name in FACTS}),
        # Hashes of strings are others with each seed.
        env=os.environ | {"PYTHONHASHSEED": "17", "PYTHONPATH": PATHS},
        check=True,
    )


@pytest.mark.parametrize("name", FACTS)
def test_copies_are_equal_and_hold_what_they_were_made_of(name):
    made = used(name)
    pickled = pickle.loads(pickle.dumps(made))
    for twin in (copy.copy(made), copy.deepcopy(made), pickled):
        assert twin == made and hash(twin) == hash(made) and "_hash" in vars(twin)
        assert set(vars(twin)) - {"_hash"} < set(vars(made))


def test_a_hash_is_of_every_field():
    facts = EpilogueFacts(("scale",), "relu", "BatchNorm", 1e-5)
    other = EpilogueFacts(("scale",), "relu", "BatchNorm", 1e-5, "float16")
    assert facts != other and hash(facts) != hash(other)
