"""Parameter groups that are empty on some stages, stages and steps without gradients, long runs."""

from __future__ import annotations

import gc
import os

import torch
from cases_numbers import clipped
from cases_optimizers import ADAM, SETUPS, ZERO_1, allow_fp16
from cases_precision import Head, SparseEmbed
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from engine_cases import engine, worst
from models import Block, Embed, Reference, batch, cross_entropy, project, stage_state
from suite import case
from torch import nn


class NoBias(Block):
    """A block whose linear layer has no bias."""

    def __init__(self, index, dtype=torch.float32):
        super().__init__(index, dtype=dtype)
        self.linear.bias = None


def _layers(dtype=torch.float32):
    return [LayerSpec(NoBias, 0, dtype=dtype), LayerSpec(NoBias, 1, dtype=dtype), LayerSpec(Block, 2, dtype=dtype),
            LayerSpec(Block, 3, dtype=dtype)], nn.MSELoss()


def _groups(parameters, keep_empty=True):
    """Biases, which the first stage does not have, then matrices."""
    parameters = list(parameters)
    groups = [{"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
              {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1, "lr": 0.01}]
    return [group for group in groups if group["params"] or keep_empty]


def _rates(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.9**step])


def _named_groups(module):
    names = {id(p): name for name, p in module.named_parameters()}
    return [{**group, "params": [(names[id(p)], p) for p in group["params"]]}
            for group in _groups(module.parameters(), keep_empty=False)]


def _client(module):
    optimizer = torch.optim.AdamW(_groups(module.parameters()))
    return {"optimizer": optimizer, "lr_scheduler": _rates(optimizer)}


#: how a script brings its groups: arguments of initialize
WAYS = {
    "model_parameters": lambda module: {"model_parameters": _groups(module.parameters())},
    "only what is not empty": lambda module: {"model_parameters": _groups(module.parameters(), keep_empty=False)},
    "named, only what is not empty": lambda module: {"optimizer": torch.optim.AdamW(_named_groups(module))},
    "client optimizer and scheduler": _client,
    "callable": lambda module: {"model_parameters": _groups(module.parameters()), "optimizer": torch.optim.AdamW},
}
PRECISIONS = ("fp32", "zero-1 fp32", "bf16", "fp16", "zero-1 fp16")


@case(2)
def groups(rank, world):
    """(precision, way) -> weight error after 4 clipped AdamW steps, worst error of the norm, rates of every step."""
    allow_fp16()
    found = {}
    for name in PRECISIONS:
        keys, dtype, _ = SETUPS[name]
        for way, arguments in WAYS.items():
            if "only what is not empty" in way and name != "zero-1 fp32":
                continue
            more = {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.3}
            if way == "model_parameters":
                more["scheduler"] = {"type": "WarmupLR", "params": {"warmup_min_lr": [0.0, 0.0], "warmup_max_lr": [0.02, 0.01],
                                                                    "warmup_num_steps": 3, "warmup_type": "linear"}}
            made = engine(_layers(dtype), 0, world, "zb-h1", 3, optimizer=ADAM, arguments=arguments, **keys, **more)
            moving = []

            def adamw(parameters, moving=moving, way=way):
                optimizer = torch.optim.AdamW(_groups(parameters))
                # Before its step is wrapped, which torch's schedulers do not take.
                moving.extend([_rates(optimizer)] if way.startswith("client") else [])
                return optimizer

            reference = Reference(_layers(torch.float64), optimizer=lambda p: clipped(p, 0.3, adamw))
            rates, norm_error = [], 0.0
            for number in range(4):
                batches = [batch("mlp", 3 * number + i, dtype=dtype) for i in range(3)]
                if way == "model_parameters":
                    for group, rate in zip(reference.optimizer.param_groups, made.get_lr()):
                        group["lr"] = rate
                rates.append(list(made.get_lr()))
                made.train_batch(iter(batches))
                reference.step([tuple(x.double() for x in pair) for pair in batches])
                for scheduler in moving:
                    scheduler.step()
                norm_error = max(norm_error, abs(float(made.get_global_grad_norm()) / reference.optimizer.norms[-1] - 1))
            found[name, way] = worst(stage_state(made.module), reference.state()), norm_error, rates
            made.destroy()
    return found


class Sometimes(Block):
    """A block that is the identity in every other step of three micro-batches."""

    def __init__(self, index, dtype=torch.float32):
        super().__init__(index, dtype=dtype)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x if (self.calls - 1) // 3 % 2 else super().forward(x)


class Frozen(Block):
    """A block that does not train."""

    def __init__(self, index, dtype=torch.float32):
        super().__init__(index, dtype=dtype)
        self.requires_grad_(False)


