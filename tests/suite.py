"""Cases for the engine that share one process group per number of ranks: starting one costs more than most cases."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import time
from collections.abc import Callable

import ranks

_MODULES = ("cases_numbers", "cases_optimizers", "cases_precision", "cases_groups", "cases_boundaries", "cases_shapes",
            "cases_modes", "cases_plans", "cases_transport", "cases_data", "cases_stress", "cases_checkpoints",
            "cases_checkpoint_faults", "cases_megatron", "cases_neox", "cases_features")
_CASES: dict[int, dict[str, Callable]] = {}
#: for work on one case: a comma-separated list of names
_ONLY = os.environ.get("ENGINE_CASES", "")


def case(*worlds: int):
    """Registers ``function(rank, world)`` to run on those numbers of ranks; what it returns goes to the test."""

    def register(function):
        for world in worlds:
            _CASES.setdefault(world, {})[function.__name__] = function
        return function

    return register


def _run_all(rank: int, world: int, only: str) -> dict:
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage_1_and_2

    # It collects garbage ten times an engine.
    bf16_optimizer.see_memory_usage = stage_1_and_2.see_memory_usage = lambda *args, **kwargs: None
    for name in _MODULES:
        importlib.import_module(name)
    # Once, before any engine exists: an engine that is frozen while alive would never be collected.
    gc.collect()
    gc.freeze()
    found = {}
    for name, function in _CASES[world].items():
        if only and name not in only.split(","):
            continue
        started = time.monotonic()
        print(f"=== case {name}", flush=True)
        found[name] = function(rank, world)
        ranks.drop_groups()
        print(f"=== {name}: {time.monotonic() - started:.1f} s", flush=True)
        if os.environ.get("ENGINE_TIMES") and rank == 0:
            with open(os.environ["ENGINE_TIMES"], "a") as file:
                file.write(f"{world} {name} {time.monotonic() - started:.1f}\n")
    return found


@functools.cache
def _results(world: int) -> list[dict] | ranks.RanksFailed:
    try:
        return ranks.run(_run_all, world, _ONLY, limit=float(os.environ.get("ENGINE_LIMIT", 1200)))
    except ranks.RanksFailed as error:
        # Kept: every test would run all cases again, only to see the same.
        return error


def result(world: int, name: str) -> list:
    """What case ``name`` returned on every rank; the first call runs all cases of that number of ranks."""
    results = _results(world)
    if isinstance(results, ranks.RanksFailed):
        raise results
    return [found[name] for found in results]
