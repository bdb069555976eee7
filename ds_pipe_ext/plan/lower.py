"""Plan -> programs: adds communication, buffer slots, and the end of the step.

The plan is simulated once. Walking its events in time order, the send of a result is appended to the producer's
program and, at the same moment, the receive to the consumer's. Every program is then a projection of one global
order, so the set cannot deadlock even if every send blocks until it is matched. Receives, which the runtime posts
without waiting, may then be moved up to overlap transfer and compute.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from .check import check
from .ir import Op, Overlap, Plan, PlanError
from .simulate import Costs, simulate

#: Instruction kinds beside the compute kinds F, B, I, W of a plan.
LOAD, SEND_ACT, RECV_ACT, SEND_GRAD, RECV_GRAD = "load", "send_act", "recv_act", "send_grad", "recv_grad"
REDUCE_TIED, REDUCE, STEP = "reduce_tied", "reduce", "step"
_RECEIVES = (RECV_ACT, RECV_GRAD)
_SENDS = (SEND_ACT, SEND_GRAD)


class Instr(NamedTuple):
    """One instruction of a rank's program.

    Attributes:
        kind: a compute kind (F, B, I, W) or one of the constants above.
        stage: the stage of this rank that it concerns (sender's own stage for sends, receiver's own for receives).
        mb: micro-batch.
        slot: index of this micro-batch's buffers on this rank.
        peer: the other rank of a transfer, else -1.
        window: for activations: how many later receives of this link the receiver has already posted when it looks at
            this one. Both ends need it to agree on what happens if a shape changes.
    """

    kind: str
    stage: int = -1
    mb: int = -1
    slot: int = -1
    peer: int = -1
    window: int = 0

    def __str__(self) -> str:
        if self.stage < 0:
            return self.kind
        text = f"{self.stage}{self.kind if len(self.kind) == 1 else '.' + self.kind + '.'}{self.mb}"
        return text if self.peer < 0 else f"{text}@{self.peer}"


@dataclass(frozen=True)
class Program:
    """Everything one rank does in a step, in order.

    Attributes:
        rank: position along the pipeline axis.
        instrs: the instructions.
        slots: number of buffer slots that suffice.
    """

    rank: int
    instrs: tuple[Instr, ...]
    slots: int


def forward_only(placement: tuple[int, ...], microbatches: int) -> Plan:
    """The evaluation plan: forwards only, any placement, any number of micro-batches."""
    ranks: list[list[Op]] = [[] for _ in range(max(placement) + 1)]
    waves = sorted((s + m, s, m) for s in range(len(placement)) for m in range(microbatches))
    for _, s, m in waves:
        ranks[placement[s]].append(Op(s, "F", m))
    return Plan("forward-only", tuple(tuple(line) for line in ranks), placement, microbatches)


def lower(plan: Plan, costs: Costs | None = None, *, backward: bool = True, ahead: int = 2) -> tuple[Program, ...]:
    """Checks a plan and turns it into one program per rank.

    Args:
        plan: the plan. Its updates, if written, must be each rank's last operation; they become the step.
        costs: what the global order of transfers is derived from; F = I = W and a small delay if None.
        backward: False for evaluation plans.
        ahead: most receives per link and direction that may be outstanding; 0 keeps every receive where the
            projection put it, which one process group for both directions needs.

    Raises:
        PlanError: if the plan is incomplete, deadlocks, or updates in the middle of the step.
    """
    check(plan, backward=backward)
    bare = _fuse_first_stage(_without_updates(plan))
    programs = _project(bare, costs)
    if ahead:
        programs = [_hoist(program, ahead) for program in programs]
    programs = _windows(programs)
    result = []
    for rank, program in enumerate(programs):
        instrs, slots = _allocate(program)
        if backward:
            instrs += [Instr(REDUCE_TIED), Instr(REDUCE), Instr(STEP)]
        result.append(Program(rank, tuple(instrs), slots))
    return tuple(result)


def _without_updates(plan: Plan) -> Plan:
    ranks = []
    for rank, line in enumerate(plan.ranks):
        body = list(line)
        while body and isinstance(body[-1], Op) and body[-1].kind == "U":
            body.pop()
        for entry in body:
            if isinstance(entry, Op) and entry.kind == "U":
                raise PlanError(f"{plan.name}: rank {rank} updates stage {entry.stage} in the middle of the step; "
                                "a synchronous plan may update only after its last backward")
        ranks.append(tuple(body))
    return replace(plan, ranks=tuple(ranks))


def _fuse_first_stage(plan: Plan) -> Plan:
    # The first stage sends no gradient, so splitting I from a W that follows at once would only cost overhead.
    ranks = []
    for line in plan.ranks:
        body: list[Op | Overlap] = []
        for entry in line:
            before = body[-1] if body else None
            if isinstance(entry, Op) and isinstance(before, Op) and entry.kind == "W" and before.kind == "I" \
                    and before.stage == entry.stage == 0 and before.mb == entry.mb:
                body[-1] = Op(0, "B", entry.mb)
            else:
                body.append(entry)
        ranks.append(tuple(body))
    return replace(plan, ranks=tuple(ranks))


def _project(plan: Plan, costs: Costs | None) -> list[list[Instr]]:
    costs = costs or Costs.uniform(plan, hop=0.01)
    # A duration of zero would let an operation's end sort before its start.
    floor = 1e-9
    costs = Costs(*(tuple(max(value, floor) for value in row)
                    for row in (costs.forward, costs.input_grad, costs.weight_grad)), costs.hop)
    programs: list[list[Instr]] = [[] for _ in range(plan.n_ranks)]
    moments = []
    for number, event in enumerate(simulate(plan, costs).events):
        moments.append((event.start, 1, number, event))
        moments.append((event.end, 0, number, event))
    last = plan.n_stages - 1
    loaded = set()
    for _, start, _, event in sorted(moments, key=lambda moment: moment[:3]):
        rank, (s, kind, m) = event.rank, event.op
        if start:
            if kind == "F" and s in (0, last) and (rank, m) not in loaded:
                loaded.add((rank, m))
                programs[rank].append(Instr(LOAD, s, m))
            programs[rank].append(Instr(kind, s, m))
        elif kind == "F" and s < last and plan.placement[s + 1] != rank:
            peer = plan.placement[s + 1]
            programs[rank].append(Instr(SEND_ACT, s, m, peer=peer))
            programs[peer].append(Instr(RECV_ACT, s + 1, m, peer=rank))
        elif kind in "IB" and s > 0 and plan.placement[s - 1] != rank:
            peer = plan.placement[s - 1]
            programs[rank].append(Instr(SEND_GRAD, s, m, peer=peer))
            programs[peer].append(Instr(RECV_GRAD, s - 1, m, peer=rank))
    return programs


def _consumer(instr: Instr) -> tuple[str, int, int]:
    return ("act" if instr.kind == RECV_ACT else "grad", instr.stage, instr.mb)


def _consumes(instr: Instr) -> tuple[str, int, int] | None:
    if instr.kind == "F":
        return ("act", instr.stage, instr.mb)
    return ("grad", instr.stage, instr.mb) if instr.kind in "IB" else None


def _hoist(program: list[Instr], ahead: int) -> list[Instr]:
    """Moves each receive up to just after the ``ahead``-th message before it in its link was used."""
    used_at = {_consumes(instr): at for at, instr in enumerate(program) if _consumes(instr)}
    forward_at = {(instr.stage, instr.mb): at for at, instr in enumerate(program) if instr.kind == "F"}
    links: dict[tuple, list[Instr]] = defaultdict(list)
    target: list[tuple[float, int, Instr]] = []
    floor: dict[tuple, float] = defaultdict(lambda: -1.0)
    for at, instr in enumerate(program):
        if instr.kind not in _RECEIVES:
            target.append((at, at, instr))
            continue
        link = (instr.kind, instr.stage)
        queue = links[link]
        queue.append(instr)
        place = used_at[_consumer(queue[-1 - ahead])] + 0.5 if len(queue) > ahead else -1.0
        if instr.kind == RECV_GRAD:
            # The shapes of the gradients are those of the outputs, known once the forward has run.
            place = max(place, forward_at[(instr.stage, instr.mb)] + 0.5)
        place = min(max(place, floor[link]), at)
        floor[link] = place
        target.append((place, at, instr))
    return [instr for _, _, instr in sorted(target, key=lambda item: item[:2])]


def _windows(programs: list[list[Instr]]) -> list[list[Instr]]:
    window: dict[tuple[int, int], int] = {}
    for program in programs:
        used_at = {_consumes(instr): at for at, instr in enumerate(program) if _consumes(instr)}
        links: dict[int, list[tuple[int, Instr]]] = defaultdict(list)
        for at, instr in enumerate(program):
            if instr.kind == RECV_ACT:
                links[instr.stage].append((at, instr))
        for queue in links.values():
            seen_at = len(program)
            for number in range(len(queue) - 1, -1, -1):
                instr = queue[number][1]
                # Headers are read in link order: a later message used earlier forces this one to be looked at first.
                seen_at = min(seen_at, used_at[_consumer(instr)])
                window[(instr.stage, instr.mb)] = sum(at < seen_at for at, _ in queue[number + 1:])
    result = []
    for program in programs:
        body = []
        for instr in program:
            if instr.kind == RECV_ACT:
                instr = instr._replace(window=window[(instr.stage, instr.mb)])
            elif instr.kind == SEND_ACT:
                instr = instr._replace(window=window[(instr.stage + 1, instr.mb)])
            body.append(instr)
        result.append(body)
    return result


def _allocate(program: list[Instr]) -> tuple[list[Instr], int]:
    """Slots by lifetime: from the first to the last instruction of a (stage, micro-batch)."""
    last_use = {(instr.stage, instr.mb): at for at, instr in enumerate(program)}
    free: list[int] = []
    slot_of: dict[tuple[int, int], int] = {}
    slots = 0
    body = []
    for at, instr in enumerate(program):
        key = (instr.stage, instr.mb)
        if key not in slot_of:
            if not free:
                free.append(slots)
                slots += 1
            slot_of[key] = free.pop(0)
        body.append(instr._replace(slot=slot_of[key]))
        if last_use[key] == at:
            free.append(slot_of[key])
            free.sort()
    return body, slots
