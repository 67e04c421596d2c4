"""Reference nets built from mlx_lattice.nn."""
