"""One failure, one message, on every rank, soon.

A rank that fails in an engine call writes what happened to the job's store. One thread in every process looks there; a
rank that is still stuck some seconds later is ended with that message, since a blocked collective cannot be woken. If a
rank is in one operation for long, the threads of all ranks print what each is doing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .data import DataEnded
from .p2p import TransferError, plain
from .watcher import watcher

#: how long a rank that saw another's failure may take to fail by itself, inside and outside the engine's calls
_GRACE_S = 8.0
_GRACE_OUTSIDE_S = 15.0
#: how long a secondary failure waits, so that the first one's message is the last that a launcher shows
_YIELD_S = 6.0
#: how long a roll call takes: every watcher looks several times
_ROLL_S = 2.0
#: how long a process may go on after a failure that another rank caused
_UNWIND_S = 10.0
#: how long rank 0, whose exit may take the store along, waits until the others have read what it wrote
_READ_S = 2.5
#: how long an interrupt may stay without effect because the main thread is blocked
_INTERRUPT_S = 3.0
_LONGEST = 4000
_LOOKS_FOR_STILLNESS = 4
_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "load": "loading",
          "send_act": "send of the output", "recv_act": "receive of the input", "send_grad": "send of the input gradient",
          "recv_grad": "receive of the output gradient", "reduce_tied": "sum of the gradients of tied weights",
          "reduce": "averaging of gradients over replicas", "step": "optimizer step"}
_engines = itertools.count()


def operation(doing) -> str:
    """What a rank was doing, for people: ``2F3 (stage 2, forward, micro-batch 3)``."""
    instr = getattr(doing, "instr", None)
    if instr is None:
        return str(doing)
    words = _KINDS.get(instr.kind, instr.kind)
    if instr.stage < 0:
        return words if instr.mb < 0 else f"{words} of micro-batch {instr.mb}"
    return f"{instr.stage}{instr.kind}{instr.mb} (stage {instr.stage}, {words}, micro-batch {instr.mb})"


def lost_connection(error: BaseException) -> bool:
    """True if ``error`` is what a collective raises because another rank is gone or silent."""
    if isinstance(error, TransferError):
        return error.lost
    # Not ConnectionError: that is what a user's own data source may raise.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(
        re.search(r"gloo/|Connection (closed|reset) by peer|NCCL (error|communicator)|ncclRemoteError", str(error))))


def own_connection(store=None):
    """A connection of its own to the job's store, or None without one. The default one blocks while a thread waits on it,
    and keeping it would keep the server alive after the process group is destroyed."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    try:
        return _get_default_store().clone()
    except (RuntimeError, NotImplementedError, KeyError, AttributeError):
        # Backends such as MPI have no store.
        return None


