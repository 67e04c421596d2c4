"""flash_attn: attention in sequences of their own lengths, and in batches.

Sequences of different lengths run by mlx_lattice, which attends in all of them at once.
A batch of equal sequences stays in PyTorch, whose own attention is fused; so do
``causal``, ``window_size``, ``dropout_p`` and ``return_attn_probs``, one sequence at a
time. Results have the dtype of the queries, which may be float32 too.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import mlx.core as mx
import torch
from torch.nn import functional

from .. import ops
from ..tensor import SparseTensor
from . import bridge

__version__ = "2.7.4"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

EVERYWHERE = (-1, -1)


class _Sequences:
    """Where sequences lie in packed rows.

    Attributes:
        starts: (B + 1) ints.
    """

    def __init__(self, cu_seqlens: torch.Tensor):
        self.starts = cu_seqlens.tolist()
        self._like: SparseTensor | None = None
        self._slots: mx.array | None = None

    @property
    def sizes(self) -> list[int]:
        """The length of each sequence."""
        return [b - a for a, b in pairwise(self.starts)]

    @property
    def like(self) -> SparseTensor:
        """A tensor whose batch elements are the sequences."""
        if self._like is None:
            count, rows = len(self.starts) - 1, self.starts[-1]
            place = mx.arange(rows, dtype=mx.int32)
            ends = mx.array(self.starts[1:], dtype=mx.int32)
            sequence = mx.searchsorted(ends, place, "right").astype(mx.int32)
            coords = mx.stack([sequence, place], axis=1)
            feats = mx.zeros((rows, 1))
            self._like = SparseTensor(coords, feats, batch_size=max(1, count)).eval()
        return self._like

    @property
    def slots(self) -> mx.array:
        """(B, M) int32: rows of each sequence, any behind them."""
        if self._slots is None:
            starts = mx.array(self.starts[:-1], dtype=mx.int32)[:, None]
            place = mx.arange(max(self.sizes, default=0), dtype=mx.int32)
            last = max(0, self.starts[-1] - 1)
            self._slots = mx.minimum(starts + place, last)
            mx.eval(self._slots)
        return self._slots


_sequences = bridge.ByTensor(_Sequences)


def _sequences_of(cu_seqlens: torch.Tensor, rows: int, name: str) -> _Sequences:
    """Return the sequences of a tensor; raise if they do not cover all rows."""
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError(f"{name} must be (B + 1,) integers that begin with 0")
    found = _sequences[cu_seqlens]
    starts = found.starts
    if starts[0] != 0 or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"{name} must begin with 0 and never fall; got {starts}")
    if starts[-1] != rows:
        raise ValueError(
            f"{name} must end with {rows}, the number of rows; got {starts[-1]}"
        )
    return found


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attend from the queries of each sequence to its keys.

    Args:
        q: (N, heads, D).
        k, v: (M, kv_heads, D); ``kv_heads`` divides ``heads``.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) integers: where each sequence begins.
        max_seqlen_q, max_seqlen_k, deterministic: ignored.
        dropout_p: of the probabilities.
        softmax_scale: factor of the scores, by default ``D ** -0.5``.
        causal: let a query see the keys up to its own place, counted from the end.
        window_size: keys before and behind a query's place that it sees; -1 for all.
        softcap, alibi_slopes, block_table: not provided.
        return_attn_probs: also return the logarithms of the sums, and None.

    Returns:
        (N, heads, D); or that, (heads, N) float32, and None.
    """
    _expect_absent(softcap, alibi_slopes, block_table)
    bridge.device_of(q, k, v)
    of_q = _sequences_of(cu_seqlens_q, len(q), "cu_seqlens_q")
    of_k = of_q
    if cu_seqlens_k is not cu_seqlens_q:
        of_k = _sequences_of(cu_seqlens_k, len(k), "cu_seqlens_k")
    if len(of_q.starts) != len(of_k.starts):
        raise ValueError(
            f"cu_seqlens_q has {len(of_q.starts) - 1} sequences and cu_seqlens_k "
            f"{len(of_k.starts) - 1}"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rule = causal, tuple(window_size), dropout_p
    if rule != (False, EVERYWHERE, 0.0) or return_attn_probs:
        return _one_by_one(q, k, v, of_q, of_k, scale, rule, return_attn_probs)
    if of_q.starts == of_k.starts:
        return bridge.call(
            lambda *arrays: ops.full_attention(*arrays, of_q.like, scale=scale), q, k, v
        )
    return bridge.call(lambda *arrays: _cross(*arrays, of_q, of_k, scale), q, k, v)


def _cross(q, k, v, of_q: _Sequences, of_k: _Sequences, scale: float) -> mx.array:
    """Attend to sequences of other lengths than the queries have."""
    if not len(q) or not len(k):
        return mx.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    lengths, slots = mx.array(of_k.sizes, dtype=mx.int32), of_k.slots
    options = {"lengths": lengths, "scale": scale}
    return ops.cross_attention(q, k[slots], v[slots], of_q.like, **options)


def _one_by_one(q, k, v, of_q, of_k, scale, rule, with_sums):
    """Attend in PyTorch, a sequence at a time."""
    results, sums = [], []
    for (a, b), (c, d) in zip(
        pairwise(of_q.starts), pairwise(of_k.starts), strict=True
    ):
        y, lse = _attend(q[None, a:b], k[None, c:d], v[None, c:d], scale, rule)
        results.append(y[0])
        sums.append(lse[0] if with_sums else None)
    result = torch.cat(results) if results else q.new_zeros(q.shape)
    return (result, torch.cat(sums, 1), None) if with_sums else result


def _attend(q, k, v, scale: float, rule: tuple) -> tuple[torch.Tensor, object]:
    """Return (B, N, heads, D) by PyTorch's attention, and a lazy (B, heads, N) sum."""
    causal, window, dropout = rule
    heads, rows, keys = q.shape[2], q.shape[1], k.shape[1]
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    if k.shape[1] != heads:
        k, v = (a.repeat_interleave(heads // a.shape[1], 1) for a in (k, v))
    mask = _mask(rows, keys, causal, window, q.device)
    if not rows or not keys:
        y = v.new_zeros((*q.shape[:-1], v.shape[-1]))
    else:
        options = {"attn_mask": mask, "dropout_p": dropout, "scale": scale}
        y = functional.scaled_dot_product_attention(q, k, v, **options)
    if mask is not None:  # a query that sees no key gets 0
        y = y.masked_fill(~mask.any(1)[:, None], 0)
    return y.transpose(1, 2), _Sums(q, k, scale, mask)


class _Sums:
    """The logarithms of the sums of a softmax, computed if they are asked for."""

    def __init__(self, q, k, scale: float, mask: torch.Tensor | None):
        self._arguments = q, k, scale, mask

    def __getitem__(self, index: object) -> torch.Tensor:
        q, k, scale, mask = self._arguments
        scores = q.float() @ k.float().transpose(-1, -2) * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.logsumexp(-1)[index]


def _mask(rows: int, keys: int, causal: bool, window: tuple[int, int], device):
    """Return (rows, keys) bool of the keys that each query sees, or None for all."""
    left, right = window
    right = 0 if causal else right
    if left < 0 and right < 0:
        return None
    place = torch.arange(rows, device=device)[:, None] + keys - rows
    apart = torch.arange(keys, device=device) - place
    seen = torch.ones((rows, keys), dtype=torch.bool, device=device)
    if left >= 0:
        seen &= apart >= -left
    if right >= 0:
        seen &= apart <= right
    return seen


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend among the rows of each sequence.

    Args:
        qkv: (N, 3, heads, D): queries, keys and values.
        cu_seqlens: (B + 1,) integers: where each sequence begins.
        max_seqlen: ignored.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs: those of ``flash_attn_varlen_func``.

    Returns:
        (N, heads, D), or what ``return_attn_probs`` adds.
    """
    rule = causal, tuple(window_size), dropout_p, return_attn_probs
    if rule == (False, EVERYWHERE, 0.0, False):
        _expect_absent(softcap, alibi_slopes)
        rows = _sequences_of(cu_seqlens, len(qkv), "cu_seqlens")
        scale = qkv.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        return bridge.call(
            lambda a: ops.full_attention(a, None, None, rows.like, scale=scale), qkv
        )
    q, k, v = qkv.unbind(1)
    sizes = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    last = deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, *sizes, *options, *last)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *args: object,
    **options: object,
) -> Any:
    """Attend as ``flash_attn_varlen_func`` with keys and values (M, 2, kv_heads, D)."""
    sizes = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, *kv.unbind(1), *sizes, *args, **options)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend in a batch of sequences of one length, by PyTorch's attention.

    Args:
        q: (B, N, heads, D).
        k, v: (B, M, kv_heads, D); ``kv_heads`` divides ``heads``.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs: those of ``flash_attn_varlen_func``.

    Returns:
        (B, N, heads, D); or that, (B, heads, N) float32, and None.
    """
    _expect_absent(softcap, alibi_slopes)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    y, sums = _attend(q, k, v, scale, (causal, tuple(window_size), dropout_p))
    return (y, sums[:], None) if return_attn_probs else y


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, *args: object, **options: object
) -> Any:
    """Attend as ``flash_attn_func`` with (B, N, 3, heads, D)."""
    return flash_attn_func(*qkv.unbind(2), *args, **options)


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *args: object, **options: object
) -> Any:
    """Attend as ``flash_attn_func`` with keys and values (B, M, 2, kv_heads, D)."""
    return flash_attn_func(q, *kv.unbind(2), *args, **options)


def flash_attn_with_kvcache(*_: object, **__: object) -> Any:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "flash_attn_with_kvcache is not provided; use flash_attn_func with the whole "
        "keys and values"
    )


def _expect_absent(softcap: float, alibi_slopes: object, block_table: object = None):
    given = {"softcap": softcap, "alibi_slopes": alibi_slopes}
    given["block_table"] = block_table
    for name, value in given.items():
        if value is not None and not (isinstance(value, float | int) and value == 0):
            raise NotImplementedError(
                f"flash_attn's {name} is not provided; use "
                "torch.nn.functional.scaled_dot_product_attention with attn_mask"
            )
