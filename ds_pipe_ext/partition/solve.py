"""The two solvers behind DeepSpeed's partition methods, with the same boundaries to the last tie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def uniform(items: int, stages: int) -> list[int]:
    """Boundaries (``stages + 1`` ints) of equal counts; the first stages take one more each if it does not divide.

    With fewer items than stages the last stages stay empty.
    """
    if items <= stages:
        return [min(stage, items) for stage in range(stages + 1)]
    chunk, rest = divmod(items, stages)
    return [stage * chunk + min(stage, rest) for stage in range(stages + 1)]


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Boundaries that make the heaviest and the lightest stage differ least, found prefix by prefix.

    The difference of a prefix is minimised before the next stage is added, as DeepSpeed does; of equal differences the
    last cut wins. Takes ``len(weights)**2 * stages`` steps at most.

    Args:
        weights: one number per layer, any unit.
        stages: number of stages.
    """
    n = len(weights)
    if n <= stages:
        return uniform(n, stages)
    total = [0, *accumulate(weights)]
    # Of the best cut of the first i layers into j stages: its heaviest and lightest stage; one list per j.
    heaviest, lightest = total[:], total[:]
    cuts: list[list[int]] = [[0] * (n + 1)]
    for j in range(2, stages + 1):
        new_heaviest, new_lightest, cut = [0.0] * (n + 1), [0.0] * (n + 1), [0] * (n + 1)
        for i in range(j, n + 1):
            best = float("inf")
            for k in range(j - 1, i):
                weight = total[i] - total[k]
                high = max(heaviest[k], weight)
                low = min(lightest[k], weight)
                if high - low <= best:
                    best, new_heaviest[i], new_lightest[i], cut[i] = high - low, high, low, k
        heaviest, lightest = new_heaviest, new_lightest
        cuts.append(cut)
    boundaries = [n]
    for cut in reversed(cuts):
        boundaries.append(cut[boundaries[-1]])
    return boundaries[::-1]
