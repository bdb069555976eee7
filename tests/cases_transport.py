"""What ranks of the engine's process groups do to test the shared-memory transport."""

import json

import torch
from deepspeed.pipe import LayerSpec
from engine_cases import engine, worst
from models import Block, Reference, batch, stage_state
from suite import case
from torch import nn


class Conjugated(Block):
    """Returns a complex tensor whose conjugation is not in its memory."""

    def forward(self, x):
        y = self.linear(x)
        return torch.complex(y, 2 * y).conj()


class Imaginary(Block):
    """Its gradient comes back with a sign that is not in its memory."""

    def forward(self, z):
        return torch.tanh(self.linear(z.conj().imag + z.real))


@case(2)
def conjugated(rank, world):
    """transport -> (loss error, weight error) of one step."""
    found = {}
    for transport in ("auto", "process_group"):
        def model():
            return [LayerSpec(Conjugated, 0, dtype=torch.float64), LayerSpec(Imaginary, 1, dtype=torch.float64)], nn.MSELoss()

        reference = Reference(model())
        made = engine(model(), 0, world, "zb-h1", 3, pipeline={"p2p_transport": transport})
        batches = [batch("mlp", i, dtype=torch.float64) for i in range(3)]
        loss = made.train_batch(iter(batches)).item()
        found[transport] = abs(loss - reference.step(batches)), worst(stage_state(made.module), reference.state())
        made.destroy()
    return found


@case(2, 4)
def connections(rank, world):
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


@case(2)
def kept_outputs(rank, world):
    """transport -> most micro-batches whose sent outputs were still held after a gradient came back, in a step of 12 micro-batches."""
    found = {}
    for transport in ("auto", "process_group"):
        made = engine("mlp", 4, world, "1f1b", 12, pipeline={"p2p_transport": transport})
        take, held = made._links.take_grad, [0]

        def counting(stage, mb):
            gradient = take(stage, mb)
            held.append(len({entry[1][2] for entry in made._links._sent if "output" in entry[1][0]}))
            return gradient

        made._links.take_grad = counting
        for _ in range(2):
            made.train_batch(iter([batch("mlp", i, dtype=torch.float32) for i in range(12)]))
        found[transport] = max(held)
        made.destroy()
    return found


@case(2)
def measured_after_the_end(rank, world):
    """last_step of the last of three steps: read after the engine was destroyed, rank 1 a second later than rank 0."""
    import time

    found = {}
    for transport in ("auto", "process_group"):
        made = engine("mlp", 4, world, "zb-h1", 4, pipeline={"p2p_transport": transport})
        for _ in range(3):
            made.train_batch(iter([batch("mlp", i, dtype=torch.float32) for i in range(4)]))
        time.sleep(rank)
        made.destroy()
        found[transport] = made.last_step
    made = engine("mlp", 4, world, "zb-h1", 4, dtype=torch.bfloat16, bf16={"enabled": True}, gradient_clipping=1.0,
                  zero_optimization={"stage": 1}, optimizer={"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}})
    for _ in range(3):
        made.train_batch(iter([batch("mlp", i, dtype=torch.bfloat16) for i in range(4)]))
    # Upstream's norm is a tensor there.
    found["bf16, ZeRO-1"] = json.loads(json.dumps(made.last_step))
    made.destroy()
    return found
