"""Asynchronous transfers between neighbouring stages.

Every activation is announced by a header, so any shape can follow any other without a flag. While a link's shapes stay
the same, its receives are posted ahead into pooled buffers and the header only confirms them; where messages have tags it
then travels inside the message. When a shape changes, the sender first fills the receives that are already posted (their
number, the window, is known to both ends from the program), then describes and sends the new tensors; for the rest of that
step the receiver posts each payload once its header has arrived. Gradients have the shapes of the activations, which both
ends know.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .partitioned import Whole
from .transport import Transport, Work
from .wire import ENDED, HEADER_BYTES, HEADER_NUMBERS, BufferPool, Form, Spec, describe, fits, form_of

_SAME, _CHANGED = 0, 1
_ACT, _GRAD, _HEADER, _BLOB, _LOSS, _NUMBERS, _SAMPLES = range(7)
_KINDS = 7
#: between hosts' memories a copy below this size costs less than a second message; elsewhere messages are cheap
_PACK_BELOW_TAGGED, _PACK_BELOW = 1 << 20, 1 << 15
_PADDING = [0] * (HEADER_BYTES // 8 - HEADER_NUMBERS)
_NO_HEADER = (0, 0, 0, 0)
_OUTPUT = "the output of {}F{} to be received by rank {}"
#: what carries the header of an activation whose tensors are all empty
_NOTHING = torch.empty(0, dtype=torch.uint8)
_NO_TENSORS = Form((), (), (), (), False, (((0, ), torch.uint8), ))


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


def _as_tensor(header: tuple[int, int, int, int]) -> torch.Tensor:
    return torch.tensor([*header, *_PADDING])


class Posted(NamedTuple):
    """A posted receive of numbers."""

    message: torch.Tensor
    work: Work
    what: tuple


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
        to_next, to_prev: transports to higher and to lower ranks.
        host: a transport of tensors in host memory between the same ranks, for headers.
        hoisted: the programs post receives ahead of the global order, so to_next and to_prev must be two groups, or tagged.
        acts, grads: what of an activation and of a gradient this rank sends.
    """

    def __init__(self, device, peers: list[int], rank: int, to_next: Transport, to_prev: Transport, host: Transport,
                 hoisted: bool, acts: Whole, grads: Whole):
        self._act_share, self._grad_share = acts, grads
        self._device = device
        self._rank = rank
        #: how messages call a pipeline rank
        self._names = [str(peer) if peer == p else f"{peer} (pipeline rank {p})" for p, peer in enumerate(peers)]
        self._transports = (to_next, to_prev)
        self._host = host
        self._hoisted = hoisted
        # Headers that travel with their message rely on tags.
        self._inline = to_next.tagged
        self._packed_header = to_next.tagged and not to_next.carries
        self._carries = to_next.carries
        self._pack_below = _PACK_BELOW_TAGGED if self._inline else _PACK_BELOW
        self._pool = BufferPool(device)
        self._states: dict[tuple, _LinkState] = {}
        self._mode = "train"
        self._digest = 0
        self._sent: deque = deque()
        self._shared: tuple[list, list] | None = None
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
        for work, what, _ in self._sent:
            self._wait(work, what)
        self._sent.clear()

    def send_act(self, stage: int, mb: int, peer: int, value, window: int) -> Spec:
        """Sends a stage's output, or ``ENDED`` in its place, to ``peer``; returns its description.

        Raises:
            TypeError: if the output holds anything but dense tensors.
        """
        state = self._state("out", stage)
        spec = self.spec_of(value, stage, mb)
        values = [] if spec == ENDED else [value] if spec.single else list(value)
        what = (_OUTPUT, stage, mb, self._names[peer])
        changed = spec is not state.spec
        inline = state.ahead and self._inline
        blob = torch.frombuffer(bytearray(pickle.dumps(spec)), dtype=torch.uint8) if changed else None
        header = (_CHANGED if changed else _SAME, mb, 0 if blob is None else blob.numel(), self._digest | stage)
        if not inline:
            self._send(self._host, _as_tensor(header), peer, stage, _HEADER, what)
        if changed:
            if state.ahead:
                self._fill(state, peer, stage, header, window, what)
            self._send(self._host, blob, peer, stage, _BLOB, what)
            state.change(spec)
            inline = False
        state.count += 1
        self._send_payload(self._act_share.cut(values), spec, peer, stage, header if inline else None, what)
        return spec

    def _send_payload(self, values, spec, peer, stage, header, what):
        """The messages of an activation; ``header`` travels with them unless it is None."""
        packed = header is not None and self._packed_header
        form = form_of(self._act_share.specs(spec.tensors), self._pack_below, packed)
        messages = form.messages(values, _as_tensor(header) if packed else None)
        if header is not None and not messages:
            messages = [_NOTHING]
        transport = self._transport(self._rank, peer)
        for message in messages:
            self._send(transport, message, peer, stage, _ACT, what, header or _NO_HEADER)
            header = None

    def _fill(self, state, peer, stage, header, window, what):
        """Satisfies the receives that the peer has posted for the old shapes; the first of them carries the header."""
        tensors = self._act_share.specs(state.spec.tensors)
        for _ in range(window + 1):
            blank = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in tensors]
            self._send_payload(blank, state.spec, peer, stage, header if self._inline else None, what)

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
        """Waits for stage ``stage``'s input: ``(value, description)``; tensors whose gradient returns require one.

        ``(None, ENDED)`` if the data ended before this micro-batch.
        """
        state = self._state("in", stage)
        self._read_headers(state, stage, mb)
        incoming = state.arrived.pop(mb)
        for work in incoming.works:
            self._wait(work, ("the output of {}F{} from rank {}", stage - 1, mb, self._names[incoming.peer]))
        values = self._act_share.join(incoming.form.values(incoming.messages, self._device), incoming.spec.tensors)
        if self._mode == "train":
            for value, spec in zip(values, incoming.spec.tensors):
                value.requires_grad_(spec.grad)
        if incoming.spec == ENDED:
            return None, ENDED
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
            self._send(self._transport(self._rank, peer), message, peer, stage, _GRAD,
                       ("the input gradient of stage {}, micro-batch {}, to be received by rank {}", stage, mb,
                        self._names[peer]))

    def spec_of(self, value, stage: int, mb: int) -> Spec:
        """The description of a stage's output that is not sent yet."""
        spec = self._state("out", stage).spec
        return spec if fits(value, spec) else describe(value, stage, mb)

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
        if self._sent:
            self._release((_OUTPUT, stage, mb))
        return self._grad_share.join(incoming.form.values(incoming.messages, self._device), incoming.spec.tensors)

    def send_loss(self, stage: int, numbers: list[float]) -> None:
        """Gives ``numbers`` of the stage that computes the loss to all other ranks, which have called :meth:`post_loss`."""
        message = torch.tensor(numbers, dtype=torch.float64)
        for peer, name in enumerate(self._names):
            if peer != self._rank:
                self._send(self._host, message, peer, stage, _LOSS,
                           ("the loss of stage {} to be received by rank {}", stage, name))

    def post_loss(self, stage: int, peer: int, count: int) -> Posted:
        """Posts the receive of ``count`` numbers of stage ``stage`` on pipeline rank ``peer``: before a step, so that their
        sender can be done with them whatever this rank does. :meth:`take` gives them."""
        message = torch.empty(count, dtype=torch.float64)
        return Posted(message, self._host.recv(message, peer, _KINDS * stage + _LOSS),
                      ("the loss from rank {}", self._names[peer]))

    def send_samples(self, stage: int, peer: int, fingerprints: list[int]) -> None:
        """Sends what the first stage has read to the rank of the last, which has called :meth:`post_samples`."""
        self._send(self._host, torch.tensor(fingerprints), peer, stage, _SAMPLES,
                   ("the fingerprints of stage {}'s samples to be received by rank {}", stage, self._names[peer]))

    def post_samples(self, stage: int, peer: int, count: int) -> Posted:
        """Posts, before a step, the receive of the fingerprints of what ``stage`` on pipeline rank ``peer`` will read."""
        message = torch.empty(count, dtype=torch.int64)
        return Posted(message, self._host.recv(message, peer, _KINDS * stage + _SAMPLES),
                      ("the fingerprints of stage {}'s samples from rank {}", stage, self._names[peer]))

    def take(self, posted: Posted) -> list:
        """Waits for the numbers of a posted receive."""
        self._wait(posted.work, posted.what)
        return posted.message.tolist()

    def share(self, numbers: list[float]) -> None:
        """Gives ``numbers`` to all ranks, as all of them do. Nobody waits before :meth:`shared` where messages outlive their
        sender; a rank may end after its last step."""
        own = torch.tensor(numbers, dtype=torch.float64)
        rows = [own if peer == self._rank else torch.empty_like(own) for peer in range(len(self._names))]
        works = []
        for peer, row in enumerate(rows):
            if peer != self._rank:
                works.append((self._host.recv(row, peer, _NUMBERS), ("the measurements of rank {}", self._names[peer])))
        for peer, name in enumerate(self._names):
            if peer != self._rank:
                with contextlib.suppress(TransferError) if self._host.keeps else contextlib.nullcontext():
                    # A rank that has ended after this step does not want them; any other loss shows in what is received.
                    works.append(self._start(self._host, own, peer, _NUMBERS,
                                             ("its measurements to be received by rank {}", name), _NO_HEADER))
        self._shared = rows, works
        if not self._host.keeps:
            self._wait_shared()

    @property
    def sharing(self) -> bool:
        """True from :meth:`share` to :meth:`shared`."""
        return self._shared is not None

    def shared(self) -> list[list[float]]:
        """Every rank's numbers of the last :meth:`share`, once."""
        self._wait_shared()
        (rows, _), self._shared = self._shared, None
        return [row.tolist() for row in rows]

    def _wait_shared(self) -> None:
        works = self._shared[1]
        while works:
            work, what, *_ = works.pop(0)
            self._wait(work, what)

    def hurry(self) -> None:
        """From now on a wait lasts seconds at most."""
        for transport in {*self._transports, self._host}:
            transport.hurry()

    def close(self) -> None:
        """Frees what the transports hold."""
        self._shared = None
        for transport in {*self._transports, self._host}:
            transport.close()

    def _state(self, side: str, stage: int) -> _LinkState:
        key = (self._mode, side, stage)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = _LinkState()
        return state

    def _transport(self, source: int, target: int) -> Transport:
        return self._transports[0] if target > source else self._transports[1]

    def _send(self, transport: Transport, message: torch.Tensor, peer: int, stage: int, what: int, text: tuple,
              header: tuple[int, int, int, int] = _NO_HEADER) -> None:
        sent = self._start(transport, message, peer, _KINDS * stage + what, text, header)
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        if not sent[0].is_completed():
            self._sent.append(sent)

    def _release(self, what: tuple) -> None:
        """Drops what was sent as ``what`` and has arrived; gloo itself does not tell before somebody waits."""
        kept = deque()
        for entry in self._sent:
            if entry[1][:3] == what:
                self._wait(*entry[:2])
            else:
                kept.append(entry)
        self._sent = kept

    def _start(self, transport: Transport, message: torch.Tensor, peer: int, tag: int, text: tuple, header: tuple) -> tuple:
        try:
            # The message is kept until the work is done.
            return transport.send(message, peer, tag, header), text, message
        except RuntimeError as error:
            raise self._lost(text, error) from error

    def _post_header(self, incoming: _Incoming, stage: int) -> None:
        incoming.header = torch.empty(HEADER_BYTES // 8, dtype=torch.int64)
        incoming.header_work = self._host.recv(incoming.header, incoming.peer, _KINDS * (stage - 1) + _HEADER)

    def _post_payload(self, incoming: _Incoming, spec: Spec, stage: int, inline: bool) -> None:
        incoming.spec = spec
        incoming.form = form_of(self._act_share.specs(spec.tensors), self._pack_below, inline and self._packed_header)
        if inline and self._carries and not incoming.form.shapes:
            incoming.form = _NO_TENSORS._replace(tensors=incoming.form.tensors)
        self._receive(incoming, (self._mode, stage), stage - 1, _ACT)

    def _receive(self, incoming: _Incoming, key: tuple, sender_stage: int, what: int) -> None:
        transport, tag = self._transport(incoming.peer, self._rank), _KINDS * sender_stage + what
        for position, (shape, dtype) in enumerate(incoming.form.shapes):
            message = self._pool.take((*key, position), shape, dtype)
            incoming.messages.append(message)
            incoming.works.append(transport.recv(message, incoming.peer, tag))

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
                header = incoming.works[0].header if self._carries else incoming.form.header(incoming.messages)
                flag, sent_mb, length, sent_stage = header
                incoming.works = []
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
        self._wait(self._host.recv(blob, incoming.peer, _KINDS * (stage - 1) + _BLOB), what)
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
            raise self._lost(what, error) from error
        self._waiting = None

    def _lost(self, what: tuple, error: RuntimeError) -> TransferError:
        return TransferError(f"pipeline rank {self._rank} was waiting for {what[0].format(*what[1:])}: {plain(error)}",
                             lost=True)
