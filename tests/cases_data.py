"""Data: iterators that end, loaders, losses weighted by tokens."""

from __future__ import annotations

import itertools

import torch
from cases_numbers import F64
from cases_optimizers import ADAM, SETUPS, setup
from engine_cases import SCHEDULES, engine, worst
from models import Reference, batch, layers, stage_state
from suite import case
from torch import nn

from ds_pipe_ext import DataEnded

#: micro-batches that the first and the last stage have when two are left to be read in a step of four
ENDS = {"both": (2, 2), "at the boundary": (0, 0), "first sooner": (1, 3), "last sooner": (3, 1), "only the first": (2, 9),
        "only the last": (9, 0)}


def _ended(call) -> str:
    try:
        call()
    except DataEnded as error:
        assert isinstance(error, StopIteration)
        return str(error)
    return "did not end"


@case(2, 3)
def data_ends(rank, world):
    """schedule, transport, which -> (message, error of the next epoch's losses, of weights, what a dropped step changed)."""
    found = {}
    for number, schedule in enumerate(SCHEDULES):
        for transport in ("auto", "process_group"):
            # Groups cost time; one schedule after the other meets both.
            if world == 3 and transport != ("auto", "process_group")[number % 2]:
                continue
            reference = Reference("tied", world + 2, F64)
            made = engine("tied", world + 2, world, schedule, 4, dtype=F64,
                          pipeline={"p2p_transport": transport, "check_samples": True})
            data = itertools.count()
            for which, (first, last) in ENDS.items():
                batches = [batch("tied", next(data)) for _ in range(4)]
                losses = [made.train_batch(iter(batches)).item() - reference.step(batches)]
                before, step = stage_state(made.module), made.global_steps
                rows = [batch("tied", next(data)) for _ in range({0: first, world - 1: last}.get(rank, 0))]
                message = _ended(lambda rows=rows: made.train_batch(iter(rows)))
                evaluated = _ended(lambda rows=rows: made.eval_batch(iter(rows)))
                changed = [n for n, p in made.module.named_parameters() if p.grad is not None and p.grad.any()]
                changed += [n for n, p in stage_state(made.module).items() if not torch.equal(p, before[n])]
                data = itertools.count(100 * (1 + list(ENDS).index(which)))
                batches = [batch("tied", next(data)) for _ in range(4)]
                losses.append(made.train_batch(iter(batches)).item() - reference.step(batches))
                found[schedule, transport, which] = (
                    message, evaluated, max(map(abs, losses)), worst(stage_state(made.module), reference.state()),
                    changed, made.global_steps - step)
            made.destroy()
    return found


@case(4)
def data_ends_on_one_replica(rank, world):
    """schedule -> (message, losses and weights with a dropped step, without)."""
    found = {}
    for schedule in ("1f1b", "zb-h1"):
        runs = []
        for interrupted in (False, True):
            made = engine("mlp", 4, world, schedule, 2, stages=2, optimizer=ADAM, zero_allow_untested_optimizer=True,
                          zero_optimization={"stage": 1, "reduce_bucket_size": 1000})
            replica = made.mpu.get_data_parallel_rank()
            losses, message = [], ""
            for step in range(3):
                if interrupted and step == 1:
                    rows = 1 if replica == 1 else 2
                    message = _ended(lambda rows=rows: made.train_batch(batch("mlp", 50 + i) for i in range(rows)))
                losses.append(made.train_batch(batch("mlp", 4 * step + 2 * replica + i) for i in range(2)).item())
            runs.append((losses, stage_state(made.module)))
            made.destroy()
        found[schedule] = message, *runs
    return found


@case(2)
def data_ends_under_every_optimizer(rank, world):
    """name -> (messages, losses and weights with dropped steps, without)."""
    found = {}
    for name, (_, dtype, _) in SETUPS.items():
        runs, messages = [], []
        for interrupted in (False, True):
            made, _ = setup(name, "mlp", world, "zb-h1")
            losses = []
            for step in range(3):
                if interrupted and step:
                    rows = [batch("mlp", 80 + i, dtype=dtype) for i in range(2 + rank)]
                    messages.append(_ended(lambda rows=rows: made.train_batch(iter(rows))))
                losses.append(made.train_batch(batch("mlp", 3 * step + i, dtype=dtype) for i in range(3)).item())
            runs.append((losses, stage_state(made.module)))
            made.destroy()
        found[name] = messages, *runs
    return found


class Loader:
    """Yields its batches anew whenever it is iterated."""

    def __init__(self, numbers):
        self.numbers, self.begun = numbers, 0

    def __iter__(self):
        self.begun += 1
        return (batch("mlp", i) for i in self.numbers)


