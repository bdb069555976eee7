"""Loss scaling, overflow, numbers that are none, and the optimizers and communication types that the JSON can name."""

from __future__ import annotations

import itertools

import deepspeed
import deepspeed.runtime.engine as upstream_engine
import torch
from cases_optimizers import ADAM, ZERO_1, allow_fp16, late_weight_grads, register, setup
from deepspeed.pipe import LayerSpec
from deepspeed.runtime import torch_autocast
from engine_cases import engine
from models import Block, batch, layers, stage_state
from suite import case
from torch import nn

import ds_pipe_ext
from ds_pipe_ext.runtime.launch import uninstall

SGD = {"type": "SGD", "params": {"lr": 1.0}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4,
                                         "warmup_type": "linear"}}


def trained(made, data, steps, m=3) -> dict:
    """Losses, norms, loss scales, whether the steps were applied, learning rates; the weights at the end."""
    found = {"losses": [], "norms": [], "scales": [], "applied": [], "rates": []}
    for step in range(steps):
        found["losses"].append(made.train_batch(data(m * step + i) for i in range(m)).item())
        found["norms"].append(float(made.get_global_grad_norm() or 0))
        found["scales"].append(float(made._get_optimizer_loss_scale() or 0))
        found["applied"].append(made.was_step_applied())
        found["rates"].append(made.get_lr())
    found["skipped"], found["state"] = made.skipped_steps, stage_state(made.module)
    return found


#: fp16 by wrapper: DeepSpeed keys
FP16 = {"unfused": {}, "fused": {}, "zero-1": {"zero_optimization": ZERO_1},
        "zero-1, offloaded": {"zero_optimization": {**ZERO_1, "offload_optimizer": {"device": "cpu"}},
                              "zero_force_ds_cpu_optimizer": False}}


@case(2)
def growing_scale(rank, world):
    """(wrapper, schedule) -> as :func:`trained`: the loss scale doubles in every step; None: upstream's, where it stays."""
    allow_fp16()
    register("late-w", late_weight_grads)
    fused, found = upstream_engine.FusedAdam, {}
    for wrapper, schedule in ((None, None), *itertools.product(FP16, ("1f1b", "late-w"))):
        # Which wrapper DeepSpeed takes depends on the class of the optimizer only.
        upstream_engine.FusedAdam = torch.optim.SGD if wrapper == "fused" else fused
        scale = {"initial_scale_power": 8, "loss_scale_window": 1} if wrapper else {"loss_scale": 256}
        made = engine("tied", 5, world, schedule, 3, optimizer=SGD, zero_allow_untested_optimizer=True,
                      fp16={"enabled": True, **scale}, **FP16[wrapper or "zero-1"])
        found[wrapper, schedule] = type(made.optimizer).__name__, trained(made, lambda i: batch("tied", i), 4)
        made.destroy()
    upstream_engine.FusedAdam = fused
    return found


@case(2)
def overflow(rank, world):
    """fp16 from a scale that is far too high, under a warm-up of the learning rate: (setup, schedule) -> :func:`trained`."""
    found = {}
    for name in ("zero-1 fp16", "zero-1 fp16, offloaded", "fp16"):
        for schedule in (None, "1f1b", "zb-h1"):
            if (name, schedule) == ("fp16", None):
                # Unscaled losses do not overflow.
                continue
            made, data = setup(name, "tied", world, schedule, optimizer=None, scheduler=WARMUP,
                               fp16={"enabled": True, "initial_scale_power": 18, "hysteresis": 1})
            found[name, schedule] = trained(made, data, 8)
            made.destroy()
    return found


BROKEN = ("fp32", "zero-1 fp32", "zero-1 fp32, offloaded", "bf16", "zero-1 bf16", "zero-1 fp16", "fp16")


