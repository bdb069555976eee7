"""What each instruction of a program does on this rank."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from . import instructions as ins
from .accumulate import gradient_of
from .losses import StepLoss
from .optimizers import scaled
from .wire import ENDED, Spec


@dataclass(slots=True)
class MicroBatch:
    """What one micro-batch keeps on one stage between its first and last instruction."""

    inputs: object = None
    input_spec: Spec | None = None
    outputs: object = None
    output_spec: Spec | None = None
    loss: torch.Tensor | None = None
    #: the data had ended: nothing is computed
    ended: bool = False
    input_grads: list = field(default_factory=list)


#: below this a copy costs less than an autograd function
_CLONE_BELOW = 256 * 1024


class _OwnMemory(torch.autograd.Function):
    """Identity whose output may be modified in place although the input is a leaf (a first layer such as ReLU(inplace)
    does that): same memory, but not a view."""

    @staticmethod
    def forward(ctx, x):
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())

    @staticmethod
    def backward(ctx, grad):
        return grad


class InstructionExecutor(StepLoss):
    """The instructions' methods, by DeepSpeed's table ``_INSTRUCTION_MAP``; :class:`~.engine.PlanEngine` makes what they use:
    the transfers, the split backward, the meter and the buffers of the step."""

    def _state(self, instr) -> MicroBatch:
        key = (instr.stage, instr.mb)
        state = self._slots.get(key)
        if state is None:
            state = self._slots[key] = MicroBatch()
        return state

    def _forward(self, instr):
        state = self._state(instr)
        if instr.stage == 0:
            self._take_batch(instr, state)
        elif self._links:
            start = self._meter.now()
            state.inputs, state.input_spec = self._links.take_act(instr.stage, instr.mb)
            self._meter.waited(start)
            state.ended = state.input_spec == ENDED
        if self._is_loss(instr.stage) and (state.ended or self._batches[instr.mb] is None):
            # From here on this stage reads nothing more for the step.
            self._missing = max(self._missing, self._window - instr.mb)
            state.ended = True
        if state.ended:
            state.inputs = None
            if not self._is_loss(instr.stage):
                state.output_spec = ENDED
            return
        start = self._meter.now()
        with self._meter.saving(instr):
            outputs = self._run_layers(self._inputs_for_layers(state.inputs))
            state.outputs = tuple(outputs) if isinstance(outputs, list) else outputs
            if self._is_loss(instr.stage):
                self._compute_loss_of(instr, state)
        self._meter.computed(instr, start)
        if self._evaluating:
            state.inputs = None

    def _take_batch(self, instr, state):
        batch = self._batches[instr.mb]
        if batch is None:
            state.ended = True
            return
        state.inputs = self._own_inputs(batch[0])
        self._meter.count_batch(state.inputs)
        if self._owns_loss():
            self._batches[instr.mb] = None, batch[1]
        else:
            del self._batches[instr.mb]

    def _run_layers(self, inputs):
        if not self._lean:
            # The engine's forward, which upstream's PipelineEngine hides from users.
            outputs = super(PipelineEngine, self).forward(inputs)
        elif self.torch_autocast_enabled() or torch.is_autocast_enabled():
            with autocast_if_enabled(self):
                outputs = self.module(inputs)
        else:
            outputs = self.module(inputs)
        if not self.module.training:
            ds_checkpointing.reset()
        return outputs

    @staticmethod
    def _inputs_for_layers(inputs):
        def own(x):
            if not x.requires_grad:
                # What came in one message shares a version counter, which a layer that works in place would move.
                return x.data
            return x.clone() if x.nbytes < _CLONE_BELOW else _OwnMemory.apply(x)

        return own(inputs) if torch.is_tensor(inputs) else tuple(own(x) for x in inputs)

    def _send_output(self, instr):
        state = self._state(instr)
        value = ENDED if state.ended else state.outputs
        state.output_spec = self._links.send_act(instr.stage, instr.mb, instr.peer, value, instr.window)
        if self._evaluating:
            state.outputs = None

    def _post_input(self, instr):
        self._links.post_act(instr.stage, instr.mb, instr.peer)

    def _post_grad(self, instr):
        state = self._state(instr)
        if state.output_spec is None:
            # Posted ahead of the send: the output is there, its description not yet.
            state.output_spec = self._links.spec_of(state.outputs, instr.stage, instr.mb)
        self._links.post_grad(instr.stage, instr.mb, instr.peer, state.output_spec)

    def _backward(self, instr):
        state = self._state(instr)
        loss_stage = self._is_loss(instr.stage)
        grads = None
        if not loss_stage:
            start = self._meter.now()
            grads = self._links.take_grad(instr.stage, instr.mb)
            self._meter.waited(start)
        if state.ended:
            if state.input_spec is not None:
                # The stage before computed, and waits for zeros.
                state.input_grads = [None for spec in state.input_spec.tensors if spec.grad]
            return
        start = self._meter.now()
        with self._split.collecting((instr.stage, instr.mb)) if instr.kind == "I" else contextlib.nullcontext():
            if loss_stage and self._nothing_trains(state):
                pass
            elif loss_stage and self._lean:
                (state.loss / self.gradient_accumulation_steps()).backward()
            elif loss_stage:
                # The engine's backward, which upstream's PipelineEngine hides from users.
                super(PipelineEngine, self).backward(scaled(self.optimizer, state.loss))
            elif grads:
                self._backward_from(state, grads)
        self._meter.computed(instr, start)
        state.outputs = state.loss = None
        if instr.stage > 0:
            inputs = [state.inputs] if torch.is_tensor(state.inputs) else state.inputs
            state.input_grads = [x.grad for x, spec in zip(inputs, state.input_spec.tensors) if spec.grad]
        state.inputs = None

    def _nothing_trains(self, state) -> bool:
        """True if the loss has no gradient because neither this stage nor those before it train anything."""
        return not (state.loss.requires_grad or any(p.requires_grad for p in self.module.parameters())
                    or (state.input_spec and any(spec.grad for spec in state.input_spec.tensors)))

    def _backward_from(self, state, grads):
        outputs = [state.outputs] if torch.is_tensor(state.outputs) else state.outputs
        outputs = [x for x, spec in zip(outputs, state.output_spec.tensors) if spec.grad]
        if self._lean:
            torch.autograd.backward(outputs, grads)
            return
        bf16 = self.using_bf16_optimizer
        if bf16:
            self.optimizer.clear_lp_grads()
        # DeepSpeed's output hooks refuse a backward that the engine did not announce.
        self._running_engine_backward = True
        try:
            torch.autograd.backward(outputs, grads)
        finally:
            self._running_engine_backward = False
        if bf16 and not self._config.bfloat16_config.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)
        if self.wall_clock_breakdown():
            # Started by the output hooks; upstream stops them in a backward that only the loss stage runs.
            self._stop_timers(self.engine_timers.backward_inner_timers)
            self._stop_timers(self.engine_timers.backward_timers)

    def _weight_grad(self, instr):
        if self._state(instr).ended:
            return
        start = self._meter.now()
        self._split.run((instr.stage, instr.mb))
        self._meter.computed(instr, start)

    def _send_grad(self, instr):
        state = self._state(instr)
        self._links.send_grad(instr.stage, instr.mb, instr.peer, state.input_grads, state.input_spec)
        state.input_grads = []
        if len(self.fwd_outputs) == self.micro_batches and not self.is_data_parallel:
            # As soon as nobody waits for something else: a rank that is done with its step returns the loss.
            self._give_loss()

    def _reduce_tied(self, instr):
        self._hear()
        gradient = gradient_of(self.optimizer)
        for weight, group in self.module.get_tied_weights_and_groups():
            # The other owners reduce whether or not this stage used the weight.
            if weight.requires_grad:
                dist.all_reduce(gradient(weight), group=group)

    def _reduce(self, instr):
        self._hear()
        plain = self.dp_world_size == 1 and not self.zero_optimization() and not self.using_bf16_optimizer
        if plain and not self.has_moe_layers:
            # Nothing to average: upstream would still copy every gradient twice. Missing ones become zero, as there.
            self._get_gradients_for_reduction()
        else:
            self._exec_reduce_grads()

    def _step(self, instr):
        if self._split and self._split.pending:
            waiting = ", ".join(f"stage {s} micro-batch {m}" for s, m in self._split.pending)
            raise RuntimeError(f"weight gradients of {waiting} were never computed: the plan {self.plan.name} steps "
                               "before their W; nothing was updated")
        self._hear()
        self._meter.before_step()
        self._exec_optimizer_step()

    _INSTRUCTION_MAP = {
        ins.LoadMicroBatch: StepLoss._load,
        ins.Forward: _forward,
        ins.Backward: _backward,
        ins.InputGrad: _backward,
        ins.WeightGrad: _weight_grad,
        ins.SendActivation: _send_output,
        ins.PostActivation: _post_input,
        ins.SendGrad: _send_grad,
        ins.PostGrad: _post_grad,
        ins.ReduceTiedGrads: _reduce_tied,
        ins.ReduceGrads: _reduce,
        ins.OptimizerStep: _step,
    }

