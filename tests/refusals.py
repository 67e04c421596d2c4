"""A small tensor, and what is expected of a call that is refused."""

import mlx.core as mx
import pytest

import mlx_lattice as ml


def tensor(coords=((0, 0, 0, 0), (0, 1, 2, 3)), channels=4, **facts) -> ml.SparseTensor:
    return ml.SparseTensor(mx.array(coords), mx.ones((len(coords), channels)), **facts)


def refused(error, sentence, call) -> None:
    with pytest.raises(error, match=sentence):
        call()