@case(2)
def no_number(rank, world):
    """name -> of three clipped steps, the second with a W on the last stage that is no number: applied, kept, finite."""
    found = {}
    for name in BROKEN:
        made, data = setup(name, "mlp", world, "zb-h1", optimizer=None, gradient_clipping=0.5)
        accumulate, rows = made._split._accumulate, []
        value = float("nan" if name == "fp32" else "inf")

        def broken(param, grad, accumulate=accumulate, made=made, value=value):
            if made.global_steps == 1 and made.stage_id == world - 1:
                grad = torch.full_like(grad, value)
            accumulate(param, grad)

        made._split._accumulate = broken
        for step in range(3):
            before = stage_state(made.module)
            made.train_batch(data(3 * step + i) for i in range(3))
            after = stage_state(made.module)
            rows.append((made.was_step_applied(), all(torch.equal(before[n], after[n]) for n in after),
                         all(p.isfinite().all().item() for p in after.values())))
        found[name] = rows, made.skipped_steps
        made.destroy()
    return found


@case(2)
def no_number_in_the_loss(rank, world):
    """(name, schedule) -> of three steps, the second with a loss that is no number: applied, loss finite, weights finite."""
    found = {}
    for name in BROKEN:
        for schedule in (None, "1f1b", "zb-h1"):
            if (name, schedule) == ("fp16", None):
                continue
            made, data = setup(name, "mlp", world, schedule, optimizer=None)
            rows = []
            for step in range(3):
                batches = [data(3 * step + i) for i in range(3)]
                if step == 1:
                    batches[1][1].fill_(float("nan"))
                finite = made.train_batch(iter(batches)).isfinite().item()
                rows.append((made.was_step_applied(), finite, all(p.isfinite().all().item()
                                                                  for p in stage_state(made.module).values())))
            found[name, schedule] = rows
            made.destroy()
    return found


