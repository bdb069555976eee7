"""Write a pipelined causal LM as an ordinary Hugging Face directory; each stage writes its own layers."""

import json
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file

from .checkpoints import INDEX, SINGLE
from .layers import PipelineLayer

MAX_SHARD_BYTES = 4 * 10**9


def save_pretrained(engine_or_module, directory, tokenizer=None, max_shard_bytes=MAX_SHARD_BYTES):
    """Write config, generation config, tokenizer and sharded safetensors that `from_pretrained` reads.

    Collective: every rank calls it. Ranks of the first data-parallel replica write the layers they hold, one shard in
    memory at a time; rank 0 writes the rest, the index last. A weight tied between stages is written once.

    Args:
        engine_or_module: a DeepSpeed pipeline engine, a pipeline module, or any module or list of built layers.
        directory: created if absent; weight files of an earlier save in it are replaced.
        tokenizer: anything with save_pretrained.
        max_shard_bytes: upper bound of a file's tensors, unless one tensor alone is larger.

    Raises:
        ValueError: a rank without layers of `layers_of`, or layers of the model that no rank holds.
        RuntimeError: writing failed on some rank; raised on all of them with that rank's error.
    """
    directory = Path(directory)
    module = engine_or_module
    if hasattr(module, "train_batch"):  # an engine; a module may have an attribute named module for other reasons
        module = module.module
    layers = _layers(module)
    _raise_together(
        ValueError, None if layers else "there are no layers made by ds_pipe_ext.hf here; pass the engine or its module"
    )
    shell, source = layers[0].shell, layers[0].source
    tensors = _own_tensors(module, layers)
    sizes = _gather({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()})
    files = _plan_files(sizes, max_shard_bytes)
    planned = {name for _, _, names in files for name in names}
    missing = sorted(set(shell.tensor_names) - planned)
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(
            f"No rank holds these tensors of the model: {missing[:8]}{more}. Call save_pretrained on every rank, with "
            "all layers."
        )

    with _Together():
        directory.mkdir(parents=True, exist_ok=True)
        for owner, file, names in files:
            if owner == _rank():
                # Clones, because parameters of some optimizers are views of one flat buffer.
                save_file(
                    {name: tensors[name].detach().cpu().clone().contiguous() for name in names},
                    directory / file,
                    {"format": "pt"},
                )
        if _rank() == 0:
            source.config.dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
            for part in (source.config, source.generation_config, tokenizer):
                if part is not None:
                    part.save_pretrained(directory)
    with _Together():
        if _rank() == 0:
            _finish(directory, files, sum(max(held.get(name, 0) for held in sizes) for name in planned))


def _layers(module):
    items = module if isinstance(module, (list, tuple)) else [module]
    found = dict.fromkeys(layer for item in items for layer in item.modules())
    return [layer for layer in found if isinstance(layer, PipelineLayer)]


def _own_tensors(module, layers):
    """This rank's tensors by their names in the model; empty outside the first data-parallel replica."""
    grid = getattr(module, "_grid", None)
    if grid is not None and grid.data_parallel_id != 0:
        return {}
    return {name: tensor for layer in layers for name, tensor in layer.hf_named_parameters()}


def _plan_files(sizes, max_shard_bytes):
    """[(rank, file, tensor names)] from each rank's {name: bytes}; the first rank that holds a tensor writes it."""
    shards, seen = [], set()
    for rank, held in enumerate(sizes):
        names, filled = [], 0
        for name, size in held.items():
            if name in seen:
                continue
            seen.add(name)
            if names and filled + size > max_shard_bytes:
                shards.append((rank, names))
                names, filled = [], 0
            names.append(name)
            filled += size
        if names:
            shards.append((rank, names))
    if len(shards) == 1:
        return [(shards[0][0], SINGLE, shards[0][1])]
    return [
        (rank, f"model-{index:05d}-of-{len(shards):05d}.safetensors", names)
        for index, (rank, names) in enumerate(shards, 1)
    ]


def _finish(directory, files, total_size):
    """Remove weight files of an earlier save and write the index."""
    current = {file for _, file, _ in files}
    for path in [directory / SINGLE, directory / INDEX, *directory.glob("model-*-of-*.safetensors")]:
        if path.name not in current:
            path.unlink(missing_ok=True)
    if current != {SINGLE}:
        weight_map = {name: file for _, file, names in files for name in sorted(names)}
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class _Together:
    """A block that fails on every rank if it fails on one."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None and not isinstance(error, Exception):
            return False
        message = None if error is None else f"{kind.__name__}: {error}"
        _raise_together(RuntimeError, message, cause=error)
        return False


def _raise_together(kind, message, cause=None):
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(_gather(message)) if text is not None]
    if failures:
        raise kind(f"save_pretrained failed on {len(failures)} rank(s); " + "; ".join(failures)) from cause


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(value) -> list:
    """Every rank's value, in rank order."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