class FrozenEmbed(Embed):
    """An embedding that does not train."""

    def __init__(self, dtype=torch.float32):
        super().__init__(dtype=dtype)
        self.requires_grad_(False)


class Tanh(nn.Module):
    """A layer without parameters."""

    def forward(self, x):
        return torch.tanh(x)


#: for fp32 without ZeRO only: DeepSpeed's other optimizers flatten gradients
SPARSE = "sparse embedding"


def odd_models(dtype) -> dict:
    """name -> (layers of two stages of two layers each, loss, kind of the data)."""

    def block(i):
        return LayerSpec(Block, i, dtype=dtype)

    def frozen(i):
        return LayerSpec(Frozen, i, dtype=dtype)

    return {
        "last stage sometimes unused": ([block(0), block(1), LayerSpec(Sometimes, 2, dtype=dtype),
                                         LayerSpec(Sometimes, 3, dtype=dtype)], nn.MSELoss(), "mlp"),
        "first stage frozen": ([frozen(0), frozen(1), block(2), block(3)], nn.MSELoss(), "mlp"),
        "last stage without parameters": ([block(0), block(1), LayerSpec(Tanh), LayerSpec(Tanh)], nn.MSELoss(), "mlp"),
        "frozen tie": ([TiedLayerSpec("embed", FrozenEmbed, dtype=dtype), block(1), block(2),
                        TiedLayerSpec("embed", FrozenEmbed, dtype=dtype, forward_fn=project)], cross_entropy, "tied"),
        "last stage has the tied weight only": ([TiedLayerSpec("embed", Embed, dtype=dtype), block(1), LayerSpec(Tanh),
                                                 TiedLayerSpec("embed", Embed, dtype=dtype, forward_fn=project)],
                                                cross_entropy, "tied"),
        # The reference has dense gradients: torch clips no others.
        SPARSE: ([LayerSpec(SparseEmbed, sparse=dtype is torch.float32, dtype=dtype), block(1), block(2),
                  LayerSpec(Head, dtype=dtype)], cross_entropy, "tied"),
    }


ODD = ("fp32", "zero-1 fp32", "bf16", "zero-1 bf16, fp32 accumulation, immediate", "zero-1 bf16", "fp16", "zero-1 fp16",
       "zero-1 fp32, offloaded")


@case(2)
def odd_stages(rank, world):
    """(precision, model) -> weight error after 4 clipped SGD steps, worst error of the norm, frozen weights kept."""
    allow_fp16()
    found = {}
    for name in ODD:
        keys, dtype, _ = SETUPS[name]
        for kind in odd_models(dtype):
            if kind == SPARSE and name != "fp32":
                continue
            specs, loss, data = odd_models(dtype)[kind]
            made = engine((specs, loss), 0, world, "zb-h1", 3, optimizer={"type": "SGD", "params": {"lr": 0.1}},
                          boundaries=[0, 2, 4], zero_allow_untested_optimizer=True, **{**keys, "gradient_clipping": 0.3})
            reference = Reference(odd_models(torch.float64)[kind][:2], optimizer=lambda p: clipped(
                [x for x in p if x.requires_grad], 0.3, lambda p: torch.optim.SGD(p, lr=0.1)))
            before = {n: p.detach().clone() for n, p in made.module.named_parameters() if not p.requires_grad}
            norm_error = 0.0
            for number in range(4):
                batches = [batch(data, 3 * number + i, dtype=dtype) for i in range(3)]
                made.train_batch(iter(batches))
                reference.step([tuple(x.double() if x.is_floating_point() else x for x in pair) for pair in batches])
                norm_error = max(norm_error, abs(float(made.get_global_grad_norm()) / reference.optimizer.norms[-1] - 1))
            kept = all(torch.equal(p, before[n]) for n, p in made.module.named_parameters() if n in before)
            found[name, kind] = worst(stage_state(made.module), reference.state()), norm_error, kept
            made.destroy()
    return found


def _resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@case(2)
def two_hundred_steps(rank, world):
    """schedule -> after 20 and after 200 steps: (tensors, Python objects, resident bytes)."""
    found = {}
    for schedule in ("1f1b", "zb-h1"):
        made = engine("mlp", 2, world, schedule, 2, optimizer=ADAM, zero_optimization=ZERO_1)
        rows = []
        for step in range(200):
            made.train_batch(batch("mlp", 2 * step + i) for i in range(2))
            if step + 1 in (20, 200):
                gc.collect()
                objects = gc.get_objects()
                rows.append((sum(isinstance(x, torch.Tensor) for x in objects), len(objects), _resident()))
                del objects
        found[schedule] = rows
        made.destroy()
    return found
