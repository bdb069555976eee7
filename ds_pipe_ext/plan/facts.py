"""Numbers that follow from a plan's order alone: buffers, activations, pending weight gradients."""

from __future__ import annotations

from .ir import Plan

#: what each kind adds to: activations in flight (F to I), activations held (F to W), pending weight gradients (I to W)
_DELTAS = {"F": (1, 1, 0), "I": (-1, 0, 1), "W": (0, -1, -1), "B": (-1, -1, 0), "U": (0, 0, 0)}


def _peaks(plan: Plan, column: int) -> list[int]:
    level = [0] * plan.n_stages
    peak = [0] * plan.n_stages
    for rank in range(plan.n_ranks):
        for op in plan.ops(rank):
            level[op.stage] += _DELTAS[op.kind][column]
            peak[op.stage] = max(peak[op.stage], level[op.stage])
    return peak


def in_flight(plan: Plan) -> list[int]:
    """Per stage: most micro-batches between their forward and the end of their input gradient (F to I)."""
    return _peaks(plan, 0)


def held(plan: Plan) -> list[int]:
    """Per stage: most micro-batches between their forward and the end of their weight gradient (F to W)."""
    return _peaks(plan, 1)


def pending_weight_grads(plan: Plan) -> list[int]:
    """Per rank: most weight gradients that wait at once, over all its stages (I to W)."""
    result = []
    for rank in range(plan.n_ranks):
        level = peak = 0
        for op in plan.ops(rank):
            level += _DELTAS[op.kind][2]
            peak = max(peak, level)
        result.append(peak)
    return result


def splits_backward(plan: Plan) -> bool:
    """True if some stage runs I and W apart."""
    return any(op.kind == "W" for rank in range(plan.n_ranks) for op in plan.ops(rank))
