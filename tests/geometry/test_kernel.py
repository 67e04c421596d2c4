"""KernelSpec: offsets of both rules, output shapes, and what it refuses."""

import pytest
import reference as ref

from mlx_lattice import KernelSpec

BOXES = [
    # dims, size, stride, padding, dilation
    (1, 3, 1, None, 1),
    (1, 4, 2, None, 3),
    (2, (3, 2), (2, 1), None, (1, 2)),
    (2, (5, 4), 1, (2, 0), (2, 1)),
    (3, 3, 1, None, 1),
    (3, 3, 2, 1, 2),
    (3, (1, 2, 3), (1, 2, 3), (0, 1, 2), 1),
    (3, 7, 1, None, 1),
    (4, 2, 2, None, 1),
    (4, (1, 3, 2, 1), 1, 1, 1),
]


@pytest.mark.parametrize(("d", "size", "stride", "padding", "dilation"), BOXES)
def test_offsets_of_a_box(d, size, stride, padding, dilation):
    spec = KernelSpec.of(
        d, kernel_size=size, stride=stride, padding=padding, dilation=dilation
    )
    expected = ref.kernel_offsets(size, d, dilation=dilation, padding=padding)
    assert list(map(list, spec.offsets)) == expected.tolist()
    assert spec.volume == len(expected) and spec.dims == d
    assert spec.stride == ref.per_axis(stride, d)
    assert spec.origin == ref.effective_padding(size, dilation, padding, d)


@pytest.mark.parametrize(("d", "size", "stride", "padding", "dilation"), BOXES)
@pytest.mark.parametrize("extent", (0, 1, 2, 7, 16))
def test_output_shapes(d, size, stride, padding, dilation, extent):
    spec = KernelSpec.of(
        d, kernel_size=size, stride=stride, padding=padding, dilation=dilation
    )
    shape, facts = (extent,) * d, (size, stride, padding, dilation)
    cells = tuple(-(-extent // s) for s in ref.per_axis(stride, d))
    expected = ref.conv_shape(shape, *facts)
    if extent and 0 in expected:  # as PyTorch refuses it
        with pytest.raises(ValueError, match=r"reaches over \d+ cells on axis \d"):
            spec.output_shape(shape, "reach")
    else:
        assert spec.output_shape(shape, "reach") == expected
    assert spec.output_shape(shape, "cell") == cells
    if extent:
        made = spec.transposed_output_shape(shape)
        assert made == ref.conv_transpose_shape(shape, *facts)


def test_custom_offsets_keep_their_order():
    offsets = [(0, 0), (3, -1), (-2, 5)]
    spec = KernelSpec.of(2, offsets=offsets, stride=2)
    assert spec.offsets == tuple(offsets) and spec.volume == 3
    assert spec == KernelSpec.of(2, offsets=[list(o) for o in offsets], stride=(2, 2))
    assert hash(spec) != hash(KernelSpec.of(2, offsets=offsets[::-1], stride=2))


@pytest.mark.parametrize(
    ("arguments", "pointwise", "symmetric"),
    (
        ({"kernel_size": 1}, True, True),
        ({"kernel_size": 1, "stride": 2}, False, True),
        ({"offsets": [(0, 0, 0)]}, True, True),
        ({"kernel_size": 3}, False, True),
        ({"kernel_size": 3, "padding": 0}, False, False),
        ({"kernel_size": 2}, False, False),
        ({"offsets": [(0, 0, 1), (0, 0, -1)]}, False, True),
    ),
    ids=str,
)
def test_pointwise_and_symmetric(arguments, pointwise, symmetric):
    spec = KernelSpec.of(3, **arguments)
    assert spec.is_pointwise is pointwise
    assert spec.is_symmetric is symmetric


@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        ({"kernel_size": 3}, "3x3x3"),
        ({"kernel_size": 2, "stride": 2}, "2x2x2, stride 2"),
        ({"kernel_size": (3, 1, 1), "padding": 0}, "3x1x1, padding 0"),
        ({"stride": (2, 1, 1), "dilation": 2}, "3x3x3, stride (2, 1, 1), dilation 2"),
        ({"offsets": [(0, 0, 0), (0, 0, 1)]}, "2 offsets"),
    ),
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_text(arguments, text):
    assert str(KernelSpec.of(3, **arguments)) == text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    (
        ({"kernel_size": (3, 3)}, r"kernel_size must be an int or 3 ints.*\(3, 3\)"),
        ({"kernel_size": 0}, "kernel_size must be at least 1 on every axis"),
        ({"kernel_size": 2.5}, "kernel_size must be an int or 3 ints.*2.5"),
        ({"stride": (1, 0, 1)}, r"stride must be at least 1.*\(1, 0, 1\)"),
        ({"stride": "2"}, "stride must be an int"),
        ({"dilation": 0}, "dilation must be at least 1"),
        ({"padding": -1}, "padding must be at least 0"),
        ({"offsets": []}, "offsets must be a non-empty list of 3-tuples"),
        ({"offsets": [(0, 0)]}, "offsets must be a non-empty list of 3-tuples"),
        (
            {"offsets": [(0, 0, 1), (1, 0, 0), (0, 0, 1)]},
            r"offsets must be distinct; \(0, 0, 1\) comes twice",
        ),
        ({"offsets": [(0, 0, 0)], "padding": 1}, "offsets and padding were both given"),
    ),
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        KernelSpec.of(3, **arguments)
