"""flash_attn's functions against attention of PyTorch, one sequence at a time."""

from itertools import pairwise

import pytest
from torch_scenes import close, gradients, torch

import mlx_lattice as ml
from mlx_lattice.compat import flash_attn

functional = torch.nn.functional
LENGTHS_Q, LENGTHS_K = (5, 0, 32, 23), (9, 4, 0, 39)


def starts(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(torch.int32)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def one_by_one(q, k, v, of_q, of_k, causal=False, window=(-1, -1), scale=None):
    """The definition, in float32; a query that sees no key gets 0."""
    results, sums = [], []
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = q.shape[1]
    k, v = (a.repeat_interleave(heads // a.shape[1], 1) for a in (k, v))
    for (a, b), (c, d) in zip(
        pairwise(of_q.tolist()), pairwise(of_k.tolist()), strict=True
    ):
        scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[c:d].float()) * scale
        apart = torch.arange(d - c)[None] - (
            torch.arange(b - a)[:, None] + d - c - b + a
        )
        if causal:
            scores = scores.masked_fill(apart > 0, -torch.inf)
        if window[0] >= 0:
            scores = scores.masked_fill(apart < -window[0], -torch.inf)
        if window[1] >= 0:
            scores = scores.masked_fill(apart > window[1], -torch.inf)
        sums.append(scores.logsumexp(-1))
        shares = torch.softmax(scores, -1).nan_to_num()
        results.append(torch.einsum("hqk,khd->qhd", shares, v[c:d].float()))
    return torch.cat(results).to(q.dtype), torch.cat(sums, 1)


def compare(y, expected, leaves, tolerance=1e-5):
    close(y, expected, tolerance)
    for got, other in zip(
        gradients(y, leaves), gradients(expected, leaves), strict=True
    ):
        close(got, other, tolerance)


PRECISIONS = ("float32", 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_packed_sequences(dtype, tolerance):
    kind = getattr(torch, dtype)
    qkv, cu = drawn(60, 3, 4, 16, dtype=kind), starts(LENGTHS_Q)
    y = flash_attn.flash_attn_varlen_qkvpacked_func(
        qkv, cu, max_seqlen=1024, dropout_p=0, softmax_scale=0.3
    )
    assert y.dtype == kind
    expected, _ = one_by_one(*qkv.unbind(1), cu, cu, scale=0.3)
    compare(y, expected, (qkv,), tolerance)
    by_place = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 32)
    close(by_place, one_by_one(*qkv.unbind(1), cu, cu)[0], tolerance)


@pytest.mark.parametrize("dtype, tolerance", PRECISIONS)
def test_queries_and_keys_of_other_lengths(dtype, tolerance):
    kind = getattr(torch, dtype)
    of_q, of_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    q, kv = drawn(60, 4, 16, dtype=kind), drawn(52, 2, 4, 16, dtype=kind)
    y = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, of_q, of_k, 32, 39)
    expected, _ = one_by_one(q, *kv.unbind(1), of_q, of_k)
    compare(y, expected, (q, kv), tolerance)
    plain = flash_attn.flash_attn_varlen_func(
        q, *kv.unbind(1), of_q, of_k, max_seqlen_q=32, max_seqlen_k=39
    )
    assert torch.equal(plain, y)


def test_fewer_heads_of_keys():
    cu = starts(LENGTHS_Q)
    q, k, v = drawn(60, 6, 8), drawn(60, 2, 8), drawn(60, 2, 8)
    y = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu.clone(), 32, 32)
    compare(y, one_by_one(q, k, v, cu, cu)[0], (q, k, v))


@pytest.mark.parametrize(
    "causal, window", ((True, (-1, -1)), (False, (2, 1)), (True, (3, 0)))
)
def test_causal_and_windows(causal, window):
    of_q, of_k = starts(LENGTHS_Q), starts(LENGTHS_K)
    q, kv = drawn(60, 4, 16), drawn(52, 2, 4, 16)
    y, sums, nothing = flash_attn.flash_attn_varlen_kvpacked_func(
        q, kv, of_q, of_k, 32, 39, causal=causal, window_size=window,
        return_attn_probs=True,
    )  # fmt: skip
    expected, others = one_by_one(q, *kv.unbind(1), of_q, of_k, causal, window)
    compare(y, expected, (q, kv))
    assert nothing is None and sums.shape == (4, 60)
    torch.testing.assert_close(sums, others)
    qkv = drawn(60, 3, 4, 16)
    y = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, of_q, 32, causal=True)
    close(y, one_by_one(*qkv.unbind(1), of_q, of_q, True)[0])


