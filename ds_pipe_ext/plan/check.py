"""Is a plan complete, and can it run?"""

from __future__ import annotations

from collections import Counter, deque

from .ir import Fact, Op, Plan, PlanError, flat, gives, needs


def check(plan: Plan, *, backward: bool = True) -> None:
    """Raises :class:`PlanError` unless every micro-batch passes every stage exactly once and no operation waits for ever.

    Args:
        plan: the plan.
        backward: False for evaluation plans, which hold forwards only.
    """
    _complete(plan, backward)
    order(plan)


def _complete(plan: Plan, backward: bool) -> None:
    for stage, rank in enumerate(plan.placement):
        if not 0 <= rank < plan.n_ranks:
            raise PlanError(f"{plan.name}: stage {stage} is placed on rank {rank}; there are {plan.n_ranks} ranks")
    count: Counter[Op] = Counter()
    for rank in range(plan.n_ranks):
        for op in plan.ops(rank):
            if not 0 <= op.stage < plan.n_stages or plan.placement[op.stage] != rank:
                raise PlanError(f"{plan.name}: rank {rank} runs {op}, but does not hold stage {op.stage}")
            if op.kind != "U" and not 0 <= op.mb < plan.microbatches:
                raise PlanError(f"{plan.name}: {op} on rank {rank}: micro-batches are 0 .. {plan.microbatches - 1}")
            count[op] += 1
    for stage in range(plan.n_stages):
        for mb in range(plan.microbatches):
            seen = {kind: count[Op(stage, kind, mb)] for kind in "FBIW"}
            where = f"{plan.name}: stage {stage}, micro-batch {mb} (rank {plan.placement[stage]})"
            if seen["F"] != 1:
                raise PlanError(f"{where}: {seen['F']} forwards, expected 1")
            legal = ({"B": 1, "I": 0, "W": 0}, {"B": 0, "I": 1, "W": 1}) if backward else ({"B": 0, "I": 0, "W": 0}, )
            if {k: seen[k] for k in "BIW"} not in legal:
                expected = "one B, or one I and one W" if backward else "no backward"
                raise PlanError(f"{where}: {seen['B']} B, {seen['I']} I, {seen['W']} W, expected {expected}")


def order(plan: Plan) -> list[tuple[int, Op]]:
    """One global order ``(rank, op)`` that respects every rank's own order and every dependency.

    Raises:
        PlanError: if there is none; names for every stuck rank the operation and what it waits for.
    """
    lines = [deque(flat(entry) for entry in line) for line in plan.ranks]
    done: set[Fact] = set()
    result: list[tuple[int, Op]] = []
    waiting: dict[Fact, list[int]] = {}
    ready = deque(range(plan.n_ranks))
    while ready:
        rank = ready.popleft()
        while lines[rank]:
            group = lines[rank][0]
            missing = [f for op in group for f in needs(op, plan.n_stages) if f not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            lines[rank].popleft()
            for op in group:
                result.append((rank, op))
                for fact in gives(op):
                    done.add(fact)
                    ready.extend(waiting.pop(fact, ()))
    stuck = [(rank, line[0]) for rank, line in enumerate(lines) if line]
    if stuck:
        lines_out = []
        for rank, group in stuck:
            for op in group:
                for fact in needs(op, plan.n_stages):
                    if fact not in done:
                        source = {"act": "F", "grad": "I or B", "ctx": "I"}[fact.what]
                        lines_out.append(f"  rank {rank} at {op} waits for {source} of stage {fact.stage}, "
                                         f"micro-batch {fact.mb} (rank {plan.placement[fact.stage]})")
        raise PlanError(f"{plan.name}: deadlock after {len(result)} operations:\n" + "\n".join(lines_out))
    return result