@case(2)
def loaders_of_the_user(rank, world):
    """(losses by loader, by iterator, how often it began, whether the ends were told, error for a list)."""
    runs = []
    for as_loader in (True, False):
        made = engine("mlp", 4, world, "1f1b", 2)
        train, held_out = Loader(range(6)), Loader(range(20, 24))
        losses, ends = [], []
        for _ in range(2):
            data, evaluation = (train, held_out) if as_loader else (iter(train), iter(held_out))
            for step in range(3):
                losses.append(made.train_batch(data).item())
                if step < 2:
                    losses.append(made.eval_batch(evaluation).item())
            ends.append([_ended(lambda data=data: made.train_batch(data)),
                         _ended(lambda evaluation=evaluation: made.eval_batch(evaluation))])
        # What set_dataloader got begins anew as well.
        made.set_dataloader(Loader(range(4)))
        for _ in range(2):
            losses += [made.train_batch().item(), made.train_batch().item()]
            ends.append(_ended(made.train_batch))
        refused = ""
        if as_loader:
            try:
                made.train_batch([batch("mlp", 0)] * 2)
            except ValueError as error:
                refused = str(error)
        runs.append((losses, ends, train.begun, held_out.begun, refused))
        made.destroy()
    return runs


class _Tokens(nn.CrossEntropyLoss):
    """Cross entropy of (rows, positions, vocabulary), mean over labels that are not -100; NaN without any."""

    def forward(self, logits, labels):
        return super().forward(logits.flatten(0, -2), labels.flatten())


def ragged(number: int, valid: int):
    """A micro-batch with ``valid`` labels of 10."""
    tokens, labels = batch("tied", number)
    labels = labels.flatten()
    labels[valid:] = -100
    return tokens, labels.view(2, 5)


#: targets of the micro-batches of the steps; 0: none at all
TARGETS = ((2, 8, 5), (0, 10, 1), (0, 0, 0), (3, 0, 10))


@case(1, 2, 4)
def token_weights(rank, world):
    """schedule -> errors against one loss over all tokens: of losses and weights, of evaluations."""
    found = {}
    stages, replicas = (2, 2) if world == 4 else (world, 1)
    # Upstream does not average float64 gradients over replicas.
    dtype = F64 if replicas == 1 else torch.float32
    for schedule in SCHEDULES:
        reference = Reference((layers("tied", 4, F64)[0], _Tokens()))
        made = engine((layers("tied", 4, dtype)[0], _Tokens()), 4, world, schedule, 3, stages=stages,
                      pipeline={"loss_weighting": "token"})
        replica = made.mpu.get_data_parallel_rank() if replicas > 1 else 0
        errors, evaluations = [], []
        for step, targets in enumerate(TARGETS):
            own = [[ragged(100 * r + 10 * step + i, targets[(i + r) % 3]) for i in range(3)] for r in range(replicas)]
            pairs = [pair for batches in own for pair in batches]
            whole = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
            empty = not any(targets)
            with torch.no_grad():
                expected = 0.0 if empty else reference.loss(*whole).item()
            evaluations.append(abs(made.eval_batch(iter(own[replica])).item() - expected))
            loss = made.train_batch(iter(own[replica])).item()
            errors.append(abs(loss - expected))
            if not empty:
                reference.step([whole])
            errors.append(worst(stage_state(made.module), reference.state()))
        found[schedule] = errors, evaluations
        made.destroy()
    return found


@case(2)
def token_weights_of_a_known_sum(rank, world):
    """Losses (token, mean of means) of two micro-batches whose targets sum to 4 over 2 and to 40 over 8."""

    class Given(nn.Module):

        def forward(self, outputs, labels):
            per_target = torch.where(labels == 2, 2.0, 5.0) + 0 * outputs.sum()
            return per_target[labels != -100].mean()

    found = []
    for weighting in ("token", "micro_batch"):
        made = engine((layers("mlp", 4)[0], Given()), 0, world, "zb-h1", 2, pipeline={"loss_weighting": weighting})
        labels = torch.full((2, 8), -100), torch.full((2, 8), -100)
        labels[0][0, :2], labels[1][0, :8] = 2, 5
        found.append(made.train_batch((batch("mlp", i)[0], labels[i]) for i in range(2)).item())
        made.destroy()
    return found


@case(2)
def token_weights_refused(rank, world):
    """The error for labels that cannot be counted."""
    made = engine("mlp", 4, world, "1f1b", 1, pipeline={"loss_weighting": "token"})
    try:
        made.train_batch(batch("mlp", i) for i in range(1))
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        made.destroy()
    return ""
