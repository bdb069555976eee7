"""Checkpoints that cannot be written, and those that are not loaded: what every rank is told."""

from __future__ import annotations

import os
import shutil

import torch
import torch.distributed as dist
from cases_checkpoints import from_stock, shared_folder, steps, told_by
from cases_numbers import Frozen
from cases_optimizers import ADAM, SETUPS
from deepspeed.pipe import LayerSpec
from engine_cases import engine
from models import layers, stage_state
from suite import case


def refuse_writes(monkey, match):
    """Lets ``torch.save`` fail for files whose name has ``match``."""
    save = torch.save

    def failing(state, path, *args, **kwargs):
        if match in os.path.basename(str(path)):
            raise OSError(28, "No space left on device")
        return save(state, path, *args, **kwargs)

    monkey(failing)
    return save


@case(2, 4)
def failed_saves(rank, world):
    """what -> (message, files in the folder, tag of latest, whether the old one loads, losses with and without failures)."""
    found = {}
    for name in ("fp32", "zero-1 fp32"):
        keys = SETUPS[name][0]
        runs = []
        with shared_folder() as folder:
            for failing in (False, True):
                made = engine("mlp", 4, world, "zb-h1", 2, stages=2, optimizer=ADAM, zero_allow_untested_optimizer=True, **keys)
                losses = steps(made, "mlp", 0, count=1)
                if failing:
                    made.save_checkpoint(folder, tag="good")
                    before = {str(p.relative_to(folder)) for p in folder.rglob("*")}
                    dist.barrier()
                    told = []
                    for place in ("layer_03", "mp_rank_01", "ds_pipe_ext_rank_00001"):
                        for tag in ("good", "other"):
                            save = refuse_writes(lambda function: setattr(torch, "save", function), place)
                            try:
                                told.append((place, tag, told_by(lambda: made.save_checkpoint(folder, tag=tag))))
                            finally:
                                torch.save = save
                    told.append(("tags", "", told_by(lambda: made.save_checkpoint(folder, tag=f"tag{rank}"))))
                    blocked = folder / "file"
                    if rank == 0:
                        blocked.write_text("in the way")
                    dist.barrier()
                    told.append(("folder", "", told_by(lambda: made.save_checkpoint(blocked / "here"))))
                    dist.barrier()
                    if rank == 0:
                        blocked.unlink()
                    dist.barrier()
                    after = {str(p.relative_to(folder)) for p in folder.rglob("*")}
                losses += steps(made, "mlp", 1)
                runs.append(losses)
                made.destroy()
            made = engine("mlp", 4, world, "zb-h1", 2, stages=2, optimizer=ADAM, zero_allow_untested_optimizer=True, **keys)
            made.load_checkpoint(folder)
            resumed = runs[1][:1] + steps(made, "mlp", 1)
            made.destroy()
        found[name] = told, sorted(before ^ after), runs, resumed
    return found


def spoil(path, how):
    """Damages a file and returns a function that repairs it."""
    if how == "left over":
        shutil.copy(path.with_name(path.name.replace("02", "01")), path)
        return path.unlink
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(content[:-10])
    else:
        path.write_bytes(b"\0" * 64 + content[64:-64] + b"\0" * 64)
    return lambda: path.write_bytes(content)


@case(2)
def refused_loads(rank, world):
    """what -> the error of this rank."""
    found = {}
    with shared_folder() as folder:
        ours, stock, sharded = folder / "ours", folder / "stock", folder / "sharded"
        zero = SETUPS["zero-1 fp32"][0]
        for schedule, where, keys in (("zb-h1", ours, {}), (None, stock, {}), (None, folder / "stock-1", zero),
                                      ("1f1b", sharded, zero)):
            made = from_stock("mlp", 4, world, keys, schedule)
            steps(made, "mlp", 0, count=1)
            made.save_checkpoint(where)
            made.destroy()
        tag = "global_step1"
        specs, loss_fn = layers("mlp", 4)
        frozen = [LayerSpec(Frozen, index, torch.float32) if index == 3 else spec for index, spec in enumerate(specs)]
        made = engine((frozen, loss_fn), 0, world, "1f1b", 2, optimizer=ADAM, boundaries=[0, 2, 4])
        steps(made, "mlp", 0, count=1)
        made.save_checkpoint(folder / "frozen")
        made.destroy()

        def attempt(what, where, count=4, boundaries=(0, 2, 4), spoiled=None, setup="fp32", universal=False, tag=None,
                    **options):
            made = engine("mlp", count, world, "1f1b", 2, boundaries=list(boundaries), optimizer=ADAM,
                          zero_allow_untested_optimizer=True, checkpoint={"load_universal": universal}, **SETUPS[setup][0])
            repair = spoil(*spoiled) if spoiled and rank == 0 else None
            dist.barrier()
            before = stage_state(made.module)
            found[what] = told_by(lambda: made.load_checkpoint(where, tag=tag, **options))
            if found[what] and "cannot be read" not in found[what]:
                assert all(torch.equal(value, before[name]) for name, value in stage_state(made.module).items())
                # The engine is as it was.
                assert steps(made, "mlp", 0, count=1)
            dist.barrier()
            if repair:
                repair()
            made.destroy()

        for name in ("layer_02-model_states.pt", "mp_rank_01_model_states.pt"):
            attempt(f"missing {name}", ours, spoiled=(ours / tag / name, "missing"))
            attempt(f"short {name}", ours, spoiled=(ours / tag / name, "short"))
        attempt("stock missing", stock, spoiled=(stock / tag / "layer_02-model_states.pt", "missing"))
        attempt("stock left over", stock, spoiled=(stock / tag / "mp_rank_02_model_states.pt", "left over"))
        attempt("no such tag", ours, tag="global_step9")
        attempt("other model", ours, count=5, boundaries=(0, 2, 5))
        attempt("other zero", ours, setup="zero-1 fp32")
        attempt("sharded elsewhere", sharded, setup="zero-1 fp32", boundaries=(0, 1, 4))
        attempt("stock elsewhere", stock, boundaries=(0, 1, 4))
        attempt("stock sharded elsewhere", folder / "stock-1", setup="zero-1 fp32", boundaries=(0, 3, 4))
        attempt("stock with ZeRO", folder / "stock-1")
        attempt("stock without ZeRO", stock, setup="zero-1 fp32")
        attempt("frozen while it was saved", folder / "frozen")
        attempt("universal without ZeRO", ours, universal=True, tag=tag)
        attempt("not universal", sharded, setup="zero-1 fp32", universal=True, tag=tag)
        for what, where in (("weights only", sharded), ("weights only from stock", stock)):
            attempt(what, where, boundaries=(0, 3, 4), load_module_only=True)
            attempt(f"{what}, with counters", where, boundaries=(0, 3, 4), load_optimizer_states=False)
    return found


@case(2)
def spoiled_inside(rank, world):
    """A file of the right length with wrong bytes: the error of the rank that reads it."""
    with shared_folder() as folder:
        made = engine("mlp", 4, world, "1f1b", 2)
        made.save_checkpoint(folder)
        if rank == 0:
            for layer in (0, 2):
                spoil(folder / "global_step0" / f"layer_{layer:02d}-model_states.pt", "zeros")
        dist.barrier()
        told = told_by(lambda: made.load_checkpoint(folder))
        made.destroy()
    return told
