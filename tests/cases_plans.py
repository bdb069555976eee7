"""Schedules of somebody else: random plans trained as a registered schedule, module and engine of other makes."""

from __future__ import annotations

import itertools
import random

import torch
from cases_numbers import F64
from cases_optimizers import late_weight_grads, register
from engine_cases import SCHEDULES, engine, worst
from models import Reference, batch, layers, stage_state
from suite import case
from torch import nn


def _register_random():
    from ds_pipe_ext.registry import schedules
    from ds_pipe_ext.testing import random_plan

    if "any-order" not in schedules.names():

        @schedules.register("any-order")
        def any_order(shape, seed=0, split=0.5):
            """A plan in an order that nobody would write."""
            return random_plan(random.Random(seed), range(shape.ranks), shape.microbatches, split)


@case(2, 4)
def others_schedules(rank, world):
    """(case, loss error, weight error): schedules that this test defines, updates are gradients."""
    _register_random()
    register("late-w", late_weight_grads)
    found = []
    for kind in ("tuple", "tied"):
        for seed, m, groups in itertools.product(range(4), (1, 5), (1, 2)):
            schedule = {"name": "any-order", "seed": seed, "split": (0.0, 0.5, 1.0, 0.7)[seed]}
            reference = Reference(kind, world + 2, F64)
            made = engine(kind, world + 2, world, schedule, m, dtype=F64,
                          pipeline={"p2p_groups": groups, "p2p_transport": ("auto", "process_group")[seed % 2]})
            error = 0.0
            for step in range(3):
                batches = [batch(kind, m * step + i, dtype=F64) for i in range(m)]
                error = max(error, abs(made.train_batch(iter(batches)).item() - reference.step(batches)))
            found.append(((kind, seed, m, groups), error, worst(stage_state(made.module), reference.state())))
            made.destroy()
    reference = Reference("mlp", world + 1, F64)
    made = engine("mlp", world + 1, world, "late-w", 4, dtype=F64)
    batches = [batch("mlp", i, dtype=F64) for i in range(4)]
    error = abs(made.train_batch(iter(batches)).item() - reference.step(batches))
    found.append((("late-w", ), error, worst(stage_state(made.module), reference.state())))
    made.destroy()
    return found


@case(2)
def installed(rank, world):
    """What deepspeed.initialize gives before, during and after install(), for upstream's own module."""
    import deepspeed
    from deepspeed.pipe import PipelineModule as Upstream

    import ds_pipe_ext

    def train(schedule, section=None):
        specs, loss = layers("tied", 5)
        section = {"schedule": schedule} if schedule else section
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.0,
                  "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": 10**6,
                  **({"pipeline": section} if section else {})}
        made, *_ = deepspeed.initialize(model=Upstream(specs, num_stages=world, loss_fn=loss, partition_method="uniform"),
                                        model_parameters=None, config=config)
        losses = [made.train_batch(batch("tied", 3 * s + i) for i in range(3)).item() for s in range(2)]
        result = (type(made).__name__, isinstance(made, deepspeed.PipelineEngine),
                  issubclass(type(made), deepspeed.PipelineEngine), losses)
        made.destroy()
        return result

    found = {"before": train(None), "before, with a schedule": train("zb-h1")}
    original = deepspeed.PipelineEngine
    ds_pipe_ext.install()
    ds_pipe_ext.install()
    try:
        found["installed, no schedule"] = train(None, {"stages": world})
        for schedule in SCHEDULES:
            found["installed", schedule] = train(schedule)
        found["a module"] = isinstance(nn.Linear(1, 1), deepspeed.PipelineEngine)
    finally:
        ds_pipe_ext.uninstall()
    found["restored"] = deepspeed.PipelineEngine is original
    found["after"] = train("zb-h1")
    return found


@case(2)
def stock_module(rank, world):
    """initialize() with upstream's module, with and without a schedule; the partition it did not read is refused."""
    from deepspeed.pipe import PipelineModule as Upstream

    import ds_pipe_ext

    def made(pipeline):
        specs, loss = layers("mlp", 4)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.0,
                  "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": 10**6, "pipeline": pipeline}
        return ds_pipe_ext.initialize(model=Upstream(specs, num_stages=world, loss_fn=loss, partition_method="uniform"),
                                      config=config)[0]

    found = {}
    for pipeline in ({"stages": world}, {"schedule": "zb-h1"}, {"schedule": "zb-h2", "partition": [0, 2, 4]},
                     {"schedule": "1f1b", "stages": "auto"}):
        engine_made = made(pipeline)
        losses = [engine_made.train_batch(batch("mlp", i) for i in range(3)).item() for _ in range(2)]
        found[str(pipeline)] = type(engine_made).__name__, losses
        engine_made.destroy()
    errors = []
    for pipeline in ({"schedule": "zb-h1", "partition": [0, 1, 4]}, {"schedule": "zb-h1", "stages": 1},
                     {"schedule": "zb-h9"}, {"schedule": "zb-h1", "loss_chunk_tokens": 8}):
        try:
            made(pipeline)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return found, errors


@case(1)
def one_rank(rank, world):
    """One stage: (schedule, loss error, weight error, evaluation error)."""
    found = []
    for schedule in (*SCHEDULES, "late-w"):
        register("late-w", late_weight_grads)
        reference = Reference("mlp", 3, F64)
        made = engine("mlp", 3, 1, schedule, 3, dtype=F64, gradient_clipping=0.0)
        batches = [batch("mlp", i, dtype=F64) for i in range(3)]
        errors = [abs(made.train_batch(iter(batches)).item() - reference.step(batches)),
                  worst(stage_state(made.module), reference.state())]
        with torch.no_grad():
            expected = sum(reference.loss(*b).item() for b in batches) / 3
        found.append((schedule, [*errors, abs(made.eval_batch(iter(batches)).item() - expected)]))
        made.destroy()
    return found
