"""Plan -> programs: adds communication, buffer slots, and the end of the step.

The plan is simulated once. Walking its events in time order, the send of a result is appended to the producer's
program and, at the same moment, the receive to the consumer's. Every program is then a projection of one global
order, so the set cannot deadlock even if every send blocks until it is matched. Receives, which the runtime posts
without waiting, may then be moved up to overlap transfer and compute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from .check import complete
from .ir import Op, Overlap, Plan, PlanError
from .simulate import Costs, simulate

#: Instruction kinds beside the compute kinds F, B, I, W of a plan.
LOAD, SEND_ACT, RECV_ACT, SEND_GRAD, RECV_GRAD = "load", "send_act", "recv_act", "send_grad", "recv_grad"
REDUCE_TIED, REDUCE, STEP = "reduce_tied", "reduce", "step"
_RECEIVES, _SENDS = (RECV_ACT, RECV_GRAD), (SEND_ACT, SEND_GRAD)
#: An instruction before its slot and window are known: kind, stage, micro-batch, peer.
Draft = tuple[str, int, int, int]


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
    complete(plan, backward=backward)
    bare = _fuse_first_stage(_without_updates(plan))
    programs = _project(bare, costs)
    if ahead:
        programs = [_hoist(program, ahead) for program in programs]
    windows = _windows(programs)
    result = []
    for rank, program in enumerate(programs):
        instrs, slots = _allocate(program, windows)
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


def _project(plan: Plan, costs: Costs | None) -> list[list[Draft]]:
    costs = costs or Costs.uniform(plan, hop=0.01)
    # A duration of zero would let an operation's end sort before its start.
    floor = 1e-9
    costs = Costs(*(tuple(max(value, floor) for value in row)
                    for row in (costs.forward, costs.input_grad, costs.weight_grad)), costs.hop)
    programs: list[list[Draft]] = [[] for _ in range(plan.n_ranks)]
    events = simulate(plan, costs).events
    # The sort is stable: of moments at one time the ends come first, each in the order of the simulation.
    times = [event.end for event in events] + [event.start for event in events]
    last = plan.n_stages - 1
    loaded = set()
    for moment in sorted(range(len(times)), key=times.__getitem__):
        start = moment >= len(events)
        rank, (s, kind, m) = events[moment - len(events) if start else moment][:2]
        if start:
            if kind == "F" and s in (0, last) and (rank, m) not in loaded:
                loaded.add((rank, m))
                programs[rank].append((LOAD, s, m, -1))
            programs[rank].append((kind, s, m, -1))
        elif kind == "F" and s < last and plan.placement[s + 1] != rank:
            peer = plan.placement[s + 1]
            programs[rank].append((SEND_ACT, s, m, peer))
            programs[peer].append((RECV_ACT, s + 1, m, rank))
        elif kind in "IB" and s > 0 and plan.placement[s - 1] != rank:
            peer = plan.placement[s - 1]
            programs[rank].append((SEND_GRAD, s, m, peer))
            programs[peer].append((RECV_GRAD, s - 1, m, rank))
    return programs


def _uses(program: list[Draft]) -> dict[str, dict[tuple[int, int], int]]:
    """Kind of receive -> (stage, micro-batch) -> where in the program what arrived is used."""
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    for at, (kind, stage, mb, _) in enumerate(program):
        if kind == "F":
            forward[(stage, mb)] = at
        elif kind in ("I", "B"):
            backward[(stage, mb)] = at
    return {RECV_ACT: forward, RECV_GRAD: backward}


def _hoist(program: list[Draft], ahead: int) -> list[Draft]:
    """Moves each receive up to just after the ``ahead``-th message before it in its link was used.

    What that operation sends goes first: another rank is waiting for it.
    """
    uses = _uses(program)

    def after(at: int) -> float:
        end = at
        while at + 1 < len(program) and program[at + 1][0] in (*_RECEIVES, *_SENDS):
            at += 1
            end = at if program[at][0] in _SENDS else end
        return end + 0.5

    links: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    floor: dict[tuple, float] = defaultdict(lambda: -1.0)
    target: list[tuple[float, int]] = []
    for at, instr in enumerate(program):
        kind, stage, mb, peer = instr
        if kind not in _RECEIVES:
            target.append((at, at))
            continue
        key, link = (stage, mb), (kind, peer)
        # Messages of one kind between two ranks must be posted in the order they are sent, whatever stages they join.
        queue = links[link]
        queue.append(key)
        place = after(uses[kind][queue[-1 - ahead]]) if len(queue) > ahead else -1.0
        if kind == RECV_GRAD:
            # The shapes of the gradients are those of the outputs, known once the forward has run.
            place = max(place, after(uses[RECV_ACT][key]))
        floor[link] = place = min(max(place, floor[link]), at)
        target.append((place, at))
    target.sort()
    return [program[at] for _, at in target]


def _windows(programs: list[list[Draft]]) -> dict[tuple[int, int], int]:
    """(receiving stage, micro-batch) -> :attr:`Instr.window` of the activation's transfer."""
    window: dict[tuple[int, int], int] = {}
    for program in programs:
        used_at = _uses(program)[RECV_ACT]
        links: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, (kind, stage, mb, _) in enumerate(program):
            if kind == RECV_ACT:
                links[stage].append((at, mb))
        for stage, queue in links.items():
            posted = [at for at, _ in queue]
            seen_at = len(program)
            for number in range(len(queue) - 1, -1, -1):
                mb = queue[number][1]
                # Headers are read in link order: a later message used earlier forces this one to be looked at first.
                seen_at = min(seen_at, used_at[(stage, mb)])
                window[(stage, mb)] = max(0, bisect_left(posted, seen_at) - number - 1)
    return window


def _allocate(program: list[Draft], windows: dict[tuple[int, int], int]) -> tuple[list[Instr], int]:
    """Slots by lifetime: from the first to the last instruction of a (stage, micro-batch). The lowest free one is taken."""
    last_use = {(stage, mb): at for at, (_, stage, mb, _) in enumerate(program)}
    free: list[int] = []
    slot_of: dict[tuple[int, int], int] = {}
    slots = 0
    body = []
    for at, (kind, stage, mb, peer) in enumerate(program):
        key = (stage, mb)
        slot = slot_of.get(key)
        if slot is None:
            if free:
                slot = heappop(free)
            else:
                slot = slots
                slots += 1
            slot_of[key] = slot
        window = windows[key] if kind == RECV_ACT else windows[(stage + 1, mb)] if kind == SEND_ACT else 0
        body.append(Instr(kind, stage, mb, slot, peer, window))
        if last_use[key] == at:
            heappush(free, slot)
    return body, slots
