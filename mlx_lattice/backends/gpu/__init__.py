"""What Metal and CUDA share: kernels, and the launches of each family."""
