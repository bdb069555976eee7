"""How a message travels between two pipeline ranks: over a process group, or through memory that both processes share.

Between processes of one host a message is a copy into shared memory and one token through a Unix socket, which wakes the
thread that waits for it. Over gloo it wakes a further thread on either side, twice. The memory has no name and comes with
the first token that speaks of it, so nothing stays behind when a process is killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A transfer under way.

    Attributes:
        header: the numbers that came with a received message, on transports that carry them.
    """

    header: tuple[int, int, int, int]

    def wait(self) -> object:
        """Returns when a received message is there, or the memory of a sent one may be reused.

        Raises:
            RuntimeError: the peer is gone or silent.
        """

    def is_completed(self) -> bool:
        """True if :meth:`wait` would return at once; False may be wrong."""


class Transport(Protocol):
    """Point-to-point messages between the ranks of one pipeline. Messages are contiguous tensors, peers pipeline ranks."""

    #: messages of one pair are told apart by tag
    tagged: bool
    #: a message may carry four numbers beside its tensor
    carries: bool
    #: a message arrives even if its sender has ended
    keeps: bool

    def send(self, message: torch.Tensor, peer: int, tag: int, header: tuple[int, int, int, int] = (0, 0, 0, 0)) -> Work:
        """Starts to send; ``message`` must not change until the work is done."""

    def recv(self, message: torch.Tensor, peer: int, tag: int) -> Work:
        """Posts a receive; those of one peer and tag are filled in the order in which they were posted."""

    def hurry(self) -> None:
        """Waits of transports that keep messages last seconds at most from now on."""

    def close(self) -> None:
        """Frees what the transport holds."""


class GroupTransport:
    """Over a process group.

    Args:
        group: the process group.
        peers: global rank of every pipeline rank.
    """

    carries = keeps = False

    def __init__(self, group, peers: list[int]):
        self._group = group
        self._peers = [dist.get_group_rank(group, peer) for peer in peers]
        self.tagged = dist.get_backend(group) == "gloo"

    # The group's own methods: dist.isend and irecv check again what is known here, for every message.

    def send(self, message, peer, tag, header=None):
        return self._group.send([message], self._peers[peer], tag)

    def recv(self, message, peer, tag):
        return self._group.recv([message], self._peers[peer], tag)

    def hurry(self):
        pass

    def close(self):
        pass


#: bytes of the message, tag, block, number of freed blocks, header, the freed blocks
_TOKEN = struct.Struct("=q3i4q7i")
_ACKS = 7
_NO_HEADER = (0, 0, 0, 0)
_NO_ACKS = [0] * _ACKS
_HURRY_S = 5.0
#: free blocks of one size that keep their memory, and the size from which it matters
_KEPT, _LARGE = 8, 1 << 18
_MADV_REMOVE = 9
_SMALLEST = mmap.PAGESIZE
_FD = struct.Struct("=i")
_ANCILLARY = socket.CMSG_SPACE(_FD.size)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _Block:
    """Shared memory, mapped without keeping a file descriptor: there may be hundreds of blocks."""

    __slots__ = ("address", "size", "index")

    def __init__(self, fd: int, size: int, index: int):
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"cannot map {size} bytes of shared memory")
        self.address, self.size, self.index = address, size, index

    def empty(self) -> None:
        """Gives the memory back, but not its place: a receiver that was behind once does not cost memory for ever."""
        _libc.madvise(self.address, self.size, _MADV_REMOVE)

    def unmap(self) -> None:
        _libc.munmap(self.address, self.size)


class _Done:
    """A message that has been copied."""

    @staticmethod
    def wait():
        return True

    @staticmethod
    def is_completed():
        return True


_DONE = _Done()


class _Receive:
    __slots__ = ("_end", "_message", "_key", "header")

    def __init__(self, end, message, key):
        self._end, self._message, self._key = end, message, key
        self.header = None

    def wait(self):
        self.header = self._end.take(self._key, self._message)
        return True

    def is_completed(self):
        return self.header is not None


