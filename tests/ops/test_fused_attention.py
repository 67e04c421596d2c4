"""MLX's attention: which calls it fuses, and what a trace and explain say of them."""

import io

import mlx.core as mx
import pytest

import mlx_lattice as ml
from mlx_lattice import backends
from mlx_lattice.checks import dtype_name
from mlx_lattice.inspect.trace import AttentionRecord
from mlx_lattice.ops.attention_calls import WIDTHS, Call


def call(patch=1024, channels=16, dtype=mx.float16, values=None, **facts):
    sizes = 10_240 // patch, 4, 4, patch, patch, channels, values or channels
    return Call(*sizes, dtype_name(dtype), False)._replace(**facts)


def on_mac(monkeypatch, training=False):
    """Decide as on a Mac: its kernel takes WIDTHS, outside of training."""
    takes = property(
        lambda c: not training and c.channels == c.values in WIDTHS and c.queries > 8
    )
    monkeypatch.setattr(Call, "fused", takes)


def traced(function):
    with backends.portable_only(), ml.trace() as t:
        mx.eval(function())
    return [record.attention for record in t.attention]


def scan(n=40):
    cells = mx.arange(n, dtype=mx.int32)
    coords = mx.stack([cells // 30, cells, cells % 7, cells % 3], axis=1)
    return ml.SparseTensor(coords, mx.random.normal((n, 32)))


@pytest.mark.parametrize(
    "training, form",
    ((False, ", fused"), (True, ", composed by MLX")),
)
def test_a_trace_says_what_runs(monkeypatch, training, form):
    x = scan()
    q = mx.random.normal((len(x), 2, 64))
    with monkeypatch.context() as patched:
        on_mac(patched, training)
        (told,) = traced(lambda: ml.ops.full_attention(q, q, q, x))
        tokens = mx.random.normal((2, 9, 2, 64))
        (other,) = traced(lambda: ml.ops.cross_attention(q, tokens, tokens, x))
    assert told.form == form and form in str(told) and other.form == form
    assert told.fused == (0 if training else told.calls)
    found = AttentionRecord("call", told).as_dict()
    assert found["fused"] == told.fused


@pytest.mark.parametrize("channels", (16, 64))
@pytest.mark.parametrize("name", ("m1-max", "m5", "h200", "cpu"))
def test_attention_is_explained_for_any_device(name, channels):
    n = 2100
    coords = mx.stack([*[mx.zeros((n,), mx.int32)] * 3, mx.arange(n)], axis=1)
    x = ml.SparseTensor(coords, mx.zeros((n, 2 * channels), dtype=mx.float16))
    layer = ml.nn.SparseAttention(2 * channels, 2, patch=1024)
    layer.set_dtype(mx.float16)
    found = ml.explain_attention(x, layer, device=name)
    text = str(found)
    assert name in text and len(found.attended) == 1
    if name == "cpu":
        assert "the CPU's kernel" in text or "composed by MLX" in text
        return
    large = max(found.forms[0], key=lambda form: form.call.keys)
    assert large.call[3:7] == (1024, 1024, channels, channels)
    assert large.fused == (name == "h200" or channels == 64)


def test_what_attends_to_nothing_is_refused():
    x = scan()
    with pytest.raises(ValueError, match="attends to nothing; ml.explain explains"):
        ml.explain_attention(x, ml.nn.Linear(32, 4))


def asked(c: Call) -> bool:
    """Whether MLX makes one primitive of a call."""
    q, k = (c.groups, c.heads, c.queries), (c.groups, c.kv_heads, c.keys)
    shapes = (*q, c.channels), (*k, c.channels), (*k, c.values)
    dtype = getattr(mx, c.dtype)
    given = [mx.zeros(shape, dtype=dtype) for shape in shapes]
    mask = mx.zeros((1, 1, 1, c.keys), dtype=dtype) if c.masked else None
    y = mx.fast.scaled_dot_product_attention(*given, scale=1.0, mask=mask)
    text = io.StringIO()
    mx.export_to_dot(text, y)
    return "ScaledDotProductAttention" in text.getvalue()


def test_mlx_fuses_what_is_said_on_a_gpu():
    if mx.default_device() != mx.gpu:
        pytest.skip("it asks MLX on a GPU")
    for channels in (16, 48, 64, 72, 80, 96, 100, 128):
        for queries in (64, 4):
            for masked in (False, True):
                each = call(64, channels, queries=queries, masked=masked)
                assert asked(each) == each.fused, each
    seen = []

    def loss(x):
        seen.append((asked(call(64, 64)), call(64, 64).fused))
        return x.sum()

    mx.grad(loss)(mx.ones((2,)))
    assert seen[0][0] == seen[0][1]
