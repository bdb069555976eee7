"""Asynchronous transfers between neighbouring stages.

Every activation is announced by a small header on a host group, so any shape can follow any other without a flag.
While a link's shapes stay the same its receives are posted ahead into pooled buffers and the header only confirms
them. When a shape changes, the sender first fills the receives that are already posted (their number, the window, is
known to both ends from the program), then describes and sends the new tensors; for the rest of that step the receiver
posts each payload once its header has arrived. Gradients have the shapes of the activations, which both ends know.
"""

from __future__ import annotations

import pickle
import re
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .wire import BufferPool, Spec, describe, from_messages, message_shapes, to_messages

_SAME, _CHANGED = 0, 1
_ACT, _GRAD, _BLOB = 0, 1, 2


class TransferError(RuntimeError):
    """A transfer failed: the peer died, raised, or runs another plan.

    Attributes:
        lost: the peer is gone or silent, so the cause is there.
    """

    def __init__(self, message: str, lost: bool = False):
        super().__init__(message)
        self.lost = lost


def plain(error: BaseException) -> str:
    """A transport's error without its source lines, addresses and advice."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if re.search(r"[Cc]onnection (closed|reset) by peer|Broken pipe|[Cc]onnection was likely closed", text):
        return "its process has gone (it failed, was killed, or ended early)"
    if "Timed out" in text or "timed out" in text:
        return "it did not answer within the timeout of the process group"
    return re.sub(r"^\[[^\]]*\]\s*", "", text)


@dataclass
class _Incoming:
    """A posted receive: its header, and its payload once posted."""

    mb: int
    peer: int
    header: torch.Tensor | None = None
    header_work: object = None
    spec: Spec | None = None
    messages: list[torch.Tensor] = field(default_factory=list)
    works: list = field(default_factory=list)
    payload_posted: bool = False


@dataclass
class _LinkState:
    """Agreed shapes of one activation link; both ends go through the same states."""

    spec: Spec | None = None
    ahead: bool = False
    uniform: bool = True
    count: int = 0
    queue: deque = field(default_factory=deque)
    arrived: dict = field(default_factory=dict)

    def change(self, spec: Spec) -> None:
        """A message with other shapes: no more receives ahead in this step; in the next, if the rest stayed the same."""
        self.spec = spec
        self.ahead = False
        self.uniform = self.uniform and self.count == 0


class Links:
    """All transfers of one rank of one pipeline.

    Args:
        device: where activations live.
        peers: global rank of every pipeline rank.
        rank: own pipeline rank.
        to_next, to_prev: process groups for messages to higher and to lower ranks (the same one if ``groups`` is 1).
        host: a gloo group of the same ranks, for headers.
        hoisted: whether the programs post receives ahead of the projected order; needs two groups.
    """

    def __init__(self, device, peers, rank, to_next, to_prev, host, hoisted: bool):
        self._device = device
        self._peers = list(peers)
        #: how messages call a pipeline rank
        self._names = [f"rank {peer}" if peer == p else f"rank {peer} (pipeline rank {p})" for p, peer in enumerate(peers)]
        self._rank = rank
        self._groups = (to_next, to_prev)
        self._host = host
        self._hoisted = hoisted
        self._pool = BufferPool(device)
        self._states: dict[tuple, _LinkState] = {}
        self._mode = "train"
        self._digest = 0
        self._sent: deque = deque()
        self._grads: dict[tuple[int, int], _Incoming] = {}
        #: what this rank is waiting for, as text; read by the fault monitor.
        self.waiting_for = ""

    def begin(self, mode: str, digest: int = 0) -> None:
        """Starts a step; ``mode`` (train or eval) selects the set of agreed shapes; headers compare ``digest`` (the plan)."""
        self._mode, self._digest = mode, digest
        for (kind, _), state in self._states.items():
            if kind == mode or kind == f"{mode}-in":
                state.ahead = state.uniform and self._hoisted
                state.uniform, state.count = True, 0

    def end(self) -> None:
        """Waits until everything sent in this step has left."""
        while self._sent:
            work, _, what = self._sent.popleft()
            self._wait(work, what)

    def send_act(self, stage: int, mb: int, peer: int, value, window: int) -> Spec:
        """Sends a stage's output to ``peer``; returns its description.

        Raises:
            TypeError: if the output holds anything but dense tensors.
        """
        spec = describe(value, f"stage {stage} (micro-batch {mb})")
        values = [value] if spec.single else list(value)
        state = self._state("out", stage)
        what = f"the send of {stage}F{mb}'s output to {self._names[peer]}"
        changed = spec != state.spec
        blob = None
        if changed:
            blob = torch.frombuffer(bytearray(pickle.dumps(spec)), dtype=torch.uint8)
        header = torch.tensor([_CHANGED if changed else _SAME, mb, 0 if blob is None else blob.numel(), stage, self._digest],
                              dtype=torch.int64)
        self._post_host(header, peer, stage, _ACT, what)
        if changed:
            self._post_host(blob, peer, stage, _BLOB, what)
            if state.ahead:
                for _ in range(window + 1):
                    for shape, dtype in message_shapes(state.spec.tensors):
                        self._post(torch.empty(shape, dtype=dtype, device=self._device), peer, stage, _ACT, what)
            state.change(spec)
        state.count += 1
        for message in to_messages(values, spec.tensors):
            self._post(message, peer, stage, _ACT, what)
        return spec

    def post_act(self, stage: int, mb: int, peer: int) -> None:
        """Posts the receive of stage ``stage``'s input."""
        state = self._state("in", stage)
        incoming = _Incoming(mb, peer, torch.zeros(5, dtype=torch.int64))
        incoming.header_work = dist.irecv(incoming.header, self._peers[peer], group=self._host,
                                          tag=self._tag(stage - 1, _ACT))
        if state.ahead:
            self._post_payload(incoming, state.spec, stage)
        state.queue.append(incoming)
        if not self._hoisted:
            # One group for both directions: the payload's place in that group's order is here.
            self._read_headers(state, stage, mb)

    def take_act(self, stage: int, mb: int) -> tuple[object, Spec]:
        """Waits for stage ``stage``'s input: ``(value, description)``; tensors whose gradient returns require one."""
        state = self._state("in", stage)
        self._read_headers(state, stage, mb)
        incoming = state.arrived.pop(mb)
        for work in incoming.works:
            self._wait(work, f"the output of {stage - 1}F{mb} from {self._names[incoming.peer]}")
        values = from_messages(incoming.messages, incoming.spec.tensors, self._device)
        if self._mode == "train":
            for value, spec in zip(values, incoming.spec.tensors):
                value.requires_grad_(spec.grad)
        return (values[0] if incoming.spec.single else tuple(values)), incoming.spec

    def send_grad(self, stage: int, mb: int, peer: int, grads: list[torch.Tensor | None], spec: Spec) -> None:
        """Sends the gradients of a stage's input: one per tensor whose gradient returns; a missing one is zero."""
        wanted = tuple(tensor for tensor in spec.tensors if tensor.grad)
        values = []
        for grad, tensor in zip(grads, wanted, strict=True):
            if grad is None:
                grad = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
            values.append(grad.to(tensor.dtype))
        for message in to_messages(values, wanted):
            self._post(message, peer, stage, _GRAD, f"the send of stage {stage}'s input gradient of micro-batch {mb} "
                       f"to {self._names[peer]}")

    def post_grad(self, stage: int, mb: int, peer: int, spec: Spec) -> None:
        """Posts the receive of the gradients of stage ``stage``'s output, whose description is ``spec``."""
        wanted = tuple(tensor for tensor in spec.tensors if tensor.grad)
        incoming = _Incoming(mb, peer, spec=Spec(False, wanted))
        self._receive(incoming, ("grad", stage), stage + 1, _GRAD)
        self._grads[(stage, mb)] = incoming

    def take_grad(self, stage: int, mb: int) -> list[torch.Tensor]:
        """Waits for the gradients of stage ``stage``'s output: one per tensor whose gradient returns."""
        incoming = self._grads.pop((stage, mb))
        for work in incoming.works:
            self._wait(work, f"the gradient of micro-batch {mb} from stage {stage + 1} on {self._names[incoming.peer]}")
        return from_messages(incoming.messages, incoming.spec.tensors, self._device)

    def _state(self, side: str, stage: int) -> _LinkState:
        key = (self._mode if side == "out" else f"{self._mode}-in", stage)
        return self._states.setdefault(key, _LinkState())

    @staticmethod
    def _tag(sender_stage: int, what: int) -> int:
        return 4 * sender_stage + what

    def _group(self, source: int, target: int):
        return self._groups[0] if target > source else self._groups[1]

    def _post(self, message: torch.Tensor, peer: int, stage: int, what: int, text: str) -> None:
        work = dist.isend(message, self._peers[peer], group=self._group(self._rank, peer), tag=self._tag(stage, what))
        self._sent.append((work, message, text))

    def _post_host(self, message: torch.Tensor, peer: int, stage: int, what: int, text: str) -> None:
        work = dist.isend(message, self._peers[peer], group=self._host, tag=self._tag(stage, what))
        self._sent.append((work, message, text))

    def _post_payload(self, incoming: _Incoming, spec: Spec, stage: int) -> None:
        incoming.spec = spec
        incoming.payload_posted = True
        self._receive(incoming, (self._mode, stage), stage - 1, _ACT)

    def _receive(self, incoming: _Incoming, key: tuple, sender_stage: int, what: int) -> None:
        incoming.messages = [self._pool.take((*key, position), shape, dtype)
                             for position, (shape, dtype) in enumerate(message_shapes(incoming.spec.tensors))]
        group = self._group(incoming.peer, self._rank)
        incoming.works = [dist.irecv(message, self._peers[incoming.peer], group=group,
                                     tag=self._tag(sender_stage, what)) for message in incoming.messages]

    def _read_headers(self, state: _LinkState, stage: int, mb: int) -> None:
        """Reads headers in link order until micro-batch ``mb``'s has been read."""
        while mb not in state.arrived:
            if not state.queue:
                raise TransferError(f"stage {stage} needs micro-batch {mb}, whose receive was never posted")
            incoming = state.queue.popleft()
            what = f"the output of {stage - 1}F{incoming.mb} from {self._names[incoming.peer]}"
            self._wait(incoming.header_work, what)
            flag, sent_mb, length, sent_stage, digest = incoming.header.tolist()
            if (sent_mb, sent_stage, digest) != (incoming.mb, stage - 1, self._digest):
                raise TransferError(f"pipeline rank {self._rank} expected {what}, but got {sent_stage}F{sent_mb}"
                                    f"{'' if digest == self._digest else ' of another plan'}: the ranks run different plans "
                                    "(another schedule, number of micro-batches, or train_batch against eval_batch)")
            if flag == _CHANGED:
                self._change(state, stage, incoming, length, what)
            state.count += 1
            if not incoming.payload_posted:
                self._post_payload(incoming, state.spec, stage)
            state.arrived[incoming.mb] = incoming

    def _change(self, state: _LinkState, stage: int, incoming: _Incoming, length: int, what: str) -> None:
        blob = torch.empty(length, dtype=torch.uint8)
        self._wait(dist.irecv(blob, self._peers[incoming.peer], group=self._host, tag=self._tag(stage - 1, _BLOB)),
                   f"the shapes of {what}")
        # Only this project's own sender writes here: the two processes share a trust domain, as in torch.distributed.
        spec = pickle.loads(blob.numpy().tobytes())
        for posted in (incoming, *state.queue):
            if posted.payload_posted:
                for work in posted.works:
                    self._wait(work, what)
                posted.messages, posted.works, posted.payload_posted = [], [], False
        state.change(spec)

    def _wait(self, work, what: str) -> None:
        self.waiting_for = what
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferError(f"pipeline rank {self._rank} was waiting for {what}: {plain(error)}", lost=True) from error
        self.waiting_for = ""