@pytest.mark.parametrize("causal", (False, True))
def test_batches(causal):
    qkv = drawn(3, 7, 3, 4, 16)
    cu = starts([7] * 3)
    expected, sums = one_by_one(*qkv.flatten(0, 1).unbind(1), cu, cu, causal)
    expected = expected.unflatten(0, (3, 7))
    y = flash_attn.flash_attn_qkvpacked_func(qkv, causal=causal)
    compare(y, expected, (qkv,))
    close(flash_attn.flash_attn_func(*qkv.unbind(2), causal=causal), y)
    close(flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:]),
          flash_attn.flash_attn_func(*qkv.unbind(2)))  # fmt: skip
    _, found, _ = flash_attn.flash_attn_func(
        *qkv.unbind(2), causal=causal, return_attn_probs=True
    )
    torch.testing.assert_close(found, sums.unflatten(1, (3, 7)).transpose(0, 1))


def test_dropout_leaves_some_probabilities_out():
    qkv, cu = torch.randn(60, 3, 4, 16), starts(LENGTHS_Q)
    whole = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 32)
    some = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 32, dropout_p=0.5)
    assert some.shape == whole.shape and not torch.allclose(some, whole)


def test_changed_lengths_are_seen():
    qkv, cu = torch.randn(60, 3, 4, 16), starts(LENGTHS_Q)
    flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 32)
    cu[1:3] += 6
    y = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 32)
    close(y, one_by_one(*qkv.unbind(1), cu, cu)[0])
    with torch.inference_mode():
        cu = cu.clone()
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 32)
        cu[1] -= 3
        y = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 32)
        close(y, one_by_one(*qkv.unbind(1), cu, cu)[0])


def test_attention_is_traced():
    qkv, cu = torch.randn(60, 3, 4, 16), starts(LENGTHS_Q)
    with ml.trace() as trace:
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 32)
    assert len(trace.attention) == 1


def test_no_rows():
    cu = torch.zeros(3, dtype=torch.int32)
    qkv = drawn(0, 3, 4, 16)
    y = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 1)
    assert y.shape == (0, 4, 16)
    y.sum().backward()
    some = starts((2, 3))
    q, kv = torch.randn(5, 4, 16), torch.zeros(0, 2, 4, 16)
    z = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, some, cu, 3, 1)
    assert z.shape == (5, 4, 16) and (z == 0).all()


def test_errors():
    qkv, cu = torch.randn(60, 3, 4, 16), starts(LENGTHS_Q)
    call = flash_attn.flash_attn_varlen_qkvpacked_func
    with pytest.raises(
        ValueError, match="must end with 60, the number of rows; got 59"
    ):
        call(qkv, torch.tensor([0, 5, 59], dtype=torch.int32), 60)
    for wrong in ([1, 60], [0, 40, 20, 60]):
        with pytest.raises(ValueError, match="begin with 0 and never fall"):
            call(qkv, torch.tensor(wrong), 60)
    with pytest.raises(ValueError, match=r"must be \(B \+ 1,\)"):
        call(qkv, torch.tensor(60), 60)
    with pytest.raises(ValueError, match="4 sequences and cu_seqlens_k 1"):
        q, k, v = qkv.unbind(1)
        flash_attn.flash_attn_varlen_func(q, k, v, cu, torch.tensor([0, 60]), 1, 1)
    for options in ({"softcap": 2.0}, {"alibi_slopes": torch.ones(4)}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(options))} is not"):
            call(qkv, cu, 32, **options)
    with pytest.raises(NotImplementedError, match="use flash_attn_func"):
        flash_attn.flash_attn_with_kvcache(qkv)
    with pytest.raises(RuntimeError, match="one device; got cpu and meta"):
        flash_attn.flash_attn_varlen_func(
            qkv[:, 0], qkv[:, 1].to("meta"), qkv[:, 2], cu, cu, 32, 32
        )
