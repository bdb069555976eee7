"""What crosses a stage boundary: kinds of tensors, in-place layers, kept tensors, model-parallel shares."""

from __future__ import annotations

import itertools

import torch
from cases_numbers import F64, Tanh, count_messages
from deepspeed.pipe import LayerSpec
from engine_cases import SCHEDULES, engine, worst
from models import Block, Reference, batch, layers, stage_state
from suite import case
from torch import nn


class Make(Block):
    """Everything a tuple may hold: 97 tensors, some of them views, scalars, or empty."""

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        rows = x.shape[0]
        extra = [torch.full((i % 3 + 1, ), i) for i in range(90)]
        return (y, y.detach() > 0, torch.arange(rows), y.mean(), y.new_empty(0, 8), (2 * y).t(), y[:, :1].expand(rows, 8),
                *extra)


class Mix(Block):
    """Uses all of it; works in place on what has no gradient after autograd has saved its neighbour."""

    def forward(self, value):
        y, mask, count, scalar, empty, turned, wide, *extra = value
        assert (mask.dtype, count.dtype, scalar.dim(), empty.shape) == (torch.bool, torch.int64, 0, (0, 8))
        scale = y * mask.to(y.dtype)
        count.add_(1)
        total = sum(e.sum() for e in extra)
        out = y + 0.1 * scalar + 0.1 * turned.t() + 0.2 * wide + scale + 0.01 * count[:, None] + empty.sum() + 1e-4 * total
        return torch.tanh(self.linear(out))


class Table(Block):
    """Makes (x, a table without gradient, positions): as a model with rotary positions does."""

    def forward(self, x):
        table = torch.cos(torch.arange(8, dtype=x.dtype))[None] * torch.ones(x.shape[0], 1, dtype=x.dtype)
        return torch.tanh(self.linear(x)), torch.arange(x.shape[0]), table


class Rotate(Block):
    """Multiplies by the table, then changes the positions in place."""

    def forward(self, value):
        x, positions, table = value
        y = torch.tanh(self.linear(x * table))
        positions += 1
        return y, positions, table


class EndTable(nn.Module):
    """Back to one tensor."""

    def forward(self, value):
        x, positions, table = value
        return x + 0.1 * positions[:, None].to(x.dtype) + table


class Two(Block):
    """A second output with a gradient, which nobody uses."""

    def __init__(self, index, dtype=F64):
        super().__init__(index, dtype=dtype)
        self.unused = nn.Linear(8, 8, dtype=dtype)
        nn.init.ones_(self.unused.weight)
        nn.init.zeros_(self.unused.bias)

    def forward(self, x):
        return torch.tanh(self.linear(x)), self.unused(x)


class One(Block):
    """Uses the first of two inputs."""

    def forward(self, value):
        return torch.tanh(self.linear(value[0]))


class Keep(Block):
    """Keeps what it received, beside a copy made then."""

    kept: list

    def forward(self, value):
        value = value if isinstance(value, tuple) else (value, )
        self.__dict__.setdefault("kept", []).extend((x.detach(), x.detach().clone()) for x in value)
        return torch.tanh(self.linear(value[0]))


def _spec(kind, *args):
    return LayerSpec(kind, *args, dtype=F64)


def _models(inplace=True):
    # In one process ReLU would change what tanh has saved; at a boundary the stage owns what it received.
    relu = LayerSpec(nn.ReLU, inplace=inplace)
    return {
        "everything": ([_spec(Make, 0), _spec(Mix, 1), _spec(Make, 2), _spec(Mix, 3)], [0, 1, 4]),
        "everything, late": ([_spec(Make, 0), _spec(Mix, 1), _spec(Make, 2), _spec(Mix, 3)], [0, 3, 4]),
        "unused": ([_spec(Two, 0), _spec(One, 1), _spec(Two, 2), _spec(One, 3)], [0, 1, 4]),
        "in place": ([_spec(Block, 0), relu, _spec(Block, 1), _spec(Block, 2)], [0, 1, 4]),
        "kept": ([_spec(Block, 0), _spec(Keep, 1), _spec(Block, 2)], [0, 1, 3]),
        "kept tuple": ([_spec(Make, 0), _spec(Keep, 1), _spec(Block, 2)], [0, 1, 3]),
    }


