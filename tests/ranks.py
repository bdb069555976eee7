"""Runs a function in several gloo processes with a hard time limit; per-rank tracebacks on failure."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]


class RanksFailed(AssertionError):
    """Some rank raised, died or did not end; the message holds what every rank said."""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def drop_groups() -> None:
    """Destroys all process groups but the default one, and what DeepSpeed remembers of them.

    To be called between engines: every gloo group keeps threads, and upstream never destroys a pipeline module's groups, so
    a process with dozens of engines is busy with nothing else.
    """
    import gc

    import torch.distributed as dist
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.utils import groups
    from torch.distributed import distributed_c10d

    for engine in [thing for thing in gc.get_objects() if issubclass(type(thing), PipelineEngine)]:
        # Hooks on the outputs that upstream's engine keeps hold the engine, and with it its groups and their threads.
        for name in ("pipe_buffers", "fwd_outputs", "loss", "total_loss", "agg_train_loss"):
            engine.__dict__.pop(name, None)
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    for name, value in vars(groups).items():
        if name.startswith("_") and isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
        elif name.isupper() and isinstance(value, dict):
            value.clear()
    gc.collect()


def _enter(rank: int, world: int, port: int, folder: str, payload: bytes, limit: float, init: bool):
    faulthandler.dump_traceback_later(limit - 2, file=sys.stderr)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world),
                      CROSS_RANK="0", CROSS_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      OMP_NUM_THREADS="1")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".torch_extensions"))
    log = open(Path(folder) / f"rank{rank}.log", "w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        import torch

        torch.set_num_threads(1)
        # Before communication starts: the function's module may prepare it.
        function, args = pickle.loads(payload)
        if init:
            import deepspeed

            deepspeed.init_distributed("gloo", verbose=False)
            from ds_pipe_ext.runtime.guards import unlink_shared_buffers

            unlink_shared_buffers()  # for runs with upstream's engine too
        result = function(rank, world, *args)
        (Path(folder) / f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
        if init:
            import torch.distributed as dist

            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    # Threads of libraries (store, monitors) must not keep the process alive.
    os._exit(0)


def run(function, world: int, *args, limit: float = 240.0, init: bool = True) -> list:
    """``[function(rank, world, *args) for every rank]``, each in its own process; functions must be importable.

    Raises:
        RanksFailed: with every rank's output, if one fails or ``limit`` seconds pass.
    """
    codes, results, logs, _ = run_raw(function, world, *args, limit=limit, init=init)
    if any(code != 0 for code in codes):
        shown = "\n".join(f"--- rank {r} (exit {code})\n{log[-6000:]}" for r, (code, log) in enumerate(zip(codes, logs)))
        raise RanksFailed(f"{function.__name__} on {world} ranks failed:\n{shown}")
    return results


def run_raw(function, world: int, *args, limit: float = 240.0, init: bool = True, method: str = "spawn"):
    """As :func:`run`, but returns ``(exit codes, results, logs, seconds)`` without judging; -9 = killed at the limit.

    ``method`` is how the processes start; ``"forkserver"`` imports torch and DeepSpeed once for many short runs.
    """
    context = mp.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["torch", "deepspeed"])
    payload = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        started = time.monotonic()
        processes = [context.Process(target=_enter, args=(r, world, port, folder, payload, limit, init))
                     for r in range(world)]
        for process in processes:
            process.start()
        ended = [0.0] * world
        while time.monotonic() - started < limit and any(p.is_alive() for p in processes):
            for r, process in enumerate(processes):
                if not ended[r] and not process.is_alive():
                    ended[r] = time.monotonic() - started
            if any(p.exitcode not in (None, 0) for p in processes) and init:
                # The others get the time that the engine promises, not the whole limit.
                limit = min(limit, time.monotonic() - started + 45)
            time.sleep(0.05)
        for r, process in enumerate(processes):
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            ended[r] = ended[r] or time.monotonic() - started
        # DeepSpeed's shared-memory op leaves 69 MB for every rank that did not clean up.
        for segment in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            segment.unlink()
        logs, results = [], []
        for r in range(world):
            log, result = Path(folder) / f"rank{r}.log", Path(folder) / f"rank{r}.pkl"
            logs.append(log.read_text() if log.exists() else "")
            results.append(pickle.loads(result.read_bytes()) if result.exists() else None)
        return [p.exitcode for p in processes], results, logs, ended
