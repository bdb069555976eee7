"""One group of processes over gloo: started, watched, and ended whatever happens.

`run` starts `world` processes that call `target(context, *args)`. Each reports progress; if one fails or none reports for
`patience` seconds, all are ended and the error carries every rank's traceback and last lines of output.
"""

import datetime
import faulthandler
import json
import multiprocessing
import os
import pathlib
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field


class LaunchError(RuntimeError):
    """A process failed or hung; the message says which and shows its output."""


@dataclass
class Context:
    """What a process knows about itself."""

    rank: int
    world: int
    patience: float
    _queue: object = field(repr=False)

    def report(self, text: str) -> None:
        """Tells the parent that things go on; shown if this is rank 0."""
        faulthandler.dump_traceback_later(self.patience, exit=True)
        self._queue.put((self.rank, text))


def _child(target, rank, world, folder, patience, reports, args):
    log = os.open(os.path.join(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    context = Context(rank, world, patience, reports)
    context.report("starting")
    try:
        import deepspeed
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        deepspeed.utils.logger.setLevel("ERROR")
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world,
                                timeout=datetime.timedelta(seconds=patience))
        deepspeed.init_distributed("gloo", verbose=False)
        from ds_pipe_ext.runtime.guards import unlink_shared_buffers

        unlink_shared_buffers()
        result = target(context, *args)
        with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as file:
            json.dump(result, file)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()


def build_deepspeed_op() -> None:
    """Compiles DeepSpeed's shared-memory op once, in this process, before anything can be ended by a timeout.

    A build that is ended leaves a lock on which every later run waits for ever.
    """
    root = pathlib.Path(__file__).resolve().parents[1]
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(root / ".torch_extensions"))
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    build_shm_op()


def run(target: Callable, world: int, args: tuple = (), *, patience: float = 120.0,
        progress: Callable[[str], None] = lambda text: None) -> list:
    """Runs `target(context, *args)` in `world` processes and returns each rank's (JSON-able) result.

    Args:
        target: an importable function.
        patience: seconds without any report, or in one collective, after which the run counts as hung.
        progress: called with rank 0's reports.

    Raises:
        LaunchError: if a process fails or hangs.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        reports = spawn.Queue()
        children = [spawn.Process(target=_child, args=(target, rank, world, folder, patience, reports, args))
                    for rank in range(world)]
        try:
            for child in children:
                child.start()
            heard = time.monotonic()
            while any(child.is_alive() for child in children):
                try:
                    rank, text = reports.get(timeout=0.2)
                    heard = time.monotonic()
                    if rank == 0:
                        progress(text)
                except queue.Empty:
                    pass
                failed = [rank for rank, child in enumerate(children) if child.exitcode not in (None, 0)]
                if failed:
                    time.sleep(2.0)  # the others' tracebacks
                    raise LaunchError(f"rank {failed[0]} failed\n{_logs(folder, world)}")
                if time.monotonic() - heard > patience + 10:
                    raise LaunchError(f"no process reported for {patience + 10:.0f} s\n{_logs(folder, world)}")
            failed = [rank for rank, child in enumerate(children) if child.exitcode != 0]
            if failed:
                raise LaunchError(f"rank {failed[0]} failed\n{_logs(folder, world)}")
            return [json.loads(pathlib.Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(world)]
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
            for child in children:
                if child.pid is not None:
                    child.join()


def _logs(folder: str, world: int) -> str:
    parts = []
    for rank in range(world):
        path = pathlib.Path(folder, f"{rank}.log")
        lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
        parts.append(f"---- rank {rank}, last lines\n" + "\n".join(lines[-40:]))
    return "\n".join(parts)