class _End:
    """This rank's end of the connection to one peer."""

    def __init__(self, connection: socket.socket, transport: SharedMemoryTransport):
        self.socket = connection
        self.ended = False
        self._transport = transport
        self._own: list[_Block] = []
        self._free: dict[int, list[_Block]] = {}
        self._theirs: dict[int, _Block] = {}
        self._acks: list[int] = []
        self._arrived: dict[tuple[int, int], tuple[_Block, int, tuple]] = {}
        self._counted: dict[int, int] = {}
        self._posted: dict[int, int] = {}

    def send(self, message: torch.Tensor, tag: int, header: tuple[int, int, int, int]) -> None:
        nbytes = message.nbytes
        # Powers of two: changing lengths share few sizes. Pages that are never written take no memory.
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if not free:
            while self.read(socket.MSG_DONTWAIT):
                pass
        if free:
            block = free.pop()
            ctypes.memmove(block.address, message.data_ptr(), nbytes)
            self._send(nbytes, tag, block.index, header)
            return
        fd = os.memfd_create("ds_pipe_ext", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            block = _Block(fd, size, len(self._own))
            self._own.append(block)
            ctypes.memmove(block.address, message.data_ptr(), nbytes)
            self._send(nbytes, tag, block.index, header, ((socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd)), ))
        finally:
            os.close(fd)

    def post(self, message: torch.Tensor, tag: int) -> _Receive:
        number = self._posted.get(tag, 0)
        self._posted[tag] = number + 1
        return _Receive(self, message, (tag, number))

    def take(self, key: tuple[int, int], message: torch.Tensor) -> tuple[int, int, int, int]:
        arrived = self._arrived
        while key not in arrived:
            self.read()
        block, nbytes, header = arrived.pop(key)
        if nbytes != message.nbytes:
            raise RuntimeError(f"a message of {nbytes} bytes came where one of {message.nbytes} was expected")
        ctypes.memmove(message.data_ptr(), block.address, nbytes)
        self._acks.append(block.index)
        if len(self._acks) >= _ACKS:
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                # If the peer does not read now, the next token tells it; and having sent everything, it may have ended.
                self._put(0, 0, -1, _NO_HEADER)
        return header

    def read(self, flags: int = 0) -> bool:
        """Reads a token; False if there is none and ``flags`` forbid to wait."""
        try:
            data, ancillary, told, _ = self.socket.recvmsg(_TOKEN.size, _ANCILLARY, flags)
        except BlockingIOError:
            if flags:
                return False
            raise RuntimeError("Timed out waiting for a message") from None
        except ConnectionResetError:
            # Reported once when the peer has ended without reading everything; what it sent before follows.
            return True
        except OSError as error:
            raise RuntimeError(f"cannot receive: {error}") from error
        if not data:
            self.ended = True
            if flags:
                return False
            raise RuntimeError("Connection closed by peer")
        if told & socket.MSG_CTRUNC:
            raise RuntimeError("this process has no file descriptor left for a peer's shared memory: raise the limit "
                               "(ulimit -n)")
        nbytes, tag, index, count, *rest = _TOKEN.unpack(data)
        for ack in rest[4:4 + count]:
            block = self._own[ack]
            free = self._free[block.size]
            if len(free) >= _KEPT and block.size >= _LARGE:
                block.empty()
            free.append(block)
        if ancillary:
            fd = _FD.unpack(ancillary[0][2])[0]
            try:
                self._theirs[index] = _Block(fd, os.fstat(fd).st_size, index)
            finally:
                os.close(fd)
        if index >= 0:
            number = self._counted.get(tag, 0)
            self._counted[tag] = number + 1
            self._arrived[tag, number] = (self._theirs[index], nbytes, tuple(rest[:4]))
        return True

    def _send(self, *token) -> None:
        while True:
            try:
                return self._put(*token)
            except BlockingIOError:
                self._transport.make_room(self)

    def _put(self, nbytes: int, tag: int, index: int, header: tuple[int, int, int, int], ancillary: tuple = ()) -> None:
        acks = self._acks[:_ACKS]
        token = _TOKEN.pack(nbytes, tag, index, len(acks), *header, *acks, *_NO_ACKS[len(acks):])
        self.socket.sendmsg((token, ), ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        del self._acks[:_ACKS]

    def close(self) -> None:
        self.socket.close()
        for block in (*self._own, *self._theirs.values()):
            block.unmap()


#: Loaders fork workers, which outlive a killed rank: with a copy of its sockets they would hide its end from the peers.
_open: weakref.WeakSet[SharedMemoryTransport] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [transport.close() for transport in list(_open)])


