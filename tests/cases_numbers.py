"""Cases about numbers that go wrong in silence: replicas, ties, frozen weights, the gradient norm, accumulation."""

from __future__ import annotations

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from engine_cases import SCHEDULES, engine, set_micro_batches, worst
from models import Block, Embed, Reference, batch, cross_entropy, layers, project, stage_state
from suite import case
from torch import nn

F64 = torch.float64


def clipped(parameters, limit, make):
    """An optimizer that clips by the global norm before it steps; ``norms`` keeps the norms."""
    parameters = list(parameters)
    optimizer = make(parameters)
    step, optimizer.norms = optimizer.step, []

    def clip_and_step():
        optimizer.norms.append(nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], limit).item())
        step()

    optimizer.step = clip_and_step
    return optimizer


class Frozen(Block):
    """A block that does not train."""

    def __init__(self, index, dtype=F64):
        super().__init__(index, dtype=dtype)
        self.requires_grad_(False)


class FrozenEmbed(Embed):
    """An embedding that does not train."""

    def __init__(self, dtype=F64):
        super().__init__(dtype=dtype)
        self.requires_grad_(False)


class Square(nn.Module):
    """A matrix that two stages share."""

    def __init__(self, dtype=F64):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8, dtype=dtype) + 0.1 * torch.randn(
            8, 8, dtype=dtype, generator=torch.Generator().manual_seed(3)))

    def forward(self, x):
        return x @ self.weight


def transposed(square, x):
    """The shared matrix, used the other way round."""
    return x @ square.weight.t()


class Tanh(nn.Module):
    """A layer without parameters."""

    def forward(self, x):
        return torch.tanh(x)


def _f64(tensor):
    return tensor.to(F64) if tensor.is_floating_point() else tensor


@case(4)
def data_parallel(rank, world):
    """2 stages x 2 replicas in fp32 (upstream averages no fp64) against fp64: (case, loss, weight and norm error)."""
    found = []
    for kind, clip in (("mlp", 0.0), ("tied", 0.0), ("tied", 0.1)):
        for schedule in SCHEDULES:
            reference = Reference(kind, 5, F64, lambda p: clipped(p, clip or 1e9, lambda p: torch.optim.SGD(p, lr=1.0)))
            made = engine(kind, 5, world, schedule, 3, stages=2, gradient_clipping=clip)
            for step in range(2):
                pieces = [[batch(kind, 20 * step + 2 * i + replica) for replica in range(2)] for i in range(3)]
                own = [piece[rank % 2] for piece in pieces]
                whole = [tuple(_f64(torch.cat(tensors)) for tensors in zip(*piece)) for piece in pieces]
                loss = made.train_batch(iter(own)).item()
                error = abs(loss - reference.step(whole))
                found.append(((kind, clip, schedule, step), error, worst(stage_state(made.module), reference.state()),
                              abs(made.get_global_grad_norm() / reference.optimizer.norms[-1] - 1)))
            made.destroy()
    return found


def _tie_models():
    frozen_tie = [TiedLayerSpec("embed", FrozenEmbed), LayerSpec(Block, 0, dtype=F64), LayerSpec(Block, 1, dtype=F64),
                  TiedLayerSpec("embed", FrozenEmbed, forward_fn=project)]
    # Stage 0 meets "a" first, stage 1 meets "b" first.
    two = [TiedLayerSpec("a", Embed, dtype=F64), TiedLayerSpec("b", Square), LayerSpec(Block, 0, dtype=F64),
           LayerSpec(Block, 1, dtype=F64), TiedLayerSpec("b", Square, forward_fn=transposed),
           TiedLayerSpec("a", Embed, dtype=F64, forward_fn=project)]
    return {"tied": layers("tied", 4, F64), "frozen tie": (frozen_tie, cross_entropy), "two ties": (two, cross_entropy)}


@case(2)
def ties(rank, world):
    """20 clipped Adam steps: per step this rank's copies of the shared weights, and the final error."""
    adam = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
    found = {}
    for name, model in _tie_models().items():
        for schedule in SCHEDULES:
            reference = Reference(model, optimizer=lambda p: clipped(p, 0.5, lambda p: torch.optim.AdamW(
                [x for x in p if x.requires_grad], lr=1e-2, weight_decay=0.1)))
            made = engine(_tie_models()[name], 0, world, schedule, 4, optimizer=adam, gradient_clipping=0.5)
            copies, norm_error = [], 0.0
            for step in range(20):
                batches = [batch("tied", 4 * step + i) for i in range(4)]
                made.train_batch(iter(batches))
                reference.step(batches)
                copies.append({key: value for key, value in stage_state(made.module).items() if key.startswith("tied.")})
                norm_error = max(norm_error, abs(made.get_global_grad_norm() / reference.optimizer.norms[-1] - 1))
            found[name, schedule] = copies, worst(stage_state(made.module), reference.state()), norm_error
            made.destroy()
    return found


