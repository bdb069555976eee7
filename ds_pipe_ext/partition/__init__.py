"""Partitioners: pure functions ``(layers, stages, **options) -> boundaries`` that cut a list of layers into stages."""

from . import rules
from .base import Layer, resolve, split

__all__ = ["Layer", "resolve", "rules", "split"]
