"""Parameters by names that do not depend on the split: which file holds what, for tied layers and optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from deepspeed.pipe import TiedLayerSpec
from torch import nn

from .optimizers import IDLE

_TIED = "tied_modules."


def _layers_of(module, key: str) -> list[int]:
    """The layers that share the tied module ``key``, by their place in the whole model."""
    return [index for index, spec in enumerate(module._layer_specs) if isinstance(spec, TiedLayerSpec) and spec.key == key]


def _here(module, layers: Iterable[int]) -> list[int]:
    return [index for index in layers if module._local_start <= index < module._local_stop]


def _by_module(module, indices: Iterable[int]) -> bool:
    """True if one of the layers runs the module's own forward: upstream writes and reads its file."""
    return any(module._layer_specs[index].forward_fn is None for index in indices)


def _shared(module, key: str) -> list[str]:
    return module.tied_weight_attrs[key]


# ------------------------------------------------------------------------------------------------- files of tied layers

def unwritten(module) -> dict[int, nn.Module]:
    """Tied modules of this rank whose state upstream writes to no layer file, by the layer whose file shall hold them.

    It skips layers with a ``forward_fn``. A weight that stages share is in one file; what they do not share in each.
    """
    result = {}
    for key, tied in module.tied_modules.items():
        layers = _layers_of(module, key)
        here = _here(module, layers)
        if _by_module(module, here):
            continue
        if (not _by_module(module, layers) and here[0] == layers[0]) or _own_state(module, key):
            result[here[0]] = tied
    return result


def _own_state(module, key: str) -> list[str]:
    """Names in the tied module's state that the stages do not share."""
    tied = module.tied_modules[key]
    shared = {id(tied.get_parameter(name)) for name in _shared(module, key)}
    return [name for name, value in tied.state_dict(keep_vars=True).items() if id(value) not in shared]


def unread(module) -> dict[str, list[int]]:
    """Tied modules of this rank that upstream reads from no layer file, with the layers whose files may hold them."""
    result = {}
    for key in module.tied_modules:
        layers = _layers_of(module, key)
        here = _here(module, layers)
        if not _by_module(module, here):
            result[key] = list(dict.fromkeys(here + layers))
    return result


def load_unread(module, folder: Path, checkpoint_engine, strict: bool) -> None:
    """Loads the tied modules of :func:`unread`; their shared weights are made alike on all stages by what upstream loads."""
    for key, layers in unread(module).items():
        files = next((files for layer in layers if (files := layer_files(module, folder, layer))), [])
        if files:
            own = module._grid.get_slice_parallel_rank() if len(files) > 1 else 0
            module.tied_modules[key].load_state_dict(checkpoint_engine.load(files[own], map_location="cpu"), strict=strict)


def layer_files(module, folder: Path, layer: int) -> list[str]:
    """Files of a layer, one a tensor-parallel rank; ``layer`` by its place in the whole model."""
    return module.ckpt_layer_path_list(str(folder), layer - module._local_start)


def absent_layers(module, folder: Path, strict: bool = True) -> list[str]:
    """A sentence for every layer of this rank that has weights and no file; of tied ones only if ``strict``."""
    result = [f"there is no file {module.ckpt_layer_path(str(folder), index)}"
              for index, layer in enumerate(module.forward_funcs)
              if isinstance(layer, nn.Module) and not module.ckpt_layer_path_list(str(folder), index)]
    for key, layers in unread(module).items():
        if strict and not any(layer_files(module, folder, layer) for layer in layers):
            result.append(f"the weights of the tied layers {sorted(layers)} ({key!r}) are in no file of {folder}: DeepSpeed "
                          "does not save a tied module if all its layers have a forward_fn")
    return result


# ---------------------------------------------------------------------------------------------------- optimizer state

def is_first_copy(module, name: str) -> bool:
    """False for a parameter of a tied module that a stage before this one holds too, and for one that fills a group."""
    if not name.startswith(_TIED):
        return name != IDLE
    first = _layers_of(module, name.removeprefix(_TIED).split(".", 1)[0])[0]
    return module._local_start <= first < module._local_stop


