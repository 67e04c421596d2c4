"""tensor_ops on Metal against the oracle, on the CPU, with every check but lint."""

import cases
import pytest
import reference as ref
from conftest import KINDS, Numbers, pair
from metal_checks import PASSES, VOLUMES, check, check_bias, checked, host
from test_metal_matrix import CHANNELS, WIDE, splitting  # noqa: F401

from mlx_lattice.backends import metal_matrix

host.require()

ROUTE = "tensor_ops"
DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("case", (*KINDS, *VOLUMES), ids=str)
def test_relations(case, pass_):
    check(ROUTE, pair(case, n=30), 12, 20, pass_, "float16")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("channels", (*CHANNELS, *WIDE), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels(dtype, channels, pass_):
    check(ROUTE, pair(KINDS[0]), *channels, pass_, dtype)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("n", (15, 17, 64, 65, 150))
def test_rows_around_a_tile(n, pass_, splitting):  # noqa: F811
    check(
        ROUTE,
        pair(cases.Case("submanifold", 2, 3), "block", n),
        9,
        33,
        pass_,
        "float16",
    )


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("geometry", ("empty", "one"))
def test_no_row_and_one_row(geometry, pass_):
    check(ROUTE, pair(KINDS[3], geometry), 10, 3, pass_, "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype):
    check_bias(ROUTE, pair(KINDS[0]), 12, 35, dtype)


def test_the_same_numbers_as_simdgroup_matrices():
    relation, _ = pair(KINDS[0], n=100)
    numbers = Numbers(relation, 40, 70, 1, "float16")
    arguments = numbers.x, numbers.w, relation, 1, False
    first, second = (
        checked(metal_matrix.CONV[route], *arguments)
        for route in (ROUTE, "sorted_implicit_gemm")
    )
    ref.assert_close(first, ref.to_numpy(second), "float16")


@pytest.mark.parametrize("pass_", PASSES)
def test_float32_is_refused(pass_):
    with pytest.raises(ValueError, match="float16 and bfloat16; got float32"):
        check(ROUTE, pair(KINDS[0]), 4, 6, pass_, "float32")
