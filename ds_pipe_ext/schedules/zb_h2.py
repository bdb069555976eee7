"""ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241)."""

from ..plan.ir import Op
from ..registry import schedules
from .base import per_rank
from .zero_bubble import lagging_weight_grads


@schedules.register("zb-h2")
@per_rank
def zb_h2(r, p, m):
    """As zb-h1 with 2(p-r)-1 warm-up forwards and 2r weight gradients waiting: no stall inside a rank's own span when
    F = I = W, for 2p-1 micro-batches held. A barrier at the end of the step brings the idle time back.

    ::

        rank 0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 ..
        rank 1 | .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    yield from lagging_weight_grads(Op, r, m, warm=2 * (p - r) - 1, lag=2 * r)
