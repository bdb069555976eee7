"""What a step reads: iterators and loaders, data that ends, and whether the two ends of the pipeline read the same."""

from __future__ import annotations

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from .samples import STEPS, compare, fingerprint


class DataEnded(StopIteration):
    """The data ended before the call had all its micro-batches; raised on every rank, with nothing updated.

    It is what an iterator raises, so ``except StopIteration`` around ``train_batch`` or ``eval_batch`` ends an epoch. The
    micro-batches that were read for the unfinished step are dropped, and the next call may bring a new iterator.
    """


def count_targets(loss_fn, labels) -> int:
    """Number of targets that ``loss_fn`` averages over: what ``pipeline.loss_weighting: "token"`` weights a micro-batch by.

    ``loss_fn.count_targets(labels)`` if there is one, else the labels that are not ``loss_fn.ignore_index`` (-100).

    Raises:
        ValueError: if the labels are not one integer tensor and the loss function does not say how to count.
    """
    own = getattr(loss_fn, "count_targets", None)
    if own is not None:
        return int(own(labels))
    if not torch.is_tensor(labels) or labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        found = str(labels.dtype).removeprefix("torch.") if torch.is_tensor(labels) else type(labels).__name__
        raise ValueError(f"pipeline.loss_weighting is \"token\", but the labels are {found}: only integer labels can be "
                         "counted. Give the loss function a method count_targets(labels) that returns the number of targets, or "
                         "set pipeline.loss_weighting to \"micro_batch\"")
    return int((labels != getattr(loss_fn, "ignore_index", -100)).sum())


class StepData(PipelineEngine):
    """The part of the engine that reads. :class:`~.engine.PlanEngine` calls ``_begin_reading`` before every step."""

    def _begin_reading(self, micro_batches: int, training: bool) -> None:
        #: by micro-batch: (inputs, labels), what this rank does not need left out; None if the data had ended
        self._batches: dict[int, tuple | None] = {}
        self._window = micro_batches
        self._read = self._missing = 0
        self._targets: list[int] = []
        self._weights: list[float] | None = None
        #: of what was read, while the samples of the first and the last stage are compared, else None
        self._fingerprints = self._begin_comparison() if training else None
        self._training_step = training
        self._samples_posted = None
        if self._fingerprints is not None and self._owns_loss():
            self._samples_posted = self._links.post_samples(0, self.plan.placement[0], micro_batches)

    def _begin_comparison(self) -> list[int] | None:
        ends = self.plan.placement[0], self.plan.placement[-1]
        if not self.pipe_config.check_samples or self._compared >= STEPS or ends[0] == ends[1]:
            return None
        self._compared += 1
        return []

    @property
    def _by_tokens(self) -> bool:
        return self.pipe_config.loss_weighting == "token"

    def set_dataiterator(self, iterator):
        """As upstream's; a loader is read on from call to call, and begins anew after it has ended."""
        reads = self.is_first_stage() or self.is_last_stage()
        super().set_dataiterator(self._iterator_of(iterator) if reads else None)

    def _iterator_of(self, source):
        if source is None or hasattr(source, "__next__"):
            return source
        if isinstance(source, (list, tuple)) or not hasattr(source, "__iter__"):
            raise ValueError(f"the data is a {type(source).__name__}; allowed: an iterator of (inputs, labels), or a loader "
                             "that keeps being the same object from call to call (for a list: iter(the_list))")
        if id(source) not in self._loaders:
            # The loader itself is kept: another one could get its id.
            self._loaders[id(source)] = source, iter(source)
        return self._loaders[id(source)][1]

    def _restart_loader(self) -> None:
        """The loader that is being read begins anew at the next call."""
        self._loaders = {key: pair for key, pair in self._loaders.items() if pair[1] is not self.data_iterator}
        if self.training_dataloader is not None:
            self.data_iterator = iter(self.training_dataloader)

    def _load(self, instr):
        # Weights need the labels of the whole step; the last stage waits for the first output anyway.
        ahead = self._by_tokens and self._training_step and self._owns_loss()
        while self._read < (self._window if ahead else instr.mb + 1):
            self._read_one()
        if ahead and self._weights is None:
            self._weights = self._weigh()

    def _owns_loss(self) -> bool:
        return self.plan.placement[-1] == self.stage_id

    def _read_one(self):
        batch = None
        if not self._missing:
            try:
                batch = self._next_batch()
            except StopIteration:
                self._missing = self._window - self._read
        first = self.plan.placement[0] == self.stage_id
        if self._missing:
            self._batches[self._read] = None
        else:
            inputs, labels = self._prepare(batch)
            self._batches[self._read] = inputs if first else None, labels
            if self._by_tokens and self._compute_loss and self._owns_loss():
                self._targets.append(count_targets(self.module.loss_fn, labels))
        self._read += 1
        if self._fingerprints is not None:
            self._fingerprints.append(-1 if self._missing else fingerprint(batch))
            if self._read == self._window and first:
                self._links.send_samples(0, self.plan.placement[-1], self._fingerprints)

    def _weigh(self) -> list[float]:
        """Weights whose mean over the micro-batches of all replicas is 1."""
        total = torch.tensor(float(sum(self._targets)), dtype=torch.float64, device=self.device)
        if self.is_data_parallel:
            dist.all_reduce(total, group=self.mpu.get_data_parallel_group())
        if not total:
            return [0.0] * self._window
        return [count * self._window * self.dp_world_size / total.item() for count in self._targets]

    def _prepare(self, batch):
        prepare = getattr(self.module, "prepare_batch", None)
        if prepare is not None:
            batch = prepare(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(f"the data iterator must yield (inputs, labels), got {type(batch).__name__}"
                             f"{f' of length {len(batch)}' if isinstance(batch, (tuple, list)) else ''}")
        return batch

    def _own_inputs(self, value):
        """Inputs of the first stage on the device, as upstream makes them: the caller's tensors are never modified."""
        reentrant = self._reentrant_activation_checkpointing()

        def own(tensor):
            tensor = tensor.clone().detach().to(self.device)
            if reentrant:
                tensor.requires_grad_(tensor.is_floating_point())
            return tensor

        if torch.is_tensor(value):
            return own(value)
        if not isinstance(value, (tuple, list)) or not all(torch.is_tensor(x) for x in value):
            raise ValueError(f"the inputs of a batch must be a tensor or a tuple of tensors, got {type(value).__name__}")
        return tuple(own(x) for x in value)

    def _own_labels(self, value):
        if torch.is_tensor(value):
            return value.to(self.device)
        if isinstance(value, (tuple, list)):
            return tuple(x.to(self.device).detach() if torch.is_tensor(x) else x for x in value)
        return value

    def _compare_samples(self) -> None:
        """On the rank of the last stage."""
        first = self._links.take(self._samples_posted)
        known = [(a, b) for a, b in zip(first, self._fingerprints, strict=True) if a >= 0 and b >= 0]
        compare([a for a, _ in known], [b for _, b in known])

