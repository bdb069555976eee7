"""Checkpoints: either way with upstream's engine, moved to other splits, resumed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import shutil
import tempfile
from pathlib import Path

import deepspeed
import numpy
import ranks
import torch
import torch.distributed as dist
from cases_numbers import F64
from cases_optimizers import ADAM, SETUPS
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from engine_cases import SCHEDULES, engine
from models import Block, Embed, batch, cross_entropy, layers, project, stage_state
from suite import case
from torch import nn

#: all that DeepSpeed's own engine resumes; bf16 without ZeRO fails there
STOCK = ("fp32", "zero-1 fp32", "zero-1 bf16", "zero-1 bf16, fp32 accumulation")


@contextlib.contextmanager
def shared_folder():
    """A new folder, the same on every rank."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, 0)
    try:
        yield Path(made[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])


def from_stock(kind, count, world, config, schedule=None):
    """An engine over DeepSpeed's own module: upstream's engine, or ours if ``schedule`` is given."""
    specs, loss_fn = layers(kind, count) if isinstance(kind, str) else kind
    module = deepspeed.pipe.PipelineModule(specs, num_stages=world, loss_fn=loss_fn, partition_method="uniform")
    whole = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": ADAM,
             "steps_per_print": 10**6, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, **config}
    if schedule is None:
        return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=whole)[0]
    import ds_pipe_ext

    whole["pipeline"] = {"schedule": schedule}
    return ds_pipe_ext.initialize(model=module, model_parameters=list(module.parameters()), config=whole)[0]


def steps(made, kind, first, count=2, dtype=torch.float32, m=2):
    """Losses of some steps; a step's micro-batches depend on its number and the replica only."""
    replica, replicas = made.grid.get_data_parallel_id(), made.dp_world_size
    losses = []
    for step in range(first, first + count):
        numbers = range(step * m * replicas + replica, (step + 1) * m * replicas, replicas)
        losses.append(made.train_batch(batch(kind, i, dtype=dtype) for i in numbers).item())
    return losses


def told_by(action):
    """The error of ``action`` as text, or None."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def state_of(made):
    """name -> (weight, both moments in fp32, step) of this rank's trained parameters, shards put together."""
    found = {}
    for param, name in made.param_names.items():
        if hasattr(param, "_hp_mapping"):
            values = [safe_get_full_fp32_param(param), *(safe_get_full_optimizer_state(param, key)
                                                         for key in ("exp_avg", "exp_avg_sq"))]
            (step, ) = {float(state["step"]) for state in made.optimizer.optimizer.state.values()}
        elif param in made.optimizer.state:
            state = made.optimizer.state[param]
            values, step = [param.detach(), state["exp_avg"], state["exp_avg_sq"]], float(state["step"])
        else:
            continue
        found[name] = [value.double().flatten().tolist() for value in values], step
    return found


@case(2)
def stock_checkpoints(rank, world):
    """setup -> rows: losses, those of the other engine that loaded the checkpoint, directly or converted, and what it got."""
    found = {}
    for name in STOCK:
        keys, dtype, _ = SETUPS[name]

        def made(schedule, keys=keys):
            return from_stock("tied", 5, world, keys, schedule)

        with shared_folder() as folder:
            for which, schedule in (("stock", None), ("ours", "zb-h1")):
                one = made(schedule)
                steps(one, "tied", 0, dtype=dtype)
                one.save_checkpoint(folder / which, client_state={"mine": 7})
                expected = steps(one, "tied", 2, dtype=dtype)
                one.destroy()
                for universal in (False, True)[:1 + (name != "fp32")]:
                    if universal:
                        convert(rank, folder / which)
                    other = made("1f1b" if schedule is None else None, keys | {"checkpoint": {"load_universal": universal}})
                    path, client = other.load_checkpoint(folder / which)
                    found.setdefault(name, []).append((expected, steps(other, "tied", 2, dtype=dtype), client["mine"],
                                                       other.global_steps, path is not None))
                    other.destroy()
                    ranks.drop_groups()
    return found


class Noisy(Block):
    """Draws from every generator in its forward."""

    def __init__(self, index, dtype=torch.float32):
        super().__init__(index, dtype=dtype)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x)) * (1 + 0.1 * random.random() + 0.1 * numpy.random.rand())


