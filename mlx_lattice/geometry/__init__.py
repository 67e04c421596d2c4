"""Coordinate rows: order, uniqueness, look-up, neighbour tables and their views."""
