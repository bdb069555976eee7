"""The engine: DeepSpeed's PipelineEngine running any lowered plan."""

from __future__ import annotations

import contextlib
import random

import numpy
import torch
import torch.distributed as torch_dist
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.config import MUON_OPTIMIZER
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from deepspeed.runtime.utils import is_model_parallel_parameter

from ..config import PipeConfig
from ..nn.split_backward import SplitBackward
from ..plan.facts import splits_backward
from ..plan.lower import forward_only, lower
from . import instructions as ins
from .accumulate import accumulator_of
from .checkpoint import Checkpointing
from .data import DataEnded
from .executor import InstructionExecutor, MicroBatch
from .faults import FaultMonitor
from .metrics import Meter, track_plan
from .optimizers import align_groups, client_aligned, correct, idle_parameter, muon_groups
from .p2p import Links
from .partitioned import slices
from .transport import GroupTransport, share_memory


class PlanEngine(Checkpointing, InstructionExecutor):
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
        self._faults = FaultMonitor(dist.get_rank(), getattr(kwargs.get("model"), "stage_id", 0), pipe_config.watchdog_seconds)
        with self._faults.watching("the start of the engine", step=False):
            self._start(pipe_config, *args, **kwargs)

    def _start(self, pipe_config, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._schedules: dict[tuple, ins.PlanSchedule] = {}
        self._slots: dict[tuple[int, int], MicroBatch] = {}
        self._loaders: dict[int, tuple] = {}
        self._evaluating = False
        self._logits: list = []
        self._loss_numbers: list[float] = []
        self._compared = 0
        self._links = self._faults.links = self._make_links() if self.is_pipe_parallel else None
        self.plan = pipe_config.plan(self.num_stages, self.micro_batches)
        self._split = None
        if splits_backward(self.plan):
            self._split = SplitBackward(accumulator_of(self.optimizer))
            self._split.attach(self.module)
        if self.module.activation_checkpoint_func is checkpointing.checkpoint:
            self.module.activation_checkpoint_func = _checkpoint
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

    def steps_per_print(self):
        """As upstream's; with a breakdown and nothing given every tenth step, where upstream divides by None."""
        given = super().steps_per_print()
        return 10 if given is None and self.wall_clock_breakdown() else given

    def _make_links(self) -> Links:
        two = self.pipe_config.p2p_groups == 2
        own, peers = self.grid.pp_proc_group, [self.grid.stage_to_global(stage) for stage in range(self.num_stages)]
        if torch_dist.get_backend(own) == "gloo":
            shared = None
            if self.pipe_config.p2p_transport == "auto" and torch.device(self.device).type == "cpu":
                shared = share_memory(own, self.stage_id, peers)
            # gloo tells messages apart by tag; a further group would keep more threads.
            transports = (shared or GroupTransport(own, peers), ) * 3
        else:
            # Every rank takes part in making every group, in the same order.
            for ranks in self.grid.pipe_groups:
                first = torch_dist.new_group(ranks)
                made = (first, torch_dist.new_group(ranks) if two else first, torch_dist.new_group(ranks, backend="gloo"))
                if self.global_rank in ranks:
                    self._own_groups = set(made)
                    transports = [GroupTransport(group, peers) for group in made]
        return Links(torch.device(self.device), peers, self.stage_id, *transports, hoisted=two,
                     acts=slices(self, self.pipe_config.pipe_partitioned),
                     grads=slices(self, self.pipe_config.grad_partitioned))

    def _configure_optimizer(self, client_optimizer, model_parameters):
        super()._configure_optimizer(client_aligned(self, client_optimizer), model_parameters)
        correct(self.optimizer)

    def _configure_basic_optimizer(self, model_parameters):
        # torch refuses an empty list, and DeepSpeed's own optimizers look at the first parameter.
        parameters = list(model_parameters) or [idle_parameter(self)]
        if self.optimizer_name() == MUON_OPTIMIZER:
            parameters = muon_groups(self, list(model_parameters))
        made = super()._configure_basic_optimizer(parameters)
        align_groups(self, made)
        return made

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
        self._begin_reading(pipe_schedule.micro_batches, pipe_schedule.backward)
        self._begin_losses()
        if self._links:
            self._links.begin("train" if pipe_schedule.backward else "eval", pipe_schedule.digest)
        self._meter.begin(pipe_schedule)
        faults = self._faults
        try:
            for cmd in pipe_schedule.instructions:
                faults.doing = cmd
                self._INSTRUCTION_MAP[type(cmd)](self, cmd.instr)
            self._hear()
            if self._links:
                self._links.end()
            faults.doing = "the end of the step (gather of losses and measurements)"
        except DataEnded:
            self._drop_step()
            raise
        except BaseException:
            if self._split:
                self._split.discard()
            raise
        finally:
            self._slots.clear()
            self._batches.clear()
        self._meter.end()

    def _drop_step(self):
        """All instructions up to the step have run on every rank, but the data ended: as if it had not begun."""
        if self._links:
            self._links.end()
        if self._split:
            self._split.discard()
        if self._training_step:
            self.optimizer.zero_grad()
            self.module.zero_grad()
        self._restart_loader()

    # -------------------------------------------------------------------------------------------------- training

    def train_batch(self, data_iter=None):
        """As upstream's; a failure on any rank ends it on all: see :mod:`.faults`.

        Args:
            data_iter: iterator of (inputs, labels), or a loader, which is read on from call to call.

        Raises:
            DataEnded: a StopIteration, on every rank, if the data ended on any of them; nothing was updated.
        """
        with self._faults.watching("train_batch"):
            step = self.global_steps
            try:
                loss = super().train_batch(data_iter)
            except DataEnded:
                self.timers(TRAIN_BATCH_TIMER).stop()
                raise
            self._print_flops(step)
            return loss

    def _print_flops(self, step):
        """Prints what the flops profiler saw in ``step``; upstream does so in engine.step(), which a pipeline never calls."""
        if not self.flops_profiler_enabled() or step != self.flops_profiler_profile_step() or self.global_rank != 0:
            return
        self.flops_profiler.print_model_profile(profile_step=step, module_depth=self.flops_profiler_module_depth(),
                                                top_modules=self.flops_profiler_top_modules(),
                                                detailed=self.flops_profiler_detailed(),
                                                output_file=self.flops_profiler_output_file())
        self.flops_profiler.end_profile()

    def compile(self, *args, **kwargs):
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError("engine.compile() is not supported with a pipeline.schedule: it compiles a stage as a whole, whose "
                         "linear layers a split backward has to see; remove the call")

    def get_global_grad_norm(self):
        """Norm of the last step's gradients over all stages, before clipping."""
        self._meter.settle()
        return super().get_global_grad_norm()

    def clip_fp32_gradients(self):
        """Clips by the norm over all stages; upstream counts the first stage's gradients only (fp32, ZeRO-0)."""
        total = self._squared_norm().to(torch.float64)
        dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        self._global_grad_norm = total.sqrt().item()
        factor = self.gradient_clipping() / (self._global_grad_norm + 1e-6)
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        # A norm that is no number makes all gradients none on all stages, as torch's clipping does.
        if not factor >= 1.0:
            for grad in (grad for grad in grads if grad.is_sparse):
                grad.mul_(factor)
            if dense := [grad for grad in grads if not grad.is_sparse]:
                torch._foreach_mul_(dense, factor)

    def _squared_norm(self) -> torch.Tensor:
        """Sum of squares of this rank's gradients, each parameter of the model counted on one rank only."""
        first_slice = self.grid.get_slice_parallel_rank() == 0
        grads = [p.grad for p in self.module.parameters()
                 if p.grad is not None and not getattr(p, "ds_pipe_replicated", False)
                 and (first_slice or is_model_parallel_parameter(p))]
        if not grads:
            return torch.zeros((), device=self.device)
        # Rows that occur several times are summed first.
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        return torch.stack(torch._foreach_norm(grads)).square().sum()

    def eval_batch(self, data_iter, return_logits=False, compute_loss=True, reduce_output="avg", bcast_loss=True,
                   num_micro_batches=None):
        """Evaluates one batch. As upstream's, but leaves training state, iterator and module mode as they were.

        Args:
            data_iter: iterator of (inputs, labels), or a loader; ``num_micro_batches`` of them are read.
            return_logits: also return the last stage's outputs of all micro-batches, concatenated along the first
                dimension (a list if their other dimensions differ); None on the other stages.
            compute_loss: apply the loss function; otherwise the outputs are reduced in its place.
            reduce_output: ``"avg"`` over micro-batches and data-parallel replicas, or None for the list of all.
            bcast_loss: give the result to all stages.
            num_micro_batches: default: as many as in training.

        Returns:
            The loss, or ``(loss, logits)``.

        Raises:
            DataEnded: a StopIteration, on every rank, if the data ended on any of them.
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
        if self.__dict__.get("_links"):
            if self.__dict__.get("_meter") and not faults.failed:
                # last_step stays readable; what a rank that is gone or far behind does not send is left out.
                self._links.hurry()
                with contextlib.suppress(RuntimeError):
                    self._meter.settle()
            self._links.close()
        # Every gloo group keeps threads.
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


def _checkpoint(function, *inputs):
    """Reentrant checkpointing where it works. Around layers whose inputs need no gradient (an embedding, what follows a frozen
    layer) it loses the gradients of their weights without a word, so there it is the other kind."""
    if torch.is_grad_enabled() and not any(torch.is_tensor(x) and x.requires_grad for x in inputs):
        return checkpointing.non_reentrant_checkpoint(function, *inputs)
    return checkpointing.checkpoint(function, *inputs)


def _joined(logits: list):
    if all(torch.is_tensor(x) and x.dim() and x.shape[1:] == logits[0].shape[1:] for x in logits):
        return torch.cat(logits)
    return logits
