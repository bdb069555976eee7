"""The only reader of the ``pipeline`` section of a DeepSpeed configuration: in goes the JSON, out comes one frozen object.

Errors are ValueErrors that name the key path, the value, what is allowed and the nearest known name.
"""

from __future__ import annotations

import base64
import difflib
import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import hjson
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictBool, StrictFloat, StrictInt, ValidationError
from pydantic import field_validator, model_validator

from . import partition as partitions
from .plan import Plan
from .registry import nearest, schedules
from .schedules.base import Shape, build, check_options

_ALLOWED = {
    "stages": "an int of at least 1, or \"auto\" (all ranks, or num_stages of the module)",
    "schedule": "the name of a schedule, an object with a name and its options, or null for DeepSpeed's own",
    "p2p_groups": "1 or 2",
    "p2p_transport": "\"auto\" (shared memory if all ranks of the pipeline run on the CPUs of one host) or \"process_group\"",
    "check_samples": "true or false",
    "loss_weighting": "\"micro_batch\" (the mean of the micro-batches' losses) or \"token\" (the mean over all targets)",
    "loss_chunk_tokens": "an int of at least 1, or null for the logits of the whole micro-batch at once",
    "watchdog_seconds": "a number of at least 0 (0: never)",
    "pipe_partitioned": "true or false",
    "grad_partitioned": "true or false",
    "seed_layers": "true or false",
    "use_reentrant": "true or false",
    "activation_checkpoint_interval": "an int of at least 0",
}


