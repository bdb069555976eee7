"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards."""

from ..plan.ir import Op
from ..registry import schedules
from .base import per_rank


@schedules.register("gpipe")
@per_rank
def gpipe(r, p, m):
    """All m forwards, then m backwards in the same order. Bubble (p-1)(F+B); every rank holds m micro-batches.

    ::

        rank 0 | F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
        rank 1 | .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .. ..
    """
    yield from (Op(r, "F", i) for i in range(m))
    yield from (Op(r, "B", i) for i in range(m))
