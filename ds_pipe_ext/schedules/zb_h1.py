"""ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241)."""

from ..plan.ir import Op
from ..registry import schedules
from .base import per_rank
from .zero_bubble import lagging_weight_grads


@schedules.register("zb-h1")
@per_rank
def zb_h1(r, p, m):
    """1F1B with the weight gradient split off; rank r lets r of them wait. Bubble (p-1) max(F, F+I-W); p micro-batches held.

    ::

        rank 0 | F0 F1 .. I0 W0 F2 I1 W1 F3 I2 W2 .. I3 W3
        rank 1 | .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3 ..
    """
    yield from lagging_weight_grads(Op, r, m, warm=p - r, lag=r)
