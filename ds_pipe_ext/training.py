"""What a DeepSpeed configuration asks of precision, ZeRO and optimizer, and a pipeline cannot do.

DeepSpeed finds these out with assertions after process groups exist, with an error that names something else, or not at all.
Read here from the JSON alone; ``docs/optimizers.md`` lists what works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from .config import value_at

_DTYPES = {"fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
           "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
           "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32"}
_REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
_MUP_OPTIMIZERS = ("muadam", "muadamw", "musgd")
#: the only ones that DeepSpeed puts under ZeRO unasked, of those that the JSON can name
_TESTED_UNDER_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
_REMOVED_KEYS = {"sparse_gradients": "embeddings built with sparse=True are reduced sparsely without it",
                 "amp": "use fp16, bf16 or torch_autocast"}


def check_training(source: Mapping, client_optimizer: bool = False) -> None:
    """Raises ValueError for the first of :func:`problems`."""
    for problem in problems(source, client_optimizer):
        raise ValueError(problem)


def problems(source: Mapping, client_optimizer: bool = False) -> Iterator[str]:
    """One sentence for everything in a whole DeepSpeed configuration that cannot work in a pipeline.

    Args:
        source: the configuration. Values that are ``"auto"`` are left to who fills them in.
        client_optimizer: the script brings its own optimizer, so that the one of the JSON is not used.
    """
    for key, instead in _REMOVED_KEYS.items():
        if key in source:
            yield f"{key} was removed from DeepSpeed; remove the key: {instead}"
    zero = source.get("zero_optimization", {})
    zero = zero if isinstance(zero, Mapping) else {"stage": int(zero is True)}
    stage = zero.get("stage", 0)
    precision = _precision(source)
    if precision is None:
        yield "fp16.enabled and bf16.enabled are both true; choose one of them"
        precision = "fp32"
    given = value_at(source, "data_types.grad_accum_dtype")
    accumulation = _DTYPES.get(given, precision) if given is not None else precision
    yield from _of_zero(zero, stage, source)
    if stage == 0 and accumulation != precision:
        yield (f"data_types.grad_accum_dtype is {given!r} with {precision} parameters: without ZeRO, DeepSpeed accumulates in "
               f"the parameters' type; remove the key or set zero_optimization.stage to 1")
    if source.get("managed_gradient_accumulation") is False:
        yield ("managed_gradient_accumulation is false: a pipeline's step is one train_batch, whose micro-batches the engine "
               "counts; remove the key")
    if value_at(source, "torch_autocast.enabled") is True \
            and _DTYPES.get(value_at(source, "torch_autocast.dtype")) == "fp16":
        yield ("torch_autocast.dtype is float16: its gradient scaler would know the scale on the last stage only; allowed: "
               "bfloat16, or fp16.enabled instead of torch_autocast")
    if not client_optimizer:
        yield from _of_optimizer(source, stage, precision, accumulation)


def _of_zero(zero: Mapping, stage: Any, source: Mapping) -> Iterator[str]:
    if stage in (2, 3):
        yield (f"zero_optimization.stage is {stage}: a pipeline accumulates gradients over micro-batches, which ZeRO 2 and 3 "
               "cannot; allowed: 0, 1")
        return
    for key, stages in (("offload_optimizer", (1, )), ("offload_param", ())):
        device = value_at(zero, f"{key}.device") or "none"
        if device != "none" and stage not in stages:
            allowed = "zero_optimization.stage 1" if stages else "ZeRO 3, which a pipeline cannot use"
            yield f"zero_optimization.{key}.device is {device!r} at stage {stage}: it needs {allowed}; remove {key}"
    if value_at(zero, "offload_optimizer.device") == "nvme":
        yield "zero_optimization.offload_optimizer.device is 'nvme', which DeepSpeed treats as 'cpu' at stage 1; write 'cpu'"
    if zero.get("zenflow") is not None:
        yield "zero_optimization.zenflow works in DeepSpeedEngine.step, which a pipeline does not call; remove it"
    # DeepSpeed's default is 1.0.
    clipping = source.get("gradient_clipping", 1.0)
    if stage == 1 and zero.get("compute_grad_norm") is False and clipping != 0:
        yield (f"zero_optimization.compute_grad_norm is false, but gradient_clipping is {clipping}, which needs the norm; set "
               "gradient_clipping to 0")


def _of_optimizer(source: Mapping, stage: Any, precision: str, accumulation: str) -> Iterator[str]:
    given = value_at(source, "optimizer.type")
    if not isinstance(given, str):
        return
    name = given.lower()
    if name in _REMOVED_OPTIMIZERS:
        yield f"optimizer.type is {given!r}, which was removed from DeepSpeed; use Adam, AdamW or Lamb"
        return
    if name in _MUP_OPTIMIZERS and find_spec("mup") is None:
        yield f"optimizer.type is {given!r}, but the package mup is not installed; pip install mup, or use Adam, AdamW or SGD"
    if "max_grad_norm" in (value_at(source, "optimizer.params") or {}):
        yield "optimizer.params.max_grad_norm is no parameter of DeepSpeed's optimizers; use gradient_clipping"
    if name == "muon" and precision == "bf16" and (stage != 1 or accumulation != "bf16"):
        yield ("optimizer.type is 'Muon' with bf16: in a pipeline it works under zero_optimization.stage 1 with "
               "data_types.grad_accum_dtype bf16 only")
    if name == "lamb" and value_at(source, "fp16.loss_scale"):
        yield (f"optimizer.type is {given!r}, which needs a dynamic loss scale, but fp16.loss_scale is "
               f"{value_at(source, 'fp16.loss_scale')}; remove it")
    if stage == 0 and precision == "fp16" and value_at(source, "optimizer.legacy_fusion") is True:
        yield ("optimizer.legacy_fusion is true, which needs an Adam that unscales gradients itself; DeepSpeed's no longer "
               "does: remove it")
    if stage == 1 and name not in _TESTED_UNDER_ZERO and source.get("zero_allow_untested_optimizer") is not True:
        yield (f"optimizer.type is {given!r}, which DeepSpeed has not tested under ZeRO; set zero_allow_untested_optimizer to "
               "true if it works on each number by itself, as SGD does")


def _precision(source: Mapping) -> str | None:
    bf16 = value_at(source, "bf16.enabled" if "bf16" in source else "bfloat16.enabled") is True
    fp16 = value_at(source, "fp16.enabled") is True
    return None if bf16 and fp16 else "bf16" if bf16 else "fp16" if fp16 else "fp32"
