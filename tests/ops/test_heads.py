"""Heads before attention, normalised and turned, on every backend that is here."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from contractions import exact, moved
from head_checks import SHAPES, Given, derivatives
from places import HERE
from reference_attention import dense, tensor, turned

from mlx_lattice import nn

shapes = pytest.mark.parametrize("shape, dtype", SHAPES, ids=str)
places = pytest.mark.parametrize("place", HERE, ids=lambda place: place.name)


@places
@shapes
def test_normalised_and_turned(place, shape, dtype):
    Given(shape, dtype).check(place, dtype)


@places
@pytest.mark.parametrize("parts", (1, 3))
@pytest.mark.parametrize("scaled, turns", ((True, False), (False, True)))
def test_one_of_the_two(place, scaled, turns, parts):
    given = Given((40, 2, 32), "float16", parts, scaled, turns, "float16")
    given.check(place, "float16")


@places
def test_views_that_begin_anywhere(place):
    given = Given((12, 2, 16), "float16")
    given.x, given.dy = moved(given.x), moved(given.dy)
    given.check(place, "float16")


@places
def test_derivatives_of_any_order(place):
    with place.inside():
        derivatives(Given((7, 2, 16), "float32"))


def test_scales_of_two_dtypes_and_no_rows():
    given = Given((4, 2, 16), "float16")
    mixed = given.scales[0].astype(mx.float16), given.scales[1]
    ref.assert_close(given.run(given.x, *mixed), given.y, "float16")
    none = given.x[:0]
    given.angles = [a[:0] for a in given.angles]
    assert given.run(none, *given.scales).shape == none.shape


@places
def test_a_layer_is_its_parts(place):
    """Attention prepares its heads as rotary and a norm of each would."""
    x = tensor()
    x = x.replace(mx.array(cases.features(len(x), 64, 5)))
    layer = nn.SparseAttention(64, 2, rope=True, rope_base=50.0, qk_rms_norm=True)
    q, k, v = mx.split(layer.to_qkv(x.feats).reshape(len(x), 3, 2, 32), 3, axis=1)
    q, k = (turned(unit(exact(a)[:, 0]), np.array(x.coords), base=50.0) for a in (q, k))
    batch = np.array(x.coords)[:, 0].tolist()
    wanted = dense(*(mx.array(a) for a in (q, k, exact(v)[:, 0])), batch)[0]
    wanted = exact(layer.to_out(mx.array(wanted.reshape(len(x), 64))))
    for results in place.run(lambda: layer(x).feats).values():
        ref.assert_close(results[0], wanted)


def unit(values):
    """Heads of root mean square 1."""
    return values / np.sqrt((values**2).mean(axis=2, keepdims=True) + 1e-12)
