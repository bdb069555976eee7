"""What ranks of the engine's process groups do to test the shared-memory transport."""

from suite import case


@case(2, 4)
def connections(rank, world):
    import torch
    import torch.distributed as dist

    from ds_pipe_ext.runtime import transport

    group, peers = dist.new_group(), list(range(world))
    shared = transport.share_memory(group, rank, peers)
    buffers = {peer: torch.zeros(1) for peer in peers if peer != rank}
    works = [shared.recv(buffer, peer, 0) for peer, buffer in buffers.items()]
    for peer in buffers:
        shared.send(torch.tensor([float(rank)]), peer, 0)
    for work in works:
        work.wait()
    found = {"rank": rank, "sums": sum(int(buffer) for buffer in buffers.values())}
    shared.close()
    listen = transport._listen
    try:
        for name, change in (("elsewhere", lambda row: ("another host", *row[1:])), ("without", lambda row: None)):
            transport._listen = lambda *args: change(listen(*args)) if rank == world - 1 else listen(*args)
            found[name] = transport.share_memory(group, rank, peers)
    finally:
        transport._listen = listen
    return found
