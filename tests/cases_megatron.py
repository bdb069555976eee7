"""A program in the manner of Megatron-DeepSpeed, unchanged but for `ds_pipe_ext.install()`: 2 stages x 2 tensor-parallel ranks."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile

import deepspeed
import megatron_models as megatron
import torch
from cases_numbers import F64, clipped
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from engine_cases import SCHEDULES
from models import Reference, stage_state
from suite import case

import ds_pipe_ext

SEED, MICRO_BATCHES = 1234, 4


class Settings:
    """What a run varies: whether activations travel and are checkpointed in shares, dropout, recomputation, precision."""

    def __init__(self, schedule, shares=True, dropout=0.0, interval=0, dtype=torch.float32, **config):
        self.schedule, self.shares, self.dropout, self.interval, self.dtype = schedule, shares, dropout, interval, dtype
        self.config = config

    def json(self) -> dict:
        pipeline = {"pipe_partitioned": self.shares, "grad_partitioned": self.shares}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2}},
            "gradient_clipping": 0.0,
            "activation_checkpointing": {"partition_activations": self.shares},
            "pipeline": {**pipeline, **({"schedule": self.schedule} if self.schedule else {})},
            **self.config,
        }


@contextlib.contextmanager
def _installed():
    """What the program's start patches and configures for the whole process is undone for the next case."""
    kept = {name: getattr(ds_checkpointing, name) for name in ("mpu", "mp_rank", "mp_size", "mp_group", "num_layers",
                                                               "PARTITION_ACTIVATIONS")}
    ds_pipe_ext.install()
    try:
        yield
    finally:
        ds_pipe_ext.uninstall()
        vars(ds_checkpointing).update(kept)
        ds_checkpointing.get_cuda_rng_tracker().reset()


@contextlib.contextmanager
def program(rank, settings, mpu):
    """The user's start: arguments, model-parallel unit, random states, model, engine; yields engine and batch function."""
    with tempfile.TemporaryDirectory() as folder, _installed():
        path = os.path.join(folder, "ds_config.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(settings.json(), file)
        args = argparse.Namespace(local_rank=rank, deepspeed=True, deepspeed_config=path)
        ds_checkpointing.configure(mpu, deepspeed_config=path)
        torch.manual_seed(SEED)
        ds_checkpointing.model_parallel_cuda_manual_seed(SEED)
        model = megatron.GPTModelPipe(mpu, dropout=settings.dropout, dtype=settings.dtype, interval=settings.interval)
        engine, optimizer, loader, scheduler = deepspeed.initialize(
            args=args, model=model, model_parameters=[p for p in model.parameters() if p.requires_grad])
        assert optimizer is engine.optimizer and loader is None and scheduler is engine.lr_scheduler
        assert engine.grid.get_pipe_parallel_rank() == mpu.get_pipeline_model_parallel_rank()
        assert engine.grid.get_slice_parallel_rank() == mpu.get_tensor_model_parallel_rank()
        assert engine.grid.get_data_parallel_rank() == mpu.get_data_parallel_rank()
        length = [megatron.LENGTH]

        def batch_fn(data):
            """Only the first rank of a model-parallel group reads; the others are sent what it read."""
            text = data["text"] if data is not None else torch.empty((2, megatron.LENGTH + 1), dtype=torch.long)
            group = mpu.get_tensor_model_parallel_group()
            torch.distributed.broadcast(text, torch.distributed.get_global_rank(group, 0), group=group)
            return megatron.split_batch({"text": text[:, :length[0] + 1]}, settings.dtype)

        engine.set_batch_fn(batch_fn)
        try:
            yield engine, length
        finally:
            engine.destroy()


def _reader(mpu, start=0):
    if mpu.get_tensor_model_parallel_rank():
        return None
    return (megatron.sample(i) for i in range(start, 10**6))


def _train(engine, mpu):
    """Three steps with an evaluation in between, as Megatron's loop does it: what the program gets to see."""
    data, seen = _reader(mpu), []
    for iteration in range(3):
        loss = engine.train_batch(data_iter=data)
        seen.append((loss.item(), engine.get_lr(), engine.global_steps, engine.get_additional_losses(),
                     engine.was_step_applied()))
        if iteration == 1:
            engine.reset_activation_shape()
            seen.append(engine.eval_batch(_reader(mpu, 900)).item())
            engine.reset_activation_shape()
    return seen


VARIANTS = {
    "whole": {"shares": False},
    "shares": {"interval": 1, "steps_per_print": 1},
    "dropout": {"dropout": 0.1, "interval": 1, "steps_per_print": 3},
    "dropout, whole": {"dropout": 0.1, "interval": 2, "shares": False},
    "zero": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 10_000}, "gradient_clipping": 0.5, "dropout": 0.1},
}


