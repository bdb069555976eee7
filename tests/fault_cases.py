"""What the ranks of the failure tests run: one place, one rank and one step in which something goes wrong."""

from __future__ import annotations

import atexit
import importlib
import itertools
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from models import Block, batch
from torch import nn

import ds_pipe_ext

BOOM = "boom on purpose"
MICRO_BATCHES = 4
#: longer than the others may take to end
ALIVE_S = 28.0
# Its start takes seconds of spinning, and ranks that are killed leave 70 MB each in /dev/shm; training does not use it.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
_case: dict = {}
_now = {"rank": -1, "step": -1, "calls": 0}


def _act(how: str):
    print(f"FAILS AT {time.time()}", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "os._exit":
        os._exit(7)
    if how == "sys.exit":
        sys.exit(3)
    raise {"raise": ValueError(BOOM), "memory": MemoryError(BOOM), "interrupt": KeyboardInterrupt(BOOM),
           "oom": torch.OutOfMemoryError(f"CUDA out of memory: {BOOM}"),
           "gloo": RuntimeError(f"{BOOM}, not a transfer"), "socket": ConnectionResetError(f"{BOOM}: bucket unreachable")}[how]


def trigger(place: str) -> None:
    """Fails if this is the place, rank, step and (there) second call that the case names."""
    if _case.get("place") != place or _case["rank"] != _now["rank"] or _case["step"] != _now["step"]:
        return
    _now["calls"] += 1
    if _now["calls"] == _case.get("call", 1):
        _act(_case["how"])


class _Backward(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        trigger("backward")
        return grad


class FaultyBlock(Block):
    """A block with places to fail in."""

    def __init__(self, index: int):
        super().__init__(index)
        self.linear.weight.register_post_accumulate_grad_hook(lambda p: trigger("weight_grad"))

    def state_dict(self, *args, **kwargs):
        trigger("save")
        return super().state_dict(*args, **kwargs)

    def forward(self, x):
        trigger("forward")
        if _case.get("sleep"):
            time.sleep(_case["sleep"])
        return _Backward.apply(super().forward(x))


class FaultyLoss(nn.MSELoss):
    """A loss that may fail."""

    def forward(self, outputs, labels):
        trigger("loss")
        return super().forward(outputs, labels)


def _data():
    for index in itertools.count():
        trigger("data")
        if _case.get("rows") == index:
            return
        other = _case.get("place") == "samples" and _case["rank"] == _now["rank"]
        if other and index == 0:
            print(f"FAILS AT {time.time()}", flush=True)
        yield batch("mlp", index + 1000 * other)


def _prepare(value):
    trigger("prepare_batch")
    return value


def build(world: int, schedule: str, micro_batches: int = MICRO_BATCHES, **config):
    """An engine over faulty blocks."""
    from deepspeed.pipe import LayerSpec

    whole = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": micro_batches,
             "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}, "steps_per_print": 10**6,
             "gradient_clipping": 0.0, "pipeline": {"schedule": schedule} if schedule else {}, **config}
    module = ds_pipe_ext.PipelineModule([LayerSpec(FaultyBlock, i) for i in range(2 * world)], num_stages=world,
                                        loss_fn=FaultyLoss(), config=whole, partition_method="uniform")
    module.prepare_batch = _prepare
    made, *_ = ds_pipe_ext.initialize(model=module, model_parameters=list(module.parameters()), config=whole)
    # ZeRO wraps the optimizer.
    getattr(made.optimizer, "optimizer", made.optimizer).register_step_pre_hook(lambda *a: trigger("optimizer"))
    return made


def train(rank, world, case, steps=4):
    """Trains until the case's failure; ``alive``: the failing rank catches it and sleeps."""
    _case.update(case)
    _now["rank"] = rank
    made = build(world, case.get("schedule", "1f1b"), **case.get("config", {}))
    before = [p.detach().clone() for p in made.module.parameters()]
    data = _data()
    try:
        for step in range(steps):
            _now.update(step=step, calls=0)
            if case.get("between") and rank == case["rank"] and step == case["step"]:
                _act(case["how"])
            if case.get("other_call") and rank == case["rank"] and step == case["step"]:
                made.eval_batch(data)
            elif case.get("other_count") and rank == case["rank"] and step == case["step"]:
                made.set_train_batch_size(2 * 2 * MICRO_BATCHES)
            made.train_batch(data)
            if case["place"] == "save" and step == case["step"]:
                # Beside the log, in the run's own folder.
                made.save_checkpoint(Path(os.readlink("/proc/self/fd/1")).parent / "checkpoints")
    except BaseException:
        if all(map(torch.equal, before, made.module.parameters())):
            print("WEIGHTS KEPT", flush=True)
        if not (case.get("alive") and rank == case["rank"]):
            raise
        traceback.print_exc()
        sys.stderr.flush()
        time.sleep(ALIVE_S)
        os._exit(1)
    return made.global_steps


def disagree(rank, world, config_of, how="engine"):
    """Every rank brings its own configuration; ``config_of[rank]`` overrides. Returns the error's text."""
    config = dict(config_of.get(rank, {}))
    began = time.monotonic()
    try:
        build(world, config.pop("schedule", "1f1b"), config.pop("micro_batches", MICRO_BATCHES), **config)
    except ValueError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def two_engines(rank, world):
    """One after the other, then two at the same time, a failed start in between; ranks finish at different times."""
    import threading

    _now["rank"] = rank
    for _ in range(2):
        made = build(world, "1f1b")
        made.train_batch(_data())
        made.destroy()
    errors = disagree(rank, world, {1: {"micro_batches": 8}})[0]
    first, second = build(world, "zb-h1"), build(world, "1f1b")
    data = _data()
    for _ in range(2):
        first.train_batch(data)
        second.train_batch(data)
        second.eval_batch(data)
    threads = [t.name for t in threading.enumerate() if t.name.startswith("ds-pipe")]
    first.destroy()
    second.train_batch(data)
    second.destroy()
    left = [t.name for t in threading.enumerate() if t.name.startswith("ds-pipe")]
    return errors, threads, left


def plain_end(rank, world, port, lag, destroy):
    """Ends by the interpreter's own exit, in a process of its own (see ``main``)."""
    del port
    _now["rank"] = rank
    made = build(world, "1f1b")
    data = _data()
    for _ in range(2):
        made.train_batch(data)
    if destroy == "destroy":
        made.destroy()
    # Longer than every grace period: a rank that finished must not be taken for a failed one.
    time.sleep(lag if rank == world - 1 else 0)
    print("DONE", flush=True)


def idle_cost(rank, world, seconds):
    """CPU seconds that this process uses while it sleeps, with an engine built."""
    made = build(world, "1f1b")
    made.train_batch(_data())
    before = time.process_time()
    time.sleep(seconds)
    used = time.process_time() - before
    made.train_batch(_data())
    return used


def file_store(rank, world, path, case):
    """The process group is the user's own, over a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(path, world), rank=rank, world_size=world)
    return train(rank, world, case)


def interrupted(rank, world, signal_number, transport):
    """Rank 0 sleeps in a step for long; rank 1, blocked in a transfer, gets the signal."""
    import threading

    _case.update(place="nowhere", rank=-1, step=-1)
    _now["rank"] = rank
    made = build(world, "1f1b", pipeline={"schedule": "1f1b", "p2p_transport": transport})
    data = _data()
    made.train_batch(data)
    if rank == 0:
        _case["sleep"] = 7
    else:
        def send():
            print(f"FAILS AT {time.time()}", flush=True)
            os.kill(os.getpid(), signal_number)

        threading.Timer(1.0, send).start()
    made.train_batch(data)


def forked(rank, world):
    """Threads that watch on this rank after children were forked that collected the engine or ended by themselves."""
    import gc
    import threading

    made = build(world, "1f1b")
    data = _data()
    made.train_batch(data)
    for way in ("collect", "end"):
        if (child := os.fork()) == 0:
            if way == "collect":
                del made
                gc.collect()
                os._exit(0)
            # What the interpreter does at a normal end.
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
    made.train_batch(data)
    time.sleep(2)
    return [t.name for t in threading.enumerate() if t.name == "ds-pipe-faults"]


def still(rank, world):
    """Rank 1 sleeps in a forward, rank 2 outside the engine, both for long; the others wait. Nobody fails."""
    _case.update(place="nowhere", rank=-1, step=-1)
    _now["rank"] = rank
    made = build(world, "1f1b", pipeline={"schedule": "1f1b", "watchdog_seconds": 1})
    data = _data()
    made.train_batch(data)
    if rank == 1:
        _case["sleep"] = 3
    if rank == 2:
        time.sleep(6)
    made.train_batch(data)


def main():
    """Under the launcher: ``script.py NAME ARGUMENTS...``, ranks from the environment."""
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if arguments[0] == "train":
        place, failing, step, how = arguments[1:]
        train(rank, world, {"place": place, "rank": int(failing), "step": int(step), "how": how})
    else:
        plain_end(rank, world, None, float(arguments[1]), arguments[2])


if __name__ == "__main__":
    main()
