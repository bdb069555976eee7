"""What crosses a stage boundary: the description of a tuple of tensors and its form on the wire.

Large tensors travel alone; small ones are packed into one message, which may carry a header too. A description holds
shape, dtype and whether a gradient comes back for every tensor, so that the receiver can post its buffers before
anything arrives.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

#: Alignment inside a packed message: what torch's own allocator gives, since some GEMMs round differently below it.
_ALIGN = 64
#: Numbers in a header: changed or not, micro-batch, bytes of the description that follows, sender's stage.
HEADER_NUMBERS = 4
HEADER_BYTES = _ALIGN


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


#: in place of an activation: the data ended before this micro-batch. A single tensor has one description, so no value has this.
ENDED = Spec(True, ())


def describe(value, stage: int, mb: int) -> Spec:
    """The :class:`Spec` of what ``stage`` returned for micro-batch ``mb``.

    Raises:
        TypeError: if it is not a dense tensor or a tuple of dense tensors; names the position.
    """
    if value is ENDED:
        return ENDED
    single = isinstance(value, torch.Tensor)
    where = f"stage {stage} (micro-batch {mb})"
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


def fits(value, spec: Spec | None) -> bool:
    """True if ``value`` is what ``spec`` describes; cheaper than describing it again."""
    if spec is None:
        return False
    if value is ENDED:
        return spec == ENDED
    values = (value, ) if isinstance(value, torch.Tensor) else value
    if spec.single != isinstance(value, torch.Tensor) or not isinstance(values, (tuple, list)) \
            or len(values) != len(spec.tensors):
        return False
    return all(isinstance(x, torch.Tensor) and x.shape == known.shape and x.dtype is known.dtype
               and x.requires_grad == known.grad and x.layout is torch.strided
               for x, known in zip(values, spec.tensors))


def _plain(value: torch.Tensor) -> torch.Tensor:
    """Contiguous, and with every conjugation and sign in its memory: transports see nothing else."""
    return value.detach().resolve_conj().resolve_neg().contiguous()


class Form(NamedTuple):
    """How the tensors of a description are grouped into messages.

    Attributes:
        tensors: the description.
        alone: positions sent as they are.
        packed: positions packed into the last message; tensors without elements need no message.
        offsets: their byte offsets there.
        inline: the packed message begins with a header (and exists even if nothing is packed).
        shapes: shape and dtype of every message, in the order in which they are sent.
    """

    tensors: tuple[TensorSpec, ...]
    alone: tuple[int, ...]
    packed: tuple[int, ...]
    offsets: tuple[int, ...]
    inline: bool
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def messages(self, values: list[torch.Tensor], header: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Contiguous message tensors; those sent alone share memory with ``values`` where these are contiguous."""
        messages = [_plain(values[i]) for i in self.alone]
        if len(self.shapes) == len(messages):
            return messages
        pieces, end = [], 0
        if self.inline:
            pieces.append(header.view(torch.uint8))
            end = pieces[0].numel()
        for i, offset in zip(self.packed, self.offsets):
            if offset > end:
                pieces.append(torch.zeros(offset - end, dtype=torch.uint8, device=values[i].device))
            pieces.append(_plain(values[i]).view(-1).view(torch.uint8))
            end = offset + self.tensors[i].nbytes
        total = self.shapes[-1][0][0]
        if total > end:
            pieces.append(torch.zeros(total - end, dtype=torch.uint8, device=pieces[-1].device))
        messages.append(torch.cat(pieces))
        return messages

    def values(self, messages: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The tensors, sharing the messages' memory."""
        values: list[torch.Tensor | None] = [None] * len(self.tensors)
        for i, message in zip(self.alone, messages):
            values[i] = message
        for i, offset in zip(self.packed, self.offsets):
            spec = self.tensors[i]
            values[i] = messages[-1][offset:offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        return [torch.empty(spec.shape, dtype=spec.dtype, device=device) if value is None else value
                for value, spec in zip(values, self.tensors)]

    @staticmethod
    def header(messages: list[torch.Tensor]) -> list[int]:
        """The header's numbers in received messages of an inline form."""
        return messages[-1][:8 * HEADER_NUMBERS].view(torch.int64).tolist()


@lru_cache(maxsize=1024)
def form_of(tensors: tuple[TensorSpec, ...], pack_below: int, inline: bool) -> Form:
    """Groups tensors into messages: up to ``pack_below`` bytes they are packed, larger ones travel alone.

    Args:
        tensors: the description.
        pack_below: bytes; packing costs a copy, a message its latency.
        inline: reserve room for a header in the packed message.
    """
    small = [i for i, spec in enumerate(tensors) if 0 < spec.nbytes <= pack_below]
    if len(small) < 2 and not inline:
        small = []
    alone = tuple(i for i, spec in enumerate(tensors) if spec.nbytes and i not in small)
    offsets, end = [], HEADER_BYTES if inline else 0
    for i in small:
        offsets.append(end)
        end += -(-tensors[i].nbytes // _ALIGN) * _ALIGN
    shapes = tuple((tensors[i].shape, tensors[i].dtype) for i in alone)
    if end:
        shapes = (*shapes, ((end, ), torch.uint8))
    return Form(tensors, alone, tuple(small), tuple(offsets), inline, shapes)


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
