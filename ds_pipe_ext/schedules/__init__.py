"""Schedules: pure functions ``(shape, **options) -> Plan``, one file each, registered by name."""

from . import gpipe, one_f_one_b, zb_h1, zb_h2
from .base import Shape, build, per_rank

__all__ = ["Shape", "build", "gpipe", "one_f_one_b", "per_rank", "zb_h1", "zb_h2"]
