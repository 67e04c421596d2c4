"""CUDA: planners, geometry, compilation, and the thresholds of NVIDIA GPUs."""
