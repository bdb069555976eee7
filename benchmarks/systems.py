"""The systems that are compared: each trains the same sleeping model, one optimizer step per call of `step`.

A system has a name, a schedule, its stages on this rank, and `step() -> loss or None` (None where it is not known).
"""

import contextlib
import itertools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ds_pipe_ext.nn.split_backward import SplitBackward
from ds_pipe_ext.plan import Plan, lower
from ds_pipe_ext.registry import schedules
from ds_pipe_ext.runtime.transport import share_memory
from ds_pipe_ext.schedules import Shape, build

from sleeping import SleepingLayer, nap

STOCK, TORCH, OURS, REPLAY, AUTOGRAD = "deepspeed", "torch", "ds_pipe_ext", "bare replay", "autograd replay"
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Setting:
    """One comparison: p ranks, m micro-batches of `rows` x `hidden`, (F, I, W) seconds of one rank's whole share."""

    ranks: int
    microbatches: int
    times: tuple[float, float, float]
    rows: int = 8
    hidden: int = 64

    def layers(self, stages: int) -> list[SleepingLayer]:
        """`stages` layers whose times add up to one rank's share on every rank."""
        times = tuple(value * self.ranks / stages for value in self.times)
        torch.manual_seed(0)
        return [SleepingLayer(self.hidden, times, stage) for stage in range(stages)]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one micro-batch; the same values on every rank and in every step."""
        generator = torch.Generator().manual_seed(1)
        return (torch.randn(self.rows, self.hidden, generator=generator),
                torch.randn(self.rows, self.hidden, generator=generator))


class DeepSpeedSystem:
    """An engine made by `initialize` (DeepSpeed's own or ours), driven by `train_batch`."""

    def __init__(self, name, schedule, setting: Setting, initialize, *, plan: Plan | None = None, module_class=None,
                 stages: int | None = None, pipeline: dict | None = None):
        from deepspeed.pipe import PipelineModule

        self.name, self.schedule, self.plan = name, schedule, plan
        stages = stages or setting.ranks
        # num_stages is the number of ranks, also for modules that put two stages on each.
        module = (module_class or PipelineModule)(layers=setting.layers(stages), num_stages=setting.ranks,
                                                  loss_fn=nn.MSELoss(), partition_method="uniform")
        m, rows = setting.microbatches, setting.rows
        config = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": m,
                  "train_batch_size": rows * m, "steps_per_print": 10**9, "gradient_clipping": 0.0,
                  "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}}}
        if pipeline:
            config["pipeline"] = pipeline
        self.engine, *_ = initialize(model=module, config=config,
                                     model_parameters=[p for p in module.parameters() if p.requires_grad])
        self.batches = itertools.repeat(setting.batch())
        rank = dist.get_rank()
        self.stages = (rank, ) if stages == setting.ranks else (rank, stages - 1 - rank)

    def order(self) -> list[list[tuple[str, int]]]:
        """What this rank must sleep, in order, as far as it is known: groups of (kind, stage)."""
        return _groups(self.plan)

    def step(self) -> float | None:
        return float(self.engine.train_batch(data_iter=self.batches))


class TorchSystem:
    """A schedule of torch.distributed.pipelining with a plain SGD."""

    LINEAR, LOOP, VEE = "linear", "loop", "vee"
    KINDS = {"gpipe": ("ScheduleGPipe", LINEAR), "1f1b": ("Schedule1F1B", LINEAR),
             "interleaved-1f1b": ("ScheduleInterleaved1F1B", LOOP),
             "interleaved-zb": ("ScheduleInterleavedZeroBubble", LOOP),
             "zb-v": ("ScheduleZBVZeroBubble", VEE), "dualpipev": ("ScheduleDualPipeV", VEE)}

    def __init__(self, schedule, setting: Setting):
        from torch.distributed import pipelining

        self.name, self.schedule, self.plan = TORCH, schedule, None
        class_name, placement = self.KINDS[schedule]
        p, rank = setting.ranks, dist.get_rank()
        count = p if placement == self.LINEAR else 2 * p
        self.stages = {self.LINEAR: (rank, ), self.LOOP: (rank, rank + p), self.VEE: (rank, 2 * p - 1 - rank)}[placement]
        layers = setting.layers(count)
        example = torch.zeros(setting.rows, setting.hidden)
        stages = [pipelining.PipelineStage(layers[s], s, count, torch.device("cpu"),
                                           input_args=example.clone().requires_grad_(s > 0),
                                           output_args=example.clone().requires_grad_()) for s in self.stages]
        self.schedule_object = getattr(pipelining, class_name)(
            stages[0] if placement == self.LINEAR else stages, setting.microbatches, loss_fn=nn.MSELoss())
        self.optimizer = torch.optim.SGD([p for s in self.stages for p in layers[s].parameters()], lr=LEARNING_RATE)
        x, y = (tensor.repeat(setting.microbatches, 1) for tensor in setting.batch())
        self.inputs = (x, ) if 0 in self.stages else ()
        self.target = y if count - 1 in self.stages else None

    def order(self) -> list[list[tuple[str, int]]]:
        """As planned (known of the multi-stage schedules); torch runs the whole backward of stage 0 in its W."""
        groups = []
        programs = getattr(self.schedule_object, "pipeline_order_with_comms", None) or {}
        for action in programs.get(dist.get_rank(), ()):
            for part in action.sub_actions or (action, ):
                kind, stage = part.computation_type.value, part.stage_index
                if stage == 0 and kind in ("I", "W"):
                    kind = "" if kind == "I" else "B"
                if kind in ("F", "I", "W", "B"):
                    groups.append([(k, stage) for k in ("IW" if kind == "B" else kind)])
        return groups

    def step(self) -> float | None:
        losses: list[torch.Tensor] = []
        last = {} if self.target is None else {"target": self.target, "losses": losses}
        self.schedule_object.step(*self.inputs, **last, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(sum(loss.item() for loss in losses) / len(losses)) if losses else None


class ReplaySystem:
    """A lowered program with sleeps for compute and plain torch.distributed transfers: no engine, no autograd.

    What an engine could reach on this machine: its distance from a replay is the engine's own cost.
    """

    _groups = None

    def __init__(self, schedule, setting: Setting, plan: Plan):
        self.name, self.schedule, self.plan = REPLAY, schedule, plan
        rank = dist.get_rank()
        self.stages = plan.stages_of(rank)
        self.instrs = lower(plan)[rank].instrs
        share = setting.ranks / plan.n_stages
        self.times = dict(zip("FIW", (value * share for value in setting.times)))
        self.shape = (setting.rows, setting.hidden)
        if ReplaySystem._groups is None:
            # One group per direction, so that one cannot queue behind the other.
            ReplaySystem._groups = {"act": dist.new_group(), "grad": dist.new_group()}

    def order(self) -> list[list[tuple[str, int]]]:
        return _groups(self.plan)

    def step(self) -> None:
        arrivals, sends = {}, []
        payload = torch.zeros(self.shape)
        for kind, stage, mb, _, peer, *_ in self.instrs:
            if kind in ("recv_act", "recv_grad"):
                what = kind[5:]
                buffer = torch.empty(self.shape)
                work = dist.irecv(buffer, src=peer, group=self._groups[what])
                arrivals[what, stage, mb] = (work, buffer)
            elif kind in ("send_act", "send_grad"):
                sends.append(dist.isend(payload, dst=peer, group=self._groups[kind[5:]]))
            elif kind in "FIWB":
                if kind != "W" and (what := "act" if kind == "F" else "grad", stage, mb) in arrivals:
                    arrivals.pop((what, stage, mb))[0].wait()
                for part in "IW" if kind == "B" else kind:
                    nap(part, stage, self.times[part])
        for work in sends:
            work.wait()
        if arrivals:
            raise RuntimeError(f"received but never used: {sorted(arrivals)}")


class AutogradReplaySystem(ReplaySystem):
    """A replay that runs the layers through autograd and the split backward, over shared memory: no engine.

    Its distance from the bare replay is what autograd costs on cores that have slept, with which any engine begins; the
    engine's own cost is its distance from this.
    """

    _transport = None

    def __init__(self, schedule, setting: Setting, plan: Plan):
        super().__init__(schedule, setting, plan)
        self.name = AUTOGRAD
        rank = dist.get_rank()
        if AutogradReplaySystem._transport is None:
            AutogradReplaySystem._transport = share_memory(dist.group.WORLD, rank, list(range(setting.ranks)))
        self.layer, self.last = setting.layers(setting.ranks)[rank], rank == setting.ranks - 1
        self.split = SplitBackward()
        self.split.attach(self.layer)
        self.loss_fn = nn.MSELoss()
        self.inputs, self.labels = setting.batch()
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=LEARNING_RATE)

    def step(self) -> float | None:
        transport, m = self._transport, self.plan.microbatches
        arrivals, inputs, outputs, grads, losses = {}, {}, {}, {}, []

        def arrived(what, mb):
            work, buffer = arrivals.pop((what, mb))
            work.wait()
            return buffer

        for kind, stage, mb, _, peer, *_ in self.instrs:
            if kind in ("recv_act", "recv_grad"):
                buffer = torch.empty(self.shape)
                arrivals[kind[5:], mb] = transport.recv(buffer, peer, kind == "recv_grad"), buffer
            elif kind == "send_act":
                transport.send(outputs[mb].detach(), peer, 0)
            elif kind == "send_grad":
                transport.send(grads.pop(mb), peer, 1)
            elif kind == "F":
                x = inputs[mb] = self.inputs.detach() if stage == 0 else arrived("act", mb).requires_grad_()
                outputs[mb] = self.layer(x)
                if self.last:
                    outputs[mb] = self.loss_fn(outputs[mb], self.labels)
                    losses.append(outputs[mb].detach())
            elif kind in ("I", "B"):
                y, dy = outputs.pop(mb), torch.tensor(1 / m) if self.last else arrived("grad", mb)
                with self.split.collecting(mb) if kind == "I" else contextlib.nullcontext():
                    torch.autograd.backward([y], [dy])
                grads[mb] = inputs.pop(mb).grad
            elif kind == "W":
                self.split.run(mb)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(sum(losses) / m) if losses else None


def one_stage_plans(setting: Setting) -> dict[str, Plan]:
    """The registered schedules that keep one stage on each rank, in model order; name -> plan."""
    plans = {}
    for name in schedules.names():
        plan = build(name, Shape(setting.ranks, setting.microbatches))
        if plan.placement == tuple(range(setting.ranks)):
            plans[name] = plan
    return plans


def catalogue(setting: Setting) -> dict[str, object]:
    """Key -> function that makes the system; keys are `system:schedule`, the reference first."""
    import deepspeed
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    import ds_pipe_ext

    p, m = setting.ranks, setting.microbatches
    makers = {f"{STOCK}:1f1b": lambda: DeepSpeedSystem(STOCK, "1f1b", setting, deepspeed.initialize)}
    if m >= 2 * p:
        makers[f"{STOCK}:dualpipev"] = lambda: DeepSpeedSystem(
            STOCK, "dualpipev", setting, deepspeed.initialize, module_class=DualPipeVModule, stages=2 * p)
    for name in TorchSystem.KINDS:
        if name != "dualpipev" or m >= 2 * p:
            makers[f"{TORCH}:{name}"] = lambda name=name: TorchSystem(name, setting)
    plans = one_stage_plans(setting)
    for name, plan in plans.items():
        makers[f"{OURS}:{name}"] = lambda name=name, plan=plan: DeepSpeedSystem(
            OURS, name, setting, ds_pipe_ext.initialize, plan=plan, pipeline={"schedule": name})
    for name, plan in plans.items():
        makers[f"{REPLAY}:{name}"] = lambda name=name, plan=plan: ReplaySystem(name, setting, plan)
    for name, plan in plans.items():
        makers[f"{AUTOGRAD}:{name}"] = lambda name=name, plan=plan: AutogradReplaySystem(name, setting, plan)
    return makers


def check_step(system, setting: Setting, slept: list[tuple[str, int, float]], loss: float | None) -> None:
    """Raises unless the step slept F, I and W once per stage and micro-batch, in the plan's order, with a finite loss."""
    where = f"{system.name} {system.schedule}, rank {dist.get_rank()}"
    for stage in system.stages:
        for kind in "FIW":
            seen = sum(k == kind and s == stage for k, s, _ in slept)
            if seen != setting.microbatches:
                raise AssertionError(f"{where}: stage {stage} slept {kind} {seen} times in a step, expected "
                                     f"{setting.microbatches}; in all {''.join(k for k, _, _ in slept)}")
    if len(slept) != 3 * setting.microbatches * len(system.stages):
        raise AssertionError(f"{where}: slept for stages that it does not hold: {sorted({s for _, s, _ in slept})}")
    at = 0
    for group in system.order():
        if sorted((kind, stage) for kind, stage, _ in slept[at:at + len(group)]) != sorted(group):
            raise AssertionError(f"{where}: expected {' '.join(f'{stage}{kind}' for kind, stage in group)} after {at} "
                                 f"sleeps; slept {' '.join(f'{stage}{kind}' for kind, stage, _ in slept)}")
        at += len(group)
    if loss is not None and not math.isfinite(loss):
        raise AssertionError(f"{where}: the loss is {loss}")


def _groups(plan: Plan | None) -> list[list[tuple[str, int]]]:
    """What a rank sleeps, in order; a full backward, or I directly followed by its own W, sleeps in either order."""
    groups: list[list[tuple[str, int]]] = []
    before = None
    for op in plan.ops(dist.get_rank()) if plan else ():
        if op.kind == "B":
            groups.append([("I", op.stage), ("W", op.stage)])
        elif op.kind == "W" and before == op._replace(kind="I"):
            groups[-1].append(("W", op.stage))
        elif op.kind != "U":
            groups.append([(op.kind, op.stage)])
        before = op
    return groups