class SharedMemoryTransport:
    """Between processes of one host; for tensors in host memory. Made by :func:`share_memory`."""

    tagged = carries = keeps = True

    def __init__(self, connections: dict[int, socket.socket], timeout: float):
        self._ends = {peer: _End(connection, self) for peer, connection in connections.items()}
        _open.add(self)
        self._limit(timeout)

    def _limit(self, timeout: float) -> None:
        self._timeout = timeout
        seconds = int(timeout)
        for end in self._ends.values():
            end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO,
                                  struct.pack("ll", seconds, int((timeout - seconds) * 1e6)))

    def hurry(self):
        self._limit(_HURRY_S)

    def send(self, message, peer, tag, header=_NO_HEADER):
        try:
            self._ends[peer].send(message, tag, header)
        except (BrokenPipeError, ConnectionResetError):
            raise RuntimeError("Connection closed by peer") from None
        except OSError as error:
            # Such as too many file descriptors under way, or no memory.
            raise RuntimeError(f"cannot send {message.nbytes} bytes through shared memory: {error}; pipeline.p2p_transport "
                               "\"process_group\" does without") from error
        return _DONE

    def recv(self, message, peer, tag):
        return self._ends[peer].post(message, tag)

    def make_room(self, blocked: _End) -> None:
        """Waits until ``blocked`` may take a token. Reads meanwhile: the peer may be waiting for that in turn."""
        poll = select.poll()
        ends = {end.socket.fileno(): end for end in self._ends.values() if end is blocked or not end.ended}
        for fd, end in ends.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if end is blocked else 0))
        ready = poll.poll(self._timeout * 1000)
        if not ready:
            raise RuntimeError("Timed out waiting for room to send")
        for fd, events in ready:
            if events & select.POLLIN:
                ends[fd].read(socket.MSG_DONTWAIT)

    def close(self):
        for end in self._ends.values():
            end.close()
        self._ends = {}


def share_memory(group, rank: int, peers: list[int]) -> SharedMemoryTransport | None:
    """Connects the ranks of ``group``, if all of them are processes of one user on one host; otherwise None on every rank.

    Collective over the group.

    Args:
        group: a gloo group of one pipeline's ranks; its timeout is that of the transfers.
        rank: own pipeline rank.
        peers: global rank of every pipeline rank.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        rows: list = [None] * len(peers)
        dist.all_gather_object(rows, _listen(listener, len(peers)), group=group)
        by_rank = [rows[dist.get_group_rank(group, peer)] for peer in peers]
        if None in by_rank or any(row[:-1] != by_rank[0][:-1] for row in by_rank):
            return None
        timeout = group._get_backend(torch.device("cpu")).options._timeout / timedelta(seconds=1)
        listener.settimeout(timeout)
        connections = {}
        for peer in range(rank):
            connections[peer] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(by_rank[peer][-1])
            connection.send(_FD.pack(rank))
        while len(connections) < len(peers) - 1:
            connection, _ = listener.accept()
            connection.settimeout(None)
            _, user, _ = struct.unpack("=3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():
                connection.close()
                continue
            connections[_FD.unpack(connection.recv(_FD.size))[0]] = connection
    return SharedMemoryTransport(connections, timeout)


def _listen(listener: socket.socket, peers: int) -> tuple | None:
    """Host, network namespace, user and address at which ``listener`` now listens; None where that does not exist."""
    try:
        os.close(os.memfd_create("ds_pipe_ext", os.MFD_CLOEXEC))
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read()
        namespace = os.stat("/proc/self/ns/net").st_ino
        address = f"\0ds_pipe_ext-{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(peers)
    except (AttributeError, OSError):
        return None
    return host, namespace, os.getuid(), address
