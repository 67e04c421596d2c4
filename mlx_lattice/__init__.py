"""Sparse convolution for MLX."""
