"""Mistakes of other libraries in this layer: one test for each, so that none returns.

The list, with where each was seen, is in the project's notes on its peers.
"""

import threading

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, Numbers, bits, build, drawn, pair

import mlx_lattice as ml
from mlx_lattice import ops
from mlx_lattice.routes import launch

# Rows that are not there


@pytest.mark.parametrize("shift", (1, -5), ids=("after", "before"))
def test_an_absent_origin_is_not_found(shift):
    """Padding rows of zeros answered for (0, 0, 0, 0)."""
    coords = mx.array([(0, shift, 0, 0), (0, shift, 1, 0), (1, 0, 0, 0)])
    manager = ml.CoordinateManager()
    index = manager[manager.insert(coords)].index
    wanted = [(0, 0, 0, 0), (1, 0, 0, 0), (0, -1, -1, -1), (-1, 0, 0, 0)]
    assert index.find(mx.array(wanted)).tolist() == [-1, 2, -1, -1]


# Support


def test_no_input_vanishes_from_a_strided_convolution_with_padding():
    """The support of the unpadded convolution was kept: inputs were lost in silence."""
    facts = {"d": 3, "kernel_size": 2, "stride": 2, "padding": 1}
    coords = cases.geometry("negative", 3, 40)
    cell = build(cases.Case("forward", support="cell", **facts), coords)
    reach = build(cases.Case("forward", support="reach", **facts), coords)
    kept = set(ref.rows_of(cell.out_coords))
    lost = [
        i
        for i, (b, *site) in enumerate(ref.rows_of(coords))
        if (b, *((c + 1) // 2 for c in site)) not in kept
    ]
    assert lost and cell.coverage().unused_inputs.tolist() == lost
    assert f"inputs with no edge   {len(lost)}" in str(cell.coverage())
    assert reach.coverage().unused_inputs.size == 0
    assert reach.n_edges == len(coords), "with k = s every input has one output"


# Coordinates


@pytest.mark.parametrize("width", (10, 18, 21, 31))
@pytest.mark.parametrize("d", (2, 3, 4))
def test_no_bits_of_a_coordinate_are_dropped(width, d):
    """Keys of 18 or 21 bits an axis take distant sites for one another."""
    low = -(1 << width - 1)
    high = low + (1 << width) - 1
    rows = [(0, *(high if a == b else low for b in range(d))) for a in range(d)]
    rows += [(0, *[low] * d), (1, *[low] * d), (0, *[high] * d)]
    relation = build(cases.Case("submanifold", d, 3), np.array(rows, np.int32))
    assert relation.n_edges == len(rows), "each has itself alone"
    lookups = mx.array([[r[0], *(v ^ 1 for v in r[1:])] for r in rows])
    manager = ml.CoordinateManager()
    index = manager[manager.insert(mx.array(rows))].index
    assert set(index.find(lookups).tolist()) == {-1}


def test_positions_are_64_bit():
    """Rows times kernel volume overflowed 32 bits; here it passes 62."""
    n, volume = 2**30, 343
    rng = np.random.default_rng(0)
    edges = [tuple(map(int, e)) for e in rng.integers(0, (n, n, volume), (300, 3))]
    edges += [(n - 1, n - 1, volume - 1), (0, n - 1, volume - 1), (n - 1, 0, 0)]
    columns = [mx.array(c) for c in np.array(edges, np.int32).T.copy()]
    relation = ml.Relation.from_edges(*columns, n, n, volume)

    def by_offset(e):
        return e[2], e[1], e[0]

    got = [tuple(e) for e in relation.edges.tolist()]
    assert got == sorted(edges, key=by_offset)
    got = [tuple(e) for e in relation.T.edges.tolist()]
    assert got == sorted(((o, i, k) for i, o, k in edges), key=by_offset)
    assert relation.has_table is False


# Kernels


def test_transposed_kernels_larger_than_the_stride_are_not_quadratic():
    """20 000 rows would take 4e8 steps; a search takes a fraction of a second."""
    fine = cases.geometry("surface", 3, 20_000)
    manager = ml.CoordinateManager()
    key = manager.insert(mx.array(fine))
    down = manager.kernel_relation(key, kernel_size=3, stride=2)
    up = manager.transposed_kernel_relation(down.keys[1], kernel_size=3, stride=2)
    assert up.n_in < up.n_out == len(fine)
    assert bits(up.out_in) == bits(down.in_out)


# Contractions


def run(x, weight, observed):
    with launch.observe(lambda call: observed.append(str(call.choice))):
        y = ops.subm_conv3d(x, weight)
        mx.eval(y.feats)
    return y.feats


@pytest.mark.parametrize("channels", ((16, 16), (33, 31)), ids=str)
def test_both_weight_layouts_run_the_same_route_to_the_same_bits(channels):
    """The layout that modules hold ran 18 times slower than the packed one."""
    c_in, c_out = channels
    x = drawn("surface", n=60, channels=c_in, dtype="float16")
    flat = mx.array(cases.weights(27, c_in, c_out)).astype(x.dtype)
    module = flat.reshape(3, 3, 3, c_in, c_out).transpose(4, 0, 1, 2, 3)
    module = mx.contiguous(module)
    routes = []
    results = [run(x, w, routes) for w in (flat, module)]
    assert bits(results[0]) == bits(results[1])
    assert len(routes) == 2 and routes[0] == routes[1]


# Order and identity


def test_a_forced_route_ends_with_its_block_and_stays_in_its_thread():
    """The algorithm was a global variable of the process."""
    relation, _ = pair(KINDS[0])
    at, seen = Numbers(relation, 32, 32), []

    def route() -> str:
        with launch.observe(lambda call: seen.append(call.choice.route.name)):
            ml.conv(at.x, at.w, relation)
        return seen[-1]

    usual = route()
    other = "explicit_gemm"
    assert usual != other
    with ml.routes.only(other):
        assert route() == other
        inside = []
        thread = threading.Thread(target=lambda: inside.append(route()))
        thread.start()
        thread.join()
        assert inside == [usual]
        with ml.routes.only("grouped_gemm"):
            assert route() == "grouped_gemm"
        assert route() == other
    with pytest.raises(RuntimeError), ml.routes.only(other):
        raise RuntimeError
    assert route() == usual
