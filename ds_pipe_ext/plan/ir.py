"""The plan: which stage runs what for which micro-batch, per rank, in order.

A plan holds compute operations only. Its text form is the CSV that ``torch.distributed.pipelining`` reads: one line
per rank, operations separated by commas, ``2F0`` = stage 2, forward, micro-batch 0; ``(0F7;7B3)`` = run together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: F forward, B full backward, I input gradient, W weight gradient, U update of the stage's weights.
KINDS = ("F", "B", "I", "W", "U")


class PlanError(ValueError):
    """A plan that cannot be read or cannot run; the message says which operation and why."""


class Op(NamedTuple):
    """One compute operation: ``stage``, ``kind`` (one of :data:`KINDS`), ``mb`` (micro-batch, -1 for U)."""

    stage: int
    kind: str
    mb: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.mb if self.kind != 'U' else ''}"


class Overlap(NamedTuple):
    """Operations of one rank that are run together (braided by the runtime, or one after the other)."""

    parts: tuple[Op, ...]

    def __str__(self) -> str:
        return "(" + ";".join(str(op) for op in self.parts) + ")"


class Fact(NamedTuple):
    """What an operation makes available to others: ``act`` (stage output), ``grad`` (gradient of the stage input)
    or ``ctx`` (what the weight-gradient pass needs)."""

    what: str
    stage: int
    mb: int


def needs(op: Op, n_stages: int) -> tuple[Fact, ...]:
    """The facts that must exist before ``op`` may start: the only dependency rule in the project."""
    s, kind, m = op
    if kind == "F":
        return (Fact("act", s - 1, m), ) if s > 0 else ()
    if kind in "IB":
        own = (Fact("act", s, m), )
        return own + (Fact("grad", s + 1, m), ) if s < n_stages - 1 else own
    if kind == "W":
        return (Fact("ctx", s, m), )
    return ()


def gives(op: Op) -> tuple[Fact, ...]:
    """The facts that ``op`` makes available when it ends."""
    s, kind, m = op
    if kind == "F":
        return (Fact("act", s, m), )
    if kind == "I":
        return (Fact("grad", s, m), Fact("ctx", s, m))
    if kind == "B":
        return (Fact("grad", s, m), )
    return ()


def flat(entry: Op | Overlap) -> tuple[Op, ...]:
    """The operations of one entry of a rank's list."""
    return entry.parts if isinstance(entry, Overlap) else (entry, )


@dataclass(frozen=True)
class Plan:
    """Operations of every rank in order, and where each stage lives.

    Attributes:
        name: the schedule that wrote it.
        ranks: for every rank its operations in order.
        placement: stage -> rank.
        microbatches: number of micro-batches in one step.
    """

    name: str
    ranks: tuple[tuple[Op | Overlap, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def n_ranks(self) -> int:
        return len(self.ranks)

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that ``rank`` holds, in model order."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def ops(self, rank: int) -> Iterator[Op]:
        """Operations of ``rank`` in order, those run together one after the other."""
        for entry in self.ranks[rank]:
            yield from flat(entry)

    def to_csv(self) -> str:
        """One comma-separated line per rank, ending in a newline."""
        return "".join(",".join(str(e) for e in line) + "\n" for line in self.ranks)


_OP = re.compile(r"^(\d+)([FBIWU])(\d*)$")
_TOGETHER = re.compile(r"^\(([^()]*)\)(?:OVERLAP_F_B)?$")


def parse_op(text: str) -> Op:
    """Reads ``2F0``; raises :class:`PlanError` on anything else."""
    match = _OP.match(text.strip())
    if not match or (match[2] == "U") != (match[3] == ""):
        raise PlanError(f"{text!r} is not an operation: expected stage, one of {''.join(KINDS)}, micro-batch "
                        "(none for U), as in 2F0 or 2U")
    return Op(int(match[1]), match[2], int(match[3]) if match[3] else -1)


def parse_csv(text: str, name: str = "csv", placement: Iterable[int] | None = None) -> Plan:
    """Reads a plan from its text form.

    Args:
        text: one line per rank; empty cells (torch writes them for idle time) are skipped.
        name: name of the plan.
        placement: stage -> rank; taken from the operations if None.
    """
    ranks = []
    for number, line in enumerate(line for line in text.splitlines() if line.strip()):
        entries: list[Op | Overlap] = []
        for cell in (cell.strip() for cell in line.split(",")):
            if not cell:
                continue
            try:
                together = _TOGETHER.match(cell)
                if together:
                    entries.append(Overlap(tuple(parse_op(part) for part in together[1].split(";"))))
                else:
                    entries.append(parse_op(cell))
            except PlanError as error:
                raise PlanError(f"line {number + 1}: {error}") from None
        ranks.append(tuple(entries))
    owners: dict[int, int] = {}
    top = -1
    for rank, entries in enumerate(ranks):
        for op in (op for entry in entries for op in flat(entry)):
            if owners.setdefault(op.stage, rank) != rank:
                raise PlanError(f"stage {op.stage} appears on rank {owners[op.stage]} and on rank {rank}")
            top = max(top, op.mb)
    if placement is None:
        missing = [s for s in range(max(owners, default=-1) + 1) if s not in owners]
        if missing:
            raise PlanError(f"no operation names stage {missing[0]}")
        placement = tuple(owners[s] for s in range(len(owners)))
    return Plan(name, tuple(ranks), tuple(placement), top + 1)
