"""Where weights come from: a model in memory, random numbers, safetensors files or a GGUF file; one unit at a time."""

import copy
import zlib
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from .checkpoints import GGUFTensors, SafetensorsTensors
from .structure import find_units, refusal

DEFAULT_SEED = 1234  # DeepSpeed's base_seed


def open_source(model_or_directory, *, dtype=None, gguf_file=None, seed=None):
    """The weight source of a model, a configuration or a directory.

    Raises:
        ValueError: none of the three, an unsupported architecture or quantisation, or arguments that do not apply.
    """
    if isinstance(model_or_directory, PreTrainedModel):
        _refuse_arguments("a model in memory", gguf_file=gguf_file, seed=seed)
        return ModelSource(model_or_directory, dtype)
    if isinstance(model_or_directory, PreTrainedConfig):
        _refuse_arguments("a configuration", gguf_file=gguf_file)
        return RandomSource(model_or_directory, dtype, DEFAULT_SEED if seed is None else seed)
    if isinstance(model_or_directory, (str, Path)):
        _refuse_arguments("a directory", seed=seed)
        return _open_directory(Path(model_or_directory), dtype, gguf_file)
    raise ValueError(
        "model_or_directory must be a transformers PreTrainedModel, a PretrainedConfig or a directory, not "
        f"{type(model_or_directory).__name__}. For a wrapped model (PEFT, compiled) pass the model inside."
    )


def _refuse_arguments(kind, **arguments):
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} does not apply to {kind}; leave it out.")


def _open_directory(directory, dtype, gguf_file):
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory; download the model first and pass the folder with its config.json or "
            ".gguf file."
        )
    if gguf_file is None and not (directory / "config.json").exists():
        found = sorted(path.name for path in directory.glob("*.gguf"))
        if len(found) != 1:
            raise ValueError(
                f"{directory} has no config.json and {len(found)} .gguf files ({found}); name one with gguf_file=."
            )
        gguf_file = found[0]
    if gguf_file is not None:
        if not (directory / gguf_file).is_file():
            raise ValueError(
                f"{directory} has no file {gguf_file!r}; it has "
                f"{sorted(path.name for path in directory.glob('*.gguf'))}."
            )
        config = AutoConfig.from_pretrained(directory, gguf_file=gguf_file)
        tensors = GGUFTensors(directory / gguf_file)
        config.__dict__.pop("quantization_config", None)  # the weights are dequantised as they are read
    else:
        config = AutoConfig.from_pretrained(directory)
        tensors = SafetensorsTensors(directory)
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"{directory} holds quantised weights (config.quantization_config); only GGUF files and unquantised "
                "safetensors can be trained."
            )
        dtype = dtype or config.dtype or tensors.dtype
    return CheckpointSource(config, dtype or torch.get_default_dtype(), tensors, directory)


class ModelSource:
    """Weights of a model in memory: layers take over its own modules.

    Args:
        model: a causal LM.
        dtype: cast each unit to it as it is taken; None keeps the model's.
    """

    def __init__(self, model, dtype=None):
        if getattr(model, "quantization_method", None) is not None:
            raise refusal(model, f"its weights are quantised ({model.quantization_method})")
        self.template, self.dtype = model, dtype
        self.config, self.generation_config = _settings(model, dtype)

    def build_unit(self, name):
        if self.template is None:
            raise ValueError(
                f"The model of layer {name} was released after its pipeline module was built; call pipeline_module "
                "again with the model."
            )
        unit = self.template.get_submodule(name)
        return unit if self.dtype is None else unit.to(self.dtype)

    def tied_head(self, units) -> bool:
        """Whether embedding and head share one weight."""
        embedding, head = self.template.get_submodule(units.embedding), self.template.get_submodule(units.head)
        return _checked_tie(self.template, embedding.weight is head.weight, head)

    def check(self, units):
        """A model in memory has all its weights."""

    def release(self):
        """Forget the model, so that the modules of other ranks' layers can be freed."""
        self.template = None


class _EmptyModelSource:
    """A source whose template is the model built on the meta device; `_fill` gives one unit its weights."""

    def __init__(self, config, dtype):
        self.template = _empty_model(config, dtype)
        self.config, self.generation_config = _settings(self.template, dtype)

    def build_unit(self, name):
        parent_name, _, leaf = name.rpartition(".")
        parent = self.template.get_submodule(parent_name)
        empty = parent._modules[leaf]
        # Weights are set on a copy standing in the template, which stays empty itself.
        parent._modules[leaf] = unit = copy.deepcopy(empty)
        try:
            self._fill(name, unit)
        finally:
            parent._modules[leaf] = empty
        return unit

    def tied_head(self, units) -> bool:
        """Whether embedding and head share one weight."""
        tied = self.template.get_expanded_tied_weights_keys(all_submodels=True)
        return _checked_tie(self.template, f"{units.head}.weight" in tied, self.template.get_submodule(units.head))

    def check(self, units):
        """Nothing can be missing before weights are read."""

    def release(self):
        """The template holds no weights."""


