"""What a step measured: compute and waits per rank, the bubble, activation bytes; gathered once per step."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict

import torch

from ..plan import facts
from ..plan.simulate import Costs, simulate

#: one number of each per rank, in this order, in the step's single gather
_FIELDS = ("compute_s", "wait_s", "pipeline_s", "step_s", "samples", "tokens", "peak_activation_bytes", "in_flight",
           "squared_norm", "forward_s", "input_grad_s", "weight_grad_s")
_SAMPLE_EVERY = 50
#: plans larger than this are not simulated after every step
_SIMULATE_BELOW = 20_000
_NOTHING = contextlib.nullcontext()


class _Clock:
    """Times on the host, or on the device's stream where work is queued asynchronously."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.now = self._event if self._cuda else time.perf_counter

    @staticmethod
    def _event():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start, end) -> float:
        return start.elapsed_time(end) / 1000 if self._cuda else end - start

    def settle(self, mark) -> None:
        if self._cuda:
            mark.synchronize()


class Meter:
    """Measures the steps of one engine.

    Args:
        engine: the :class:`~.engine.PlanEngine`.
    """

    def __init__(self, engine):
        self._engine = engine
        self._clock = _Clock(torch.device(engine.device))
        self._now = self._clock.now
        self._steps = self._measured_step = 0
        self._spans: list[tuple] = []
        self._idle: list[tuple] = []
        self._live: dict[tuple[int, int], int] = {}
        self._sampling = False
        self._peak = 0.0
        self._samples = self._tokens = 0
        self._squared_norm = float("nan")
        self._training = False
        self._gathered: list[list[float]] = []
        self._report: dict = {}
        self._predicted: list[float] = []

    def begin(self, schedule) -> None:
        """Starts a step."""
        self._training = schedule.backward
        self._spans, self._idle, self._live = [], [], {}
        self._in_flight = self._most_in_flight = 0
        self._samples = self._tokens = 0
        self._squared_norm = float("nan")
        self._sampling = self._training and self._steps % _SAMPLE_EVERY == 1
        if self._sampling:
            self._peak = 0.0
        self._start = self._clock.now()
        self._pipeline_end = None

    def now(self):
        """A mark to hand to :meth:`waited` or :meth:`computed`."""
        return self._now()

    def waited(self, start) -> None:
        """A wait for another rank, begun at ``start``, is over."""
        self._idle.append((start, self._now()))

    def saving(self, instr):
        """Context around a forward: counts what it saves, in sampled steps."""
        return self._counting(instr) if self._sampling else _NOTHING

    def computed(self, instr, start) -> None:
        """A compute instruction, begun at ``start``, has been issued."""
        end = self._now()
        self._spans.append((instr.kind, start, end))
        self._pipeline_end = end
        if not self._training:
            return
        if instr.kind == "F":
            self._in_flight += 1
            self._most_in_flight = max(self._most_in_flight, self._in_flight)
        elif instr.kind in "IB":
            self._in_flight -= 1
        if self._sampling:
            if instr.kind in "IB":
                self._live.pop((instr.stage, instr.mb), None)
            self._peak = max(self._peak, sum(self._live.values()) + self._pending_bytes())

    def count_batch(self, inputs) -> None:
        """Counts samples and tokens of a micro-batch of the first stage."""
        first = inputs if torch.is_tensor(inputs) else inputs[0]
        self._samples += first.shape[0] if first.dim() else 1
        if not (first.is_floating_point() or first.is_complex() or first.dtype is torch.bool):
            self._tokens += first.numel()

    def before_step(self) -> None:
        """Before the optimizer step: gradients are complete and not yet cleared."""
        engine = self._engine
        if self._own_norm() and engine.gradient_clipping() == 0.0:
            # One dtype on all ranks: one that counts nothing does not know that of the others.
            squared = engine._squared_norm().to(torch.float64)
            if engine.is_model_parallel:
                # The gather is among stages: each rank of a slice brings the norm of the whole slice.
                torch.distributed.all_reduce(squared, group=engine.grid.get_slice_parallel_group())
            self._squared_norm = squared.item()

    def end(self) -> None:
        """Ends the instructions of a step."""
        self._end = self._clock.now()

    def gather(self) -> None:
        """Starts to gather the numbers of a training step over the pipeline; nobody waits before they are asked for."""
        self.settle()
        self._clock.settle(self._end)
        between = self._clock.between
        by_kind = defaultdict(list)
        for kind, start, stop in self._spans:
            by_kind[kind].append(between(start, stop))
        mean = {kind: sum(values) / len(values) for kind, values in by_kind.items()}
        # A full backward counts as input gradient: only the sum of the two matters for a plan that runs B.
        row = [sum(map(sum, by_kind.values())), sum(between(*pair) for pair in self._idle),
               between(self._start, self._pipeline_end), between(self._start, self._end), self._samples, self._tokens,
               self._peak, self._most_in_flight, self._squared_norm, mean.get("F", 0.0),
               mean.get("I", mean.get("B", 0.0)), mean.get("W", 0.0)]
        engine = self._engine
        if engine.is_pipe_parallel:
            engine._links.share(row)
        else:
            self._take([row])
        self._steps += 1
        self._measured_step = engine.global_steps
        if engine.monitor.enabled and engine.global_rank == 0:
            engine.monitor.write_events(self.events())

    def settle(self) -> None:
        """Waits for the numbers of the last training step."""
        links = self._engine._links
        if links and links.sharing:
            # Numbers of an older step would be taken for this one's if a rank is lost.
            self._gathered, self._report = [], {}
            self._take(links.shared())

    def _take(self, rows: list[list[float]]) -> None:
        self._gathered, self._report = rows, {}
        if self._own_norm() and self._engine.gradient_clipping() == 0.0:
            self._engine._global_grad_norm = sum(row[_FIELDS.index("squared_norm")] for row in rows)**0.5

    def report(self) -> dict:
        """The last training step as plain data.

        Returns:
            ``step`` (global steps), ``schedule``, ``step_s`` (slowest rank, seconds), ``samples_per_s`` and
            ``tokens_per_s`` (of this pipeline times the data-parallel width; tokens = elements of integer inputs, 0 for
            others), ``grad_norm``, and lists with one entry per pipeline rank: ``compute_s``, ``wait_s``,
            ``bubble_measured`` (share of the pipeline phase in which the rank did not compute), ``bubble_predicted``
            (same share, simulated from the measured costs without transfer time), ``peak_activation_bytes`` (sampled in
            the second and then every 50th step: saved for backward plus held for weight gradients), ``in_flight``,
            ``forward_s``, ``input_grad_s``, ``weight_grad_s`` (mean per micro-batch). Empty before the first step.
        """
        self.settle()
        if self._report or not self._gathered:
            return self._report
        engine = self._engine
        columns = {name: [row[i] for row in self._gathered] for i, name in enumerate(_FIELDS)}
        span = max(columns["pipeline_s"])
        step_s = max(columns["step_s"])
        width = engine.dp_world_size
        norm = engine.get_global_grad_norm()
        self._report = {
            "step": self._measured_step,
            "schedule": engine.plan.name,
            "step_s": step_s,
            "samples_per_s": max(columns["samples"]) * width / step_s,
            "tokens_per_s": max(columns["tokens"]) * width / step_s,
            "grad_norm": None if norm is None else float(norm),
            "bubble_measured": [1 - busy / span for busy in columns["compute_s"]],
            "bubble_predicted": self._predict(columns),
            **{name: columns[name] for name in ("compute_s", "wait_s", "forward_s", "input_grad_s", "weight_grad_s")},
            **{name: [int(v) for v in columns[name]] for name in ("peak_activation_bytes", "in_flight")},
        }
        return self._report

    def events(self) -> list[tuple[str, float, int]]:
        """The report as events of DeepSpeed's monitor."""
        report, step = self.report(), self._engine.global_samples
        rows = [(f"pipe/{name}/rank{r}", value, step)
                for name in ("bubble_measured", "bubble_predicted", "compute_s", "wait_s", "peak_activation_bytes",
                             "in_flight") for r, value in enumerate(report[name])]
        return rows + [(f"pipe/tokens_per_s/rank{r}", report["tokens_per_s"], step)
                       for r in range(len(report["compute_s"]))]

    def _predict(self, columns) -> list[float]:
        plan = self._engine.plan
        if 3 * plan.n_stages * plan.microbatches > _SIMULATE_BELOW and self._predicted:
            return self._predicted
        costs = Costs(tuple(columns["forward_s"]), tuple(columns["input_grad_s"]), tuple(columns["weight_grad_s"]))
        result = simulate(plan, costs)
        self._predicted = [1 - result.busy(rank) / result.makespan for rank in range(plan.n_ranks)]
        return self._predicted

    def _own_norm(self) -> bool:
        engine = self._engine
        return not (engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled())

    def _pending_bytes(self) -> int:
        split = self._engine._split
        return split.pending_bytes() if split else 0

    @contextlib.contextmanager
    def _counting(self, instr):
        """Counts the bytes that autograd saves in a forward, each storage once, parameters excluded."""
        parameters = {p.untyped_storage().data_ptr() for p in self._engine.module.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._live[(instr.stage, instr.mb)] = sum(storages.values())


def track_plan(engine) -> None:
    """Adds the resolved configuration and the plan's picture to the W&B run that DeepSpeed's monitor has opened."""
    wandb_monitor = getattr(engine.monitor, "wandb_monitor", None)
    if engine.global_rank != 0 or not getattr(wandb_monitor, "enabled", False):
        return
    import wandb

    from ..plan.draw import svg

    if wandb.run is None:
        return
    wandb.run.config.update({"deepspeed": engine._config._param_dict,
                             "pipeline": {"schedule": engine.plan.name, "ranks": engine.plan.n_ranks,
                                          "boundaries": list(engine.module.parts),
                                          "in_flight": facts.in_flight(engine.plan)}}, allow_val_change=True)
    wandb.log({"pipe/plan": wandb.Html(svg(simulate(engine.plan)))}, commit=False)
