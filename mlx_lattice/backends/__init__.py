"""Native kernels behind the routes and the geometry: one module per backend family."""
