"""Views of a relation: tables, edges, counts, CSRs, sorted rows, coverage."""

from collections import Counter

import cases
import mlx.core as mx
import numpy as np
import pytest
import reference as ref
from conftest import KINDS, multi_edges, pair

import mlx_lattice as ml
from mlx_lattice.geometry import lattice

GEOMETRIES = ("negative", "batches", "one", "empty")

# Kernels that need one, two, several and many words of a mask.
VOLUMES = (
    cases.Case("submanifold", 3, 1),
    cases.Case("submanifold", 3, 3),
    cases.Case("submanifold", 3, (2, 4, 4)),
    cases.Case("submanifold", 3, (3, 11, 1)),
    cases.Case("submanifold", 3, 4),
    cases.Case("submanifold", 3, 5),
    cases.Case("submanifold", 3, 7),
    cases.Case("forward", 3, 3, 2),
    cases.Case("generative", 3, 3, 2),
)


def edge_tuples(edges) -> list[tuple[int, ...]]:
    return [tuple(edge) for edge in np.array(edges).tolist()]


def assert_views(relation: ml.Relation, expected: ref.Relation) -> None:
    """Every view but the sorted one, against the oracle's list of edges."""
    edges = edge_tuples(expected.edges)
    assert edge_tuples(relation.edges) == edges
    assert (relation.n_edges, relation.known_edges) == (len(edges), len(edges))
    counts = expected.counts.tolist()
    assert relation.counts.tolist() == counts == list(relation.edge_counts)
    assert relation.counts.dtype == relation.edges.dtype == mx.int32
    groupings = (
        (relation.output_csr, 1, relation.n_out, (1, 2, 0)),
        (relation.input_csr, 0, relation.n_in, (0, 2, 1)),
        (relation.kernel_csr, 2, relation.volume, (2, 1, 0)),
    )
    for csr, column, groups, order in groupings:
        ordered = sorted(edges, key=lambda e, order=order: [e[c] for c in order])
        assert edge_tuples(csr.edges) == ordered
        degree = Counter(e[column] for e in edges)
        starts = np.cumsum([0] + [degree[g] for g in range(groups)])
        assert csr.indptr.tolist() == starts.tolist()
        assert csr.indptr.dtype == mx.int32
    if len({(o, k) for _, o, k in edges}) == len(edges):
        np.testing.assert_array_equal(np.array(relation.out_in), expected.out_in)
        assert relation.has_table


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_views(case, name):
    relation, expected = pair(case, name)
    assert_views(relation, expected)
    assert_views(relation.T, expected.T)
    assert relation.T.in_coords is relation.out_coords
    assert relation.T.keys == relation.keys[::-1]
    np.testing.assert_array_equal(np.array(relation.in_out), expected.T.out_in)
    twice = relation.T.T
    assert_views(twice, expected)
    assert twice.edges is relation.edges and twice.out_in is relation.out_in
    assert twice.T.output_csr is relation.T.output_csr


@pytest.mark.parametrize("seed", range(3))
def test_views_of_given_edges(seed):
    relation, expected = multi_edges(seed)
    assert_views(relation, expected)
    assert_views(relation.T, expected.T)
    assert_views(relation.T.T, expected)


def test_no_table_where_edges_share_a_row_and_offset():
    relation = ml.Relation.from_edges([0, 1], [0, 0], [0, 0], 2, 2, 1)
    assert not relation.has_table and relation.T.has_table
    assert relation.in_out.tolist() == [[0], [0]] == relation.T.out_in.tolist()
    for view in ("out_in", "sorted"):
        with pytest.raises(ValueError, match="several edges with one output row and"):
            getattr(relation, view)
    with pytest.raises(ValueError, match="several edges with one output row and"):
        relation.T.in_out  # noqa: B018


# Sorted rows


@pytest.mark.parametrize("name", ("negative", "surface", "one", "empty"))
@pytest.mark.parametrize("case", VOLUMES, ids=str)
def test_sorted_rows(case, name):
    """The table in the order of ranks, and the offsets that tiles of rows use."""
    both = pair(case, name, 70)
    for relation, expected in (both, (both[0].T, both[1].T)):
        table, view = expected.out_in, relation.sorted
        order = lattice.gray_order(mx.array(table >= 0))
        assert view.rows.tolist() == order.tolist() and view.rows.dtype == mx.int32
        ordered = np.array(view.table).reshape(-1, relation.volume)
        np.testing.assert_array_equal(ordered, table[np.array(order)])
        words = -(-relation.volume // 32)
        assert view.masks.shape == (-(-len(table) // 16), words)
        for tile in (16, 64):
            used = [
                np.flatnonzero((ordered[start : start + tile] >= 0).any(axis=0))
                for start in range(0, len(ordered), tile)
            ]
            assert view.tile_offsets(tile) == [offsets.tolist() for offsets in used]
    with pytest.raises(ValueError, match="tile must be a multiple of 16; got 24"):
        view.tile_offsets(24)


# Coverage


def assert_coverage(relation: ml.Relation, expected: ref.Relation) -> None:
    report = relation.coverage()
    assert (report.n_in, report.n_out) == (relation.n_in, relation.n_out)
    assert (report.volume, report.edges) == (relation.volume, len(expected.edges))
    for column, n, degrees, none in (
        (0, relation.n_in, report.in_degrees, report.unused_inputs),
        (1, relation.n_out, report.out_degrees, report.empty_outputs),
    ):
        degree = np.bincount(expected.edges[:, column], minlength=n)
        assert none.tolist() == np.flatnonzero(degree == 0).tolist()
        assert degrees == (tuple(np.bincount(degree).tolist()) if n else ())
        assert sum(degrees) == n


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_coverage(case, name):
    relation, expected = pair(case, name)
    assert_coverage(relation, expected)
    assert_coverage(relation.T, expected.T)


def test_coverage_reads_as_text():
    text = str(pair(cases.Case("forward", 3, 2, 3), "negative")[0].coverage())
    for part in ("edges from", "inputs with no edge", "outputs with no edge", "of 8"):
        assert part in text


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_repr_names_kind_kernel_and_sizes(case):
    relation, _ = pair(case)
    text = repr(relation)
    assert case.kind in text and str(relation.spec) in text
    assert f"{relation.n_in:,} -> {relation.n_out:,} rows" in text
    counted = relation.known_edges is not None  # some backends count with the table
    assert ("edges" in text) == counted
    assert f"{relation.n_edges:,} edges" in repr(relation)
    assert "transposed view" in repr(relation.T)
