"""What a step's losses become: weights, mean, and the message with which the last stage ends a step for all."""

from __future__ import annotations

from collections import OrderedDict

import torch
from deepspeed import comm as dist
from torch.utils import _pytree as pytree

from .data import DataEnded, StepData


class StepLoss(StepData):
    """The part of the engine that computes and shares losses."""

    def _begin_losses(self) -> None:
        self.fwd_outputs = []
        self._loss_given = self._heard = False
        self._loss_posted = None
        if not self._owns_loss():
            self._loss_posted = self._links.post_loss(len(self.plan.placement) - 1, self.plan.placement[-1], 4)

    def _is_loss(self, stage: int) -> bool:
        return stage == len(self.plan.placement) - 1

    def _compute_loss_of(self, instr, state) -> None:
        labels = self._own_labels(self._batches.pop(instr.mb)[1])
        outputs, state.outputs = state.outputs, None
        logits_of = getattr(self.module, "logits_of", lambda value: value)
        if self._evaluating and self.eval_return_logits:
            self._logits.append(logits_of(outputs))
        made = outputs
        if self._compute_loss and self.module.loss_fn is not None:
            outputs = self.module.loss_fn(outputs, labels)
        else:
            outputs = logits_of(outputs)
        if self._weights is not None:
            outputs = _times(self._weights[instr.mb], outputs)
        self.fwd_outputs.append(outputs.detach() if torch.is_tensor(outputs) else [x.detach() for x in outputs])
        if self._evaluating:
            return
        state.loss = outputs
        if self._weights is not None and not self._weights[instr.mb]:
            # Zero gradients from behind the loss function, which may have made NaN of no targets. Not none at all: replicas
            # reduce what has a gradient, and the others have one.
            state.loss = _zero(made)
        extra = self.module.get_additional_losses()
        if extra is not None:
            self.total_additional_losses = self.total_additional_losses or OrderedDict()
            for name, value in extra.items():
                self.total_additional_losses[name] = added(self.total_additional_losses.get(name), value)

    def _give_loss(self) -> None:
        """On the rank of the last stage, once a step: sends the mean loss to the other stages, or that the data ended."""
        if self._loss_given:
            return
        self._loss_given = True
        if self._fingerprints is not None:
            self._compare_samples()
        missing = self._missing
        if self.is_data_parallel:
            longest = torch.tensor(missing, device=self.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.mpu.get_data_parallel_group())
            missing = int(longest)
        self._loss_numbers = [0.0, 0.0, 0.0, float(missing)]
        if not missing and self._training_step:
            self._average_losses()
        if self._links:
            self._links.send_loss(len(self.plan.placement) - 1, self._loss_numbers)

    def _average_losses(self) -> None:
        # Summed in micro-batch order, as upstream does while they are computed.
        for loss in self.fwd_outputs:
            self.total_loss = added(self.total_loss, loss)
        self.loss = self.fwd_outputs[-1]
        if self.total_additional_losses is not None:
            return
        own = self._scale_loss_by_gas(self.total_loss).detach()
        # Upstream reports fp32; a float64 model keeps its digits.
        own = own if own.dtype is torch.float64 else own.float()
        agg = own
        if self.is_data_parallel:
            agg = own.clone()
            dist.all_reduce(agg, group=self.mpu.get_data_parallel_group())
            agg /= self.dp_world_size
        self._loss_numbers[:3] = own.item(), agg.item(), float(own.dtype is torch.float64)

    def _hear(self) -> None:
        """Once a step, before gradients leave this rank: the loss, and whether the data ended somewhere.

        Raises:
            DataEnded: on every rank, if it ended on any.
        """
        if self._heard:
            return
        self._heard = True
        if self._owns_loss():
            self._give_loss()
        else:
            self._loss_numbers = self._links.take(self._loss_posted)
        if missing := int(self._loss_numbers[3]):
            raise DataEnded(f"the data ended {missing} micro-batch{'es' if missing > 1 else ''} short of the {self._window} of "
                            "this call; nothing was updated")

    def _aggregate_total_loss(self):
        """Upstream's mean loss; a message of its own instead of a broadcast."""
        self._meter.gather()
        if self.total_additional_losses is not None or self.module.get_additional_losses() is not None:
            return super()._aggregate_total_loss()
        own, agg, double, _ = self._loss_numbers
        dtype = torch.float64 if double else torch.float32
        self.dp_group_loss, agg_loss = (torch.tensor(value, dtype=dtype, device=self.device) for value in (own, agg))
        return agg_loss

    def _reduce_outputs(self, outputs, reduce="avg", reduce_dp=True, micro_batches=None):
        """As upstream's; losses that are weighted by tokens become their mean over all targets."""
        if reduce is None or not (self._by_tokens and self._compute_loss):
            return super()._reduce_outputs(outputs, reduce=reduce, reduce_dp=reduce_dp, micro_batches=micro_batches)
        if reduce.lower() != "avg":
            raise ValueError(f"reduce_output is {reduce!r}; allowed: \"avg\" or None")
        count = torch.tensor(float(sum(self._targets)), dtype=torch.float64, device=self.device)
        if reduce_dp and self.is_data_parallel:
            dist.all_reduce(count, group=self.mpu.get_data_parallel_group())
        leaves = [pytree.tree_leaves(output) for output in outputs]
        means = []
        for losses in zip(*leaves, strict=True):
            mean = sum(_times(targets / max(count.item(), 1.0), loss) for targets, loss in zip(self._targets, losses))
            if reduce_dp and self.is_data_parallel:
                dist.all_reduce(mean, group=self.mpu.get_data_parallel_group())
            means.append(mean)
        return means[0] if torch.is_tensor(outputs[0]) else means


def _zero(outputs) -> torch.Tensor:
    """A loss of 0 with zero gradients for everything in ``outputs`` that has one."""
    leaves = [x for x in pytree.tree_leaves(outputs) if torch.is_tensor(x) and x.requires_grad]
    return sum((x.sum() * 0 for x in leaves), torch.zeros(()))


def _times(weight: float, loss):
    """``weight`` times the loss or losses; 0 for weight 0, whatever they are."""
    return pytree.tree_map(lambda x: x * weight if weight else torch.zeros_like(x), loss)


def added(total, loss):
    """The sum of two losses, or of two lists of losses; ``total`` None is 0."""
    if torch.is_tensor(loss):
        return (torch.zeros_like(loss) if total is None else total) + loss.detach()
    return [added(None if total is None else total[i], value) for i, value in enumerate(loss)]
