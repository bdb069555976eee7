"""The contract of a registered schedule or partitioner, for this package's tests and for those of other packages.

Everything here raises AssertionError, saying for which shape what went wrong. No torch is needed.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .partition.base import Layer, verify
from .plan import Instr, Op, Plan, PlanError, Program, check, facts, lower, parse_csv
from .plan.ir import gives, needs
from .plan.lower import LOAD, RECV_ACT, RECV_GRAD, REDUCE, REDUCE_TIED, SEND_ACT, SEND_GRAD, STEP
from .registry import partitioners, schedules
from .schedules.base import Shape

_MATCH = {SEND_ACT: RECV_ACT, SEND_GRAD: RECV_GRAD}
_TAIL = [REDUCE_TIED, REDUCE, STEP]


def check_schedule(schedule: str | Callable[..., Plan], *, options: Mapping[str, Any] | None = None,
                   shapes: Iterable[tuple[int, int]] | None = None) -> int:
    """Every plan is complete, runs, reads back from its text, and comes out the same twice.

    Args:
        schedule: a function ``(shape, **options) -> Plan`` or the name of a registered one.
        options: its options.
        shapes: (ranks, micro-batches) to try; 1 to 6 ranks with 1 to 3 * ranks + 1 micro-batches if None.

    Returns:
        Number of shapes planned. A shape may be refused with a ValueError (not a PlanError), but not all of them.
    """
    function = schedules.get(schedule) if isinstance(schedule, str) else schedule
    name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", repr(schedule))
    if shapes is None:
        shapes = [(p, m) for p in range(1, 7) for m in range(1, 3 * p + 2)]
    planned = 0
    for p, m in shapes:
        where = f"schedule {name}, {p} ranks, {m} micro-batches"
        try:
            plan = function(Shape(p, m), **(options or {}))
        except PlanError as error:
            raise AssertionError(f"{where}: {error}") from error
        except ValueError:
            continue
        _require((plan.n_ranks, plan.microbatches) == (p, m),
                 f"{where}: planned {plan.n_ranks} ranks and {plan.microbatches} micro-batches")
        _require(function(Shape(p, m), **(options or {})) == plan, f"{where}: a second call gave another plan")
        check_plan(plan, where)
        planned += 1
    _require(planned > 0, f"schedule {name} refused every shape")
    return planned


def check_plan(plan: Plan, where: str | None = None) -> None:
    """One plan: complete, round trip through text, runs under blocking transfers, buffers and peaks as predicted."""
    where = where or plan.name
    try:
        check(plan)
    except PlanError as error:
        raise AssertionError(f"{where}: {error}") from error
    _require(parse_csv(plan.to_csv(), plan.name) == plan, f"{where}: its text form reads back as another plan")
    for ahead in (0, 1, 2):
        programs = lower(plan, ahead=ahead)
        done = execute(programs, plan.n_stages, posted=ahead > 0)
        for rank, program in enumerate(programs):
            label = f"{where}, rank {rank}, ahead={ahead}"
            ran = [op for r, op in done if r == rank]
            _require(sorted(_halves(ran)) == sorted(_halves(op for op in plan.ops(rank) if op.kind != "U")),
                     f"{label}: what ran is not what was planned")
            _require([instr.kind for instr in program.instrs[-3:]] == _TAIL, f"{label}: does not end with {_TAIL}")
            live = _check_slots(program, label)
            _require(program.slots == live, f"{label}: {program.slots} slots for {live} live micro-batches")
            line = Plan(plan.name, tuple(tuple(ran) if r == rank else () for r in range(plan.n_ranks)), plan.placement,
                        plan.microbatches)
            for fact in (facts.in_flight, facts.held):
                executed, predicted = fact(line), fact(plan)
                for stage in plan.stages_of(rank):
                    _require(executed[stage] == predicted[stage], f"{label}: stage {stage} has {executed[stage]} "
                             f"micro-batches {fact.__name__}, the plan says {predicted[stage]}")


def execute(programs: Sequence[Program], n_stages: int, *, posted: bool) -> list[tuple[int, Op]]:
    """Runs programs under the worst transfers there are: a send waits until its receive is there.

    Args:
        programs: one per rank.
        n_stages: stages in all.
        posted: True if a receive only posts its buffer and its consumer waits; False if it waits for the send itself.

    Returns:
        The compute operations in an order in which they ran, as ``(rank, op)``.
    """
    at = [0] * len(programs)
    here: list[set] = [set() for _ in programs]
    loaded: set[tuple[int, int]] = set()
    posts: dict[tuple, deque] = defaultdict(deque)
    done: list[tuple[int, Op]] = []

    def send(rank: int, instr: Instr) -> bool:
        stage = instr.stage + 1 if instr.kind == SEND_ACT else instr.stage - 1
        op = Op(instr.stage, "F" if instr.kind == SEND_ACT else "I", instr.mb)
        _require(gives(op)[0] in here[rank], f"rank {rank} sends {instr} before it exists")
        if posted:
            queue = posts[(rank, instr.peer, instr.kind)]
            if not queue:
                return False
            _require(queue[0] == (stage, instr.mb), f"rank {rank} sends {instr}, rank {instr.peer} expects {queue[0]}")
            queue.popleft()
        else:
            program = programs[instr.peer].instrs
            other = program[at[instr.peer]] if at[instr.peer] < len(program) else None
            if other is None or (other.kind, other.stage, other.mb, other.peer) \
                    != (_MATCH[instr.kind], stage, instr.mb, rank):
                return False
            _require(other.window == instr.window, f"{instr} and {other} differ in their window")
            at[instr.peer] += 1
        here[instr.peer].add(gives(op)[0])
        return True

    def step(rank: int) -> bool:
        instr = programs[rank].instrs[at[rank]]
        if instr.kind in _MATCH:
            if not send(rank, instr):
                return False
        elif instr.kind in (RECV_ACT, RECV_GRAD):
            if not posted:
                return False
            sent = SEND_ACT if instr.kind == RECV_ACT else SEND_GRAD
            posts[(instr.peer, rank, sent)].append((instr.stage, instr.mb))
        elif instr.kind == LOAD:
            loaded.add((rank, instr.mb))
        elif instr.kind not in _TAIL:
            op = Op(instr.stage, instr.kind, instr.mb)
            if any(fact not in here[rank] for fact in needs(op, n_stages)):
                return False
            if op.kind == "F" and op.stage in (0, n_stages - 1):
                _require((rank, op.mb) in loaded, f"rank {rank} runs {op} before its data are loaded")
            here[rank].update(gives(op))
            done.append((rank, op))
        at[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program.instrs) and step(rank):
                moved = True
    stuck = [f"rank {rank} at {program.instrs[at[rank]]}" for rank, program in enumerate(programs)
             if at[rank] < len(program.instrs)]
    _require(not stuck, f"{'posted' if posted else 'blocking'} transfers deadlock: {'; '.join(stuck)}")
    _require(not any(posts.values()), "receives were posted that nothing was sent to")
    return done


def random_plan(rng: random.Random, placement: Sequence[int], microbatches: int, split: float = 0.5) -> Plan:
    """A plan that can run, in an order no author would write.

    Args:
        rng: source of randomness.
        placement: stage -> rank.
        microbatches: number of micro-batches.
        split: share of backwards written as I and W.
    """
    stages = len(placement)
    todo = [Op(s, "F", m) for s in range(stages) for m in range(microbatches)]
    for op in tuple(todo):
        todo += [op._replace(kind=kind) for kind in ("IW" if rng.random() < split else "B")]
    ranks: list[list[Op]] = [[] for _ in range(max(placement) + 1)]
    made: set = set()
    while todo:
        ready = [number for number, op in enumerate(todo) if all(fact in made for fact in needs(op, stages))]
        op = todo.pop(rng.choice(ready))
        ranks[placement[op.stage]].append(op)
        made.update(gives(op))
    return Plan("random", tuple(map(tuple, ranks)), tuple(placement), microbatches)


def check_partitioner(partitioner: str | Callable[..., Sequence[int]], *, options: Mapping[str, Any] | None = None,
                      cases: Iterable[tuple[Sequence[Layer], int]] | None = None) -> int:
    """Every result has one boundary more than stages, no empty stage, and comes out the same twice; layers are left alone.

    Args:
        partitioner: a function ``(layers, stages, **options) -> boundaries`` or the name of a registered one.
        options: its options.
        cases: (layers, stages) to try; 100 random models of Embedding, Block and Head layers if None.

    Returns:
        Number of cases tried.
    """
    function = partitioners.get(partitioner) if isinstance(partitioner, str) else partitioner
    name = partitioner if isinstance(partitioner, str) else getattr(partitioner, "__name__", repr(partitioner))
    tried = 0
    for layers, stages in cases if cases is not None else _models():
        given = list(layers)
        where = f"partitioner {name}, {len(layers)} layers, {stages} stages"
        first = function(given, stages, **(options or {}))
        try:
            verify(name, first, len(layers), stages)
        except ValueError as error:
            raise AssertionError(f"{where}: {error}") from error
        _require(given == list(layers), f"{where}: it changed the list of layers")
        _require(list(function(given, stages, **(options or {}))) == list(first), f"{where}: a second call cut elsewhere")
        tried += 1
    return tried


def _models() -> list[tuple[list[Layer], int]]:
    rng = random.Random(0)
    models = []
    for number in range(100):
        blocks = rng.randint(1, 24)
        size = rng.choice((0, 1, 10, 10**6, 10**9))
        layers = [Layer("Embedding", rng.randint(0, size)), *(Layer("Block", rng.randint(0, size)) for _ in range(blocks)),
                  Layer("Head", rng.randint(0, size))]
        models.append((layers, rng.randint(1, min(len(layers), 8)) if number % 4 else len(layers)))
    return models


def _halves(ops: Iterable[Op]) -> Iterable[Op]:
    # Lowering may fuse an I with its own W on the first stage.
    for op in ops:
        yield from (op._replace(kind="I"), op._replace(kind="W")) if op.kind == "B" else (op, )


def _check_slots(program: Program, where: str) -> int:
    """Raises if two live micro-batches share a slot; returns the most that live at once."""
    used = [instr for instr in program.instrs if instr.stage >= 0]
    last = {(instr.stage, instr.mb): at for at, instr in enumerate(used)}
    owner: dict[int, tuple[int, int]] = {}
    most = 0
    for at, instr in enumerate(used):
        key = (instr.stage, instr.mb)
        _require(0 <= instr.slot < program.slots, f"{where}: {instr} uses slot {instr.slot} of {program.slots}")
        if key not in owner.values():
            _require(instr.slot not in owner, f"{where}: {instr} takes slot {instr.slot} of {owner.get(instr.slot)}")
            owner[instr.slot] = key
        _require(owner.get(instr.slot) == key, f"{where}: {instr} uses slot {instr.slot}, which is not its own")
        most = max(most, len(owner))
        if last[key] == at:
            del owner[instr.slot]
    return most


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
