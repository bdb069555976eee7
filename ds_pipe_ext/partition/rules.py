"""The registered partitioners: DeepSpeed's own three and explicit boundaries."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..registry import partitioners
from . import solve
from .base import Layer


@partitioners.register("uniform")
def uniform(layers: Sequence[Layer], stages: int) -> list[int]:
    """Equal numbers of layers."""
    return solve.uniform(len(layers), stages)


@partitioners.register("parameters")
def parameters(layers: Sequence[Layer], stages: int) -> list[int]:
    """Numbers of parameters as even as possible."""
    return solve.balanced([layer.parameters for layer in layers], stages)


@partitioners.register("type")
def type_(layers: Sequence[Layer], stages: int, regex: str) -> list[int]:
    """Numbers of layers whose class name matches ``regex`` (any case, anywhere in the name) as even as possible.

    Raises:
        ValueError: if ``regex`` is not a regular expression or matches no layer.
    """
    try:
        pattern = re.compile(regex, re.IGNORECASE)
    except (re.error, TypeError) as error:
        raise ValueError(f"the partition 'type' needs a regular expression, got {regex!r}: {error}") from None
    weights = [int(bool(pattern.search(layer.name))) for layer in layers]
    if not any(weights):
        names = ", ".join(dict.fromkeys(layer.name for layer in layers))
        raise ValueError(f"the partition 'type:{regex}' matches no layer; the layers are: {names}")
    return solve.balanced(weights, stages)


@partitioners.register("boundaries")
def boundaries(layers: Sequence[Layer], stages: int, at: Sequence[int]) -> list[int]:
    """The boundaries as given: stage s holds the layers ``at[s] .. at[s + 1] - 1``."""
    return list(at)