def _frozen_models():
    def block(i):
        return LayerSpec(Block, i, dtype=F64)

    return {
        "first stage": [LayerSpec(Frozen, 0), LayerSpec(Frozen, 1), block(2), block(3)],
        "last stage": [block(0), block(1), LayerSpec(Frozen, 2), LayerSpec(Frozen, 3)],
        "first stage has no parameters": [LayerSpec(Tanh), LayerSpec(Tanh), block(2), block(3)],
        "last stage has no parameters": [block(0), block(1), LayerSpec(Tanh), LayerSpec(Tanh)],
    }


def count_messages(made) -> list:
    """A list that grows by one for every message sent: (what, bytes)."""
    log, send = [], made._links._send

    def counting(transport, message, peer, stage, what, *rest):
        log.append((("act", "grad", "header", "shapes", "loss", "numbers", "samples")[what], message.nbytes))
        send(transport, message, peer, stage, what, *rest)

    made._links._send = counting
    return log


@case(2)
def frozen(rank, world):
    """(case, weight error, whether frozen weights kept their bits, messages sent by this rank in a step of 4)."""
    found = []
    for name in _frozen_models():
        for schedule in SCHEDULES:
            for zero, clip in ((0, 0.0), (0, 0.1), (1, 0.1)):
                specs = _frozen_models()[name]
                model = (specs, nn.MSELoss())
                reference = Reference((_frozen_models()[name], nn.MSELoss()), optimizer=lambda p: clipped(
                    [x for x in p if x.requires_grad], clip or 1e9, lambda p: torch.optim.SGD(p, lr=1.0)))
                made = engine(model, 0, world, schedule, 4, boundaries=[0, 2, 4], gradient_clipping=clip,
                              zero_optimization={"stage": zero, "reduce_bucket_size": 100_000},
                              zero_allow_untested_optimizer=True)
                before = {n: p.detach().clone() for n, p in made.module.named_parameters() if not p.requires_grad}
                log = count_messages(made)
                batches = [batch("mlp", i, dtype=F64) for i in range(4)]
                made.train_batch(iter(batches))
                reference.step(batches)
                kept = all(torch.equal(p, before[n]) for n, p in made.module.named_parameters() if n in before)
                found.append(((name, schedule, zero, clip), worst(stage_state(made.module), reference.state()), kept,
                              [what for what, _ in log if what in ("act", "grad")]))
                made.destroy()
    return found


@case(2, 4)
def clipping(rank, world):
    """(case, update / expected update - 1, reported norm / true norm - 1, unclipped norm / true norm - 1)."""
    found = []
    for kind in ("mlp", "tied"):
        for schedule in SCHEDULES:
            ratios = []
            for clip in (0.0, 0.1):
                reference = Reference(kind, 2 * world, F64, lambda p: clipped(p, 1e9, lambda p: torch.optim.SGD(p, lr=1.0)))
                start = reference.state()
                made = engine(kind, 2 * world, world, schedule, 3, dtype=F64, gradient_clipping=clip)
                batches = [batch(kind, i, dtype=F64) for i in range(3)]
                made.train_batch(iter(batches))
                reference.step(batches)
                norm = reference.optimizer.norms[-1]
                factor = clip / norm if clip else 1.0
                wanted = {n: start[n] + factor * (p - start[n]) for n, p in reference.state().items()}
                ratios += [worst(stage_state(made.module), wanted), abs(made.get_global_grad_norm() / norm - 1),
                           abs(made.last_step["grad_norm"] / norm - 1)]
                made.destroy()
            found.append(((kind, schedule), norm, ratios))
    return found


@case(2)
def accumulation(rank, world):
    """Windows of 1, 2 and 8 micro-batches, changed in mid-training, tuples included: (case, weight error)."""
    found = []
    for kind in ("mlp", "tuple", "tied"):
        for schedule in SCHEDULES:
            reference = Reference(kind, 4, F64)
            made = engine(kind, 4, world, schedule, 8, dtype=F64)
            number = 0
            for m in (8, 1, 2, 1, 8):
                set_micro_batches(made, m)
                batches = [batch(kind, number + i, dtype=F64) for i in range(m)]
                number += m
                made.train_batch(iter(batches))
                reference.step(batches)
                found.append(((kind, schedule, m), worst(stage_state(made.module), reference.state())))
            made.destroy()
    return found
