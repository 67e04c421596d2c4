"""The commands of mlx-lattice that convert or run a net, one module each."""
