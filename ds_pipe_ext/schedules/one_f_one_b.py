"""1F1B: one forward, one backward (PipeDream-Flush, arXiv 2006.09503; DAPPLE's PA, arXiv 2007.01045)."""

from ..plan.ir import Op
from ..registry import schedules
from .base import per_rank


@schedules.register("1f1b")
@per_rank
def one_f_one_b(r, p, m):
    """min(p-r-1, m) forwards, then forward and backward in turn, then drain. Bubble (p-1)(F+B); rank r holds p-r.

    ::

        rank 0 | F0 F1 .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3
        rank 1 | .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 ..
    """
    warm = min(p - r - 1, m)
    yield from (Op(r, "F", i) for i in range(warm))
    for i in range(m):
        if warm + i < m:
            yield Op(r, "F", warm + i)
        yield Op(r, "B", i)
