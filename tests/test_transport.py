"""Messages through shared memory: sizes, order, reuse, full sockets, and peers that end."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import threading
import time

import pytest
import suite
import torch

from ds_pipe_ext.runtime.transport import SharedMemoryTransport


@pytest.fixture
def pair():
    """Two ends in one process, as pipeline ranks 0 and 1."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = SharedMemoryTransport({1: left}, timeout=20.0), SharedMemoryTransport({0: right}, timeout=20.0)
    yield ends
    for end in ends:
        end.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 1025, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_every_size_and_dtype_arrives(pair, numel, dtype):
    sent = torch.randint(0, 2, (numel, )).to(dtype)
    received = torch.zeros_like(sent)
    pair[0].send(sent, 1, 3, (1, 2, 2**62, -4))
    work = pair[1].recv(received, 0, 3)
    work.wait()
    assert torch.equal(sent, received) and work.header == (1, 2, 2**62, -4)


def test_memory_of_a_burst_is_given_back(pair):
    big = torch.ones(1 << 18)  # a block of 1 MiB
    for _ in range(64):
        pair[0].send(big, 1, 0)
    received = torch.zeros_like(big)
    for _ in range(64):
        pair[1].recv(received, 0, 0).wait()
        assert received[-1] == 1
    pair[1].send(torch.zeros(1), 0, 0)
    pair[0].recv(torch.zeros(1), 1, 0).wait()
    end = pair[0]._ends[1]
    free = sum(map(len, end._free.values()))
    assert free == len(end._own) == 64
    # Emptied memory reads as zeros.
    assert sum(bool(ctypes.c_float.from_address(block.address).value) for block in end._own) <= 8
    for value in range(64):
        pair[0].send(torch.full_like(big, value), 1, 0)
    for value in range(64):
        pair[1].recv(received, 0, 0).wait()
        assert received.eq(value).all()


def test_the_sender_may_reuse_its_tensor_at_once(pair):
    sent, received = torch.ones(100), torch.zeros(100)
    pair[0].send(sent, 1, 0).wait()
    sent.zero_()
    pair[1].recv(received, 0, 0).wait()
    assert received.eq(1).all()


def test_messages_find_their_receives_by_tag_and_in_posting_order(pair):
    for tag, value in ((1, 10), (2, 20), (1, 11), (2, 21)):
        pair[0].send(torch.tensor([value]), 1, tag)
    buffers = {(tag, n): torch.zeros(1, dtype=torch.int64) for tag in (1, 2) for n in (0, 1)}
    works = {key: pair[1].recv(buffers[key], 0, key[0]) for key in sorted(buffers)}
    for key in ((2, 1), (1, 1), (2, 0), (1, 0)):
        works[key].wait()
    assert {key: buffer.item() for key, buffer in buffers.items()} == {(1, 0): 10, (1, 1): 11, (2, 0): 20, (2, 1): 21}


def test_memory_and_descriptors_do_not_grow_with_the_number_of_messages(pair):
    received = torch.zeros(5000)
    before = descriptors()
    for number in range(300):
        pair[0].send(torch.full((5000, ), float(number)), 1, 0)
        pair[1].recv(received, 0, 0).wait()
        assert received[0] == number
    # Blocks come back seven at a time, or with the next message the other way.
    assert len(pair[0]._ends[1]._own) <= 8
    for number in range(300):
        for here, there in ((0, 1), (1, 0)):
            pair[here].send(torch.full((5000, ), float(number)), there, 0)
            pair[there].recv(received, here, 0).wait()
    assert len(pair[0]._ends[1]._own) <= 8 and len(pair[1]._ends[0]._own) <= 2
    assert descriptors() == before


def test_both_may_send_far_more_than_a_socket_holds_before_either_receives(pair):
    count = 3000
    sums = {}

    def work(rank):
        for number in range(count):
            pair[rank].send(torch.tensor([number]), 1 - rank, 0)
        buffer = torch.zeros(1, dtype=torch.int64)
        total = 0
        for number in range(count):
            pair[rank].recv(buffer, 1 - rank, 0).wait()
            assert buffer.item() == number
            total += buffer.item()
        sums[rank] = total

    threads = [threading.Thread(target=work, args=(rank, )) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sums == {0: count * (count - 1) // 2, 1: count * (count - 1) // 2}


def test_a_wrong_size_is_an_error(pair):
    pair[0].send(torch.zeros(3), 1, 0)
    with pytest.raises(RuntimeError, match="12 bytes came where one of 16 was expected"):
        pair[1].recv(torch.zeros(4), 0, 0).wait()


def test_what_was_sent_before_the_peer_ended_still_arrives_and_then_the_end_is_told(pair):
    for number in range(10):
        pair[1].send(torch.tensor([number]), 0, 0)
    # Unread at the peer's end: the operating system reports a reset before the data.
    pair[0].send(torch.zeros(1), 1, 0)
    pair[1].close()
    buffer = torch.zeros(1, dtype=torch.int64)
    for number in range(10):
        pair[0].recv(buffer, 1, 0).wait()
        assert buffer.item() == number
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        pair[0].recv(buffer, 1, 0).wait()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        pair[0].send(buffer, 1, 0)


def test_a_forked_child_does_not_hide_that_a_peer_has_ended(pair):
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    try:
        time.sleep(0.2)
        pair[1].close()
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            pair[0].recv(torch.zeros(1), 1, 0).wait()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_no_file_descriptor_left_is_told(pair):
    pair[0].send(torch.zeros(1), 1, 0)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limit[1]))
    try:
        with pytest.raises(RuntimeError, match="no file descriptor left"):
            pair[1].recv(torch.zeros(1), 0, 0).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_errors_of_the_operating_system_are_told_as_failed_transfers(pair, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(RuntimeError, match="cannot send 4 bytes through shared memory.*Too many open files.*p2p_transport"):
        pair[0].send(torch.zeros(1), 1, 0)
    work = pair[0].recv(torch.zeros(1), 1, 0)
    pair[0].close()
    with pytest.raises(RuntimeError, match="cannot receive.*Bad file descriptor"):
        work.wait()


def test_silence_and_a_peer_that_does_not_read_time_out():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    transport = SharedMemoryTransport({1: left}, timeout=0.2)
    with right:
        with pytest.raises(RuntimeError, match="Timed out"):
            transport.recv(torch.zeros(1), 1, 0).wait()
        with pytest.raises(RuntimeError, match="Timed out waiting for room"):
            for _ in range(100_000):
                transport.send(torch.zeros(1), 1, 0)
        transport.close()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_connect_on_one_host_and_otherwise_nobody_does(world):
    for found in suite.result(world, "connections"):
        assert found == {"sums": [sum(range(world)) - rank for rank in range(world)][found["rank"]], "rank": found["rank"],
                         "elsewhere": None, "without": None}


def test_sent_outputs_are_held_no_longer_than_their_micro_batch_is_in_flight():
    first, last = suite.result(2, "kept_outputs")
    assert first == {"auto": 0, "process_group": 1} and last == {"auto": 0, "process_group": 0}


def test_measurements_can_be_read_after_the_end():
    for found in suite.result(2, "measured_after_the_end"):
        for step in found.values():
            assert step["step"] == 3 and len(step["compute_s"]) == 2 and min(step["compute_s"]) > 0, found


def test_conjugations_and_signs_outside_the_memory_are_sent():
    for found in suite.result(2, "conjugated"):
        assert all(loss < 1e-6 and weights < 1e-12 for loss, weights in found.values()), found
