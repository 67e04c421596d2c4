"""The words of a rule, read as the CUDA kernels read them. Runs anywhere."""

import itertools

import numpy as np
import pytest

from mlx_lattice.backends.cuda.geometry import (
    PART_OFFSETS,
    PARTS_AT,
    TRANSPOSED,
    rule_kind,
    rule_words,
)


def source(words, k, group, x, kind, dims):
    """Where offset k of a group leads from a row, or None: the kernel's arithmetic."""
    first, count, last, step = group[:4]
    at, rest = list(x), [0] * dims
    for c in range(dims):
        if kind == TRANSPOSED:
            shift = words[4 + c]
            stride = 1 << shift if shift >= 0 else words[c]
            at[c], rest[c] = x[c] // stride, x[c] % stride
        else:
            at[c] = x[c] * words[c]
    if kind == TRANSPOSED:
        if rest[:-1] != group[8 : 7 + dims]:
            return None
        pair = words[words[10] + 2 * k : words[10] + 2 * k + 2]
        if rest[-1] != pair[1]:
            return None
        at[-1] += pair[0]
    else:
        at[-1] += last + (k - first) * step
    return [a + b for a, b in zip(at[:-1], group[4:], strict=False)] + at[-1:]


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("stride", ((1, 1, 1), (2, 2, 2), (3, 1, 4), (5,), (1, 6)))
@pytest.mark.parametrize("volume", (1, 2, 27, 64, 65, 200))
@pytest.mark.parametrize("shuffled", (False, True))
def test_every_offset_leads_to_its_row(volume, stride, transposed, shuffled):
    rng = np.random.default_rng(volume)
    dims = len(stride)
    grid = np.array(list(itertools.product(range(-100, 101), *[range(-2, 4)] * dims)))
    offsets = grid[:volume, -dims:] if dims > 1 else np.arange(volume)[:, None] - 9
    offsets = rng.permutation(offsets) if shuffled else offsets
    kind, offsets = rule_kind(tuple(map(tuple, offsets.tolist())), stride, transposed)
    words = rule_words(offsets, stride, kind)
    parts = words[PARTS_AT : PARTS_AT + -(-volume // PART_OFFSETS) + 1]
    seen = []
    for part, (start, end) in enumerate(itertools.pairwise(parts)):
        for r in range(start, end):
            group = words[words[9] + 12 * r :][:12]
            ks = range(group[0], group[0] + group[1])
            assert 1 <= group[1] <= 3
            assert all(k // PART_OFFSETS == part for k in ks)
            seen += ks
            for k, x in itertools.product(ks, rng.integers(-20, 20, (5, dims))):
                x, offset = x.tolist(), offsets[k]
                wanted = [a * s + b for a, s, b in zip(x, stride, offset, strict=True)]
                if kind == TRANSPOSED:
                    apart = [a - b for a, b in zip(x, offset, strict=True)]
                    wanted = [v // s for v, s in zip(apart, stride, strict=True)]
                    if any(v % s for v, s in zip(apart, stride, strict=True)):
                        wanted = None
                assert source(words, k, group, x, kind, dims) == wanted
    assert seen == list(range(volume))
    plain = words[words[11] :]
    assert plain == [v for offset in offsets for v in offset]


def test_a_cube_takes_a_run_a_column():
    cube = tuple(itertools.product((-1, 0, 1), repeat=3))
    words = rule_words(cube, (1, 1, 1), "UNIT")
    assert words[PARTS_AT : PARTS_AT + 2] == [0, 9]
    assert words[9] % 4 == 0


def test_far_offsets_go_by_64_bits():
    near = rule_words(((0, 1),), (1, 1), "UNIT")
    far = rule_words(((0, 1 << 30),), (1, 1), "UNIT")
    assert (near[8], far[8]) == (0, -1)
    assert max(map(abs, far[:-2])) < 1 << 30
