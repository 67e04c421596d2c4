"""A boundary is recorded in a dry run, evaluated under a limit, else nothing."""

import mlx.core as mx

from mlx_lattice.memory.stages import boundary, evaluating, is_staged, recording


def pair() -> tuple[mx.array, mx.array]:
    return mx.ones((4, 3)) * 2, mx.ones(5) + 1


def was_lazy(array: mx.array) -> bool:
    """Whether evaluating it now takes memory."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.eval(array)
    mx.synchronize()
    return mx.get_active_memory() > before


def test_a_boundary_does_nothing_by_itself():
    x, _ = pair()
    boundary(x)
    assert not is_staged() and was_lazy(x)


def test_a_dry_run_records_and_leaves_lazy():
    x, y = pair()
    with evaluating(), recording([]) as record:
        assert is_staged()
        boundary(x, y)
        boundary(y)
    assert [len(arrays) for arrays in record] == [2, 1] and record[0][0] is x
    assert was_lazy(x) and was_lazy(y)


def test_a_limit_evaluates_where_it_stands():
    x, y = pair()
    with evaluating():
        assert is_staged()
        boundary(x)
        with evaluating(False):
            boundary(y)
    assert not is_staged() and not was_lazy(x) and was_lazy(y)
