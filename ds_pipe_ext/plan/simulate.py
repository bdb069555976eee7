"""When would each operation of a plan start and end?

As-soon-as-possible execution: a rank runs its own operations in order, each as soon as what it needs has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import facts
from .check import order
from .ir import Fact, Op, Plan, gives, needs


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) per stage and micro-batch, and the delay of one hop between two ranks.

    A full backward costs ``input_grad + weight_grad``.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    hop: float = 0.0

    def __post_init__(self):
        if not len(self.forward) == len(self.input_grad) == len(self.weight_grad):
            raise ValueError("costs of forward, input gradient and weight gradient must cover the same stages, got "
                             f"{len(self.forward)}, {len(self.input_grad)}, {len(self.weight_grad)}")
        values = (*self.forward, *self.input_grad, *self.weight_grad, self.hop)
        if not all(0 <= value < float("inf") for value in values):
            raise ValueError(f"costs must be finite and not negative, got {values}")

    @classmethod
    def uniform(cls, plan: Plan, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0,
                hop: float = 0.0) -> Costs:
        """Costs of one rank's whole share, divided evenly among the stages it holds."""
        share = [len(plan.stages_of(rank)) for rank in plan.placement]
        return cls(tuple(forward / n for n in share), tuple(input_grad / n for n in share),
                   tuple(weight_grad / n for n in share), hop)

    def of(self, op: Op) -> float:
        """Duration of ``op``; updates take no time."""
        if op.kind == "B":
            return self.input_grad[op.stage] + self.weight_grad[op.stage]
        return {"F": self.forward, "I": self.input_grad, "W": self.weight_grad}[op.kind][op.stage] \
            if op.kind != "U" else 0.0


@dataclass(frozen=True)
class Event:
    """One executed operation: times in the unit of the costs; ``step`` counts repetitions of the plan."""

    rank: int
    op: Op
    start: float
    end: float
    step: int = 0


@dataclass(frozen=True)
class Simulation:
    """What the simulator found. Times are in the unit of the costs."""

    plan: Plan
    events: tuple[Event, ...]

    @property
    def makespan(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds that ``rank`` computes."""
        return sum(event.end - event.start for event in self.events if event.rank == rank)

    @property
    def bubble(self) -> float:
        """Makespan minus busy time, worst rank."""
        return self.makespan - min(self._busy())

    @property
    def stall(self) -> float:
        """Idle time between a rank's own first and last operation, worst rank."""
        first = [float("inf")] * self.plan.n_ranks
        last = [0.0] * self.plan.n_ranks
        for event in self.events:
            first[event.rank] = min(first[event.rank], event.start)
            last[event.rank] = max(last[event.rank], event.end)
        return max((end - start - busy for start, end, busy in zip(first, last, self._busy()) if end > start),
                   default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """Idle share of all ranks' time."""
        span = self.makespan * self.plan.n_ranks
        return 1 - sum(self._busy()) / span if span else 0.0

    def _busy(self) -> list[float]:
        total = [0.0] * self.plan.n_ranks
        for event in self.events:
            total[event.rank] += event.end - event.start
        return total

    def summary(self) -> dict:
        """The numbers as plain data, ready for JSON."""
        return {
            "schedule": self.plan.name,
            "ranks": self.plan.n_ranks,
            "stages": self.plan.n_stages,
            "microbatches": self.plan.microbatches,
            "makespan": self.makespan,
            "bubble": self.bubble,
            "stall": self.stall,
            "bubble_ratio": self.bubble_ratio,
            "in_flight": facts.in_flight(self.plan),
            "held": facts.held(self.plan),
            "pending_weight_grads": facts.pending_weight_grads(self.plan),
        }


def simulate(plan: Plan, costs: Costs | None = None, *, steps: int = 1) -> Simulation:
    """Runs a plan ``steps`` times without a barrier in between.

    Args:
        plan: a plan that :func:`check.check` accepts.
        costs: one entry per stage; F = I = W = 1 per rank, no delay, if None.
        steps: repetitions; a rank starts its next step as soon as its own last one is over.

    Raises:
        PlanError: if the plan deadlocks.
        ValueError: if the costs do not cover the plan's stages.
    """
    costs = costs or Costs.uniform(plan)
    if len(costs.forward) != plan.n_stages:
        raise ValueError(f"costs are given for {len(costs.forward)} stages, the plan {plan.name} has {plan.n_stages}")
    sequence = order(plan)
    clock = [0.0] * plan.n_ranks
    events: list[Event] = []
    for step in range(steps):
        made: dict[Fact, float] = {}
        for rank, op in sequence:
            start = clock[rank]
            for fact in needs(op, plan.n_stages):
                hop = costs.hop if plan.placement[fact.stage] != rank else 0.0
                start = max(start, made[fact] + hop)
            clock[rank] = start + costs.of(op)
            for fact in gives(op):
                made[fact] = clock[rank]
            events.append(Event(rank, op, start, clock[rank], step))
    return Simulation(plan, tuple(events))


def as_costs(values: Sequence[float], plan: Plan, hop: float = 0.0) -> Costs:
    """``(F, I, W)`` of one rank's share -> :class:`Costs`."""
    if len(values) != 3:
        raise ValueError(f"costs are three numbers F,I,W (one rank's whole share), got {len(values)}")
    return Costs.uniform(plan, *values, hop=hop)