class Choice(BaseModel):
    """A registered name with the keyword arguments its function is called with."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


class PipeConfig(BaseModel):
    """The ``pipeline`` section, checked. Built by :func:`read_config`; ``model_fields_set`` tells what was written there.

    Attributes:
        stages: pipeline stages (ranks along the pipeline axis), or "auto".
        schedule: the schedule, or None: DeepSpeed's own engine runs.
        partition: how layers are cut into stages; None (absent, or DeepSpeed's default "best"): nothing chosen, `parameters`.
        p2p_groups: process groups for transfers: 2 (one per direction) or 1.
        p2p_transport: "auto": shared memory where all ranks of a pipeline run on the CPUs of one host; "process_group".
        check_samples: compare what the first and the last stage read in the first steps.
        loss_weighting: "micro_batch": the loss of a step is the mean of its micro-batches' losses, as in DeepSpeed; "token":
            each is weighted by its number of targets, so that the loss is their mean over all replicas.
        loss_chunk_tokens: tokens whose logits and loss are made at a time (Hugging Face modules), or None for all at once.
        watchdog_seconds: time in one operation after which every rank prints what it does; 0 for never.
        pipe_partitioned, grad_partitioned, seed_layers, activation_checkpoint_interval, use_reentrant: DeepSpeed's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    stages: StrictInt | Literal["auto"] = "auto"
    schedule: Choice | None = None
    partition: Choice | None = None
    p2p_groups: Literal[1, 2] = 2
    p2p_transport: Literal["auto", "process_group"] = "auto"
    check_samples: StrictBool = True
    loss_weighting: Literal["micro_batch", "token"] = "micro_batch"
    loss_chunk_tokens: StrictInt | None = Field(None, ge=1)
    watchdog_seconds: StrictInt | StrictFloat = Field(120, ge=0, allow_inf_nan=False)
    pipe_partitioned: StrictBool = True
    grad_partitioned: StrictBool = True
    seed_layers: StrictBool = False
    activation_checkpoint_interval: StrictInt = Field(0, ge=0)
    use_reentrant: StrictBool = True
    _plans: dict[Shape, Plan] = PrivateAttr(default_factory=dict)

    @field_validator("stages")
    @classmethod
    def _at_least_one(cls, value):
        if value != "auto" and value < 1:
            raise ValueError(f"pipeline.stages is {value}; allowed: {_ALLOWED['stages']}")
        return value

    @field_validator("p2p_groups", mode="before")
    @classmethod
    def _not_a_bool(cls, value):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"pipeline.p2p_groups is {value!r}; allowed: {_ALLOWED['p2p_groups']}")
        return value

    @field_validator("schedule", mode="before")
    @classmethod
    def _known_schedule(cls, value):
        if value is None:
            return None
        if isinstance(value, str):
            where, name, options = "pipeline.schedule", value, {}
        elif isinstance(value, Mapping):
            options = dict(value)
            where, name = "pipeline.schedule.name", options.pop("name", None)
            if not isinstance(name, str):
                raise ValueError(f"{where} is {name!r}; allowed: {', '.join(schedules.names())}")
        else:
            raise ValueError(f"pipeline.schedule is {value!r}; allowed: {_ALLOWED['schedule']}; schedules: "
                             f"{', '.join(schedules.names())}")
        try:
            schedules.get(name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        check_options(name, options, where="pipeline.schedule")
        return Choice(name=name, options=options)

    @field_validator("partition", mode="before")
    @classmethod
    def _known_partition(cls, value):
        if isinstance(value, str) and value.lower() == "best":
            return None
        name, options = partitions.resolve(value, where="pipeline.partition")
        return Choice(name=name, options=options)

    @model_validator(mode="after")
    def _boundaries_fit(self):
        if self.boundaries and self.stages != "auto":
            parts = len(self.boundaries) - 1
            # A schedule may put several stages on a rank; plan() compares exactly.
            if parts != self.stages and (not self.active or parts % self.stages):
                raise ValueError(f"pipeline.partition has {parts + 1} boundaries, which make {parts} stages, but "
                                 f"pipeline.stages is {self.stages}; write {self.stages + 1} boundaries")
        return self

    @model_validator(mode="after")
    def _changes_nothing_in_silence(self):
        if self.loss_weighting != "micro_batch" and not self.active:
            raise ValueError(f"pipeline.loss_weighting is \"{self.loss_weighting}\", but there is no pipeline.schedule: "
                             "DeepSpeed's own engine knows only the mean over micro-batches; choose a schedule, such as 1f1b")
        if self.loss_chunk_tokens is not None and not self.active:
            raise ValueError(f"pipeline.loss_chunk_tokens is {self.loss_chunk_tokens}, but there is no pipeline.schedule, "
                             "without which it would do nothing; choose a schedule, such as 1f1b")
        return self

    @property
    def active(self) -> bool:
        """True if a schedule is given, so that this package's engine is to run."""
        return self.schedule is not None

    @property
    def boundaries(self) -> list[int] | None:
        """The explicit boundaries, or None if the partition is left to a method."""
        return self.partition.options["at"] if self.partition and self.partition.name == "boundaries" else None

    def plan(self, ranks: int, microbatches: int) -> Plan:
        """The checked plan of the schedule; the same object for the same numbers.

        Args:
            ranks: ranks along the pipeline axis.
            microbatches: micro-batches of one optimizer step (``gradient_accumulation_steps``).

        Raises:
            ValueError: if no schedule is given, it refuses these numbers, or the boundaries do not fit its stages.
        """
        if self.schedule is None:
            raise ValueError("pipeline.schedule is not given, so there is no plan: DeepSpeed's own schedule runs; "
                             f"schedules: {', '.join(schedules.names())}")
        shape = Shape(ranks, microbatches)
        if shape not in self._plans:
            try:
                plan = build(self.schedule.name, shape, **self.schedule.options)
            except TypeError as error:
                raise ValueError(f"pipeline.schedule: {self.schedule.name} cannot be planned with the options "
                                 f"{self.schedule.options}: {error}") from error
            if self.boundaries and len(self.boundaries) != plan.n_stages + 1:
                raise ValueError(f"pipeline.partition has {len(self.boundaries)} boundaries, but "
                                 f"{self.schedule.name} on {ranks} ranks has {plan.n_stages} stages; write "
                                 f"{plan.n_stages + 1} boundaries")
            self._plans[shape] = plan
        return self._plans[shape]

    def resolve_stages(self, num_stages: int | None, world: int) -> int:
        """Ranks along the pipeline axis.

        Args:
            num_stages: what the script gave to the module, or None.
            world: number of ranks in all.

        Raises:
            ValueError: if the configuration and ``num_stages`` differ, or the number does not divide ``world``.
        """
        if self.stages == "auto":
            result, source = (world, "the number of ranks") if num_stages is None else (num_stages, "num_stages")
        else:
            result, source = self.stages, "pipeline.stages"
            if num_stages is not None and num_stages != self.stages:
                raise ValueError(f"pipeline.stages is {self.stages}, but the script gave num_stages={num_stages}; remove "
                                 "one of the two, or make them equal")
        if result < 1 or world % result:
            raise ValueError(f"{source} is {result}, which does not divide the {world} ranks; allowed: "
                             f"{', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}")
        return result


def load(source: Mapping | str | os.PathLike) -> dict[str, Any]:
    """The whole DeepSpeed configuration as a dict, read as DeepSpeed reads it.

    Args:
        source: a dict, the path of a JSON (or HJSON) file, or such text in url-safe base64.

    Raises:
        ValueError: if there is no such file, it is not JSON, or a key occurs twice.
    """
    if isinstance(source, Mapping):
        return dict(source)
    where = os.fspath(source)
    if os.path.isfile(where):
        with open(where, encoding="utf-8") as file:
            text = file.read()
    else:
        try:
            text, where = base64.b64decode(where, altchars=b"-_", validate=True).decode(), "the base64 configuration"
        except ValueError:
            raise ValueError(f"there is no configuration file {where}") from None
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as json_error:
        try:
            data = hjson.loads(text, object_pairs_hook=_no_duplicates)
        except hjson.HjsonDecodeError:
            raise ValueError(f"{where} is not JSON: {json_error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where} holds a {type(data).__name__}; a DeepSpeed configuration is an object")
    return data


def value_at(source: Mapping, path: str, absent: Any = None) -> Any:
    """``source["a"]["b"]`` for the key path ``a.b``, or ``absent`` if it is not there."""
    value: Any = source
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return absent
        value = value[key]
    return value


def read_config(source: Mapping | str | os.PathLike) -> PipeConfig:
    """Reads the ``pipeline`` section of a whole DeepSpeed configuration; without the section, all defaults.

    Unknown keys are refused if a schedule is given. Otherwise the run is DeepSpeed's own, which keeps them in silence, so
    only a near miss of a known key is.

    Args:
        source: as :func:`load` takes it.

    Raises:
        ValueError: names the key path, the value, and what is allowed.
    """
    section = load(source).get("pipeline", {})
    if not isinstance(section, Mapping):
        raise ValueError(f"pipeline is {section!r}; it must be an object, such as {{\"schedule\": \"zb-h1\"}}")
    known = list(PipeConfig.model_fields)
    unknown = [key for key in section if key not in known]
    for key in unknown:
        if section.get("schedule") is not None or difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.8):
            raise ValueError(f"pipeline.{key}: unknown key{nearest(key, known)}; known: {', '.join(known)}")
    try:
        return PipeConfig(**{key: value for key, value in section.items() if key in known})
    except ValidationError as error:
        raise ValueError(_explain(error.errors()[0])) from None


