"""Metal: planners, geometry, and the thresholds of Apple GPUs."""
