"""Asynchronous transfers between neighbouring stages.

Every activation is announced by a header, so any shape can follow any other without a flag. While a link's shapes stay
the same, its receives are posted ahead into pooled buffers and the header only confirms them; over gloo it then travels
inside the message. When a shape changes, the sender first fills the receives that are already posted (their number, the
window, is known to both ends from the program), then describes and sends the new tensors; for the rest of that step the
receiver posts each payload once its header has arrived. Gradients have the shapes of the activations, which both ends
know.
"""

from __future__ import annotations

import pickle
import re
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .partitioned import Whole
from .wire import HEADER_BYTES, HEADER_NUMBERS, BufferPool, Form, Spec, describe, fits, form_of

_SAME, _CHANGED = 0, 1
_ACT, _GRAD, _HEADER, _BLOB = 0, 1, 2, 3
#: gloo: a copy below this size costs less than a second message; elsewhere messages are cheap for the host
_PACK_BELOW_GLOO, _PACK_BELOW = 1 << 20, 1 << 15
_PADDING = [0] * (HEADER_BYTES // 8 - HEADER_NUMBERS)


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


@dataclass(slots=True)
class _Incoming:
    """A posted receive: its header, if that travels alone, and its payload, once posted."""

    mb: int
    peer: int
    header: torch.Tensor | None = None
    header_work: object = None
    spec: Spec | None = None
    form: Form | None = None
    messages: list[torch.Tensor] = field(default_factory=list)
    works: list = field(default_factory=list)


@dataclass(slots=True)
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
        to_next, to_prev: process groups for messages to higher and to lower ranks.
        host: a gloo group of the same ranks, for headers.
        hoisted: the programs post receives ahead of the global order, so to_next and to_prev must be two groups, or gloo.
        acts, grads: what of an activation and of a gradient this rank sends.
    """

    def __init__(self, device, peers, rank, to_next, to_prev, host, hoisted: bool, acts: Whole, grads: Whole):
        self._act_share, self._grad_share = acts, grads
        self._device = device
        self._rank = rank
        #: how messages call a pipeline rank
        self._names = [str(peer) if peer == p else f"{peer} (pipeline rank {p})" for p, peer in enumerate(peers)]
        self._groups = (to_next, to_prev)
        self._host = host
        self._peers = {group: [dist.get_group_rank(group, peer) for peer in peers] for group in (to_next, to_prev, host)}
        self._hoisted = hoisted
        # Only gloo tells messages of one pair apart by tag, which headers inside messages rely on.
        self._inline = dist.get_backend(to_next) == "gloo"
        self._pack_below = _PACK_BELOW_GLOO if self._inline else _PACK_BELOW
        self._pool = BufferPool(device)
        self._states: dict[tuple, _LinkState] = {}
        self._mode = "train"
        self._digest = 0
        self._sent: list = []
        self._grads: dict[tuple[int, int], _Incoming] = {}
        #: what this rank is waiting for, as (function, arguments) or None; read by the fault monitor.
        self._waiting: tuple | None = None

    @property
    def waiting_for(self) -> str:
        """What this rank is waiting for at this moment, in words; empty if nothing."""
        waiting = self._waiting
        return waiting[0].format(*waiting[1:]) if waiting else ""

    def begin(self, mode: str, digest: int = 0) -> None:
        """Starts a step.

        Args:
            mode: train or eval; selects the set of agreed shapes.
            digest: of the plan; headers compare it.
        """
        self._mode, self._digest = mode, digest << 16
        for (known, _, _), state in self._states.items():
            if known == mode:
                state.ahead = state.uniform and self._hoisted and state.spec is not None
                state.uniform, state.count = True, 0

    def end(self) -> None:
        """Waits until everything sent in this step has left."""
        for work, _, what in self._sent:
            self._wait(work, what)
        self._sent.clear()

    def send_act(self, stage: int, mb: int, peer: int, value, window: int) -> Spec:
        """Sends a stage's output to ``peer``; returns its description.

        Raises:
            TypeError: if the output holds anything but dense tensors.
        """
        state = self._state("out", stage)
        spec = state.spec if fits(value, state.spec) else describe(value, stage, mb)
        values = [value] if spec.single else list(value)
        what = ("the output of {}F{} to be received by rank {}", stage, mb, self._names[peer])
        changed = spec is not state.spec
        inline = state.ahead and self._inline
        blob = torch.frombuffer(bytearray(pickle.dumps(spec)), dtype=torch.uint8) if changed else None
        header = torch.tensor([_CHANGED if changed else _SAME, mb, 0 if blob is None else blob.numel(),
                               self._digest | stage, *_PADDING])
        if not inline:
            self._send(self._host, header, peer, stage, _HEADER, what)
        if changed:
            if state.ahead:
                self._fill(state, peer, stage, header, window, what)
            self._send(self._host, blob, peer, stage, _BLOB, what)
            state.change(spec)
            inline = False
        state.count += 1
        form = form_of(self._act_share.specs(spec.tensors), self._pack_below, inline)
        for message in form.messages(self._act_share.cut(values), header):
            self._send(self._group(self._rank, peer), message, peer, stage, _ACT, what)
        return spec

    def _fill(self, state, peer, stage, header, window, what):
        """Satisfies the receives that the peer has posted for the old shapes; the first of them carries the header."""
        form = form_of(self._act_share.specs(state.spec.tensors), self._pack_below, self._inline)
        for _ in range(window + 1):
            blank = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in form.tensors]
            for message in form.messages(blank, header):
                self._send(self._group(self._rank, peer), message, peer, stage, _ACT, what)

    def post_act(self, stage: int, mb: int, peer: int) -> None:
        """Posts the receive of stage ``stage``'s input."""
        state = self._state("in", stage)
        incoming = _Incoming(mb, peer)
        if not (state.ahead and self._inline):
            self._post_header(incoming, stage)
        if state.ahead:
            self._post_payload(incoming, state.spec, stage, self._inline)
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
            self._wait(work, ("the output of {}F{} from rank {}", stage - 1, mb, self._names[incoming.peer]))
        values = self._act_share.join(incoming.form.values(incoming.messages, self._device), incoming.spec.tensors)
        if self._mode == "train":
            for value, spec in zip(values, incoming.spec.tensors):
                value.requires_grad_(spec.grad)
        return (values[0] if incoming.spec.single else tuple(values)), incoming.spec

    def send_grad(self, stage: int, mb: int, peer: int, grads: list[torch.Tensor | None], spec: Spec) -> None:
        """Sends the gradients of a stage's input: one per tensor whose gradient returns; a missing one is zero."""
        wanted = tuple(tensor for tensor in spec.tensors if tensor.grad)
        form = form_of(self._grad_share.specs(wanted), self._pack_below, False)
        values = []
        for grad, tensor in zip(grads, wanted, strict=True):
            if grad is None:
                grad = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
            values.append(grad.to(tensor.dtype))
        for message in form.messages(self._grad_share.cut(values)):
            self._send(self._group(self._rank, peer), message, peer, stage, _GRAD,
                       ("the input gradient of stage {}, micro-batch {}, to be received by rank {}", stage, mb,
                        self._names[peer]))

    def post_grad(self, stage: int, mb: int, peer: int, spec: Spec) -> None:
        """Posts the receive of the gradients of stage ``stage``'s output, whose description is ``spec``."""
        incoming = _Incoming(mb, peer, spec=Spec(False, tuple(tensor for tensor in spec.tensors if tensor.grad)))
        incoming.form = form_of(self._grad_share.specs(incoming.spec.tensors), self._pack_below, False)
        self._receive(incoming, ("grad", stage), stage + 1, _GRAD)
        self._grads[(stage, mb)] = incoming

    def take_grad(self, stage: int, mb: int) -> list[torch.Tensor]:
        """Waits for the gradients of stage ``stage``'s output: one per tensor whose gradient returns."""
        incoming = self._grads.pop((stage, mb))
        for work in incoming.works:
            self._wait(work, ("the gradient of {}F{}'s output from rank {}", stage, mb, self._names[incoming.peer]))
        return self._grad_share.join(incoming.form.values(incoming.messages, self._device), incoming.spec.tensors)

    def _state(self, side: str, stage: int) -> _LinkState:
        key = (self._mode, side, stage)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _LinkState()
        return state

    def _group(self, source: int, target: int):
        return self._groups[0] if target > source else self._groups[1]

    def _send(self, group, message: torch.Tensor, peer: int, stage: int, what: int, text: tuple) -> None:
        # The group's own method: dist.isend checks again what is known here, for every message.
        work = group.send([message], self._peers[group][peer], 4 * stage + what)
        self._sent.append((work, message, text))

    def _post_header(self, incoming: _Incoming, stage: int) -> None:
        incoming.header = torch.empty(HEADER_BYTES // 8, dtype=torch.int64)
        incoming.header_work = self._host.recv([incoming.header], self._peers[self._host][incoming.peer],
                                               4 * (stage - 1) + _HEADER)

    def _post_payload(self, incoming: _Incoming, spec: Spec, stage: int, inline: bool) -> None:
        incoming.spec = spec
        incoming.form = form_of(self._act_share.specs(spec.tensors), self._pack_below, inline)
        self._receive(incoming, (self._mode, stage), stage - 1, _ACT)

    def _receive(self, incoming: _Incoming, key: tuple, sender_stage: int, what: int) -> None:
        group = self._group(incoming.peer, self._rank)
        source, tag = self._peers[group][incoming.peer], 4 * sender_stage + what
        for position, (shape, dtype) in enumerate(incoming.form.shapes):
            message = self._pool.take((*key, position), shape, dtype)
            incoming.messages.append(message)
            incoming.works.append(group.recv([message], source, tag))

    def _read_headers(self, state: _LinkState, stage: int, mb: int) -> None:
        """Reads headers in link order until micro-batch ``mb``'s has been read."""
        while mb not in state.arrived:
            if not state.queue:
                raise TransferError(f"stage {stage} needs micro-batch {mb}, whose receive was never posted")
            incoming = state.queue.popleft()
            what = ("the output of {}F{} from rank {}", stage - 1, incoming.mb, self._names[incoming.peer])
            if incoming.header is not None:
                self._wait(incoming.header_work, what)
                flag, sent_mb, length, sent_stage = incoming.header[:HEADER_NUMBERS].tolist()
            else:
                for work in incoming.works:
                    self._wait(work, what)
                incoming.works = []
                flag, sent_mb, length, sent_stage = incoming.form.header(incoming.messages)
            if (sent_mb, sent_stage) != (incoming.mb, self._digest | stage - 1):
                same = sent_stage & ~0xFFFF == self._digest
                raise TransferError(f"pipeline rank {self._rank} expected {what[0].format(*what[1:])}, but got "
                                    f"{sent_stage & 0xFFFF}F{sent_mb}{'' if same else ' of another plan'}: the ranks run "
                                    "different plans (another schedule, number of micro-batches, or train_batch against "
                                    "eval_batch)")
            if flag == _CHANGED:
                self._change(state, stage, incoming, length, what)
            if incoming.form is None:
                self._post_payload(incoming, state.spec, stage, False)
            state.count += 1
            state.arrived[incoming.mb] = incoming

    def _change(self, state: _LinkState, stage: int, incoming: _Incoming, length: int, what: tuple) -> None:
        blob = torch.empty(length, dtype=torch.uint8)
        self._wait(self._host.recv([blob], self._peers[self._host][incoming.peer], 4 * (stage - 1) + _BLOB), what)
        # Only this project's own sender writes here: the two processes share a trust domain, as in torch.distributed.
        spec = pickle.loads(blob.numpy().tobytes())
        for posted in (incoming, *state.queue):
            if posted.form is None:
                continue
            for work in posted.works:
                self._wait(work, what)
            posted.form, posted.messages, posted.works = None, [], []
            if posted is not incoming and posted.header is None:
                self._post_header(posted, stage)
        state.change(spec)

    def _wait(self, work, what: tuple) -> None:
        self._waiting = what
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferError(f"pipeline rank {self._rank} was waiting for {what[0].format(*what[1:])}: "
                                f"{plain(error)}", lost=True) from error
        self._waiting = None
