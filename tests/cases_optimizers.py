"""DeepSpeed's optimizers: upstream's engine against ours, and a weight gradient that is lost on purpose."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from engine_cases import SCHEDULES, engine
from models import batch, stage_state
from suite import case

from ds_pipe_ext.plan import Op
from ds_pipe_ext.schedules.base import per_rank

ADAM = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
#: a small bucket: the default reserves 2 GB
ZERO_1 = {"stage": 1, "reduce_bucket_size": 100_000}
#: name -> (DeepSpeed keys, dtype of the inputs, class of the optimizer)
SETUPS = {
    "fp32": ({}, torch.float32, "AdamW"),
    "zero-1 fp32": ({"zero_optimization": ZERO_1}, torch.float32, "DeepSpeedZeroOptimizer"),
    "zero-1 fp32, other accumulation dtype": (
        {"zero_optimization": ZERO_1, "data_types": {"grad_accum_dtype": "bf16"}}, torch.float32,
        "DeepSpeedZeroOptimizer"),
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16, "BF16_Optimizer"),
    "zero-1 bf16": ({"zero_optimization": ZERO_1, "bf16": {"enabled": True}}, torch.bfloat16,
                    "DeepSpeedZeroOptimizer"),
    "zero-1 bf16, fp32 accumulation": (
        {"zero_optimization": ZERO_1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        torch.bfloat16, "BF16_Optimizer"),
    "zero-1 bf16, fp32 accumulation, immediate": (
        {"zero_optimization": ZERO_1, "bf16": {"enabled": True, "immediate_grad_update": True},
         "data_types": {"grad_accum_dtype": "fp32"}}, torch.bfloat16, "BF16_Optimizer"),
    "zero-1 bf16, bf16 master weights": (
        {"zero_optimization": ZERO_1, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True,
                                               "bf16_optimizer_states": True}}, torch.bfloat16, "DeepSpeedZeroOptimizer"),
    "zero-1 fp16": ({"zero_optimization": ZERO_1, "fp16": {"enabled": True, "loss_scale": 128}}, torch.float16,
                    "DeepSpeedZeroOptimizer"),
    "zero-1 fp32, offloaded": (
        {"zero_optimization": {**ZERO_1, "offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False},
        torch.float32, "DeepSpeedZeroOptimizer"),
    "zero-1 fp16, offloaded": (
        {"zero_optimization": {**ZERO_1, "offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False,
         "fp16": {"enabled": True, "loss_scale": 128}}, torch.float16, "DeepSpeedZeroOptimizer"),
    "fp16": ({"fp16": {"enabled": True, "loss_scale": 128}}, torch.float16, "FP16_UnfusedOptimizer"),
}
#: whose numbers are compared with upstream's for all schedules, without clipping; the others for some, with clipping
_THOROUGH = tuple(SETUPS)[:7]


def late_weight_grads(r, p, m):
    """Every rank computes all its weight gradients at the end, the first rank too."""
    for i in range(m):
        yield Op(r, "F", i)
    for i in range(m):
        yield Op(r, "I", i)
    for i in range(m):
        yield Op(r, "W", i)


def register(name, generate):
    """Registers a schedule of this test, once per process."""
    from ds_pipe_ext.registry import schedules

    if name not in schedules.names():
        schedules.register(name)(per_rank(generate))


def allow_fp16():
    """DeepSpeed refuses fp16 on CPUs, but its arithmetic is there: patched for both engines."""
    get_accelerator().is_fp16_supported = lambda: True


def setup(name, kind, world, schedule, optimizer=ADAM, **more):
    """(engine, its data) for an entry of SETUPS."""
    allow_fp16()
    keys, dtype, wrapper = SETUPS[name]
    made = engine(kind, 2 * world + 1, world, schedule, 3, optimizer=optimizer, zero_allow_untested_optimizer=True,
                  **{**keys, **more})
    found = type(made.optimizer).__name__
    assert found == (wrapper if optimizer or wrapper != "AdamW" else "SGD"), (name, found)
    return made, lambda i: batch(kind, i, dtype=dtype)


@case(2)
def optimizers(rank, world):
    """name, kind, schedule -> losses, weights and norms of three steps."""
    register("late-w", late_weight_grads)
    found = {}
    for name in SETUPS:
        if name == "fp16":
            # Upstream does not scale its losses: see cases_precision.
            continue
        for kind in ("mlp", "tied") if name in _THOROUGH else ("tied", ):
            for schedule in (None, *(SCHEDULES if kind == "mlp" else ("zb-h2", )), "late-w"):
                made, data = setup(name, kind, world, schedule, gradient_clipping=0.0 if name in _THOROUGH else 0.1)
                losses, norms = [], []
                for step in range(3):
                    losses.append(made.train_batch(iter([data(3 * step + i) for i in range(3)])).item())
                    norms.append(float(made.get_global_grad_norm() or 0))
                found[name, kind, schedule] = losses, stage_state(made.module), norms
                made.destroy()
    return found


@case(4)
def optimizers_with_replicas(rank, world):
    """2 stages x 2 replicas, clipped: as :func:`optimizers`."""
    allow_fp16()
    found = {}
    for name in ("zero-1 fp32", "zero-1 bf16", "zero-1 bf16, fp32 accumulation", "zero-1 fp16", "zero-1 fp32, offloaded"):
        keys, dtype, _ = SETUPS[name]
        for schedule in (None, "1f1b", "zb-h1", "zb-h2") if name in _THOROUGH else (None, "zb-h1"):
            made = engine("tied", 5, world, schedule, 3, optimizer=ADAM, stages=2, **{**keys, "gradient_clipping": 0.1})
            losses, norms = [], []
            for step in range(3):
                numbers = range(6 * step + rank % 2, 6 * step + 6, 2)
                losses.append(made.train_batch(batch("tied", i, dtype=dtype) for i in numbers).item())
                norms.append(float(made.get_global_grad_norm()))
            found[name, "tied", schedule] = losses, stage_state(made.module), norms
            made.destroy()
    return found


@case(2)
def lost_weight_gradients(rank, world):
    """SGD with learning rate 1: name -> (weights differ when the adapter loses one gradient, error of a forgotten W, weights moved then)."""
    register("late-w", late_weight_grads)
    found = {}
    for name in SETUPS:
        states = []
        for lost in (False, True):
            made, data = setup(name, "mlp", world, "late-w", optimizer=None)
            if lost:
                accumulate, calls = made._split._accumulate, []

                def lossy(param, grad):
                    calls.append(1)
                    if len(calls) != 1:
                        accumulate(param, grad)

                made._split._accumulate = lossy
            made.train_batch(iter([data(i) for i in range(3)]))
            states.append(stage_state(made.module))
            made.destroy()
        made, data = setup(name, "mlp", world, "late-w", optimizer=None)
        before, run = stage_state(made.module), made._split.run
        made._split.run = lambda key: 0 if key[1] == 1 else run(key)
        error = ""
        try:
            made.train_batch(iter([data(i) for i in range(3)]))
        except RuntimeError as raised:
            error = str(raised)
        made.destroy()
        found[name] = (any(not torch.equal(states[0][n], states[1][n]) for n in states[0]), error,
                       any(not torch.equal(before[n], p) for n, p in stage_state(made.module).items()))
    return found
