"""What the ranks of the engine tests run: many cases in one process group."""

from __future__ import annotations

import gc
import itertools
import weakref

import ranks
import torch
from models import Reference, batch, layers, stage_state

import ds_pipe_ext

#: engines made here that may still be in use
_live: list[weakref.ref] = []
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h2")


def engine(kind, count, world, schedule, m, dtype=torch.float32, optimizer=None, stages=None, boundaries=None, module=None,
           pipeline=None, arguments=None, **config):
    """An engine over a test model; ``schedule`` None means upstream's own.

    ``kind`` is what :func:`models.layers` takes, or its result; ``module`` are further arguments of the module,
    ``arguments`` a function of the module that gives those of ``initialize``.
    """
    gc.collect()
    if all(known() is None or known().__dict__.get("over") for known in _live):
        _live.clear()
        ranks.drop_groups()
    pipeline = {**({"schedule": schedule} if schedule else {}), **(pipeline or {})}
    if boundaries:
        pipeline["partition"] = boundaries
    specs, loss_fn = layers(kind, count, dtype) if isinstance(kind, str) else kind
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": m,
        "optimizer": optimizer or {"type": "SGD", "params": {"lr": 1.0}},
        "steps_per_print": 10**6,
        # DeepSpeed clips at 1.0 by default, and upstream counts only the first stage there.
        "gradient_clipping": 0.0,
        "pipeline": pipeline,
        **config,
    }
    module = {} if module is None else module
    if "topology" not in module:
        module = {"num_stages": stages or world, **module}
    module = ds_pipe_ext.PipelineModule(specs, loss_fn=loss_fn, config=whole,
                                        partition_method=None if boundaries else "uniform", **module)
    given = {"model_parameters": [p for p in module.parameters() if p.requires_grad]}
    given.update(arguments(module) if arguments else {})
    if "optimizer" in given:
        del whole["optimizer"]
    made, *_ = ds_pipe_ext.initialize(model=module, config=whole, **given)
    _live.append(weakref.ref(made))
    destroy = made.destroy

    def destroy_and_mark():
        destroy()
        made.__dict__["over"] = True

    made.__dict__["destroy"] = destroy_and_mark
    return made


def set_micro_batches(made, m):
    """Changes the number of micro-batches of a step without building a new engine."""
    made.set_train_batch_size(m * made.train_micro_batch_size_per_gpu() * made.dp_world_size)


def worst(state, reference) -> float:
    """Largest absolute difference of this rank's parameters from the reference's."""
    return max(((state[name] - reference[name]).abs().max().item() for name in state), default=0.0)


def parity_with_stock(rank, world, m):
    """Six Adam steps in fp32: losses of upstream's engine and ours, all schedules."""
    adam = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
    result = {}
    for kind in ("mlp", "tied"):
        for schedule in (None, *SCHEDULES):
            made = engine(kind, 2 * world + 1, world, schedule, m, optimizer=adam)
            data = (batch(kind, i) for i in itertools.count())
            losses = [made.train_batch(data).item() for _ in range(6)]
            result[kind, schedule] = (type(made).__name__, losses, stage_state(made.module))
            made.destroy()
    return result


def parity_with_one_process(rank, world, schedule):
    """float64, every number of micro-batches up to 3p+1, ragged layers, tuples, ties: (case, loss error, weight error)."""
    result = []
    for kind, count in (("mlp", world), ("mlp", 2 * world + 1), ("tuple", world + 2), ("tied", world + 3)):
        reference = Reference(kind, count, torch.float64)
        made = engine(kind, count, world, schedule, 1, dtype=torch.float64)
        data = itertools.count()
        for m in range(1, 3 * world + 2):
            set_micro_batches(made, m)
            batches = [batch(kind, next(data), dtype=torch.float64) for _ in range(m)]
            loss = made.train_batch(iter(batches)).item()
            expected = reference.step(batches)
            result.append(((kind, count, m), abs(loss - expected), worst(stage_state(made.module), reference.state())))
        made.destroy()
    return result