class FaultMonitor:
    """Tells the other ranks of a failure here, and ends this process if another's failure leaves it stuck.

    Args:
        rank: global rank.
        stage: pipeline rank.
        patience: seconds in one operation after which all ranks print what they do, and again after twice as long each
            time; 0 for never.

    Attributes:
        links: the transfers, whose ``waiting_for`` says what this rank waits for; None without a pipeline.
        doing: the instruction that runs, or what else the engine does, as text.
    """

    def __init__(self, rank: int, stage: int, patience: float = 0.0):
        self.name = f"rank {rank} (pipeline rank {stage})"
        self.links = None
        self.doing = ""
        self._rank = rank
        self._key = f"ds_pipe_ext/fault/{next(_engines)}"
        self._lock = threading.Lock()
        self._store = own_connection()
        self._address = _address(self._store)
        self._call: _Call | None = None
        self._first: dict | None = None
        self._first_seen = 0.0
        self._own = ""
        self._end_at = 0.0
        self._broken = ""
        self._answered = False
        self._patience = patience
        self._mark: tuple = ()
        self._since = self._notice_after = 0.0
        self._notices = 0
        self._looks = 0
        if self._store is not None:
            watcher.add(self)

    @property
    def failed(self) -> bool:
        """True after a failure here or elsewhere."""
        return bool(self._broken or self._own or self._first)

    def watching(self, what: str, step: bool = True) -> _Call:
        """Context of an engine call: a failure in it is told to the other ranks, and may be theirs.

        Args:
            what: the call, for messages.
            step: the ranks exchange activations in it, so that no rank can finish it after another has gone.
        """
        return _Call(self, what, step)

    def forget(self) -> None:
        """In a forked child: the lock may have been held by the watching thread, which is not here."""
        self._lock, self._store = threading.Lock(), None

    def stop(self) -> None:
        """Ends the watching."""
        watcher.remove(self)
        with self._lock:
            self._store = None

    # ------------------------------------------------------------------------------------- in the failing thread

    def _enter(self, call: _Call) -> None:
        if self._broken:
            raise RuntimeError(f"this engine failed before ({self._broken}), so its transfers hold undefined data: make a "
                               "new engine, or end the process")
        self.doing = call.what
        self._call = call
        if self._first is not None:
            error = TransferError(f"{call.what} cannot start: {_headline(self._first)}", lost=True)
            self._call = None
            self._own, self._end_at = str(error), time.monotonic() + _UNWIND_S
            raise error

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            self._call = None
            return
        where = f"{self.name} in {operation(self.doing)}"
        if not isinstance(self.doing, str):
            self._broken = f"{where}: {_text(error)}"[:_LONGEST]
        try:
            if lost_connection(error):
                self._report_lost(where, error)
            else:
                self._report_own(where, error)
        finally:
            self._call = None

    def _report_own(self, where: str, error: BaseException) -> None:
        self._own = _text(error)
        error.add_note(f"in the pipeline: {where}")
        if self._store is None:
            return
        first = self._publish(where, error)
        if first is None:
            error.add_note("the other ranks could not be told: the job's store is gone")
        elif first["rank"] != self._rank:
            error.add_note(f"before it, {_headline(first)}")
        elif self._rank == 0:
            self._until_read()

    def _report_lost(self, where: str, error: BaseException) -> None:
        cause = error
        if not isinstance(error, TransferError):
            error = TransferError(f"{self.name} lost another rank in {operation(self.doing)}: {plain(cause)}", lost=True)
            error.__cause__ = cause
        self._own = _text(error)
        self._ask()
        # The other's message is to be the last that is shown: leave it time to be, and the launcher time to end this rank.
        began = time.monotonic()
        while (waited := time.monotonic() - began) < _YIELD_S:
            self._first = self._first or self._read()
            if self._first is None and waited > _ROLL_S:
                # Early, so that those who wait for this rank do not have to wait until it ends.
                self._first = self._publish(where, error, self._silent()) or _STORE_GONE
            time.sleep(0.1)
        if self._rank == 0 and self._first is not _STORE_GONE:
            self._until_read()
        self._end_at = time.monotonic() + _UNWIND_S
        self._note(error, where, self._first)
        if error is not cause:
            raise error

    def _note(self, error: BaseException, where: str, first: dict | None) -> None:
        error.add_note(f"in the pipeline: {where}")
        if first is not None and first["rank"] != self._rank:
            error.add_note(_headline(first))

    def _publish(self, where: str, error: BaseException, silent: list[int] = ()) -> dict | None:
        """Writes this failure, or that of ``silent`` ranks, unless there is one; returns the first, None without a store."""
        record = {"rank": self._rank, "where": where, "error": _text(error)}
        if silent:
            record = {"rank": silent[0], "where": f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}",
                      "error": f"no answer, the process was killed or ended early (seen by {where})"}
        record = json.dumps(record)
        with self._lock:
            if self._store is None:
                return None
            try:
                return json.loads(self._store.compare_set(self._key, "", record))
            except RuntimeError:
                return None

    def _ask(self) -> None:
        """Roll call: a collective's error does not tell which rank has gone, but its watcher does not answer."""
        with self._lock, contextlib.suppress(RuntimeError):
            if self._store is not None and _reachable(self._address):
                self._store.set(f"{self._key}/roll", "called")

    def _answer(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):
            if self._store is not None and not self._answered and self._store.check([f"{self._key}/roll"]):
                self._store.set(f"{self._key}/here/{self._rank}", "")
                self._answered = True

    def _silent(self) -> list[int]:
        with self._lock, contextlib.suppress(RuntimeError):
            if self._store is not None and _reachable(self._address):
                return [rank for rank in range(dist.get_world_size())
                        if rank != self._rank and not self._store.check([f"{self._key}/here/{rank}"])]
        return []

    def _until_read(self) -> None:
        deadline = time.monotonic() + _READ_S
        while time.monotonic() < deadline:
            with self._lock:
                try:
                    if self._store is None or self._store.add(f"{self._key}/read", 0) >= dist.get_world_size() - 1:
                        return
                except (RuntimeError, ValueError):
                    return
            time.sleep(0.05)

    # ---------------------------------------------------------------------------------------- in the watching thread

    def _read(self) -> dict | None:
        with self._lock:
            if self._store is None:
                return None
            if not _reachable(self._address):
                return _STORE_GONE
            try:
                if not self._store.check([self._key]):
                    return None
                first = json.loads(self._store.get(self._key))
                if first["rank"] != self._rank:
                    self._store.add(f"{self._key}/read", 1)
                return first
            except RuntimeError:
                return _STORE_GONE

    def look(self, interrupted_at: float) -> None:
        """One look at the store and at the clock; ends the process if it is stuck."""
        now, call = time.monotonic(), self._call
        if _reachable(self._address):
            self._answer()
        if self._own:
            if self._end_at and now > self._end_at:
                self._end(f"did not end by itself after {self._own}", 1)
            return
        if interrupted_at and call is not None and call.entered < interrupted_at < now - _INTERRUPT_S:
            self._publish(f"{self.name} in {operation(self.doing)}", KeyboardInterrupt("interrupted"))
            self._end(f"was interrupted while it {self._activity()}", 128 + signal.SIGINT)
        self._notice_stillness(now, call)
        if self._first is None:
            first = self._read()
            if first is None or (first is _STORE_GONE and (call is None or not call.step)):
                # A rank that has finished may take the store along: nobody failed.
                self._first_seen = now
                return
            if first["rank"] == self._rank:
                return
            if first is _STORE_GONE:
                if now - max(self._first_seen, call.entered) < _GRACE_S:
                    return
            else:
                self._first_seen = now
            self._first = first
        grace = _GRACE_OUTSIDE_S if call is None else 0.0 if self._first is _STORE_GONE else _GRACE_S
        if now - self._first_seen > grace:
            self._end(f"{self._activity()}; {_headline(self._first)}", 1)

    def _notice_stillness(self, now: float, call: _Call | None) -> None:
        mark = call, self.doing, self.links and self.links._waiting
        if mark != self._mark:
            self._mark, self._since, self._notice_after = mark, now, self._patience
        if self._patience and call is not None and now - self._since >= self._notice_after:
            self._notice_after *= 2
            with self._lock, contextlib.suppress(RuntimeError):
                if self._store is not None and _reachable(self._address):
                    self._store.add(f"{self._key}/still", 1)
        self._looks += 1
        # Asked less often than the rest: it is no failure yet.
        if self._patience and self._looks % _LOOKS_FOR_STILLNESS == 0 and _reachable(self._address):
            with self._lock, contextlib.suppress(RuntimeError):
                told = self._store.add(f"{self._key}/still", 0) if self._store is not None else self._notices
            if told > self._notices:
                self._notices = told
                _say(f"a rank has not moved for long; {self.name} {self._activity()} for {now - self._since:.0f} s")

    def _activity(self) -> str:
        if self._call is None:
            return "was outside the engine"
        waiting = self.links.waiting_for if self.links else ""
        return f"was waiting for {waiting}" if waiting else f"was in {operation(self.doing)}"

    def _end(self, why: str, code: int) -> None:
        # Buffered output of the script would be lost; its lock may be held by the stuck thread.
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1.0)
        _say(f"{self.name} {why}; ending this process")
        os._exit(code)


