"""A lowered program as a DeepSpeed schedule: instructions that DeepSpeed's executor table can be keyed by."""

from __future__ import annotations

import zlib

from deepspeed.runtime.pipe import schedule as upstream

from ..plan.lower import (LOAD, RECV_ACT, RECV_GRAD, REDUCE, REDUCE_TIED, SEND_ACT, SEND_GRAD, STEP, Instr, Program)


class _PlanInstruction:
    """Carries the plan's instruction; ``str()`` is its text form, as in ``2F0``."""

    def __init__(self, instr: Instr):
        super().__init__(**({"buffer_id": instr.slot} if instr.slot >= 0 else {}))
        self.instr = instr

    def __repr__(self):
        return f"{type(self).__name__}({self.instr})"


class LoadMicroBatch(_PlanInstruction, upstream.LoadMicroBatch):
    """Reads inputs (first stage) and labels (last stage)."""


class Forward(_PlanInstruction, upstream.ForwardPass):
    """F."""


class Backward(_PlanInstruction, upstream.BackwardPass):
    """B: input and weight gradients together."""


class InputGrad(_PlanInstruction, upstream.BufferOpInstruction):
    """I: the backward without the weight gradients that can wait."""


class WeightGrad(_PlanInstruction, upstream.BufferOpInstruction):
    """W: the weight gradients that I left."""


class SendActivation(_PlanInstruction, upstream.SendActivation):
    """Sends a stage's output."""


class PostActivation(_PlanInstruction, upstream.RecvActivation):
    """Posts the receive of a stage's input; the forward waits for it."""


class SendGrad(_PlanInstruction, upstream.SendGrad):
    """Sends the gradient of a stage's input."""


class PostGrad(_PlanInstruction, upstream.RecvGrad):
    """Posts the receive of the gradient of a stage's output; the backward waits for it."""


class ReduceTiedGrads(_PlanInstruction, upstream.ReduceTiedGrads):
    """Sums the gradients of weights that several stages share."""


class ReduceGrads(_PlanInstruction, upstream.ReduceGrads):
    """Averages gradients over data-parallel replicas."""


class OptimizerStep(_PlanInstruction, upstream.OptimizerStep):
    """Clips, steps, and clears gradients."""


BY_KIND = {
    LOAD: LoadMicroBatch,
    "F": Forward,
    "B": Backward,
    "I": InputGrad,
    "W": WeightGrad,
    SEND_ACT: SendActivation,
    RECV_ACT: PostActivation,
    SEND_GRAD: SendGrad,
    RECV_GRAD: PostGrad,
    REDUCE_TIED: ReduceTiedGrads,
    REDUCE: ReduceGrads,
    STEP: OptimizerStep,
}


class PlanSchedule(upstream.PipeSchedule):
    """One rank's program in DeepSpeed's schedule interface: iterating yields lists of instructions."""

    def __init__(self, program: Program, microbatches: int, ranks: int, name: str, backward: bool):
        super().__init__(micro_batches=microbatches, stages=ranks, stage_id=program.rank)
        self.program = program
        self.name = name
        self.backward = backward
        #: what both ends of a transfer must agree on, as 31 bits
        self.digest = zlib.crc32(f"{name} {ranks} {microbatches} {backward}".encode()) >> 1
        self.instructions = [BY_KIND[instr.kind](instr) for instr in program.instrs]

    def steps(self):
        yield from ([instruction] for instruction in self.instructions)

    def num_pipe_buffers(self):
        return self.program.slots
