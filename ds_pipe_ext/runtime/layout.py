"""How a run is laid out, and whether the optimizer state of a checkpoint fits another layout."""

from __future__ import annotations

import zipfile
from importlib.metadata import version
from pathlib import Path

import torch

from . import folders, portable


def layout_of(engine) -> dict:
    """What decides which optimizer state a rank holds; JSON can hold it."""
    return {
        "boundaries": [int(bound) for bound in engine.module.parts],
        "replicas": engine.dp_world_size,
        "tensor_parallel": engine.grid.get_slice_parallel_world_size(),
        "zero_stage": engine.zero_optimization_stage(),
        "optimizer": type(engine.optimizer).__name__,
    }


def described(engine) -> dict:
    """What the manifest says about the run, but for the files."""
    return {
        "versions": {name: version(name) for name in ("ds-pipe-ext", "deepspeed", "torch")},
        "layout": layout_of(engine),
        "schedule": engine.plan.name,
        "global_steps": engine.global_steps,
        "micro_offset": engine.module.micro_offset,
    }


def words(layout: dict) -> str:
    """A layout for people."""
    bounds = layout["boundaries"]
    return (f"{len(bounds) - 1} stage{'s' * (len(bounds) > 2)} with boundaries {bounds}, "
            f"{layout['replicas']} data-parallel replica{'s' * (layout['replicas'] > 1)}, "
            f"tensor parallelism {layout['tensor_parallel']}, ZeRO {layout['zero_stage']} with {layout['optimizer']}")


def is_sharded(engine) -> bool:
    """True if the replicas share the optimizer state: ZeRO 1, and BF16_Optimizer whatever ZeRO's stage is."""
    return hasattr(engine.optimizer, "_param_slice_mappings")


def same_ranks(engine, layout: dict) -> bool:
    """True if every rank of this run has the layers that it had in ``layout``."""
    own = layout_of(engine)
    return all(own[key] == layout[key] for key in ("boundaries", "replicas", "tensor_parallel"))


def examined(engine, folder: Path, strict: bool) -> dict | None:
    """The manifest of a checkpoint that has everything this rank's layers need; None if DeepSpeed made it alone.

    Raises:
        ValueError: something is missing; names it.
    """
    if not folder.is_dir():
        others = sorted(path.parent.name for path in folder.parent.glob("*/mp_rank_*_model_states.pt"))
        raise ValueError(f"there is no checkpoint {folder}; there are {sorted(set(others)) or 'no others'}")
    manifest = folders.manifest_of(folder)
    files = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if not files:
        raise ValueError(f"{folder} is no checkpoint of DeepSpeed: it has no file mp_rank_*_model_states.pt")
    if manifest is None and (saved := opened(files[0]).get("mp_world_size", len(files))) != len(files):
        raise ValueError(f"{folder} was saved by {saved} model-parallel ranks and has {len(files)} files mp_rank_*: some are "
                         "missing, or left over from another layout; remove those that are older")
    count = len(engine.module._layer_specs)
    if manifest is not None and strict and manifest["layout"]["boundaries"][-1] != count:
        raise ValueError(f"{folder} has {manifest['layout']['boundaries'][-1]} layers, the model has {count}; build the model "
                         "that was saved, or load with load_module_strict=False")
    absent = [] if engine.has_moe_layers else portable.absent_layers(engine.module, folder, strict)
    if engine.load_universal_checkpoint():
        _check_universal(engine, folder, absent)
    elif absent:
        raise ValueError("; ".join(absent))
    return manifest


def _check_universal(engine, folder: Path, absent: list[str]) -> None:
    if not is_sharded(engine):
        raise ValueError(f"checkpoint.load_universal is true, but {type(engine.optimizer).__name__} without ZeRO in fp32 has "
                         "no universal format: its checkpoints load into any split as they are; set it to false")
    if not (folder / "zero" / "optimizer_state.pt").exists():
        raise ValueError(f"checkpoint.load_universal is true, but {folder} is no universal checkpoint; make one of the tag "
                         f"with `ds-pipe convert {folder.parent} --tag TAG`")
    names = [name for group in engine._get_zero_param_shapes() for name in group]
    if missing := [name for name in names if not (folder / "zero" / name).is_dir()]:
        raise ValueError(f"{folder} has no state of the parameters {_shortened(missing)}: they were not trained there")
    module = engine.module
    others = [name for name, param in module.named_parameters() if not param.requires_grad] + list(
        dict(module.named_buffers()).keys() & module.state_dict().keys())
    if absent and others:
        raise ValueError(f"{folder} was converted without the layer files, so that {_shortened(others)} would keep initial "
                         "values; convert it with ds-pipe convert")