#: optimizers that the JSON names: name -> (optimizer, DeepSpeed keys, dtype)
NAMED = {
    "Adam": ({"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "torch_adam": True}}, {}, torch.float32),
    "Adagrad": ({"type": "Adagrad", "params": {"lr": 1e-2}}, {}, torch.float32),
    "Adagrad, zero-1": ({"type": "Adagrad", "params": {"lr": 1e-2}}, {"zero_optimization": ZERO_1}, torch.float32),
    "RMSprop": ({"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9}}, {}, torch.float32),
    "SGD, zero-1": ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, {"zero_optimization": ZERO_1}, torch.float32),
}


@case(2)
def named_optimizers(rank, world):
    """(name, schedule) -> (class of the basic optimizer, as :func:`trained`)."""
    return _named(NAMED, world, "tied")


def compiled_optimizers(rank, world):
    """As :func:`named_optimizers`, for those of which something is compiled at first use."""
    allow_fp16()
    adam = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    offload = {"zero_optimization": {**ZERO_1, "offload_optimizer": {"device": "cpu"}}}
    muon = {"type": "Muon", "params": {"lr": 1e-2, "torch_adam": True}}
    return _named({"Muon": (muon, {}, torch.float32),
                   "Muon, zero-1": (muon, {"zero_optimization": ZERO_1}, torch.float32),
                   "Muon, zero-1 bf16": (muon, {"zero_optimization": ZERO_1, "bf16": {"enabled": True}}, torch.bfloat16),
                   "FusedAdam": (adam, {}, torch.float32),
                   "FusedAdam, zero-1 fp16": (adam, {"zero_optimization": ZERO_1, "fp16": {"enabled": True, "loss_scale": 128}},
                                              torch.float16),
                   "DeepSpeedCPUAdam": (adam, offload, torch.float32),
                   "DeepSpeedCPUAdam, bf16": (adam, {**offload, "bf16": {"enabled": True}}, torch.bfloat16)}, world, "mlp")


def _named(setups, world, kind):
    found = {}
    for name, (optimizer, keys, dtype) in setups.items():
        for schedule in (None, "zb-h1"):
            made = engine(kind, 5, world, schedule, 3, optimizer=optimizer, zero_allow_untested_optimizer=True, **keys)
            found[name, schedule] = type(made.basic_optimizer).__name__, trained(
                made, lambda i, dtype=dtype: batch(kind, i, dtype=dtype), 3)
            made.destroy()
    return found


class SparseEmbed(nn.Embedding):
    """An embedding with sparse gradients, or the same with dense ones; weights by seed."""

    def __init__(self, sparse=True, dtype=torch.float32):
        super().__init__(11, 8, sparse=sparse, dtype=dtype)
        with torch.no_grad():
            self.weight.copy_(torch.randn(11, 8, generator=torch.Generator().manual_seed(5)))


class Head(Block):
    """Width 8 to 11 tokens."""

    def __init__(self, dtype=torch.float32):
        super().__init__(9, dtype=dtype)
        self.out = nn.Linear(8, 11, dtype=dtype)
        with torch.no_grad():
            self.out.weight.copy_(torch.randn(11, 8, generator=torch.Generator().manual_seed(6)))
            self.out.bias.zero_()

    def forward(self, x):
        return self.out(super().forward(x))


#: how gradients are averaged over replicas: name -> (model, DeepSpeed keys)
AVERAGED = {
    "prescale_gradients": ("tied", {"prescale_gradients": True}),
    "gradient_predivide_factor": ("tied", {"gradient_predivide_factor": 3.0}),
    "gradient_predivide_factor, zero-1": ("tied", {"gradient_predivide_factor": 3.0, "zero_optimization": ZERO_1}),
    "communication_data_type": ("tied", {"communication_data_type": "bf16"}),
    "communication_data_type, zero-1": ("tied", {"communication_data_type": "fp16", "zero_optimization": ZERO_1}),
    "sparse embedding": ("sparse", {}),
}


@case(4)
def averaged(rank, world):
    """2 stages x 2 replicas: (name, schedule) -> as :func:`trained`."""
    found = {}
    for name, (kind, keys) in AVERAGED.items():
        for schedule in (None, "zb-h1"):
            model = kind
            if kind == "sparse":
                model = ([LayerSpec(SparseEmbed), LayerSpec(Block, 0), LayerSpec(Block, 1), LayerSpec(Head)],
                         lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()))
            made = engine(model, 5, world, schedule, 3, stages=2, optimizer=SGD, zero_allow_untested_optimizer=True, **keys)
            found[name, schedule] = trained(made, lambda i: batch("tied", 2 * i + rank % 2), 2)
            made.destroy()
    return found


@case(2)
def autocast(rank, world):
    """torch_autocast in bf16: (ZeRO stage, schedule) -> as :func:`trained`."""
    found = {}
    for stage in (0, 1):
        for schedule in (None, "1f1b", "zb-h1"):
            made = engine("tied", 5, world, schedule, 3, optimizer=ADAM, gradient_clipping=0.0,
                          torch_autocast={"enabled": True, "dtype": "bfloat16"},
                          zero_optimization={**ZERO_1, "stage": stage})
            found[stage, schedule] = trained(made, lambda i: batch("tied", i), 3)
            made.destroy()
    # For the whole process, and never switched off.
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    return found


@case(2)
def refused(rank, world):
    """(error of an engine that asks for the impossible, process groups made before it), by initialize and after install."""
    from torch.distributed import distributed_c10d

    found = []
    for keys, initialize in (({"zero_optimization": {"stage": 2}}, ds_pipe_ext.initialize),
                             ({"optimizer": {"type": "Lamb", "params": {}}}, ds_pipe_ext.initialize),
                             ({"managed_gradient_accumulation": False}, deepspeed.initialize)):
        specs, loss = layers("mlp", 4)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": 10**6,
                  "optimizer": SGD, "pipeline": {"schedule": "zb-h1"}, **keys}
        module = ds_pipe_ext.PipelineModule(specs, loss_fn=loss, config=config)
        groups = len(distributed_c10d._world.pg_map)
        ds_pipe_ext.install()
        try:
            initialize(model=module, model_parameters=list(module.parameters()), config=config)
        except ValueError as error:
            found.append((str(error), len(distributed_c10d._world.pg_map) - groups))
        finally:
            uninstall()
    return found