@case(2, 4)
def resumed(rank, world):
    """(schedule, setup, seeded) -> ((losses, weights) without a break, after a resume, consumed micro-batches)."""
    found = {}
    data = [batch("mlp", i, rows=1) for i in range(22 if world == 4 else 11)]
    data = [(x[0], y[0]) for x, y in data]
    for schedule in SCHEDULES:
        for name, seeded in (("fp32", False), ("zero-1 fp32", True)) if schedule == "zb-h2" or world == 2 else ():
            with shared_folder() as folder:
                runs = []
                for resuming in (False, True):
                    for generator in (torch.manual_seed, random.seed, numpy.random.seed):
                        generator(99 * resuming + rank)
                    made = engine(([LayerSpec(Noisy, i) for i in range(4)], nn.MSELoss()), 0, world, schedule, 3, stages=2,
                                  optimizer=ADAM, module={"seed_layers": seeded}, zero_allow_untested_optimizer=True,
                                  scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}}, **SETUPS[name][0])
                    # What initialize does with training_data, without workers, which take seconds to end; six micro-batches
                    # are an epoch, the last one is short.
                    made.deepspeed_io = functools.partial(made.deepspeed_io, num_local_io_workers=0)
                    made._build_data_iter(data)
                    if resuming:
                        made.load_checkpoint(folder)
                    else:
                        for _ in range(3):
                            made.train_batch()
                        made.save_checkpoint(folder)
                    consumed = made.consumed_micro_batches
                    losses = [made.train_batch().item() for _ in range(3)]
                    runs.append((losses, {n: p.tolist() for n, p in stage_state(made.module).items()}, consumed))
                    made.destroy()
                found[schedule, name, seeded] = runs
    return found


#: world -> layouts (boundaries, number of stages): the first one saves
LAYOUTS = {2: ([0, 2, 5], [0, 1, 5], [0, 3, 5], [0, 5]), 4: ([0, 2, 5], [0, 1, 5], [0, 3, 5], [0, 1, 2, 3, 5], [0, 5])}


@case(2, 4)
def moved(rank, world):
    """setup -> boundaries -> (state loaded, state saved, losses, losses without a break): Adam, a tie, two groups."""
    found = {}
    for name in ("fp32", "zero-1 fp32", "zero-1 bf16", "zero-1 bf16, fp32 accumulation", "bf16"):
        keys, dtype, _ = SETUPS[name]
        if world == 4 and name == "bf16":
            continue
        with shared_folder() as folder:
            for number, boundaries in enumerate(LAYOUTS[world]):
                stages = len(boundaries) - 1
                universal = bool(number) and name != "fp32"
                # One global batch on any number of replicas.
                made = engine("tied", 5, world, "zb-h1", 4 * stages // world,
                              optimizer=ADAM, stages=stages, boundaries=boundaries, zero_allow_untested_optimizer=True,
                              checkpoint={"load_universal": universal}, **keys)
                m = made.micro_batches
                if number == 0:
                    steps(made, "tied", 0, dtype=dtype, m=m)
                    made.save_checkpoint(folder)
                    if name != "fp32":
                        convert(rank, folder)
                    saved, loaded, expected = state_of(made), None, steps(made, "tied", 2, dtype=dtype, m=m)
                    found.setdefault(name, {})[tuple(boundaries)] = saved, saved, expected
                else:
                    made.load_checkpoint(folder)
                    loaded = state_of(made)
                    found[name][tuple(boundaries)] = loaded, saved, steps(made, "tied", 2, dtype=dtype, m=m)
                made.destroy()
    return found


def convert(rank, folder):
    """``ds-pipe convert`` on one rank."""
    from ds_pipe_ext.cli import main

    code = main(["convert", str(folder)]) if rank == 0 else 0
    dist.barrier()
    assert code == 0


@case(4)
def slices_moved(rank, world):
    """Tensor parallelism 2: whether this rank has the state that its slice had, not the other's, and the layer files.

    And the error of ZeRO 1 that is loaded elsewhere.
    """
    def made(boundaries, name):
        return engine("mlp", 4, world, "zb-h1", 2, optimizer=ADAM, boundaries=boundaries,
                      module={"topology": PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)},
                      zero_allow_untested_optimizer=True, **SETUPS[name][0])

    told, everywhere = {}, [None] * world
    for name in ("fp32", "zero-1 fp32"):
        with shared_folder() as folder:
            one = made([0, 2, 4], name)
            own = one.grid.get_slice_parallel_rank()
            for step in range(2):
                # Each slice its own data, so its own weights and moments.
                one.train_batch(batch("mlp", 100 * own + 2 * step + i) for i in range(2))
            one.save_checkpoint(folder)
            if name == "fp32":
                dist.all_gather_object(everywhere, (own, state_of(one)))
            one.destroy()
            other = made([0, 1, 4], name)
            told[name] = told_by(lambda: other.load_checkpoint(folder))
            if name == "fp32":
                state, files = state_of(other), len(list(folder.glob("*/layer_*")))
            other.destroy()
    same, others = ({key: value for slice_, saved in everywhere if (slice_ == own) is mine for key, value in saved.items()}
                    for mine in (True, False))
    return all(state[n] == same[n] for n in state), all(state[n] != others[n] for n in state), len(state), files, told