class _Call:
    """An engine call in progress; nested ones belong to the outermost."""

    def __init__(self, monitor: FaultMonitor, what: str, step: bool):
        self._monitor, self.what, self.step = monitor, what, step
        self.entered = time.monotonic()
        self._outermost = False

    def __enter__(self):
        if self._monitor._call is None:
            self._monitor._enter(self)
            self._outermost = True

    def __exit__(self, kind, error, trace):
        if self._outermost:
            # Data that ended is told to every rank by the engine itself.
            self._monitor._leave(None if isinstance(error, DataEnded) else error)
        return False


_STORE_GONE = {"rank": -1, "where": "the process that hosts the job's store (rank 0, unless the launcher hosts it)",
               "error": "it has gone"}


def _address(store) -> tuple[str, int] | None:
    """Where the store's server listens; None for stores without one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _reachable(address: tuple[str, int] | None) -> bool:
    # Asking a store whose server has gone makes torch print a stack trace of its own.
    if address is None:
        return True
    try:
        socket.create_connection(address, timeout=2.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        # A busy server, or no file descriptors left: no proof.
        return True
    return True


def _text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."


def _headline(first: dict) -> str:
    return f"the first failure was on {first['where']}: {first['error']}"


def _say(text: str) -> None:
    # Not print: a stuck main thread may hold the stream's lock.
    os.write(2, f"ds_pipe_ext: {text}\n".encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError, RuntimeError):
            pass
