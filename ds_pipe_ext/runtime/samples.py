"""Do the first and the last stage read the same samples? Each reads the data by itself; nothing else would tell."""

from __future__ import annotations

import zlib

import torch
from torch.utils import _pytree as pytree

#: steps after the start of an engine in which samples are compared
STEPS = 2


def fingerprint(batch) -> int:
    """Checksum of everything in ``batch`` that has a value: tensors, numbers and texts, however nested."""
    result = 0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            leaf = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            result = zlib.crc32(f"{tuple(leaf.shape)} {leaf.dtype}".encode(), result)
            result = zlib.crc32(leaf.view(-1).view(torch.uint8).numpy(), result)
        elif isinstance(leaf, (str, bytes, int, float, bool)):
            result = zlib.crc32(repr(leaf).encode(), result)
    return result


def compare(first: list[int], last: list[int]) -> None:
    """Compares the fingerprints of a step's micro-batches on the two stages.

    Raises:
        ValueError: names the micro-batches that differ, and what to do.
    """
    differ = [mb for mb, (a, b) in enumerate(zip(first, last, strict=True)) if a != b]
    if not differ:
        return
    where = f"micro-batch {differ[0]}" if len(differ) == 1 else f"micro-batches {', '.join(map(str, differ))}"
    order = " (the same samples in another order)" if sorted(first) == sorted(last) else ""
    raise ValueError(f"the first stage and the last stage read different samples for {where} of this step{order}, so labels "
                     "would not belong to their inputs; nothing was updated. All ranks of a pipeline need the same data in the "
                     "same order: seed shuffling alike on all stages, shard by data-parallel rank only. If a stage reads "
                     "stand-ins on purpose for what it does not use, set pipeline.check_samples to false")
