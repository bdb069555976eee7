"""Before anything is built: do all ranks want the same thing? Asked in the job's store, so no collective can hang."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import time
from datetime import timedelta
from importlib.metadata import version

import torch.distributed as dist

from ..config import PipeConfig, count_microbatches, load, value_at
from .faults import own_connection
from .guards import check_build_locks

_NOTICE_S = 30.0
_READ_S = 2.5
_starts = itertools.count()
_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "zero_optimization.stage",
         "fp16.enabled", "bf16.enabled", "data_types.grad_accum_dtype", "optimizer.type", "pipeline.p2p_groups",
         "pipeline.p2p_transport", "pipeline.check_samples", "pipeline.loss_weighting",
         "pipeline.activation_checkpoint_interval")


class Start:
    """One start of a module or an engine on this rank."""

    def __init__(self):
        self._key = None

    def agree(self, wanted: dict) -> None:
        """Waits until all ranks have come here.

        Args:
            wanted: what all must want alike: names and values that JSON can hold.

        Raises:
            ValueError: on every rank, if they differ or one of them was refused; names ranks, keys and values.
        """
        store = own_connection()
        if store is None:
            return
        self._tell(store, {"wanted": wanted})
        rows = [row.get("error") or row["wanted"] for row in _collect(store, self._key)]
        if any(isinstance(row, str) for row in rows) or differences(rows):
            self._until_read(store)
        failed = [f"rank {rank}: {row}" for rank, row in enumerate(rows) if isinstance(row, str)]
        if failed:
            raise ValueError(f"another rank could not start: {'; '.join(failed)}")
        if problems := differences(rows):
            raise ValueError(f"the ranks do not agree: {'; '.join(problems)}")

    def refuse(self, error: BaseException) -> None:
        """Tells ranks that wait in :meth:`agree`, or will, that this one does not come."""
        # After an agreement the others wait in the next one.
        if (store := own_connection()) is not None:
            self._tell(store, {"error": f"{type(error).__name__}: {error}"})
            self._until_read(store)

    def _tell(self, store, row: dict) -> None:
        self._key = f"ds_pipe_ext/start/{next(_starts)}"
        with contextlib.suppress(RuntimeError):
            store.set(f"{self._key}/{dist.get_rank()}", json.dumps(row))


    def _until_read(self, store) -> None:
        """Rank 0, whose exit may take the store along, waits until the others have read why."""
        with contextlib.suppress(RuntimeError):
            store.add(f"{self._key}/read", 1)
            deadline = time.monotonic() + _READ_S
            while dist.get_rank() == 0 and time.monotonic() < deadline:
                if store.add(f"{self._key}/read", 0) >= dist.get_world_size():
                    return
                time.sleep(0.02)


@contextlib.contextmanager
def starting():
    """A :class:`Start` whose exceptions are told to the other ranks."""
    if not dist.is_initialized():
        check_build_locks()
    start = Start()
    try:
        yield start
    except Exception as error:
        if not str(error).startswith(("the ranks do not agree", "another rank could not start")):
            start.refuse(error)
        raise


def differences(rows: list[dict]) -> list[str]:
    """One sentence for every key that not all rows have with the same value."""
    result = []
    for key in dict.fromkeys(key for row in rows for key in row):
        ranks: dict[str, list[str]] = {}
        for rank, row in enumerate(rows):
            ranks.setdefault(json.dumps(row[key]) if key in row else "absent", []).append(str(rank))
        if len(ranks) > 1:
            told = [f"{value} on rank{'s' if len(where) > 1 else ''} {', '.join(where)}" for value, where in ranks.items()]
            result.append(f"{key} is {' but '.join(told)}")
    return result


def wanted_by(pipe_config: PipeConfig, config, model) -> dict:
    """What the ranks of an engine must agree on."""
    data = load(config)
    result = {name: _version(name) for name in ("ds-pipe-ext", "deepspeed", "torch")}
    result["pipeline.schedule"] = str(pipe_config.schedule)
    if pipe_config.active:
        replicas = model.topology().get_dim("data") or 1
        result["gradient_accumulation_steps"] = micro_batches = count_microbatches(data, replicas)
        plan = pipe_config.plan(model.num_stages, micro_batches)
        result["the plan's digest"] = hashlib.sha256(f"{plan.placement} {plan.to_csv()}".encode()).hexdigest()[:12]
    result["the module's boundaries"] = [int(bound) for bound in getattr(model, "parts", ())]
    for key in _KEYS:
        value = value_at(data, key)
        result[key] = value if isinstance(value, (int, float, str, type(None))) else str(value)
    return result


def _collect(store, key: str) -> list[dict]:
    world = dist.get_world_size()
    rows: dict[int, dict] = {}
    started = told = time.monotonic()
    # The store's own timeout is that of the process group.
    limit = store.timeout.total_seconds() if isinstance(store.timeout, timedelta) else 1800.0
    pause = 0.01
    while True:
        missing = [rank for rank in range(world) if rank not in rows]
        for rank in missing:
            if store.check([f"{key}/{rank}"]):
                rows[rank] = json.loads(store.get(f"{key}/{rank}"))
                # One that was refused ends soon, and may take the store along.
                if "error" in rows[rank]:
                    return [rows.get(r, {"wanted": {}}) for r in range(world)]
        if len(rows) == world:
            return [rows[rank] for rank in range(world)]
        now = time.monotonic()
        if now - started > limit:
            raise TimeoutError(f"ranks {[r for r in range(world) if r not in rows]} did not come to build the pipeline "
                               f"within {limit:.0f} s")
        if now - told > _NOTICE_S:
            told = now
            print(f"ds_pipe_ext: rank {dist.get_rank()} has waited {now - started:.0f} s for ranks "
                  f"{[r for r in range(world) if r not in rows]} to build the pipeline", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return "not installed"
