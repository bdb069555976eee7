"""DeepSpeed's optimizers on the ranks of a pipeline, where every rank holds other parameters.

Their steps contain collectives over the stages: one a parameter group (ZeRO-1 and fp16 norms). DeepSpeed drops the groups
that are empty on a rank, and a stage that trains nothing has none, so ranks would wait for each other or add up the norms
of different groups. Here every rank keeps as many groups as the others, in the same order.

Loss scaling in fp16 gets what DeepSpeed leaves out: see :func:`scaled` and :func:`correct`.
"""

from __future__ import annotations

import functools

import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from .accumulate import gradient_of

#: name of every parameter that only fills a group
IDLE = "ds_pipe_ext.nothing_to_train"
#: what DeepSpeed's norms ask a tensor: is it counted on this rank?
_MARKS = (PIPE_REPLICATED, "model_parallel", "tensor_model_parallel")


def idle_parameter(engine, shape=(1, )) -> torch.nn.Parameter:
    """A parameter that belongs to no layer and gets no gradient but zeros: DeepSpeed's optimizers need one in every group."""
    dtype, _ = engine.get_data_types()
    idle = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=engine.device))
    engine.param_names[idle] = IDLE
    return idle


def muon_groups(engine, parameters: list) -> list[dict]:
    """``parameters`` as groups that all have something for either half of Muon, matrices and others."""
    groups = parameters if any(isinstance(item, dict) for item in parameters) else [{"params": parameters}]
    filled = []
    for group in groups:
        matrix, other = idle_parameter(engine, (1, 1)), idle_parameter(engine)
        matrix.use_muon, other.use_muon = True, False
        filled.append({**group, "params": [*group["params"], matrix, other]})
    return filled


def align_groups(engine, optimizer) -> None:
    """Gives ``optimizer`` as many parameter groups as it has on the other stages, none of them empty.

    Collective over the stages. Groups stay in the user's order, so learning rates and schedulers that are given per group
    mean the same group on every rank.
    """
    groups = optimizer.param_groups
    for group in groups:
        if not group["params"]:
            group["params"].append(idle_parameter(engine))
    most = torch.tensor([len(groups)], device=engine.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=engine.mpu.get_model_parallel_group())
    while len(groups) < most.item():
        idle = idle_parameter(engine)
        # torch wants names for all groups or for none.
        named = "param_names" in groups[0]
        settings = {key: value for key, value in groups[-1].items() if key not in ("params", "param_names")}
        optimizer.add_param_group({**settings, "params": [(IDLE, idle) if named else idle]})


def client_aligned(engine, optimizer):
    """What the user gave to ``initialize`` (an optimizer, a function that makes one, or None), with aligned groups."""
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        align_groups(engine, optimizer)
        return optimizer

    def make(parameters):
        made = optimizer(parameters or [idle_parameter(engine)])
        align_groups(engine, made)
        return made

    return make


def scaled(optimizer, loss: torch.Tensor) -> torch.Tensor:
    """``loss`` times the loss scale where DeepSpeed's engine divides by it afterwards without having multiplied.

    In 0.19.8 that is fp16 under ZeRO 0: its ``backward`` scales for ZeRO optimizers only.
    """
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return loss.float() * optimizer.loss_scale
    return loss


def correct(optimizer) -> None:
    """Corrects, on this instance, what DeepSpeed's steps do wrong on a pipeline.

    BF16_Optimizer cannot take the norm of a stage without gradients. All fp16 steps raise a dynamic loss scale before they
    divide by it, which halves that step's gradients. With offload_optimizer, a parameter without gradient would be stepped
    by its last one. FP16_UnfusedOptimizer counts shared weights once per stage, reports the scaled norm, and enters
    collectives only if there are gradients.
    """
    if isinstance(optimizer, BF16_Optimizer) and optimizer.using_real_optimizer:
        optimizer.get_grads_for_norm = functools.partial(_never_empty, optimizer.get_grads_for_norm,
                                                         optimizer.fp32_groups_gradients_flat[0].new_zeros(1))
    elif isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        optimizer.step = functools.partial(_fp16_step, optimizer, optimizer.step)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        if optimizer.dynamic_loss_scale:
            optimizer.step = functools.partial(_scale_kept, optimizer, optimizer.step)
        if optimizer.cpu_offload:
            optimizer.reduce_gradients = functools.partial(_none_missing, optimizer, optimizer.reduce_gradients)


def _none_missing(optimizer, reduce_gradients, **kwargs):
    gradient = gradient_of(optimizer)
    for param in (param for group in optimizer.bit16_groups for param in group):
        gradient(param)
    reduce_gradients(**kwargs)


def _never_empty(grads_for_norm, zero, for_clipping=False):
    found = grads_for_norm(for_clipping=for_clipping)
    if for_clipping or found[0]:
        return found
    return [zero], found[1]


def _fp16_step(optimizer, step, *args, **kwargs):
    for param in (param for group in optimizer.fp16_groups for param in group):
        if param.grad is None:
            param.grad = torch.zeros_like(param, requires_grad=False)
        for mark in _MARKS:
            if hasattr(param, mark):
                setattr(param.grad, mark, getattr(param, mark))
    scale = optimizer.loss_scale
    result = _scale_kept(optimizer, step, *args, **kwargs)
    if isinstance(optimizer, FP16_UnfusedOptimizer) and not is_invalid_grad_norm(optimizer._global_grad_norm):
        optimizer._global_grad_norm /= scale
    return result


def _scale_kept(optimizer, step, *args, **kwargs):
    """A step that divides by the scale that its losses had; the scale moves afterwards."""
    found = []
    optimizer._update_scale = found.append
    try:
        result = step(*args, **kwargs)
    finally:
        del optimizer._update_scale
    for overflow in found:
        optimizer._update_scale(overflow)
    return result
