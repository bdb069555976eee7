"""What crosses a stage boundary: the description of a tuple of tensors and its form on the wire.

Large tensors travel alone; small ones are packed into one message. A description holds shape, dtype and whether a
gradient comes back for every tensor, so that the receiver can post its buffers before anything arrives.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

_PACK_BELOW = 32 * 1024
_ALIGN = 16


class TensorSpec(NamedTuple):
    """Shape, dtype and whether a gradient returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    @property
    def numel(self) -> int:
        result = 1
        for size in self.shape:
            result *= size
        return result

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{' with gradient' if self.grad else ''}"


class Spec(NamedTuple):
    """Description of a boundary value: a tensor (``single``) or a tuple of tensors."""

    single: bool
    tensors: tuple[TensorSpec, ...]

    def __str__(self) -> str:
        inner = ", ".join(str(tensor) for tensor in self.tensors)
        return inner if self.single else f"({inner})"


def describe(value, where: str) -> Spec:
    """The :class:`Spec` of what a stage returned.

    Raises:
        TypeError: if it is not a dense tensor or a tuple of dense tensors; names the position.
    """
    single = isinstance(value, torch.Tensor)
    if not single and not isinstance(value, (tuple, list)):
        raise TypeError(f"{where} returned {type(value).__name__}; a stage returns a tensor or a tuple of tensors "
                        "(put other values into the layers, or turn them into tensors)")
    specs = []
    for position, tensor in enumerate([value] if single else value):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{where} returned {type(tensor).__name__} at position {position} of its tuple; only "
                            "tensors can cross a stage boundary (leave out what is None, keep lists and dicts inside "
                            "one layer)")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(f"{where} returned a tensor of layout {tensor.layout} at position {position}; only dense "
                            "tensors can cross a stage boundary")
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        specs.append(TensorSpec(tuple(tensor.shape), tensor.dtype, differentiable and tensor.requires_grad))
    return Spec(single, tuple(specs))


class Layout(NamedTuple):
    """How the tensors of a spec are grouped into messages: positions sent alone, and positions packed together."""

    alone: tuple[int, ...]
    packed: tuple[int, ...]
    offsets: tuple[int, ...]
    pack_bytes: int


@lru_cache(maxsize=1024)
def layout(tensors: tuple[TensorSpec, ...]) -> Layout:
    """Groups tensors into messages; tensors without elements need none."""
    small = [i for i, spec in enumerate(tensors) if 0 < spec.nbytes <= _PACK_BELOW]
    if len(small) < 2:
        small = []
    alone = tuple(i for i, spec in enumerate(tensors) if spec.nbytes and i not in small)
    offsets, end = [], 0
    for i in small:
        offsets.append(end)
        end += -(-tensors[i].nbytes // _ALIGN) * _ALIGN
    return Layout(alone, tuple(small), tuple(offsets), end)


@lru_cache(maxsize=1024)
def message_shapes(tensors: tuple[TensorSpec, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of every message of a spec, in the order in which they are sent."""
    plan = layout(tensors)
    shapes = tuple((tensors[i].shape, tensors[i].dtype) for i in plan.alone)
    return (*shapes, ((plan.pack_bytes, ), torch.uint8)) if plan.packed else shapes


def to_messages(values: list[torch.Tensor], tensors: tuple[TensorSpec, ...]) -> list[torch.Tensor]:
    """Contiguous message tensors; they share memory with ``values`` where those are contiguous and large."""
    plan = layout(tensors)
    messages = [values[i].detach().contiguous() for i in plan.alone]
    if plan.packed:
        pack = torch.empty(plan.pack_bytes, dtype=torch.uint8, device=values[plan.packed[0]].device)
        for i, offset in zip(plan.packed, plan.offsets):
            spec = tensors[i]
            pack[offset:offset + spec.nbytes].view(spec.dtype).view(spec.shape).copy_(values[i].detach())
        messages.append(pack)
    return messages


def from_messages(messages: list[torch.Tensor], tensors: tuple[TensorSpec, ...],
                  device: torch.device) -> list[torch.Tensor]:
    """The tensors of a spec, sharing the messages' memory."""
    plan = layout(tensors)
    values: list[torch.Tensor | None] = [None] * len(tensors)
    for i, message in zip(plan.alone, messages):
        values[i] = message
    for i, offset in zip(plan.packed, plan.offsets):
        spec = tensors[i]
        values[i] = messages[-1][offset:offset + spec.nbytes].view(spec.dtype).view(spec.shape)
    return [torch.empty(spec.shape, dtype=spec.dtype, device=device) if value is None else value
            for value, spec in zip(values, tensors)]


class BufferPool:
    """Receive buffers by (link, position, shape, dtype). A buffer is handed out again only when nothing refers to its
    memory any more: a layer may keep what it received, and so may a pending weight gradient."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: dict[tuple, tuple[tuple, list[torch.Tensor]]] = {}
        self._idle_count = self._storage_uses(torch.empty(1))

    @staticmethod
    def _storage_uses(tensor: torch.Tensor) -> int:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    def take(self, key: tuple, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A buffer of that shape for link position ``key``; its contents are undefined.

        Buffers of another shape at the same position are dropped, so that changing lengths do not pile up memory.
        """
        known, buffers = self._buffers.get(key, (None, []))
        if known != (shape, dtype):
            buffers = []
            self._buffers[key] = ((shape, dtype), buffers)
        for buffer in buffers:
            if self._storage_uses(buffer) == self._idle_count:
                # The detached alias keeps the count above idle until the last user drops it.
                return buffer.detach()
        buffers.append(torch.empty(shape, dtype=dtype, device=self._device))
        return buffers[-1].detach()

    def __len__(self) -> int:
        return sum(len(buffers) for _, buffers in self._buffers.values())