def fits(engine, manifest: dict, folder: Path) -> bool:
    """True if the optimizer state in ``folder`` is this layout's; False if it can be moved by names.

    Raises:
        ValueError: neither; names both layouts and what to do.
    """
    saved, own, places = manifest["layout"], layout_of(engine), manifest["optimizer_parameters"]
    kind = [(layout["zero_stage"], layout["optimizer"]) for layout in (saved, own)]
    alike = [key for key in saved if saved[key] == own.get(key)]
    if len(alike) == len(saved) or (set(saved) - set(alike) == {"replicas"} and not is_sharded(engine)):
        # Groups may have been formed otherwise, or other parameters frozen.
        if places and places.get(Path(engine._get_ckpt_name("", "")).name) != portable.names(engine):
            portable.located(engine, places)
            return False
        return True
    both = f"the optimizer state in {folder} was saved with {words(saved)}, and this engine has {words(own)}"
    if kind[0] != kind[1]:
        raise ValueError(f"{both}; another ZeRO stage or optimizer cannot take it: use the one that saved it, or load with "
                         "load_optimizer_states=False")
    if saved["tensor_parallel"] != own["tensor_parallel"]:
        raise ValueError(f"{both}; tensor parallelism cannot change: use {saved['tensor_parallel']}")
    if is_sharded(engine):
        raise ValueError(f"{both}; convert it once with `ds-pipe convert {folder.parent} --tag {folder.name}`, then load it "
                         'with "checkpoint": {"load_universal": true} in the DeepSpeed JSON, or load with '
                         "load_optimizer_states=False")
    if not places:
        raise ValueError(f"{both}; {own['optimizer']} keeps its own copy of the weights, whose state does not move: use the "
                         "layout that saved it, or load with load_optimizer_states=False")
    portable.located(engine, places)
    return False


def check_foreign(engine, folder: Path) -> None:
    """A checkpoint that DeepSpeed made alone says little about its layout: is the optimizer state for this rank?

    Raises:
        ValueError: it was saved with other boundaries; names both layouts as far as they are known.
    """
    own = layout_of(engine)
    files = sorted(folder.glob("mp_rank_*_model_states.pt"))
    path = Path(engine._get_ckpt_name(str(folder.parent), folder.name))
    saved = opened(path if path in files else files[0])
    unlike = ""
    if len(files) != engine.mp_world_size:
        unlike = f"{len(files)} model-parallel ranks"
    elif is_sharded(engine):
        shapes = saved.get("param_shapes")
        if shapes is None:
            unlike = "no ZeRO"
        elif saved["dp_world_size"] != engine.dp_world_size:
            unlike = f"{saved['dp_world_size']} data-parallel replicas"
        elif [dict(group) for group in shapes] != [
                dict(group) for group in engine._get_zero_param_shapes()]:
            unlike = f"the parameters {_shortened([name for group in shapes for name in group])} on this rank"
    elif saved["optimizer"] is None:
        unlike = "ZeRO"
    elif portable.names(engine) is not None and not _like(saved["optimizer"], engine.optimizer):
        counts = [len(group["params"]) for group in saved["optimizer"]["param_groups"]]
        unlike = f"other parameters on this rank ({counts} in the groups of its optimizer)"
    if unlike:
        raise ValueError(f"the optimizer state in {folder} was saved by DeepSpeed with {unlike}, and this engine has "
                         f"{words(own)}; load it into the layout that saved it and save it with ds_pipe_ext, or load with "
                         "load_optimizer_states=False")


def _like(saved: dict, optimizer) -> bool:
    if len(saved["param_groups"]) != len(optimizer.param_groups):
        return False
    for old, new in zip(saved["param_groups"], optimizer.param_groups):
        if len(old["params"]) != len(new["params"]):
            return False
        for index, param in zip(old["params"], new["params"]):
            if any(torch.is_tensor(value) and value.dim() and value.shape != param.shape
                   for value in saved["state"].get(index, {}).values()):
                return False
    return True


def opened(path: Path) -> dict:
    """The file's contents, its tensors read only when they are used."""
    return folders.read(path, lambda: torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=False))


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