@case(2)
def groups_moved(rank, world):
    """(losses without a break, after a move): groups with options of their own, a parameter with fewer steps.

    The last run is at the layout that saved, its groups filled in another order.
    """
    import ds_pipe_ext

    runs = []
    with shared_folder() as folder:
        for boundaries in ([0, 2, 5], [0, 3, 5], [0, 1, 5], [0, 2, 5]):
            specs, loss_fn = layers("mlp", 5, F64)
            config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": 10**6,
                      "gradient_clipping": 0.0, "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                      "pipeline": {"schedule": "1f1b", "partition": boundaries}}
            module = ds_pipe_ext.PipelineModule(specs, num_stages=world, loss_fn=loss_fn, config=config)
            named = list(module.named_parameters())[::-1 if len(runs) == 3 else 1]
            # The last group is empty on every stage but one.
            groups = [{"params": [p for n, p in named if "weight" in n and n != "4.linear.weight"], "weight_decay": 0.3},
                      {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 0.002},
                      {"params": [p for n, p in named if n == "4.linear.weight"], "lr": 0.004}]
            made, *_ = ds_pipe_ext.initialize(model=module, config=config, model_parameters=groups)
            if not runs:
                # As a scheduler does; the others have to take it over.
                made.optimizer.param_groups[1]["lr"] = 0.007
                late = dict(named).get("3.linear.bias")
                # Without a gradient in the first step: its own step count.
                if late is not None:
                    late.requires_grad_(False)
                steps(made, "mlp", 0, count=1, dtype=F64)
                if late is not None:
                    late.requires_grad_(True)
                steps(made, "mlp", 1, count=1, dtype=F64)
                made.save_checkpoint(folder)
            else:
                made.load_checkpoint(folder)
            state = state_of(made)
            counts = {name: count for name, (_, count) in state.items()}
            runs.append((steps(made, "mlp", 2, dtype=F64), counts))
            made.destroy()
    return runs


class Biased(Embed):
    """An embedding whose bias the stages do not share."""

    def __init__(self, dtype=torch.float32):
        super().__init__(dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(8, dtype=dtype))


def look_up(embed, tokens):
    """The first layer, as a function of the tied module."""
    return nn.functional.embedding(tokens, embed.weight) + getattr(embed, "bias", 0)


def look_back(embed, x):
    """The last layer, as a function of the tied module."""
    return project(embed, x + getattr(embed, "bias", 0))


def _tied(kind, first=0):
    """Two functions of one module around blocks; the first one is layer number ``first``."""
    ends = [TiedLayerSpec("embed", kind, forward_fn=function) for function in (look_up, look_back)]
    before = [nn.Identity() for _ in range(first)]
    return [*before, ends[0], *(LayerSpec(Block, i) for i in range(3)), ends[1]], cross_entropy


@case(2)
def tied_by_functions(rank, world):
    """(what, boundaries) -> worst difference of any weight from what was saved, after all were overwritten; and the files."""
    found = {}
    for what, kind in (("shared", Embed), ("with an own bias", Biased)):
        with shared_folder() as folder:
            made = engine(_tied(kind), 0, world, "zb-h1", 2, optimizer=ADAM, boundaries=[0, 2, 5])
            steps(made, "tied", 0)
            made.save_checkpoint(folder)
            saved = [None] * world
            dist.all_gather_object(saved, stage_state(made.module))
            expected = steps(made, "tied", 2)
            made.destroy()
            files = sorted(path.name for path in (folder / "global_step2").glob("layer_*"))
            for boundaries in ([0, 2, 5], [0, 4, 5], [0, 1, 5]):
                made = engine(_tied(kind), 0, world, "1f1b", 2, optimizer=ADAM, boundaries=boundaries)
                with torch.no_grad():
                    for param in made.module.parameters():
                        param.fill_(7)
                made.load_checkpoint(folder)
                worst = 0.0
                for name, param in stage_state(made.module).items():
                    # A bias that is not shared belongs to the stage.
                    whole = saved[rank] if "bias" in name and "tied" in name else {**saved[1], **saved[0]}
                    worst = max(worst, (param - whole[name]).abs().max().item())
                found[what, tuple(boundaries)] = worst, steps(made, "tied", 2) == expected, files
                made.destroy()
    return found


@case(2)
def many_layers(rank, world):
    """103 layers saved with other boundaries: worst difference after loading, and the number of layer files."""
    with shared_folder() as folder:
        made = engine("mlp", 103, world, "gpipe", 1, boundaries=[0, 99, 103])
        made.train_batch(iter([batch("mlp", 0)]))
        made.save_checkpoint(folder)
        saved = [None] * world
        dist.all_gather_object(saved, stage_state(made.module))
        made.destroy()
        made = engine("mlp", 103, world, "gpipe", 1, boundaries=[0, 10, 103])
        made.load_checkpoint(folder)
        whole = saved[0] | saved[1]
        worst = max((param - whole[name]).abs().max().item() for name, param in stage_state(made.module).items())
        files = len(list(folder.glob("*/layer_*")))
        made.destroy()
    return worst, files


