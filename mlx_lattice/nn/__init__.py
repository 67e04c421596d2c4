"""Modules over sparse tensors, in the manner of mlx.nn."""