def _mpu():
    return megatron.Mpu(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))


@case(4)
def megatron_stock(rank, world):
    """variant -> schedule (None: upstream's engine) -> (engine, what the program saw, weights)."""
    mpu, found = _mpu(), {}
    for name, options in VARIANTS.items():
        for schedule in (None, *SCHEDULES) if name in ("shares", "dropout") else (None, "1f1b", "zb-h2"):
            # Upstream's own engine asserts with it.
            breakdown = {"wall_clock_breakdown": schedule is not None and name != "whole"}
            with program(rank, Settings(schedule, **options, **breakdown), mpu) as (engine, _):
                seen = _train(engine, mpu)
                found.setdefault(name, {})[schedule] = type(engine).__name__, seen, stage_state(engine.module)
    return found


def _reference(clip):
    alone = megatron.Alone()
    return Reference((megatron.specs(alone, dtype=F64), megatron.loss_of(alone)),
                     optimizer=lambda p: clipped(p, clip or 1e9, lambda p: torch.optim.SGD(p, lr=0.5)))


def _batches(start, length=megatron.LENGTH):
    texts = [megatron.sample(start + i)["text"][:, :length + 1] for i in range(MICRO_BATCHES)]
    return [megatron.split_batch({"text": text}, F64) for text in texts]


def _weight_error(module, reference, mpu) -> float:
    worst, whole = 0.0, reference.state()
    for name, own in stage_state(module).items():
        # The last stage's copy of the position embedding is never used.
        if not (name.endswith("position_embeddings.weight") and mpu.get_pipeline_model_parallel_rank()):
            worst = max(worst, (megatron.own_slice(whole[name], own, mpu) - own).abs().max().item())
    return worst


@case(4)
def megatron_alone(rank, world):
    """float64 against one process with whole weights: (case, loss errors, evaluation error, weight error, norm errors)."""
    mpu, found = _mpu(), []
    for schedule, clip in itertools.product(SCHEDULES, (0.0, 0.05)):
        reference = _reference(clip)
        settings = Settings(schedule, dtype=F64, gradient_clipping=clip, scheduler={}, interval=int(clip == 0.0),
                            shares=clip == 0.0, optimizer={"type": "SGD", "params": {"lr": 0.5}})
        curriculum = CurriculumScheduler({"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 12,
                                          "schedule_type": "fixed_discrete",
                                          "schedule_config": {"difficulty": [8, 10, 12], "max_step": [1, 2]}})
        with program(rank, settings, mpu) as (engine, length):
            losses, norms, data = [], [], _reader(mpu)
            for step in range(3):
                length[0] = curriculum.update_difficulty(step + 1)
                engine.reset_activation_shape()
                loss = engine.train_batch(data).item()
                losses.append(abs(loss - reference.step(_batches(MICRO_BATCHES * step, length[0]))))
                norms += [abs(norm / reference.optimizer.norms[-1] - 1)
                          for norm in (engine.get_global_grad_norm(), engine.last_step["grad_norm"])]
            with torch.no_grad():
                expected = sum(reference.loss(*b).item() for b in _batches(900)) / MICRO_BATCHES
            evaluation = abs(engine.eval_batch(_reader(mpu, 900)).item() - expected)
            found.append(((schedule, clip), losses, evaluation, _weight_error(engine.module, reference, mpu), norms))
    return found
