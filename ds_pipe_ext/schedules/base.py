"""How a schedule is written: ``Shape`` in, ``Plan`` out; ``per_rank`` lifts a generator of one rank's operations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..plan.check import check
from ..plan.ir import Op, Overlap, Plan
from ..registry import nearest, schedules


class Shape(NamedTuple):
    """What a schedule is planned for: pipeline ranks and micro-batches of one step."""

    ranks: int
    microbatches: int


def per_rank(generate: Callable[..., Iterator[Op | Overlap]]) -> Callable[..., Plan]:
    """Lifts ``generate(r, p, m, **options)``, which yields rank ``r``'s operations, to a schedule with one stage a rank."""

    parameters = list(inspect.signature(generate).parameters.values())

    @functools.wraps(generate)
    def schedule(shape: Shape, **options) -> Plan:
        p, m = shape
        lines = tuple(tuple(generate(r, p, m, **options)) for r in range(p))
        return Plan(generate.__name__, lines, tuple(range(p)), m)

    first = inspect.Parameter("shape", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    schedule.__signature__ = inspect.Signature([first, *parameters[3:]])
    return schedule


def build(name: str, shape: Shape, **options) -> Plan:
    """The checked plan of a registered schedule.

    Raises:
        ValueError: unknown name, impossible shape, or options that the schedule does not take.
        PlanError: if the schedule writes a plan that cannot run.
    """
    if shape.ranks < 1 or shape.microbatches < 1:
        raise ValueError(f"a schedule needs at least one rank and one micro-batch, got {shape.ranks} and "
                         f"{shape.microbatches}")
    function = schedules.get(name)
    check_options(name, options)
    plan = function(shape, **options)
    plan = Plan(name, plan.ranks, plan.placement, plan.microbatches)
    if plan.microbatches != shape.microbatches or plan.n_ranks != shape.ranks:
        raise ValueError(f"the schedule {name!r} planned {plan.n_ranks} ranks and {plan.microbatches} micro-batches "
                         f"when asked for {shape.ranks} and {shape.microbatches}")
    check(plan)
    return plan


def check_options(name: str, options: dict) -> None:
    """Raises ValueError if the schedule ``name`` does not take one of ``options`` or lacks one."""
    parameters = list(inspect.signature(schedules.get(name)).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for key in options:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no options"
            raise ValueError(f"the schedule {name!r} has no option {key!r}{nearest(key, known)}; {takes}")
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ValueError(f"the schedule {name!r} needs the option {parameter.name!r}")
