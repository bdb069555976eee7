"""Readers that give the tensors of one unit of a model without reading the rest of the file."""

import json
from collections import defaultdict

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsTensors:
    """The tensors of a directory's safetensors file or shards.

    Raises:
        ValueError: no safetensors, or a shard of the index is absent.
    """

    def __init__(self, directory):
        if (directory / INDEX).exists():
            weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
            paths = sorted({directory / name for name in weight_map.values()})
        else:
            paths = [directory / SINGLE]
        absent = [path.name for path in paths if not path.exists()]
        if absent:
            raise ValueError(
                f"{directory} lacks {absent}. Weights are read from {SINGLE} or the shards of {INDEX}; convert other "
                "formats with AutoModelForCausalLM.from_pretrained(directory).save_pretrained(directory)."
            )
        self.files = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                self.files |= dict.fromkeys(file.keys(), path)

    @property
    def dtype(self):
        """The dtype of the first floating tensor."""
        kinds = (self._slice(name).get_dtype() for name in self.files)
        return next((DTYPES[kind] for kind in kinds if kind in DTYPES), None)

    def bind(self, model, weight_mapping):
        """Find out which tensors of the files make which parameters of `model`."""
        renamings = [entry for entry in weight_mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in weight_mapping if isinstance(entry, WeightConverter)]
        state, prefix = model.state_dict(), model.base_model_prefix
        self.targets = {}
        for key in self.files:
            target, _ = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, _ = rename_source_key(key, [], [], prefix, state)
            self.targets[key] = target

    def _slice(self, name):
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_slice(name)

    def shapes(self):
        """Every tensor, without its data."""
        shapes = {}
        for path in set(self.files.values()):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    view = file.get_slice(name)
                    shapes[name] = torch.empty(view.get_shape(), dtype=DTYPES.get(view.get_dtype()), device="meta")
        return shapes

    def of_unit(self, unit):
        """The tensors that make the weights of `unit`, by their names in the files."""
        by_file = defaultdict(list)
        for name, target in self.targets.items():
            if target.startswith(unit + "."):
                by_file[self.files[name]].append(name)
        tensors = {}
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as file:
                # Clones, because a tensor of the mapped file would break when the directory is saved to again.
                tensors |= {name: file.get_tensor(name).clone() for name in names}
        return tensors


class _ModelNames:
    """What the name mapping reads of a model, models inside it included but not their modules.

    transformers builds its table anew for each of hundreds of modules otherwise, which takes seconds.
    """

    def __init__(self, model):
        self.config, self.state_dict = model.config, model.state_dict
        self.children = [
            (name, _ModelNames(child)) for name, child in model.named_children() if isinstance(child, PreTrainedModel)
        ]

    def named_children(self):
        return self.children


class GGUFTensors:
    """The tensors of a GGUF file, dequantised as they are asked for, under transformers' names."""

    dtype = None

    def __init__(self, path):
        from gguf import GGUFReader

        self.reader = GGUFReader(path)
        architecture = self.reader.fields["general.architecture"].contents()
        config = load_gguf_checkpoint(str(path))["config"]
        self.processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)

    def bind(self, model, weight_mapping):
        """Find out which tensors of the file make which parameters of `model`."""
        self.names = get_gguf_hf_weights_map(_ModelNames(model), self.processor)
        self.state = model.state_dict()

    def _target(self, name):
        # Merged experts are in the map without the suffix of their tensors.
        return self.names.get(name) or self.names.get(name.removesuffix(".weight"))

    def shapes(self):
        """Every parameter that some tensor makes, without its data; the file's own shapes are before conversion."""
        targets = {self._target(tensor.name) for tensor in self.reader.tensors} & self.state.keys()
        return {name: torch.empty_like(self.state[name], device="meta") for name in targets}

    def of_unit(self, unit):
        """The tensors that make the weights of `unit`, by the model's names."""
        from gguf import dequantize

        parsed = {"tensors": {}}
        for tensor in self.reader.tensors:
            target = self._target(tensor.name)
            if target is None or not target.startswith(unit + "."):
                continue
            weights = dequantize(tensor.data, tensor.tensor_type)
            result = self.processor.process(
                weights=weights, name=tensor.name, tensor_key_mapping=self.names, parsed_parameters=parsed
            )
            if result.name in self.names:
                parsed["tensors"][self.names[result.name]] = torch.tensor(result.weights)
        return parsed["tensors"]
