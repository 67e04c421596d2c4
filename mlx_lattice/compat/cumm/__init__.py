"""cumm, of which nets use ``tensorview`` to hand NumPy's arrays to spconv."""

__version__ = "0.7.11"
