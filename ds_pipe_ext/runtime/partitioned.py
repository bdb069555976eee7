"""Transfers of a model-parallel pipeline: every rank of a slice sends its share, and the receivers put it together.

The ranks that share a stage hold the same activation. Each sends 1/n of the first tensor to its own peer, and the peers
gather it among themselves, which is the faster link. JSON keys ``pipe_partitioned`` and ``grad_partitioned``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .wire import TensorSpec


class Whole:
    """Everything is sent as it is."""

    def specs(self, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """What travels in place of ``tensors``."""
        return tensors

    def cut(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this rank sends in place of ``values``."""
        return values

    def join(self, values: list[torch.Tensor], tensors: tuple[TensorSpec, ...]) -> list[torch.Tensor]:
        """``values`` as received, put together to what ``tensors`` describe; a collective of the slice."""
        return values


class Sliced(Whole):
    """The first tensor is cut into equal shares of its elements; the last share is padded.

    Args:
        group: the ranks that share a stage.
    """

    def __init__(self, group):
        self._group = group
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def _share(self, numel: int) -> int:
        return -(-numel // self._ranks)

    def specs(self, tensors):
        if not tensors or not tensors[0].numel:
            return tensors
        return (tensors[0]._replace(shape=(self._share(tensors[0].numel), )), *tensors[1:])

    def cut(self, values):
        if not values or not values[0].numel():
            return values
        flat = values[0].detach().reshape(-1)
        share = self._share(flat.numel())
        own = flat[self._rank * share:(self._rank + 1) * share]
        if own.numel() < share:
            own = torch.cat([own, own.new_zeros(share - own.numel())])
        return [own, *values[1:]]

    def join(self, values, tensors):
        if not tensors or not tensors[0].numel:
            return values
        shares = torch.empty(self._ranks * values[0].numel(), dtype=values[0].dtype, device=values[0].device)
        # As bytes: not every backend gathers every dtype.
        dist.all_gather_into_tensor(shares.view(torch.uint8), values[0].contiguous().view(torch.uint8), group=self._group)
        return [shares[:tensors[0].numel].view(tensors[0].shape), *values[1:]]


def slices(engine, wanted: bool) -> Whole:
    """How ``engine`` sends, if the JSON key says ``wanted``."""
    return Sliced(engine.grid.get_slice_parallel_group()) if engine.is_model_parallel and wanted else Whole()