def names(engine) -> list[list[str]] | None:
    """Of the optimizer's parameters, one list a group; None if it does not hold the model's own parameters."""
    groups = getattr(engine.optimizer, "param_groups", None)
    if groups is None or any(param not in engine.param_names for group in groups for param in group["params"]):
        return None
    return [[_names_of(engine.module, engine.param_names[param])[0] for param in group["params"]] for group in groups]


def _names_of(module, name: str) -> list[str]:
    """The names under which a parameter's state may be found, the best one first.

    What the stages of a tied module do not share has the name of the module's first layer on its rank.
    """
    if not name.startswith(_TIED):
        return [name]
    key, rest = name.removeprefix(_TIED).split(".", 1)
    if rest in _shared(module, key):
        return [name]
    layers = _layers_of(module, key)
    return [f"{layer}.{rest}" for layer in dict.fromkeys(_here(module, layers) + layers)]


def located(engine, places: dict[str, list[list[str]]]) -> list[tuple]:
    """Where the state of each of the optimizer's parameters is: (file, group there, position there), group and position here.

    Args:
        places: of every file the names of its optimizer's parameters, one list a group.

    Raises:
        ValueError: a parameter has no state in any file.
    """
    found: dict[str, tuple[str, int, int]] = {}
    for file in _own_files(engine, places):
        position = itertools.count()
        for group, members in enumerate(places[file]):
            for name in members:
                place = file, group, next(position)
                if name != IDLE:
                    found.setdefault(name, place)
    result, positions = [], itertools.count()
    for group, members in enumerate(engine.optimizer.param_groups):
        for param in members["params"]:
            position = next(positions)
            if engine.param_names[param] == IDLE:
                continue
            known = [name for name in _names_of(engine.module, engine.param_names[param]) if name in found]
            if not known:
                raise ValueError(f"the checkpoint has no optimizer state of {engine.param_names[param]}: it was not trained "
                                 "there; load with load_optimizer_states=False")
            result.append((found[known[0]], group, position))
    return result


def moved_state(engine, places: dict[str, list[list[str]]], load: Callable[[str], dict]) -> dict:
    """The optimizer's state dict for the layers of this rank, gathered from the files of other ranks.

    Args:
        places: as :func:`located` takes it.
        load: gives a file's contents; each file that is needed is read once.

    Raises:
        ValueError: a parameter has no state in any file, or parameters of one group had different options.
    """
    wanted = located(engine, places)
    groups = engine.optimizer.state_dict()["param_groups"]
    state, options, others = {}, {}, {}
    for file in _own_files(engine, places):
        if not any(place[0] == file for place, _, _ in wanted) and len(options | others) == len(groups):
            continue
        saved = load(file)["optimizer"]
        for (source, old_group, old), group, new in wanted:
            if source != file:
                continue
            _keep_options(options, group, saved["param_groups"][old_group])
            if old in saved["state"]:
                state[new] = saved["state"][old]
        # A group without parameters of this rank's layers has its options from any other rank.
        for group, members in enumerate(saved["param_groups"][:len(groups)]):
            others.setdefault(group, _options(members))
    options = others | options
    return {"state": state, "param_groups": [{**group, **options.get(index, {})} for index, group in enumerate(groups)]}


def _own_files(engine, places) -> list[str]:
    """Those of this rank's tensor-parallel slice."""
    slices = engine.grid.get_slice_parallel_world_size()
    return [file for file in places if _slice_of(file, slices) == engine.grid.get_slice_parallel_rank()]


def _slice_of(file: str, slices: int) -> int:
    """The tensor-parallel rank of a file mp_rank_NN: its ranks are neighbours."""
    return int(file.split("_")[2]) % slices


def _options(group: dict) -> dict:
    return {key: value for key, value in group.items() if key != "params"}


def _keep_options(options: dict, group: int, saved: dict) -> None:
    kept = options.setdefault(group, _options(saved))
    if kept != _options(saved):
        unlike = [key for key in kept if kept[key] != saved.get(key)]
        raise ValueError(f"parameters of the optimizer's group {group} were saved with different options {unlike}; group them "
                         "as they were, or load with load_optimizer_states=False")