class RandomSource(_EmptyModelSource):
    """Random initial weights that depend on the seed and on the unit's name, not on how layers are split."""

    def __init__(self, config, dtype, seed):
        super().__init__(config, dtype or config.dtype or torch.get_default_dtype())
        self.seed = seed

    def _fill(self, name, unit):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
            _materialise(unit, parameters=True)
            _initialise(self.template, name, unit)


class CheckpointSource(_EmptyModelSource):
    """Weights from files, renamed and converted by transformers' own rules; only the tensors of a unit are read.

    Raises:
        ValueError: files and model do not match, with the missing, unexpected and misshapen tensors.
    """

    def __init__(self, config, dtype, tensors, directory):
        super().__init__(config, dtype)
        self.tensors, self.directory = tensors, directory
        if (directory / "generation_config.json").exists():
            self.generation_config = GenerationConfig.from_pretrained(directory)
        self.load_config = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=self.template._get_dtype_plan(dtype),
            weight_mapping=get_model_conversion_mapping(self.template),
        )
        self.tensors.bind(self.template, self.load_config.weight_mapping)

    def _load(self, state, **changes):
        config = copy.copy(self.load_config)
        config.__dict__.update(changes, weight_mapping=copy.deepcopy(config.weight_mapping))
        with _quiet():
            return convert_and_load_state_dict_in_model(self.template, state, config)[0]

    def check(self, units):
        """Load shapes only, on the meta device, so that every rank finds every mismatch before reading weights."""
        info = self._load(self.tensors.shapes(), device_map={"": "meta"})
        self.template._adjust_missing_and_unexpected_keys(info)
        tied = self.template.get_expanded_tied_weights_keys(all_submodels=True)
        missing = sorted(set(info.missing_keys) - set(tied))
        problems = {
            "missing": missing,
            "unexpected": sorted(info.unexpected_keys),
            "wrong shape (name, file, model)": sorted(info.mismatched_keys),
        }
        problems = {kind: names for kind, names in problems.items() if names}
        if problems or info.conversion_errors:
            raise ValueError(
                f"The weights in {self.directory} do not fit {type(self.template).__name__}: "
                f"{problems or info.conversion_errors}. Check that config and weight files belong together and that "
                "no shard is missing."
            )

    def _fill(self, name, unit):
        requires_grad = {key: parameter.requires_grad for key, parameter in unit.named_parameters()}
        self._load(self.tensors.of_unit(name))
        empty = [key for key, tensor in unit.state_dict().items() if tensor.is_meta]
        if empty:
            names = [f"{name}.{key}" for key in empty]
            raise ValueError(f"The files in {self.directory} gave no values for {names}; check that they are complete.")
        for key, parameter in unit.named_parameters():
            parameter.requires_grad_(requires_grad[key])
        if _materialise(unit, parameters=False):
            _initialise(self.template, name, unit)


def without_weights(model):
    """A copy of a model whose weights are on the meta device, while buffers outside its units keep their values."""
    units = find_units(model)
    weights = list(model.parameters())
    buffers = [buffer for name in units.all for buffer in model.get_submodule(name).buffers()]
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in weights}
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in buffers}
    return copy.deepcopy(model, memo)


def _settings(model, dtype):
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    return config, copy.deepcopy(getattr(model, "generation_config", None))


def _empty_model(config, dtype):
    """The causal LM of a configuration on the meta device, buffers outside its units filled in."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"transformers has no causal language model for {type(config).__name__} (model_type "
            f"{config.model_type!r}); pass the model itself."
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # As AutoModelForCausalLM does: of a composite configuration the text model alone may be the causal LM.
    text = config.sub_configs.get("text_config")
    config = copy.deepcopy(config.get_text_config() if text is not None and kind.config_class is text else config)
    config.dtype = dtype
    with ExitStack() as stack:
        for context in kind.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        model = kind(config)
    units = find_units(model).all
    for name, module in model.named_modules():
        inside = any(name == unit or name.startswith(unit + ".") for unit in units)
        if not inside and _materialise(module, parameters=False, recurse=False):
            _initialise(model, name, module, recurse=False)
    return model.train()


def _materialise(module, *, parameters, recurse=True):
    """Replace meta buffers (and parameters) of a module by uninitialised ones on the CPU; whether there were any."""
    found = False
    for child in module.modules() if recurse else [module]:
        for key, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[key], found = torch.empty_like(buffer, device="cpu"), True
        for key, parameter in child._parameters.items() if parameters else ():
            if parameter is not None and parameter.is_meta:
                value = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
                child._parameters[key], found = value, True
    return found


@torch.no_grad()
@initialization.guard_torch_init_functions()
def _initialise(model, name, module, recurse=True):
    """The initialisation that a model has for its module `name`; tensors read from a file are left alone."""
    path = name.split(".") if name else []
    ancestors = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    owner = next(ancestor for ancestor in ancestors if isinstance(ancestor, PreTrainedModel))
    for child in reversed(list(module.modules())) if recurse else [module]:
        owner._init_weights(child)


def _checked_tie(model, tied, head):
    if tied and getattr(head, "bias", None) is not None:
        raise refusal(
            model,
            "its head has a bias but shares its weight with the embedding; untie them (config.tie_word_embeddings)",
        )
    return tied


@contextmanager
def _quiet():
    """No progress bar for each of a rank's layers."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
