"""Shapes that change between steps and within a step, training and evaluation interleaved."""

from __future__ import annotations

import torch
from cases_numbers import F64
from engine_cases import SCHEDULES, engine, set_micro_batches, worst
from models import Reference, layers, stage_state
from suite import case

#: rows and length of every micro-batch of a training step, or of an evaluation ("e")
SHORT, LONG = [(2, 4)] * 4, [(2, 6)] * 4
STEPS = [
    ("t", SHORT), ("t", SHORT), ("t", SHORT),  # uniform: the third one receives ahead
    ("t", LONG), ("t", LONG), ("e", LONG), ("e", SHORT), ("t", LONG),
    ("t", [(2, 6), (2, 4), (2, 4), (2, 6)]), ("t", SHORT), ("t", SHORT), ("t", SHORT),
    ("t", [(2, 4), (2, 4), (2, 4), (1, 4)]), ("t", SHORT), ("e", [(2, 4), (1, 4)]), ("t", SHORT), ("e", SHORT), ("e", SHORT),
    ("e", SHORT), ("t", [(2, 4), (2, 6), (2, 4), (1, 6)]), ("t", [(1, 6)] * 7), ("t", [(3, 5)]), ("t", SHORT), ("t", SHORT),
]


def _tokens(number, rows, length):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(0, 11, (rows, length), generator=generator) for _ in range(2))


def _count_ahead(made) -> list:
    """Grows by one per activation whose receive is posted: True if its payload was posted at that moment."""
    log = []
    if made._links is not None:
        post = made._links.post_act

        def counting(stage, mb, peer):
            post(stage, mb, peer)
            state = made._links._state("in", stage)
            log.append(bool(state.queue) and state.queue[-1].form is not None)

        made._links.post_act = counting
    return log


@case(2, 4)
def shapes(rank, world):
    """(schedule, groups, transport), loss error, weight error, receives posted ahead in every step."""
    found = []
    for schedule in SCHEDULES:
        ways = [(2, "auto"), (1, "process_group")] if schedule in ("1f1b", "zb-h2") else [(2, "process_group")]
        for groups, transport in ways + [(2, "process_group"), (1, "auto")] * (schedule == "zb-h2"):
            reference = Reference("tied", world + 2, F64)
            made = engine(layers("tied", world + 2, F64), 0, world, schedule, 4,
                          pipeline={"p2p_groups": groups, "p2p_transport": transport})
            log, ahead, error, number = _count_ahead(made), [], 0.0, 0
            for kind, sizes in STEPS:
                batches = [_tokens(number + i, *size) for i, size in enumerate(sizes)]
                number += len(sizes)
                if kind == "t":
                    set_micro_batches(made, len(sizes))
                    loss = made.train_batch(iter(batches)).item()
                    expected = reference.step(batches)
                else:
                    loss = made.eval_batch(iter(batches), num_micro_batches=len(sizes)).item()
                    with torch.no_grad():
                        expected = sum(reference.loss(*b).item() for b in batches) / len(batches)
                error = max(error, abs(loss - expected))
                ahead.append(sum(log))
                log.clear()
            found.append(((schedule, groups, transport), error, worst(stage_state(made.module), reference.state()), ahead))
            made.destroy()
    return found
