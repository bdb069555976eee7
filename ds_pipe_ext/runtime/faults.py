"""One failure, one message, on every rank, soon.

A rank that fails in a step writes what happened to the job's store. A thread on every rank looks there; a rank that is
still stuck in a transfer some seconds later is ended with that message, since a blocked collective cannot be woken.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_POLL_S = 1.0
#: how long a rank that saw another's failure may take to fail by itself
_GRACE_S = 8.0
#: how long a secondary failure waits, so that the first one's message is the last that a launcher shows
_YIELD_S = 3.0
#: how long rank 0 stays after it has told of a failure, for it hosts the job's store that the others read
_LINGER_S = 2.5
_engines = itertools.count()


class FaultMonitor:
    """Tells the other ranks of a failure here, and ends this process if another's failure leaves it stuck.

    Args:
        rank: global rank.
        stage: pipeline rank.
        links: the transfers, whose ``waiting_for`` says what this rank waits for; None without a pipeline.
    """

    def __init__(self, rank: int, stage: int, links):
        self._rank, self._stage, self._links = rank, stage, links
        self._key = f"ds_pipe_ext/fault/{next(_engines)}"
        self._stopped = threading.Event()
        self._failed = False
        self._seen: dict | None = None
        self._store = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._store = _get_default_store()
            # A connection of its own: the default one blocks while the main thread waits on it.
            watcher = self._store.clone()
            self._thread = threading.Thread(target=self._watch, args=(watcher, ), daemon=True, name="ds-pipe-faults")
            self._thread.start()
            atexit.register(self.stop)

    def report(self, error: BaseException, cmd) -> None:
        """Adds to ``error`` where it happened and tells the other ranks; a consequence of another rank's failure names it."""
        self._failed = True
        where = f"rank {self._rank} (pipeline rank {self._stage}) in {getattr(cmd, 'instr', cmd)}"
        error.add_note(f"in the pipeline: {where}")
        if self._store is None:
            return
        consequence = isinstance(error, ConnectionError) or type(error).__name__ == "TransferError"
        if not consequence:
            self._publish(where, error)
            return
        deadline = time.monotonic() + _YIELD_S
        first = None
        while time.monotonic() < deadline:
            first = first or self._read(self._store)
            time.sleep(0.1)
        if first is None:
            self._publish(where, error)
        elif first["rank"] != self._rank:
            error.add_note(f"the first failure was on {first['where']}: {first['error']}")

    def stop(self) -> None:
        """Ends the watching thread."""
        self._stopped.set()
        if self._store is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _POLL_S)
        atexit.unregister(self.stop)

    def _publish(self, where: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        record = json.dumps({"rank": self._rank, "where": where, "error": text})
        try:
            self._store.compare_set(self._key, "", record)
            if self._rank == 0:
                time.sleep(_LINGER_S)
        except RuntimeError as gone:
            error.add_note(f"the other ranks could not be told (the job's store is gone: {gone})")

    def _read(self, store) -> dict | None:
        if self._seen is not None:
            return self._seen
        try:
            if store.check([self._key]):
                self._seen = json.loads(store.get(self._key).decode())
            return self._seen
        except RuntimeError:
            return {"rank": -1, "where": "the rank that hosts the job's store", "error": "it has gone"}

    def _watch(self, store) -> None:
        while not self._stopped.wait(_POLL_S):
            first = self._read(store)
            if first is None or first["rank"] == self._rank:
                continue
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline:
                if self._stopped.wait(0.2):
                    return
            if self._failed:
                # The main thread has its own exception and is unwinding; end it only if that hangs.
                if self._stopped.wait(_GRACE_S):
                    return
            waiting = self._links.waiting_for if self._links else ""
            doing = f"was waiting for {waiting}" if waiting else "was running"
            print(f"ds_pipe_ext: rank {self._rank} (pipeline rank {self._stage}) {doing} when {first['where']} failed: "
                  f"{first['error']}; ending this process", file=sys.stderr, flush=True)
            os._exit(1)