@case(2)
def weights_alone(rank, world):
    """(setup, option) -> whether a step with learning rate 0 leaves the loaded weights as they were saved."""
    found = {}
    for name in ("fp32", "bf16", "zero-1 bf16", "zero-1 bf16, fp32 accumulation"):
        keys, dtype, _ = SETUPS[name]

        def made(keys=keys, **checkpoint):
            adam = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}
            return engine("tied", 5, world, "zb-h1", 2, optimizer=adam, zero_allow_untested_optimizer=True,
                          checkpoint=checkpoint, **keys)

        with shared_folder() as folder:
            one = made()
            steps(one, "tied", 0, dtype=dtype)
            one.save_checkpoint(folder)
            saved = stage_state(one.module)
            one.destroy()
            if name != "fp32":
                convert(rank, folder)
            for option, universal in itertools.product(("load_module_only", "load_optimizer_states"), (False, True)):
                if universal and name == "fp32":
                    continue
                other = made(load_universal=universal)
                other.load_checkpoint(folder, **{option: option == "load_module_only"})
                for group in other.optimizer.param_groups:
                    group["lr"] = 0.0
                steps(other, "tied", 2, count=1, dtype=dtype)
                state = stage_state(other.module)
                found[name, option, universal] = all(torch.equal(state[n], saved[n]) for n in saved)
                other.destroy()
    return found


OPTIONS = ({}, {"load_module_only": True}, {"load_optimizer_states": False}, {"load_lr_scheduler_states": False},
           {"tag": "named"}, {"tag": "named", "load_optimizer_states": False, "load_lr_scheduler_states": False})


@case(2)
def options(rank, world):
    """What load_checkpoint gives, its options one by one: upstream's engine and ours."""
    found = {}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
    for name in ("fp32", "zero-1 bf16"):
        keys, dtype, _ = SETUPS[name]
        for schedule in (None, "zb-h1"):
            with shared_folder() as folder:
                made = from_stock("tied", 5, world, keys | {"scheduler": scheduler}, schedule)
                rows = [made.load_checkpoint(folder)]
                steps(made, "tied", 0, dtype=dtype)
                made.save_checkpoint(folder, tag="named", save_latest=False)
                rows.append(made.load_checkpoint(folder))
                made.save_checkpoint(folder, client_state={"mine": [1, 2]})
                rows.append((folder / "latest").read_text())
                made.destroy()
                for chosen in OPTIONS:
                    made = from_stock("tied", 5, world, keys | {"scheduler": scheduler}, schedule)
                    _, client = made.load_checkpoint(folder, **chosen)
                    rows.append((str(chosen), sorted(client), client.get("mine"), made.global_steps, made.global_samples,
                                 made.get_lr(), steps(made, "tied", 2, dtype=dtype), made.get_lr()))
                    made.destroy()
            found[name, schedule] = rows
    return found


@case(2)
def frozen_stage_converted(rank, world):
    """From a first stage that trains nothing and back, ZeRO 1: losses and buffers without a break, and moved."""

    class Counting(Block):

        def __init__(self, index):
            super().__init__(index)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return super().forward(x)

    class Still(Counting):

        def __init__(self, index):
            super().__init__(index)
            with torch.no_grad():
                self.linear.weight.mul_(0.5 + index)
            self.requires_grad_(False)

    found = []
    keys = {**SETUPS["zero-1 fp32"][0], "zero_allow_untested_optimizer": True}
    for splits in (([0, 2, 4], [0, 3, 4]), ([0, 3, 4], [0, 2, 4])):
        with shared_folder() as folder:
            runs = []
            for boundaries in splits:
                specs = [LayerSpec(Still, 0), LayerSpec(Still, 1), LayerSpec(Counting, 2), LayerSpec(Counting, 3)]
                made = engine((specs, nn.MSELoss()), 0, world, "1f1b", 2, optimizer=ADAM, boundaries=boundaries,
                              checkpoint={"load_universal": bool(runs)}, **keys)
                if not runs:
                    steps(made, "mlp", 0)
                    made.save_checkpoint(folder)
                    convert(rank, folder)
                else:
                    with torch.no_grad():
                        for value in itertools.chain(made.module.parameters(), made.module.buffers()):
                            value.fill_(3)
                    made.load_checkpoint(folder)
                seen = [layer.seen.item() for layer in made.module.forward_funcs]
                runs.append((steps(made, "mlp", 2), seen))
                made.destroy()
        found.append(runs)
    return found
