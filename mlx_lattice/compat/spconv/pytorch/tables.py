"""spconv.pytorch.tables: modules on lists of tensors."""

from .modules import AddTable, AddTableMisaligned, ConcatTable, JoinTable

__all__ = ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable"]
