"""Layers that sleep instead of computing, so that several ranks run truthfully on few cores.

A layer's forward takes F, its input gradient I, its weight gradient W:

* Forward and input gradient sleep until F (or I) after they began, so that the layer's own few operations are part of
  what it takes. The forward knows its beginning; the input gradient begins at a hook on the output and ends at a hook on
  the input, each of which fires once in every system.
* W is slept by a hook on the Linear's weight. It fires once for every gradient that reaches the weight: in an ordinary
  backward, in the weight pass of torch's graph split, and when a deferred weight gradient is accumulated. Where it fires
  inside the input gradient's time, it does not count towards it.

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


def nap(kind: str, stage: int, seconds: float, since: float | None = None) -> None:
    """Sleeps until ``seconds`` after ``since`` (default: now) and records how long that was in all."""
    start = time.perf_counter() if since is None else since
    time.sleep(max(0.0, start + seconds - time.perf_counter()))
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
        self.linear.weight.register_hook(self._weight_grad)
        self._began = 0.0

    def forward(self, x):
        start = time.perf_counter()
        if torch.is_grad_enabled():
            if not x.requires_grad:
                x = x.detach().requires_grad_()
            # Removed when it fires: a system may receive into the same tensor again.
            handle = x.register_hook(lambda grad: self._input_grad(handle))
            y = self.linear(x)
            y.register_hook(self._backward_begins)
        else:
            y = self.linear(x)
        nap("F", self.stage, self.times[0], start)
        return y

    def _backward_begins(self, grad):
        self._began = time.perf_counter()

    def _input_grad(self, handle):
        handle.remove()
        nap("I", self.stage, self.times[1], self._began)

    def _weight_grad(self, grad):
        if grad is None:
            return
        start = time.perf_counter()
        nap("W", self.stage, self.times[2], start)
        self._began += time.perf_counter() - start
