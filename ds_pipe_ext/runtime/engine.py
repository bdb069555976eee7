"""The engine: DeepSpeed's PipelineEngine running any lowered plan."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy
import torch
import torch.distributed as torch_dist
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.utils import is_model_parallel_parameter

from ..config import PipeConfig
from ..nn.split_backward import SplitBackward
from ..plan.facts import splits_backward
from ..plan.lower import forward_only, lower
from . import instructions as ins
from .accumulate import accumulator_of, gradient_of
from .faults import FaultMonitor
from .metrics import Meter, track_plan
from .p2p import Links
from .partitioned import slices
from .wire import Spec, describe


@dataclass
class _MicroBatch:
    """What one micro-batch keeps on one stage between its first and last instruction."""

    inputs: object = None
    input_spec: Spec | None = None
    outputs: object = None
    output_spec: Spec | None = None
    loss: torch.Tensor | None = None
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


class PlanEngine(PipelineEngine):
    """A DeepSpeed pipeline engine whose schedule is a plan.

    Made by :func:`ds_pipe_ext.initialize` when the JSON names a ``pipeline.schedule``. ``train_batch``, ``eval_batch``
    and the rest keep upstream's signatures.

    Attributes:
        last_step: what the last ``train_batch`` measured, see :class:`~.metrics.Meter`.
        plan: the current plan.
    """

    def __init__(self, pipe_config: PipeConfig, *args, **kwargs):
        self.pipe_config = pipe_config
        self._links: Links | None = None
        self._own_groups: set = set()
        self._faults = FaultMonitor(dist.get_rank(), getattr(kwargs.get("model"), "stage_id", 0))
        with self._faults.watching("the start of the engine", step=False):
            self._start(pipe_config, *args, **kwargs)

    def _start(self, pipe_config, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._schedules: dict[tuple, ins.PlanSchedule] = {}
        self._slots: dict[tuple[int, int], _MicroBatch] = {}
        self._batches: dict[int, tuple] = {}
        self._read = 0
        self._evaluating = False
        self._logits: list = []
        self._links = self._faults.links = self._make_links() if self.is_pipe_parallel else None
        self.plan = pipe_config.plan(self.num_stages, self.micro_batches)
        self._split = None
        if splits_backward(self.plan):
            self._split = SplitBackward(accumulator_of(self.optimizer))
            self._split.attach(self.module)
        self._lean = self._needs_no_hooks()
        if self._lean:
            self.module_forward_pre_hook.remove()
            self.module_forward_post_hook.remove()
        self._meter = Meter(self)
        track_plan(self)

    def _needs_no_hooks(self) -> bool:
        """True if DeepSpeed's hooks around forward and backward (timers, profilers, ZeRO, loss scaling) would do nothing."""
        return not (self.zero_optimization() or self.using_bf16_optimizer or self.fp16_enabled()
                    or self.wall_clock_breakdown() or self.flops_profiler_enabled() or self.random_ltd_enabled()
                    or self.memory_breakdown() or self.autotuning_enabled() or self.is_deepcompile_enabled()
                    or self.torch_autocast_z0_gradscaler)

    def _make_links(self) -> Links:
        two = self.pipe_config.p2p_groups == 2
        own = self.grid.pp_proc_group
        if torch_dist.get_backend(own) == "gloo":
            # gloo tells messages apart by tag; a further group would keep threads that wake a hundred times a second.
            groups = (own, own, own)
        else:
            # Every rank takes part in making every group, in the same order.
            for ranks in self.grid.pipe_groups:
                first = torch_dist.new_group(ranks)
                made = (first, torch_dist.new_group(ranks) if two else first, torch_dist.new_group(ranks, backend="gloo"))
                if self.global_rank in ranks:
                    groups = made
                    self._own_groups = set(made)
        self.host_group = groups[2]
        peers = [self.grid.stage_to_global(stage) for stage in range(self.num_stages)]
        return Links(torch.device(self.device), peers, self.stage_id, *groups, hoisted=two,
                     acts=slices(self, self.pipe_config.pipe_partitioned),
                     grads=slices(self, self.pipe_config.grad_partitioned))

    def _configure_basic_optimizer(self, model_parameters):
        parameters = list(model_parameters or [])
        if not parameters:
            # A stage may have nothing to train. torch refuses an empty list, but takes an empty group.
            parameters = [{"params": []}]
            if self.zero_optimization() or self.fp16_enabled() or self.bfloat16_enabled():
                # DeepSpeed's own optimizers look at the first parameter and take part in collectives: one that never
                # gets a gradient.
                dtype, _ = self.get_data_types()
                idle = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device=self.device))
                self.param_names[idle] = "ds_pipe_ext.nothing_to_train"
                parameters = [idle]
        return super()._configure_basic_optimizer(parameters)

    # ------------------------------------------------------------------------------------------------ schedules

    def _train_schedule(self):
        self.plan = self.pipe_config.plan(self.num_stages, self.micro_batches)
        return self._schedule(self.plan, self.micro_batches, backward=True)

    def _inference_schedule(self, micro_batches):
        return self._schedule(forward_only(self.plan.placement, micro_batches), micro_batches, backward=False)

    def _schedule(self, plan, micro_batches, backward):
        key = (plan.name, micro_batches, backward)
        if key not in self._schedules:
            ahead = 2 if self.pipe_config.p2p_groups == 2 else 0
            program = lower(plan, backward=backward, ahead=ahead)[self.stage_id]
            self._schedules[key] = ins.PlanSchedule(program, micro_batches, self.num_stages, plan.name, backward)
        return self._schedules[key]

    def _exec_schedule(self, pipe_schedule):
        self._slots.clear()
        self._batches.clear()
        self._read = 0
        self.fwd_outputs = []
        if self._links:
            self._links.begin("train" if pipe_schedule.backward else "eval", pipe_schedule.digest)
        self._meter.begin(pipe_schedule)
        faults = self._faults
        try:
            for cmd in pipe_schedule.instructions:
                faults.doing = cmd
                self._INSTRUCTION_MAP[type(cmd)](self, cmd.instr)
            if self._links:
                self._links.end()
            faults.doing = "the end of the step (gather of losses and measurements)"
        except BaseException:
            if self._split:
                self._split.discard()
            raise
        finally:
            self._slots.clear()
            self._batches.clear()
        if pipe_schedule.backward and self.fwd_outputs:
            # Summed in micro-batch order, as upstream does while they are computed.
            for loss in self.fwd_outputs:
                self.total_loss = _added(self.total_loss, loss)
            self.loss = self.fwd_outputs[-1]
        self._meter.end()

    # ---------------------------------------------------------------------------------------------- instructions

    def _state(self, instr) -> _MicroBatch:
        return self._slots.setdefault((instr.stage, instr.mb), _MicroBatch())

    def _is_loss(self, stage: int) -> bool:
        return stage == len(self.plan.placement) - 1

    def _load(self, instr):
        while instr.mb not in self._batches:
            self._batches[self._read] = self._prepare(self._next_batch())
            self._read += 1

    def _prepare(self, batch):
        prepare = getattr(self.module, "prepare_batch", None)
        if prepare is not None:
            batch = prepare(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(f"the data iterator must yield (inputs, labels), got {type(batch).__name__}"
                             f"{f' of length {len(batch)}' if isinstance(batch, (tuple, list)) else ''}")
        return batch

    def _own_inputs(self, value):
        """Inputs of the first stage on the device, as upstream makes them: the caller's tensors are never modified."""
        reentrant = self._reentrant_activation_checkpointing()

        def own(tensor):
            tensor = tensor.clone().detach().to(self.device)
            if reentrant:
                tensor.requires_grad_(tensor.is_floating_point())
            return tensor

        if torch.is_tensor(value):
            return own(value)
        if not isinstance(value, (tuple, list)) or not all(torch.is_tensor(x) for x in value):
            raise ValueError(f"the inputs of a batch must be a tensor or a tuple of tensors, got {type(value).__name__}")
        return tuple(own(x) for x in value)

    def _own_labels(self, value):
        if torch.is_tensor(value):
            return value.to(self.device)
        if isinstance(value, (tuple, list)):
            return tuple(x.to(self.device).detach() if torch.is_tensor(x) else x for x in value)
        return value

    def _forward(self, instr):
        state = self._state(instr)
        if instr.stage == 0:
            state.inputs = self._own_inputs(self._batches[instr.mb][0])
            self._meter.count_batch(state.inputs)
        elif self._links:
            start = self._meter.now()
            state.inputs, state.input_spec = self._links.take_act(instr.stage, instr.mb)
            self._meter.waited(start)
        start = self._meter.now()
        with self._meter.saving(instr):
            outputs = self._run_layers(self._inputs_for_layers(state.inputs))
            state.outputs = tuple(outputs) if isinstance(outputs, list) else outputs
            if self._is_loss(instr.stage):
                self._compute_loss_of(instr, state)
        self._meter.computed(instr, start)
        if instr.stage == 0 and not self._is_loss(instr.stage):
            del self._batches[instr.mb]
        if self._evaluating:
            state.inputs = None

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

    def _compute_loss_of(self, instr, state):
        labels = self._own_labels(self._batches.pop(instr.mb)[1])
        outputs, state.outputs = state.outputs, None
        if self._evaluating and self.eval_return_logits:
            self._logits.append(outputs)
        if self._compute_loss and self.module.loss_fn is not None:
            outputs = self.module.loss_fn(outputs, labels)
        self.fwd_outputs.append(outputs.detach() if torch.is_tensor(outputs) else [x.detach() for x in outputs])
        if self._evaluating:
            return
        state.loss = outputs
        extra = self.module.get_additional_losses()
        if extra is not None:
            self.total_additional_losses = self.total_additional_losses or OrderedDict()
            for name, value in extra.items():
                self.total_additional_losses[name] = _added(self.total_additional_losses.get(name), value)

    def _send_output(self, instr):
        state = self._state(instr)
        state.output_spec = self._links.send_act(instr.stage, instr.mb, instr.peer, state.outputs, instr.window)
        if self._evaluating:
            state.outputs = None

    def _post_input(self, instr):
        self._links.post_act(instr.stage, instr.mb, instr.peer)

    def _post_grad(self, instr):
        state = self._state(instr)
        if state.output_spec is None:
            # Posted ahead of the send: the output is there, its description not yet.
            state.output_spec = describe(state.outputs, instr.stage, instr.mb)
        self._links.post_grad(instr.stage, instr.mb, instr.peer, state.output_spec)

    def _backward(self, instr):
        state = self._state(instr)
        loss_stage = self._is_loss(instr.stage)
        grads = None
        if not loss_stage:
            start = self._meter.now()
            grads = self._links.take_grad(instr.stage, instr.mb)
            self._meter.waited(start)
        start = self._meter.now()
        with self._split.collecting((instr.stage, instr.mb)) if instr.kind == "I" else contextlib.nullcontext():
            if loss_stage and self._lean:
                (state.loss / self.gradient_accumulation_steps()).backward()
            elif loss_stage:
                # The engine's backward, which upstream's PipelineEngine hides from users.
                super(PipelineEngine, self).backward(state.loss)
            elif grads:
                self._backward_from(state, grads)
        self._meter.computed(instr, start)
        state.outputs = state.loss = None
        if instr.stage > 0:
            inputs = [state.inputs] if torch.is_tensor(state.inputs) else state.inputs
            state.input_grads = [x.grad for x, spec in zip(inputs, state.input_spec.tensors) if spec.grad]
        state.inputs = None

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
        start = self._meter.now()
        self._split.run((instr.stage, instr.mb))
        self._meter.computed(instr, start)

    def _send_grad(self, instr):
        state = self._state(instr)
        self._links.send_grad(instr.stage, instr.mb, instr.peer, state.input_grads, state.input_spec)
        state.input_grads = []

    def _reduce_tied(self, instr):
        gradient = gradient_of(self.optimizer)
        for weight, group in self.module.get_tied_weights_and_groups():
            # The other owners reduce whether or not this stage used the weight.
            if weight.requires_grad:
                dist.all_reduce(gradient(weight), group=group)

    def _reduce(self, instr):
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
        self._meter.before_step()
        self._exec_optimizer_step()

    _INSTRUCTION_MAP = {
        ins.LoadMicroBatch: _load,
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

    # -------------------------------------------------------------------------------------------------- training

    def train_batch(self, data_iter=None):
        """As upstream's; a failure on any rank ends it on all: see :mod:`.faults`."""
        with self._faults.watching("train_batch"):
            return super().train_batch(data_iter)

    def save_checkpoint(self, *args, **kwargs):
        """As upstream's; a failure on any rank is told to all."""
        with self._faults.watching("save_checkpoint", step=False):
            return super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args, **kwargs):
        """As upstream's; a failure on any rank is told to all."""
        with self._faults.watching("load_checkpoint", step=False):
            return super().load_checkpoint(*args, **kwargs)

    def _aggregate_total_loss(self):
        """Upstream's mean loss; it travels in the step's one gather instead of a broadcast of its own."""
        if self.total_additional_losses is not None or self.module.get_additional_losses() is not None:
            self._meter.gather(*(float("nan"), ) * 3)
            return super()._aggregate_total_loss()
        values = (float("nan"), ) * 3
        if self.is_last_stage():
            own = self._scale_loss_by_gas(self.total_loss).detach()
            # Upstream reports fp32; a float64 model keeps its digits.
            own = own if own.dtype is torch.float64 else own.float()
            agg = own.clone()
            if self.is_data_parallel:
                dist.all_reduce(agg, group=self.mpu.get_data_parallel_group())
                agg /= self.dp_world_size
            values = (own.item(), agg.item(), float(own.dtype is torch.float64))
        own, agg, double = self._meter.gather(*values)
        dtype = torch.float64 if double else torch.float32
        self.dp_group_loss, agg_loss = (torch.tensor(value, dtype=dtype, device=self.device) for value in (own, agg))
        return agg_loss

    def clip_fp32_gradients(self):
        """Clips by the norm over all stages; upstream counts the first stage's gradients only (fp32, ZeRO-0)."""
        total = self._squared_norm().to(torch.float64)
        dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        self._global_grad_norm = total.sqrt().item()
        factor = self.gradient_clipping() / (self._global_grad_norm + 1e-6)
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        if factor < 1.0 and grads:
            torch._foreach_mul_(grads, factor)

    def _squared_norm(self) -> torch.Tensor:
        """Sum of squares of this rank's gradients, each parameter of the model counted on one rank only."""
        first_slice = self.grid.get_slice_parallel_rank() == 0
        grads = [p.grad for p in self.module.parameters()
                 if p.grad is not None and not getattr(p, "ds_pipe_replicated", False)
                 and (first_slice or is_model_parallel_parameter(p))]
        if not grads:
            return torch.zeros((), device=self.device)
        return torch.stack(torch._foreach_norm(grads)).square().sum()

    def eval_batch(self, data_iter, return_logits=False, compute_loss=True, reduce_output="avg", bcast_loss=True,
                   num_micro_batches=None):
        """Evaluates one batch. As upstream's, but leaves training state, iterator and module mode as they were.

        Args:
            data_iter: iterator of (inputs, labels); ``num_micro_batches`` of them are read.
            return_logits: also return the last stage's outputs of all micro-batches, concatenated along the first
                dimension (a list if their other dimensions differ); None on the other stages.
            compute_loss: apply the loss function; otherwise the outputs are reduced in its place.
            reduce_output: ``"avg"`` over micro-batches and data-parallel replicas, or None for the list of all.
            bcast_loss: give the result to all stages.
            num_micro_batches: default: as many as in training.

        Returns:
            The loss, or ``(loss, logits)``.
        """
        micro_batches = self.micro_batches if num_micro_batches is None else num_micro_batches
        if micro_batches < 1:
            raise ValueError(f"num_micro_batches must be at least 1, got {micro_batches}")
        with self._faults.watching("eval_batch"):
            return self._eval_batch(data_iter, return_logits, compute_loss, reduce_output, bcast_loss, micro_batches)

    def _eval_batch(self, data_iter, return_logits, compute_loss, reduce_output, bcast_loss, micro_batches):
        schedule = self._inference_schedule(micro_batches)
        kept = {name: getattr(self, name) for name in ("data_iterator", "training_dataloader", "loss", "total_loss",
                                                       "total_additional_losses", "fwd_outputs")
                if name in self.__dict__}
        modes = [(module, module.training) for module in self.module.modules()]
        offset = self.module.micro_offset
        self.eval_return_logits, self._compute_loss, self._logits = return_logits, compute_loss, []
        self._evaluating = True
        try:
            self.module.eval()
            self.set_dataiterator(data_iter)
            with torch.no_grad(), _kept_random_state(self.module.seed_layers):
                self._exec_schedule(schedule)
            outputs, logits = self.fwd_outputs, self._logits
        finally:
            self._evaluating, self.eval_return_logits, self._logits = False, False, []
            self.module.micro_offset = offset
            for module, training in modes:
                module.training = training
            self.__dict__.update(kept)
        result = None
        if self.is_last_stage():
            result = self._reduce_outputs(outputs, reduce=reduce_output, micro_batches=micro_batches)
        if compute_loss and reduce_output is not None and (bcast_loss or self.monitor.enabled):
            result = self._bcast_pipe_scalar(result)
            if self.global_rank == 0 and self.monitor.enabled:
                self.monitor.write_events([("Train/Samples/eval_loss", result.mean().item(), self.global_samples)])
        if not return_logits:
            return result
        return result, _joined(logits) if self.is_last_stage() else None

    @property
    def last_step(self) -> dict:
        """What the last ``train_batch`` measured: see :meth:`~ds_pipe_ext.runtime.metrics.Meter.report`."""
        return self._meter.report()

    def destroy(self):
        # __del__ comes here even if __init__ did not get far.
        if (faults := self.__dict__.get("_faults")) is not None:
            faults.stop()
        if self.__dict__.get("_split"):
            self._split.detach()
        # Every gloo group keeps threads that wake a hundred times a second.
        groups, self._own_groups = self.__dict__.get("_own_groups", ()), set()
        for group in groups if torch_dist.is_initialized() else ():
            torch_dist.destroy_process_group(group)
        super().destroy()


@contextlib.contextmanager
def _kept_random_state(wanted: bool):
    """Layers that are seeded one by one (``seed_layers``) leave every random generator as it was."""
    if not wanted:
        yield
        return
    accelerator = get_accelerator()
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device = None if accelerator.device_name() == "cpu" else accelerator.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if device is not None:
            accelerator.set_rng_state(device)


def _added(total, loss):
    if torch.is_tensor(loss):
        return (torch.zeros_like(loss) if total is None else total) + loss.detach()
    return [_added(None if total is None else total[i], value) for i, value in enumerate(loss)]


def _joined(logits: list):
    if all(torch.is_tensor(x) and x.dim() and x.shape[1:] == logits[0].shape[1:] for x in logits):
        return torch.cat(logits)
    return logits
