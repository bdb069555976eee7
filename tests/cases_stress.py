"""Transfers whose timing nobody planned: random sleeps around every instruction, sends that wait for their receive."""

from __future__ import annotations

import random
import time

import torch
from deepspeed.pipe import LayerSpec
from engine_cases import SCHEDULES, engine
from suite import case
from torch import nn

from ds_pipe_ext.runtime.transport import GroupTransport

#: elements of fp32 that cross a boundary: 8 bytes and 8 MB
PAYLOADS = {"8 bytes": 2, "8 MB": 2 * 1024 * 1024}


class Scale(nn.Module):
    """tanh(w x + b) with two numbers as weights, so that the payload may have any size."""

    def __init__(self, index):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5 + 0.1 * index]))
        self.bias = nn.Parameter(torch.tensor([0.1 * index]))

    def forward(self, x):
        return torch.tanh(self.weight * x + self.bias)


def _data(elements):
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(2, 1, elements, generator=generator)
    number = 0
    while True:
        number += 1
        yield inputs * (1 + 0.01 * number), labels


class _Done:
    """The work of a send that has been waited for."""

    def wait(self):
        return True

    def is_completed(self):
        return True


def _matched(transport):
    """Lets ``transport``, over gloo, return from a send only when its receive is there."""
    send = transport.send

    def send_and_wait(*args, **kwargs):
        send(*args, **kwargs).wait()
        return _Done()

    transport.send = send_and_wait


def _disturbed(made, rng, seconds):
    table = dict(made._INSTRUCTION_MAP)

    def slow(function):

        def run(engine, instr):
            time.sleep(rng.random() * seconds)
            function(engine, instr)
            time.sleep(rng.random() * seconds)

        return run

    made._INSTRUCTION_MAP = {kind: slow(function) for kind, function in table.items()}


WAYS = [(schedule, *way) for schedule in SCHEDULES for way in (("auto", 2), ("process_group", 2), ("process_group", 1))]


def disturbed_steps(rank, world, steps, ways, seconds=0.003):
    """(schedule, transport, groups), payload -> (losses undisturbed, losses disturbed)."""
    found = {}
    rng = random.Random(rank)
    for schedule, transport, groups in ways:
        runs = {payload: [] for payload in PAYLOADS}
        for disturb in (False, True):
            made = engine(([LayerSpec(Scale, i) for i in range(world + 1)], nn.MSELoss()), 0, world, schedule, 4,
                          optimizer={"type": "SGD", "params": {"lr": 0.01}},
                          pipeline={"p2p_transport": transport, "p2p_groups": groups})
            if disturb:
                _disturbed(made, rng, seconds)
                for used in {id(t): t for t in (*made._links._transports, made._links._host)}.values():
                    if isinstance(used, GroupTransport):
                        _matched(used)
            for payload, elements in PAYLOADS.items():
                data = _data(elements)
                runs[payload].append([made.train_batch(data).item() for _ in range(steps)])
            made.destroy()
        found.update({((schedule, transport, groups), payload): both for payload, both in runs.items()})
    return found


@case(3)
def random_sleeps(rank, world):
    """As :func:`disturbed_steps`: every schedule and every way once."""
    return disturbed_steps(rank, world, 2, WAYS[::4] + WAYS[-1:], 0.001)
