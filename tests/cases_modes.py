"""Evaluation, activation checkpointing, seeds, monitoring."""

from __future__ import annotations

import csv
import random
import tempfile
from pathlib import Path

import numpy
import torch
from cases_numbers import F64
from deepspeed.pipe import LayerSpec
from engine_cases import SCHEDULES, engine, worst
from models import Block, Reference, batch, layers, stage_state
from suite import case
from torch import nn


class Dropping(Block):
    """A block with dropout that counts its forwards."""

    def __init__(self, index, dtype=torch.float32):
        super().__init__(index, dtype=dtype)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.drop(super().forward(x))


def _dropping(count=4):
    return [LayerSpec(Dropping, i) for i in range(count)], nn.MSELoss()


def _random_state():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


@case(2, 4)
def evaluation(rank, world):
    """schedule -> (errors against one process, whether shapes and lists are right)."""
    found = []
    for schedule in SCHEDULES:
        reference = Reference("tied", world + 2, F64)
        made = engine(layers("tied", world + 2, F64), 0, world, schedule, 3)
        batches = [batch("tied", i) for i in range(8)]
        made.train_batch(iter(batches[:3]))
        reference.step(batches[:3])
        last, errors, shown = rank == world - 1, [], []
        with torch.no_grad():
            losses = [reference.loss(*b) for b in batches]
            outputs = []
            for inputs, _ in batches:
                for layer in reference.layers:
                    inputs = layer(inputs)
                outputs.append(inputs)
        for m in (1, 2, 7):
            loss, logits = made.eval_batch(iter(batches), return_logits=True, num_micro_batches=m)
            errors.append(abs(loss.item() - sum(losses[:m]).item() / m))
            shown.append((logits is None) != last)
            if last:
                errors.append((logits - torch.cat(outputs[:m])).abs().max().item())
        every = made.eval_batch(iter(batches), reduce_output=None)
        shown.append(len(every) == 3 if last else every is None)
        mean = made.eval_batch(iter(batches), compute_loss=False)
        unreduced = made.eval_batch(iter(batches), compute_loss=False, reduce_output=None)
        if last:
            errors += [abs(a.item() - b.item()) for a, b in zip(every, losses)]
            errors.append((mean - sum(outputs[:3]) / 3).abs().max().item())
            errors += [(a - b).abs().max().item() for a, b in zip(unreduced, outputs)]
        alone = made.eval_batch(iter(batches), bcast_loss=False)
        errors.append(abs(alone.item() - sum(losses[:3]).item() / 3) if last else 0.0)
        shown.append((alone is None) != last)
        found.append((schedule, errors, shown))
        made.destroy()
    return found


@case(2)
def evaluation_leaves_no_trace(rank, world):
    """schedule, seeded -> (losses with evaluations in between, without, whether every state was left as it was)."""
    found = {}
    for schedule in SCHEDULES:
        for seeded in (False, True):
            runs, kept = [], []
            for evaluating in (False, True):
                torch.manual_seed(0)
                made = engine(_dropping(), 0, world, schedule, 3, pipeline={"seed_layers": seeded})
                made.module.forward_funcs[0].drop.p = 0.25
                losses = [made.train_batch(batch("mlp", i) for i in range(100)).item()]
                for _ in range(3):
                    if evaluating:
                        first = made.module.forward_funcs[0]
                        first.train(False)
                        names = ("data_iterator", "loss", "total_loss", "fwd_outputs", "micro_batches", "global_steps")
                        before = [getattr(made, name) for name in names]
                        random_before, modes = _random_state(), [m.training for m in made.module.modules()]
                        step = dict(made.last_step)
                        for m in (1, 5):
                            made.eval_batch((batch("mlp", 50 + i) for i in range(9)), num_micro_batches=m)
                        kept.append((all(a is b for a, b in zip(before, (getattr(made, name) for name in names))),
                                     random_before == _random_state(), modes == [m.training for m in made.module.modules()],
                                     step == made.last_step))
                    # The iterator set by the first call goes on.
                    losses.append(made.train_batch().item())
                runs.append(losses)
                made.destroy()
            found[schedule, seeded] = *runs, kept
    return found


@case(2)
def checkpointing(rank, world):
    """schedule, reentrant, seeded -> interval -> (losses, weights, forwards of each layer)."""
    found = {}
    for schedule in SCHEDULES:
        for reentrant in (True, False):
            for seeded in (False, True):
                for interval in (0, 1, 2):
                    torch.manual_seed(0)
                    made = engine(_dropping(8), 0, world, schedule, 4,
                                  pipeline={"activation_checkpoint_interval": interval, "use_reentrant": reentrant,
                                            "seed_layers": seeded})
                    losses = [made.train_batch(batch("mlp", 4 * step + i) for i in range(4)).item() for step in range(2)]
                    found.setdefault((schedule, reentrant, seeded), {})[interval] = (
                        losses, stage_state(made.module), [layer.calls for layer in made.module.forward_funcs])
                    made.destroy()
    return found


@case(2)
def seeds(rank, world):
    """Initial weights by layer under pipeline.seed_layers for two partitions; losses of upstream and ours."""
    found = []
    for boundaries in ([0, 1, 4], [0, 3, 4]):
        specs = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
        made = engine((specs, nn.MSELoss()), 0, world, "zb-h1", 2, boundaries=boundaries, pipeline={"seed_layers": True})
        found.append(stage_state(made.module))
        made.destroy()
    losses = {}
    for schedule in (None, *SCHEDULES):
        made = engine(_dropping(), 0, world, schedule, 3, module={"seed_layers": True}, boundaries=[0, 2, 4])
        losses[schedule] = [made.train_batch(batch("mlp", i) for i in range(3)).item() for _ in range(2)]
        made.destroy()
    return found, losses


@case(2)
def monitoring(rank, world):
    """Rows of the CSV monitor, and last_step."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        made = engine("tied", 5, world, "zb-h1", 3, steps_per_print=1,
                      csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "run"})
        for step in range(3):
            made.train_batch(batch("tied", 3 * step + i) for i in range(3))
        made.eval_batch(batch("tied", i) for i in range(3))
        rows = {}
        for path in folder.rglob("*.csv"):
            with open(path, newline="") as file:
                rows[path.stem] = list(csv.reader(file))[1:]
        last = dict(made.last_step)
        made.destroy()
    return rows, last


@case(2)
def activation_bytes(rank, world):
    """schedule -> (sampled before the second step, sampled in it, micro-batches in flight, pipeline of 3 blocks a stage)."""
    found = {}
    for schedule in SCHEDULES:
        made = engine("mlp", 6, world, schedule, 4, dtype=F64)
        peaks = []
        for _ in range(3):
            made.train_batch(batch("mlp", i, dtype=F64) for i in range(4))
            peaks.append(made.last_step["peak_activation_bytes"])
        found[schedule] = peaks, made.last_step["in_flight"]
        made.destroy()
    return found


@case(2)
def breakdown(rank, world):
    """wall_clock_breakdown in every schedule, with everything that DeepSpeed prints: losses equal those without."""
    found = []
    for schedule in SCHEDULES:
        for extra in ({}, {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}):
            runs = []
            for on in (False, True):
                for prints in ((1, ) if extra else (1, 3)) if on else (10**6, ):
                    made = engine("mlp", 4, world, schedule, 2, wall_clock_breakdown=on, steps_per_print=prints,
                                  zero_allow_untested_optimizer=True, **extra)
                    runs.append([made.train_batch(batch("mlp", 2 * s + i) for i in range(2)).item() for s in range(4)])
                    made.destroy()
            found.append((schedule, runs))
    return found
