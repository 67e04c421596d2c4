"""spconv.pytorch.hash: its table has no counterpart here."""

from __future__ import annotations


class HashTable:
    """spconv's hash table; raises NotImplementedError."""

    def __init__(self, *_: object, **__: object):
        raise NotImplementedError(
            "spconv.pytorch.hash.HashTable is not provided; use torch.unique and "
            "torch.searchsorted, or functional.sparse_add to add tensors"
        )
