"""Random configurations: what an engine may be asked for, in combinations that nobody thinks of.

Every case trains two steps with an evaluation between them, with the numbers of one process in float64, or is refused with a
clear error on every rank. A case follows from its number alone; ``FUZZ=3,17 pytest tests/test_fuzz.py`` runs those two.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass, field

import torch
from cases_data import _Tokens
from cases_optimizers import allow_fp16, late_weight_grads, register
from cases_plans import _register_random
from engine_cases import SCHEDULES, engine
from models import Reference, batch, layers, stage_state
from torch import nn

#: largest error of a loss, and of a weight as a share of the length of all updates
LIMITS = {"float64": (1e-11, 1e-11), "fp32": (2e-5, 2e-5), "bf16": (6e-2, 6e-2), "fp16": (1e-2, 1e-2)}
DTYPES = {"float64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MISTAKES = {
    "schedule": ({"pipeline": {"schedule": "zbh1"}}, r"pipeline.schedule: unknown schedule 'zbh1' \(did you mean 'zb-h1'"),
    "key": ({"pipeline": {"stage": 2}}, r"pipeline.stage: unknown key \(did you mean 'stages'"),
    "groups": ({"pipeline": {"p2p_groups": 3}}, "pipeline.p2p_groups is 3; allowed: 1 or 2"),
    "stages": ({"pipeline": {"stages": 7}}, "pipeline.stages is 7"),
    "option": ({"pipeline": {"schedule": {"name": "1f1b", "depth": 2}}}, "1f1b.*depth"),
    "boundaries": ({"pipeline": {"partition": [0, 1, 2, 3, 4, 5, 6, 99]}}, "pipeline.partition"),
    "batch": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
    "batches": ({"train_batch_size": 7}, "train_batch_size 7"),
    "zero": ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2.*allowed: 0, 1"),
    "optimizer": ({"optimizer": {"type": "SDG"}}, r"optimizer.type is 'SDG' \(did you mean 'SGD'"),
    "precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
}


@dataclass
class Case:
    """One configuration; ``rows[replica][step][mb]`` are the sizes of micro-batches, 0 targets allowed under token weights."""

    number: int
    world: int
    stages: int
    schedule: object
    micro_batches: int
    kind: str
    count: int
    boundaries: list | None
    frozen: list
    precision: str
    zero: int
    accumulate: str | None
    clip: float
    pipeline: dict
    rows: list
    mistake: str | None = None
    config: dict = field(default_factory=dict)

    def __str__(self):
        shown = {key: value for key, value in asdict(self).items() if value not in (None, {}, [])}
        return f"FUZZ={self.number}: {shown}"


def draw(number: int, world: int) -> Case:
    """Case ``number`` for ``world`` ranks."""
    rng = random.Random(1000 * number + world)
    stages = rng.choice([n for n in range(1, world + 1) if world % n == 0] + [world] * 2)
    replicas = world // stages
    m = rng.choice([1, 2, 3, stages, 2 * stages, rng.randrange(1, 3 * stages + 2)])
    kind = rng.choice(["mlp", "tuple", "tied"])
    count = stages + rng.randrange(3) + (kind == "tied") * max(0, 2 - stages) + 1
    precision = rng.choice(["fp32", "bf16", "fp16"] + ["float64"] * (2 if replicas == 1 else 0))
    zero = rng.choice([0, 1]) if precision != "float64" else 0
    accumulate = rng.choice([None, "fp32", "bf16"]) if zero and precision != "fp16" else None
    schedule = rng.choice([*SCHEDULES, *SCHEDULES, "late-w", {"name": "any-order", "seed": rng.randrange(99), "split": 0.6}])
    interval = rng.choice([0, 0, 1, 2])
    pipeline = {"p2p_groups": rng.choice([1, 2]), "p2p_transport": rng.choice(["auto", "process_group"]),
                "activation_checkpoint_interval": interval, "use_reentrant": rng.random() < 0.5,
                "seed_layers": rng.random() < 0.2, "check_samples": rng.random() < 0.7}
    if kind == "tied":
        pipeline["loss_weighting"] = rng.choice(["micro_batch", "token"])
    boundaries = None
    if rng.random() < 0.5:
        boundaries = [0, *sorted(rng.sample(range(1, count), stages - 1)), count]
    frozen = sorted(rng.sample(range(count), rng.randrange(count + 1))) if rng.random() < 0.3 else []
    changing = rng.random() < 0.5
    rows = [[[rng.randrange(1, 4) if changing else 2 for _ in range(m)] for _ in range(3)] for _ in range(replicas)]
    clip = rng.choice([0.0, 0.0, 0.05, 100.0])
    mistake = rng.choice(list(MISTAKES)) if rng.random() < 0.12 else None
    return Case(number, world, stages, schedule, m, kind, count, boundaries, frozen, precision, zero, accumulate, clip, pipeline,
                rows, mistake)


def _model(case: Case, dtype):
    specs, loss = layers(case.kind, case.count, dtype)
    for index in case.frozen:
        # A tied weight is frozen on all its places or on none.
        if case.kind != "tied" or 0 < index < case.count - 1:
            specs[index].typename = _freezing(specs[index].typename)
    return specs, _Tokens() if case.kind == "tied" else loss


def _freezing(made):

    class Frozen(made):

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.requires_grad_(False)

    return Frozen


def _batches(case: Case, replica: int, step: int, dtype):
    result = []
    for mb, rows in enumerate(case.rows[replica][step]):
        inputs, labels = batch(case.kind, 10_000 * replica + 100 * step + mb, rows, dtype)
        if case.kind == "tied" and case.pipeline["loss_weighting"] == "token":
            # From none to all of the labels count.
            labels = labels.clone()
            labels.view(-1)[(7 * mb + 3 * step + replica) % (labels.numel() + 1):] = -100
        result.append((inputs, labels))
    return result


def _reference_loss(case, reference, batches):
    """The loss that all micro-batches of all replicas make together."""
    if case.pipeline.get("loss_weighting") != "token":
        return sum(reference.loss(*b) for b in batches) / len(batches)
    counts = [int((labels != -100).sum()) for _, labels in batches]
    losses = [reference.loss(*b) * count for b, count in zip(batches, counts) if count]
    return sum(losses) / sum(counts) if losses else None


def expected(case: Case) -> tuple[list[float], dict, float]:
    """Losses (step, evaluation, step), final weights and the length of the updates, from one process in float64."""
    reference = Reference(_model(case, torch.float64))
    before, result = reference.state(), []
    trainable = [p for p in reference.parameters() if p.requires_grad]
    for step in range(3):
        batches = [pair for replica in range(len(case.rows)) for pair in _batches(case, replica, step, torch.float64)]
        for p in trainable:
            p.grad = None
        loss = _reference_loss(case, reference, batches)
        result.append(0.0 if loss is None else loss.item())
        if step == 1 or loss is None or not trainable:
            continue
        loss.backward()
        if case.clip:
            nn.utils.clip_grad_norm_([p for p in trainable if p.grad is not None], case.clip)
        with torch.no_grad():
            for p in trainable:
                if p.grad is not None:
                    p -= 0.1 * p.grad
    after = reference.state()
    length = sum((after[name] - before[name]).square().sum() for name in after)**0.5
    return result, after, float(length)


def run(case: Case) -> str:
    """Trains ``case`` on this rank; returns what is wrong, empty if nothing."""
    _register_random()
    register("late-w", late_weight_grads)
    allow_fp16()
    dtype = DTYPES[case.precision]
    config = {"gradient_clipping": case.clip}
    if case.precision in ("bf16", "fp16"):
        config[case.precision] = {"enabled": True, **({"loss_scale": 64} if case.precision == "fp16" else {})}
    if case.zero:
        config.update(zero_optimization={"stage": 1, "reduce_bucket_size": 10_000}, zero_allow_untested_optimizer=True)
    if case.accumulate:
        config["data_types"] = {"grad_accum_dtype": case.accumulate}
    pipeline, message = dict(case.pipeline), ""
    if case.mistake:
        wrong, message = MISTAKES[case.mistake]
        pipeline.update(wrong.get("pipeline", {}))
        config.update({key: value for key, value in wrong.items() if key != "pipeline"})
    made = None
    try:
        made = engine(_model(case, dtype if case.precision == "float64" else torch.float32), case.count, case.world,
                      case.schedule, case.micro_batches, stages=case.stages, boundaries=case.boundaries, pipeline=pipeline,
                      **{"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config})
        if case.mistake:
            return f"not refused: {case.mistake}"
        return _compare(case, made, dtype)
    except ValueError as error:
        if not case.mistake:
            return f"refused: {error}"
        return "" if re.search(message, str(error)) else f"said: {error}"
    finally:
        if made is not None:
            made.destroy()


def _compare(case: Case, made, dtype) -> str:
    losses, weights, length = expected(case)
    replica = made.mpu.get_data_parallel_rank() if case.stages < case.world else 0
    found = [made.train_batch(iter(_batches(case, replica, 0, dtype))).item(),
             made.eval_batch(iter(_batches(case, replica, 1, dtype))).item(),
             made.train_batch(iter(_batches(case, replica, 2, dtype))).item()]
    limit, share = LIMITS["bf16" if case.accumulate == "bf16" else case.precision]
    # Upstream broadcasts the loss of an evaluation in fp32.
    limits = [limit, max(limit, 1e-6), limit]
    wrong = [f"loss {i} is {a}, not {b}" for i, (a, b, bound) in enumerate(zip(found, losses, limits))
             if not abs(a - b) <= bound * (1 + abs(b))]
    state = stage_state(made.module)
    for name, value in state.items():
        error = (value.double() - weights[name]).norm().item()
        if not error <= share * length + limit * 0.1 * weights[name].norm().item():
            wrong.append(f"{name} is off by {error:.3g} of {length:.3g}")
    return "; ".join(wrong)


def run_numbers(rank: int, world: int, numbers: list[int]) -> list[tuple[str, str]]:
    """What is wrong with the cases of those numbers: (case, problem)."""
    import ranks

    result = []
    for number in numbers:
        case = draw(number, world)
        print(case, flush=True)
        if problem := run(case):
            result.append((str(case), problem))
        ranks.drop_groups()
    return result
