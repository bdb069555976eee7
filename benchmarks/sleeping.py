"""Layers that sleep instead of computing, so that several ranks run truthfully on few cores.

A layer sleeps F in its forward, I where its input gradient is computed, W where its weight gradient is:

* F is slept in the forward of a small Linear's owner, I by a hook on its input, which fires once, when the input
  gradient is there.
* W is slept by a hook on the Linear's weight. It fires once for every gradient that reaches the weight: in an ordinary
  backward, in the weight pass of torch's graph split, and when a deferred weight gradient is accumulated.

The first layer of a model has an input that needs no gradient, and its input gradient would be skipped. The layer makes
a leaf of such an input that does need one, so the first stage of every system sleeps I too.

Every sleep is recorded; the benchmark checks what was slept, never what should have been.
"""

import ctypes
import time

import torch
from torch import nn

#: (kind, stage key of the layer, seconds) of every sleep in this process since `drain` was called
_record: list[tuple[str, int, float]] = []


def precise_sleep() -> None:
    """Asks Linux to wake this thread on time (the default lets it oversleep by 50 microseconds)."""
    try:
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def nap(kind: str, stage: int, seconds: float) -> None:
    """Sleeps and records it."""
    start = time.perf_counter()
    time.sleep(seconds)
    _record.append((kind, stage, time.perf_counter() - start))


def drain() -> list[tuple[str, int, float]]:
    """What this process has slept since the last call."""
    global _record
    taken, _record = _record, []
    return taken


class SleepingLayer(nn.Module):
    """One layer of `hidden` features that sleeps `times` = (F, I, W) seconds; `stage` names it in the record."""

    def __init__(self, hidden: int, times: tuple[float, float, float], stage: int):
        super().__init__()
        self.times = times
        self.stage = stage
        self.linear = nn.Linear(hidden, hidden, bias=False)
        self.linear.weight.register_hook(lambda grad: None if grad is None else nap("W", stage, times[2]))

    def forward(self, x):
        if torch.is_grad_enabled():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            x.register_hook(lambda grad: nap("I", self.stage, self.times[1]))
        nap("F", self.stage, self.times[0])
        return self.linear(x)