def count_microbatches(source: Mapping, replicas: int) -> int:
    """Micro-batches of one step by DeepSpeed's own arithmetic.

    Args:
        source: the whole configuration.
        replicas: data-parallel width.

    Raises:
        ValueError: if the three batch numbers do not determine it or contradict each other.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = []
    for key in keys:
        value = source.get(key)
        if value == "auto":
            value = None
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{key} is {value!r}; allowed: an int of at least 1, or \"auto\" under the Trainer")
        values.append(value)
    total, micro, steps = values
    if total and micro and not steps:
        steps, rest = divmod(total, micro * replicas)
        if rest or not steps:
            raise ValueError(f"train_batch_size {total} is not a multiple of train_micro_batch_size_per_gpu {micro} x "
                             f"{replicas} replicas")
    elif total and micro and total != micro * steps * replicas:
        raise ValueError(f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
                         f"gradient_accumulation_steps {steps} x {replicas} replicas = {micro * steps * replicas}")
    elif total and total % ((steps or 1) * replicas):
        raise ValueError(f"train_batch_size {total} is not a multiple of gradient_accumulation_steps {steps or 1} x "
                         f"{replicas} replicas")
    elif not total and not micro and not steps:
        raise ValueError(f"the number of micro-batches is not determined; give two of {', '.join(keys)}")
    return steps or 1


def _explain(error: Mapping) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    key = error["loc"][0]
    return f"pipeline.{key} is {error['input']!r}; allowed: {_ALLOWED[key]}"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"the configuration has the key {twice[0]!r} twice in one object; remove one of them")
    return dict(pairs)
