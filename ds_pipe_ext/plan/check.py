"""Is a plan complete, and can it run?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .ir import FACTS, Fact, Op, Plan, PlanError, flat, gives, needs


def check(plan: Plan, *, backward: bool = True) -> None:
    """Raises :class:`PlanError` unless every micro-batch passes every stage exactly once and no operation waits for ever.

    Args:
        plan: the plan.
        backward: False for evaluation plans, which hold forwards only.
    """
    complete(plan, backward=backward)
    order(plan)


def complete(plan: Plan, *, backward: bool = True) -> None:
    """Raises :class:`PlanError` unless every micro-batch passes every stage exactly once; says nothing about the order."""
    for stage, rank in enumerate(plan.placement):
        if not 0 <= rank < plan.n_ranks:
            raise PlanError(f"{plan.name}: stage {stage} is placed on rank {rank}; there are {plan.n_ranks} ranks")
    stages, microbatches, placement = plan.n_stages, plan.microbatches, plan.placement
    count = {kind: [[0] * microbatches for _ in range(stages)] for kind in "FBIW"}
    for rank in range(plan.n_ranks):
        for op in plan.ops(rank):
            stage, kind, mb = op
            if not 0 <= stage < stages or placement[stage] != rank:
                raise PlanError(f"{plan.name}: rank {rank} runs {op}, but does not hold stage {stage}")
            if kind == "U":
                continue
            if not 0 <= mb < microbatches:
                raise PlanError(f"{plan.name}: {op} on rank {rank}: micro-batches are 0 .. {microbatches - 1}")
            count[kind][stage][mb] += 1
    legal = {(1, 0, 0), (0, 1, 1)} if backward else {(0, 0, 0)}
    for stage in range(stages):
        for mb, (f, *rest) in enumerate(zip(*(count[kind][stage] for kind in "FBIW"))):
            where = f"{plan.name}: stage {stage}, micro-batch {mb} (rank {placement[stage]})"
            if f != 1:
                raise PlanError(f"{where}: {f} forwards, expected 1")
            if tuple(rest) not in legal:
                expected = "one B, or one I and one W" if backward else "no backward"
                raise PlanError(f"{where}: {rest[0]} B, {rest[1]} I, {rest[2]} W, expected {expected}")


def order(plan: Plan) -> list[tuple[int, Op]]:
    """One global order ``(rank, op)`` that respects every rank's own order and every dependency.

    Raises:
        PlanError: if there is none; names for every stuck rank the operation and what it waits for.
    """
    return [(rank, op) for rank, op, _, _ in walk(plan)]


def walk(plan: Plan) -> Iterator[tuple[int, Op, tuple[Fact, ...], tuple[Fact, ...]]]:
    """As :func:`order`, one at a time, each with what it needs and what it gives; the error comes where it gets stuck."""
    stages = plan.n_stages
    position = [0] * plan.n_ranks
    done = {what: [bytearray(plan.microbatches) for _ in range(stages)] for what in FACTS}
    waiting: dict[Fact, list[int]] = {}
    ready = deque(range(plan.n_ranks))
    while ready:
        rank = ready.popleft()
        line = plan.ranks[rank]
        while position[rank] < len(line):
            group = flat(line[position[rank]])
            needed = [needs(op, stages) for op in group]
            missing = _missing(needed, done)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            position[rank] += 1
            for op, wanted in zip(group, needed):
                given = gives(op)
                yield rank, op, wanted, given
                for fact in given:
                    what, stage, mb = fact
                    done[what][stage][mb] = True
                    if fact in waiting:
                        ready.extend(waiting.pop(fact))
    stuck = [(rank, flat(line[at])) for rank, (line, at) in enumerate(zip(plan.ranks, position)) if at < len(line)]
    if stuck:
        lines = []
        for rank, group in stuck:
            for op in group:
                for fact in needs(op, stages):
                    if not done[fact.what][fact.stage][fact.mb]:
                        source = {"act": "F", "grad": "I or B", "ctx": "I"}[fact.what]
                        lines.append(f"  rank {rank} at {op} waits for {source} of stage {fact.stage}, "
                                     f"micro-batch {fact.mb} (rank {plan.placement[fact.stage]})")
        raise PlanError(f"{plan.name}: deadlock after {sum(position)} entries:\n" + "\n".join(lines))


def _missing(needed: list[tuple[Fact, ...]], done: dict[str, list[bytearray]]) -> Fact | None:
    for facts in needed:
        for fact in facts:
            what, stage, mb = fact
            if not done[what][stage][mb]:
                return fact
    return None
