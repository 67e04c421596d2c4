"""TRELLIS.2: its decoders, encoder, flow models and samplers."""

from . import pipeline, transformer, vae
from .pipeline import *
from .transformer import *
from .vae import *

__all__ = [*pipeline.__all__, *transformer.__all__, *vae.__all__]
