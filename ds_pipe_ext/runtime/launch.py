"""``initialize`` and ``install``: how a script gets the engine. Nothing is patched on import."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from importlib.metadata import version

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule as UpstreamModule
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine as UpstreamEngine

from ..config import PipeConfig, count_microbatches, load, read_config, value_at
from ..doctor import requirements
from ..features import check_features
from ..registry import nearest
from ..training import check_training
from . import agree
from .engine import PlanEngine
from .guards import drop_missing_tracker, unlink_shared_buffers
from .module import PipelineModule


def _check_deepspeed() -> None:
    found, supported = version("deepspeed"), requirements()["deepspeed"].specifier
    if not supported.contains(found, prereleases=True):
        raise RuntimeError(f"ds_pipe_ext supports deepspeed {supported}, found {found}: its pipeline engine is extended "
                           f"from inside, so another release needs another ds_pipe_ext; pip install 'deepspeed{supported}'")


class _EngineSwitch(type(UpstreamEngine)):
    """Makes calling the class choose: our engine if the JSON names a schedule, else upstream's own."""

    def __call__(cls, *args, config=None, model=None, **kwargs):
        with agree.starting() as start:
            pipe_config = read_config(config)
            if pipe_config.active:
                check_features(load(config))
                check_module(pipe_config, model)
                check_config(load(config), kwargs.get("optimizer"))
            start.agree(agree.wanted_by(pipe_config, config, model))
        if not pipe_config.active:
            return UpstreamEngine(*args, config=config, model=model, **kwargs)
        if "config_class" in kwargs:
            drop_missing_tracker(kwargs["config_class"].monitor_config)
        unlink_shared_buffers()
        return PlanEngine(pipe_config, *args, config=config, model=model, **kwargs)

    def __instancecheck__(cls, instance):
        return isinstance(instance, UpstreamEngine)

    def __subclasscheck__(cls, subclass):
        return issubclass(subclass, UpstreamEngine)


class _SwitchedEngine(UpstreamEngine, metaclass=_EngineSwitch):
    """Stands in for ``deepspeed.PipelineEngine`` while the extension is installed."""


def check_module(pipe_config: PipeConfig, model) -> None:
    """Raises ValueError if ``model`` cannot be trained by the configuration's schedule."""
    name = pipe_config.schedule.name
    if not isinstance(model, UpstreamModule):
        raise ValueError(f"pipeline.schedule is {name!r}, but the model is a {type(model).__name__}: a schedule needs a "
                         "ds_pipe_ext.PipelineModule or deepspeed.pipe.PipelineModule (for a Hugging Face model: "
                         "ds_pipe_ext.hf.pipeline_module)")
    if isinstance(model, DualPipeVModule):
        raise ValueError(f"pipeline.schedule is {name!r}, but the model is a DualPipeVModule, which runs DeepSpeed's own "
                         "DualPipeV only; use ds_pipe_ext.PipelineModule or remove pipeline.schedule")
    if pipe_config.stages not in (None, "auto") and pipe_config.stages != model.num_stages:
        raise ValueError(f"pipeline.stages is {pipe_config.stages}, but the module was built with {model.num_stages} stages")
    chunk = getattr(model, "loss_chunk_tokens", None)
    if pipe_config.loss_chunk_tokens not in (None, chunk):
        raise ValueError(f"pipeline.loss_chunk_tokens is {pipe_config.loss_chunk_tokens}, but the module was built "
                         f"{f'with {chunk}' if chunk else 'without it'}; give the same configuration to "
                         "ds_pipe_ext.hf.pipeline_module (other modules make their own logits: remove the key)")
    wanted = pipe_config.partition
    if wanted is not None and not isinstance(model, PipelineModule) and pipe_config.boundaries != list(model.parts):
        raise ValueError(f"pipeline.partition is {wanted}, but the module was already split as {list(model.parts)} by "
                         "deepspeed.pipe.PipelineModule, which does not read it; build it with "
                         "ds_pipe_ext.PipelineModule(layers, config=...) or remove pipeline.partition")


def check_config(source: Mapping, optimizer=None) -> None:
    """Raises ValueError if a whole configuration asks for what a pipeline or the accelerator cannot do.

    Args:
        source: the configuration.
        optimizer: what the script gives to ``initialize``: then the JSON's is not used.
    """
    check_training(source, client_optimizer=optimizer is not None)
    accelerator = get_accelerator()
    if value_at(source, "fp16.enabled") is True and not accelerator.is_fp16_supported():
        raise ValueError(f"fp16.enabled is true, but the accelerator {accelerator.device_name()!r} has no fp16 training; use "
                         "bf16 or fp32")
    name = value_at(source, "optimizer.type")
    if optimizer is not None or not isinstance(name, str):
        return
    if name.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, name):
        known = sorted(n for n, made in vars(torch.optim).items() if isinstance(made, type) and n != "Optimizer")
        raise ValueError(f"optimizer.type is {name!r}{nearest(name, known)}; allowed: {', '.join(DEEPSPEED_OPTIMIZERS)}, and "
                         f"of torch.optim: {', '.join(known)}")
    offloaded = name.lower() == "lion" and value_at(source, "zero_optimization.offload_optimizer")
    if accelerator.device_name() == "cpu" and name.lower() in ("lamb", "lion") and not offloaded:
        raise ValueError(f"optimizer.type is {name!r}, which DeepSpeed has no CPU kernel for; give your own optimizer to "
                         "initialize, or use Adam, AdamW, Adagrad, Muon or one of torch.optim")


def _config_of(args, config, config_params):
    config = config if config is not None else config_params
    if config is None:
        config = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    return config


@functools.wraps(deepspeed.initialize)
def initialize(args=None, model=None, *positional, config=None, config_params=None, **kwargs):
    """``deepspeed.initialize`` for a configuration that may name a ``pipeline.schedule``.

    Same arguments and return value as ``deepspeed.initialize``. Without ``pipeline.schedule`` it is that function, with
    upstream's own engine.

    Raises:
        ValueError: for a configuration or a model that cannot work, before any process group is built.
    """
    _check_deepspeed()
    source = _config_of(args, config, config_params)
    if source is not None:
        with agree.starting():
            pipe_config = read_config(source)
            if pipe_config.active:
                check_features(load(source))
                check_module(pipe_config, model)
                check_config(load(source), positional[0] if positional else kwargs.get("optimizer"))
                replicas = model.topology().get_dim("data") or 1
                pipe_config.plan(model.num_stages, count_microbatches(load(source), replicas))
    with _switched():
        return deepspeed.initialize(args, model, *positional, config=config, config_params=config_params, **kwargs)


@contextlib.contextmanager
def _switched():
    before = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = _SwitchedEngine
    try:
        yield
    finally:
        deepspeed.PipelineEngine = before


def install() -> None:
    """Makes ``deepspeed.initialize`` itself honour ``pipeline.schedule``, for scripts one does not own. Idempotent.

    Pipeline modules built by such scripts keep upstream's split; configurations without a schedule keep upstream's engine.
    """
    _check_deepspeed()
    deepspeed.PipelineEngine = _SwitchedEngine


def uninstall() -> None:
    """Undoes :func:`install`."""
    deepspeed.PipelineEngine = UpstreamEngine
