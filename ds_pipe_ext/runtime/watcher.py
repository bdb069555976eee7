"""One thread in every process that looks for all fault monitors of it, and hears the operating system's signals."""

from __future__ import annotations

import atexit
import os
import select
import signal
import threading
import time
from typing import Protocol

#: seconds between two looks
POLL_S = 0.5


class Monitor(Protocol):
    """What the watcher looks for."""

    def look(self, interrupted_at: float) -> None:
        """Called every :data:`POLL_S` seconds by the watching thread; ``interrupted_at``: when SIGINT came, or 0."""

    def forget(self) -> None:
        """Called in a forked child, which has no watching thread."""


class Watcher:
    """The thread that looks for all monitors of this process."""

    def __init__(self):
        self._monitors: list[Monitor] = []
        # Garbage collection may end another engine, which is removed here, at any moment.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._pipe: tuple[int, int] | None = None
        self._interrupted_at = 0.0

    def add(self, monitor: Monitor) -> None:
        with self._lock:
            self._monitors.append(monitor)
            if self._thread is not None:
                return
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._listen(self._pipe[1])
            self._interrupted_at = 0.0
            self._thread = threading.Thread(target=self._run, args=(self._pipe[0], ), daemon=True, name="ds-pipe-faults")
            self._thread.start()
            # A thread inside the store's C++ code must not outlive the interpreter.
            atexit.register(self._stop)

    def remove(self, monitor: Monitor) -> None:
        with self._lock:
            if monitor in self._monitors:
                self._monitors.remove(monitor)
            last = not self._monitors
        if last:
            self._stop()

    def forget(self) -> None:
        """In a forked child, which has no such thread: what it inherited would stop its parent's."""
        self._lock = threading.RLock()
        if self._thread is None:
            return
        for monitor in self._monitors:
            monitor.forget()
        self._monitors.clear()
        atexit.unregister(self._stop)
        signal.set_wakeup_fd(-1)
        for fd in self._pipe:
            os.close(fd)
        self._thread = None

    def _listen(self, fd: int) -> None:
        """Lets the operating system's signals wake the thread: the main thread, blocked in a transfer, does not see them."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)

    def _stop(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._monitors.clear()
            if threading.current_thread() is threading.main_thread():
                current = signal.set_wakeup_fd(-1)
                if current not in (-1, self._pipe[1]):
                    signal.set_wakeup_fd(current)
            os.write(self._pipe[1], b"\0")
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
            if not thread.is_alive() and threading.current_thread() is threading.main_thread():
                for fd in self._pipe:
                    os.close(fd)
        atexit.unregister(self._stop)

    def _run(self, fd: int) -> None:
        # Not select: a process with many groups has descriptors beyond its limit of 1024.
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            if poll.poll(1000 * POLL_S):
                received = os.read(fd, 64)
                if 0 in received:
                    return
                # A script with a handler of its own decides itself what an interrupt means.
                if signal.SIGINT in received and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    self._interrupted_at = time.monotonic()
                continue
            with self._lock:
                monitors = list(self._monitors)
            for monitor in monitors:
                monitor.look(self._interrupted_at)


watcher = Watcher()
os.register_at_fork(after_in_child=watcher.forget)
