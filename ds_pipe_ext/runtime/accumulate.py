"""Where a deferred weight gradient goes: DeepSpeed's own accumulator, one small adapter per optimizer.

DeepSpeed's optimizers clear ``.grad`` around every backward (BF16_Optimizer), move it elsewhere (a separate
accumulation dtype), or read it at the end of the step. A gradient computed between two backwards must therefore be
added to what the step will read, not to ``.grad`` in general.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ..nn.grad_hooks import accumulate_grad

Accumulate = Callable[[torch.nn.Parameter, torch.Tensor], None]


def accumulator_of(optimizer) -> Accumulate:
    """The function ``(param, grad)`` that adds a weight gradient where ``optimizer``'s step will find it."""
    if isinstance(optimizer, BF16_Optimizer):
        return _bf16(optimizer)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        if optimizer.use_grad_accum_attribute:
            return _grad_accum(optimizer)
        # Its hooks count what arrives during a backward pass and raise outside one; under a pipeline they do no more.
        return functools.partial(accumulate_grad, skip={handle.id for handle in optimizer._grad_acc_hooks})
    return accumulate_grad


def gradient_of(optimizer) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    """The function ``param -> gradient`` that gives what ``optimizer``'s step will read, zeros if nothing came.

    Weights that several stages share are summed there.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return _bf16_total(optimizer)
    parked = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.use_grad_accum_attribute
    name = "grad_accum" if parked else "grad"

    def gradient(param):
        if getattr(param, name) is None:
            setattr(param, name, torch.zeros_like(param, dtype=optimizer.gradient_accumulation_dtype if parked else None,
                                                  requires_grad=False))
        return getattr(param, name)

    return gradient


def _bf16_total(optimizer: BF16_Optimizer) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    place = {id(param): (i, j) for i, group in enumerate(optimizer.bf16_groups) for j, param in enumerate(group)}

    def gradient(param):
        i, j = place[id(param)]
        param._hp_grad = optimizer.fp32_groups_gradients[i][j]
        optimizer.fp32_groups_has_gradients[i][j] = True
        return param._hp_grad

    return gradient


def _bf16(optimizer: BF16_Optimizer) -> Accumulate:
    total_of = _bf16_total(optimizer)

    @torch.no_grad()
    def accumulate(param, grad):
        total = total_of(param)
        total.add_(grad.to(total.dtype).view(total.shape))

    return accumulate


def _grad_accum(optimizer: DeepSpeedZeroOptimizer) -> Accumulate:

    @torch.no_grad()
    def accumulate(param, grad):
        grad = grad.to(optimizer.gradient_accumulation_dtype)
        if param.grad_accum is None:
            param.grad_accum = grad
        else:
            param.grad_accum.add_(grad.view(param.grad_accum.shape))

    return accumulate
