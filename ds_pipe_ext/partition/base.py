"""What a partitioner is, how the choice of one is written, and the check that every result passes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..registry import nearest, partitioners


class Layer(NamedTuple):
    """One layer as a partitioner sees it: class name, number of parameters."""

    name: str
    parameters: int


def resolve(choice: Any, where: str = "partition") -> tuple[str, dict[str, Any]]:
    """Registered name and options of a choice as it is written in the configuration.

    Args:
        choice: a name, ``"best"`` (DeepSpeed's default: ``parameters``), ``"type:regex"``, a list of boundaries, or
            ``{"name": ..., option: value}``.
        where: what to call it in errors.

    Raises:
        ValueError: if there is no such partitioner, or it does not take these options.
    """
    if isinstance(choice, str):
        name, colon, regex = choice.partition(":")
        if colon and name.lower() == "type":
            name, options = "type", {"regex": regex}
        else:
            name, options = ("parameters" if choice.lower() == "best" else choice), {}
    elif isinstance(choice, Mapping):
        options = dict(choice)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise ValueError(f"{where}.name must be the name of a partitioner, got {name!r}; known: {_known()}")
    elif isinstance(choice, Sequence):
        name, options = "boundaries", {"at": list(choice)}
    else:
        raise ValueError(f"{where} is {choice!r}; allowed: a name ({_known()}), 'type:regex', a list of boundaries such "
                         "as [0, 3, 8, 10], or an object with a name and options")
    if name not in partitioners.names():
        raise ValueError(f"{where}: unknown partitioner {name!r}{nearest(name, ['best', *partitioners.names()])}; known: "
                         f"{_known()}")
    partitioners.check_options(name, options, where=where, given=2)
    if name == "boundaries":
        _check_boundaries(options["at"], where)
    elif name == "type":
        _check_regex(options["regex"], where)
    return name, options


def split(choice: Any, layers: Sequence[Layer], stages: int) -> list[int]:
    """Cuts ``layers`` into ``stages`` and checks the result, whoever wrote the partitioner.

    Args:
        choice: as :func:`resolve` takes it.
        layers: the model's layers in order.
        stages: number of stages.

    Returns:
        ``stages + 1`` ints: stage s holds the layers ``result[s] .. result[s + 1] - 1``; no stage is empty.

    Raises:
        ValueError: if the choice is not valid, or gives something else.
    """
    layers = list(layers)
    if stages < 1:
        raise ValueError(f"a model is split into at least one stage, got {stages}")
    name, options = resolve(choice)
    if len(layers) < stages:
        raise ValueError(f"the model has {len(layers)} layers, too few for {stages} stages: every stage needs at least "
                         "one; use fewer stages or a model with more layers")
    return verify(name, partitioners.get(name)(layers, stages, **options), len(layers), stages)


def verify(name: str, boundaries: Sequence[int], layers: int, stages: int) -> list[int]:
    """The boundaries as plain ints, or ValueError if they do not cut ``layers`` layers into ``stages`` non-empty stages."""
    result = [int(boundary) for boundary in boundaries]
    what = f"the partition {name!r} gave {result}"
    if len(result) != stages + 1:
        raise ValueError(f"{what}: {len(result)} boundaries, but {stages} stages need {stages + 1}")
    if result[0] != 0 or result[-1] != layers:
        raise ValueError(f"{what}: it must begin at 0 and end at {layers}, the number of layers")
    for stage, (start, stop) in enumerate(zip(result, result[1:])):
        if stop <= start:
            raise ValueError(f"{what}: stage {stage} is empty ({start} .. {stop}); boundaries must strictly increase")
    return result


def _check_boundaries(at: Any, where: str) -> None:
    allowed = "one int more than stages, beginning at 0, strictly increasing, such as [0, 3, 8, 10]"
    if isinstance(at, (str, bytes)) or not isinstance(at, Sequence):
        raise ValueError(f"{where}: boundaries are {allowed}; got {at!r}")
    for index, value in enumerate(at):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{where}[{index}] is {value!r}, not an int; boundaries are {allowed}")
    if len(at) < 2 or at[0] != 0:
        raise ValueError(f"{where} is {list(at)}; boundaries are {allowed}")
    for index in range(1, len(at)):
        if at[index] <= at[index - 1]:
            raise ValueError(f"{where}[{index}] is {at[index]}, not above {at[index - 1]} before it (stage {index - 1} "
                             f"would be empty); boundaries are {allowed}")


def _check_regex(regex: Any, where: str) -> None:
    try:
        re.compile(regex)
    except (re.error, TypeError) as error:
        raise ValueError(f"{where}: 'type' needs a regular expression, as in 'type:block', got {regex!r}: {error}") from None
    if not regex:
        raise ValueError(f"{where}: 'type:' needs a regular expression behind the colon, as in 'type:block'")


def _known() -> str:
    return ", ".join(["best", *partitioners.names()])
