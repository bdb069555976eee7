"""Where a run was: the state of every generator of random numbers, and the place in the data."""

from __future__ import annotations

import itertools
import random

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from torch.utils.data.distributed import DistributedSampler


def random_states() -> dict:
    """Of Python, numpy, torch, the accelerator, and DeepSpeed's named generators for checkpointed layers."""
    accelerator = get_accelerator()
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "accelerator": None if accelerator.device_name() == "cpu" else accelerator.get_rng_state(),
        "named": get_cuda_rng_tracker().get_states(),
    }


def restore_random_states(states: dict) -> None:
    """Takes what :func:`random_states` gave; an accelerator's state only where there is one."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    accelerator = get_accelerator()
    if states["accelerator"] is not None and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(states["accelerator"])
    get_cuda_rng_tracker().set_states(states["named"])


def start_at(loader, micro_batches: int) -> None:
    """Lets the loader that an engine makes of ``training_data`` go on after so many micro-batches, without reading them.

    Its order depends on the epoch alone. Any other loader is its owner's to move.
    """
    if not isinstance(loader, RepeatingLoader) or not isinstance(loader.loader, DeepSpeedDataLoader):
        return
    inner = loader.loader
    whole = inner.data_sampler
    if not isinstance(whole, DistributedSampler):
        return
    inner.data_sampler = _Rest(whole, micro_batches % len(inner) * inner.batch_size)
    loader.data_iter = iter(inner)
    # From the next epoch on.
    inner.data_sampler = whole


class _Rest(torch.utils.data.Sampler):
    """What is left of an epoch after ``start`` samples."""

    def __init__(self, whole: DistributedSampler, start: int):
        self._whole, self._start = whole, start

    def __iter__(self):
        return itertools.islice(iter(self._whole), self._start, None)

    def __len__(self):
        return len(self._whole) - self._start