def _run(world, schedule, specs, boundaries, rows, steps=3, m=4, **config):
    """(loss error, weight error, evaluation error, whether kept tensors kept their values)."""
    reference = Reference((specs(False), nn.MSELoss()))
    made = engine((specs(True), nn.MSELoss()), 0, world, schedule, m, boundaries=boundaries, **config)
    error = eval_error = 0.0
    for step in range(steps):
        batches = [batch("mlp", 10 * step + i, rows=rows, dtype=F64) for i in range(m)]
        loss = made.train_batch(iter([(x.clone(), y) for x, y in batches])).item()
        error = max(error, abs(loss - reference.step(batches)))
        with torch.no_grad():
            expected = sum(reference.loss(*b).item() for b in batches) / m
        eval_error = max(eval_error, abs(made.eval_batch(iter(batches)).item() - expected))
    kept = [pair for layer in made.module.modules() for pair in vars(layer).get("kept", [])]
    kept = all(torch.equal(now, then) for now, then in kept)
    result = error, worst(stage_state(made.module), reference.state()), eval_error, kept
    made.destroy()
    return result


@case(2)
def payloads(rank, world):
    """(case, errors) of two steps; 300 KB tensors take another path than small ones."""
    found = []
    for name in _models():
        boundaries = _models()[name][1]
        for rows in (2, 5000) if name in ("in place", "kept", "kept tuple") else (2, ):
            for schedule in SCHEDULES if rows == 2 else ("1f1b", "zb-h2"):
                found.append(((name, rows, schedule), _run(world, schedule, lambda inplace, n=name: _models(inplace)[n][0], boundaries,
                                                              rows)))
    return found


@case(4)
def tables(rank, world):
    """(float, int64, float without gradient) through four stages, the middle ones receive and send it."""
    found = []
    for schedule in SCHEDULES:
        def specs(inplace):
            return [_spec(Table, 0), _spec(Rotate, 1), _spec(Rotate, 2), _spec(Rotate, 3), LayerSpec(EndTable)]

        for groups, transport in itertools.product((1, 2), ("auto", "process_group")):
            found.append(((schedule, groups, transport),
                          _run(world, schedule, specs, [0, 1, 2, 3, 5], 3, m=5,
                               pipeline={"p2p_groups": groups, "p2p_transport": transport})))
    return found


@case(4)
def shares(rank, world):
    """2 stages x 2 model-parallel ranks: (case, error, bytes of a step's activations and gradients from this rank)."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    found = []
    for rows in (3, 4001):
        for acts in (False, True):
            for grads in (False, True):
                model = layers("tuple", 5, F64) if rows == 3 else ([LayerSpec(Block, i, dtype=F64) for i in range(4)],
                                                                    nn.MSELoss())
                reference = Reference(layers("tuple", 5, F64) if rows == 3 else model)
                topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
                made = engine(model, 0, world, "zb-h1", 3, module={"topology": topology},
                              pipeline={"pipe_partitioned": acts, "grad_partitioned": grads})
                error = 0.0
                for step in range(3):
                    log = count_messages(made) if step == 2 else []
                    batches = [batch("mlp", 3 * step + i, rows=rows, dtype=F64) for i in range(3)]
                    error = max(error, abs(made.train_batch(iter(batches)).item() - reference.step(batches)))
                error = max(error, worst(stage_state(made.module), reference.state()))
                found.append(((rows, acts, grads), error, [sum(n for what, n in log if what == kind)
                                                           for kind in ("act", "grad")]))
                made.destroy()
    return found


def refused(rank, world):
    """A stage returns a tuple with None in it: every rank must end with the reason."""
    class Bad(Tanh):
        def forward(self, x):
            return x, None

    made = engine(([Tanh(), Bad(), Tanh(), Block(1)], nn.MSELoss()), 0, world, "1f1b", 4, boundaries=[0, 2, 4])
    made.train_batch(iter([batch("mlp", i) for i in range(4)]))
