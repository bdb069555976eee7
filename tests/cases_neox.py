"""A program in the manner of GPT-NeoX, unchanged but for `ds_pipe_ext.install()`, and every public method of upstream's engine."""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect

import deepspeed
import neox_models as neox
import ranks
import torch
from cases_numbers import F64, clipped
from deepspeed.runtime import dataloader
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from engine_cases import SCHEDULES, worst
from models import Reference, stage_state
from suite import case

import ds_pipe_ext

MICRO_BATCHES = 3

#: methods that the program below calls
CALLED = {"train_batch", "eval_batch", "set_batch_fn", "set_has_attention_mask", "set_dataloader", "set_dataiterator",
          "set_train_batch_size", "set_train_micro_batch_size", "deepspeed_io", "get_global_grad_norm", "get_additional_losses",
          "reset_activation_shape", "set_data_post_process_func", "set_custom_curriculum_learning_schedule",
          "set_gradient_accumulation_boundary", "is_map_style_dataset", "is_iterable_style_dataset", "tput_log", "destroy",
          "collect_python_gc"}
#: what DeepSpeed calls itself: its reductions and clipping (in ReduceGrads and OptimizerStep), and what it compiles
INTERNAL = {"all_gather_scalar", "allreduce_and_copy", "allreduce_bucket", "allreduce_gradients", "allreduce_no_retain",
            "buffered_allreduce_fallback", "clip_fp32_gradients", "sparse_all_gather", "sparse_allreduce",
            "sparse_allreduce_bucket", "sparse_allreduce_no_retain", "get_autosp_backend", "get_autotp_backend",
            "get_deepcompile_backend", "get_deepspeed_compile_backend", "register_compile_pass", "get_optimizer_configuration",
            "print_forward_breakdown", "log_for_device"}
#: of checkpoints, which have tests of their own
SAVING = {"save_checkpoint", "load_checkpoint", "module_state_dict", "load_module_state_dict", "load_moe_state_dict"}


def public_methods() -> set[str]:
    return {name for name in dir(PipelineEngine) if not name.startswith("_") and not hasattr(torch.nn.Module, name)
            and callable(getattr(PipelineEngine, name))}


def surface(engine) -> dict:
    """What every other public method answers: a value, the name of a type, or an error."""
    found = {}
    for name in sorted(public_methods() - CALLED - INTERNAL - SAVING):
        method = getattr(engine, name)
        required = [p for p in inspect.signature(method).parameters.values()
                    if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        try:
            value = method(*[torch.ones(()) if p.name == "loss" else "nowhere" for p in required])
        except Exception as error:
            value = f"{type(error).__name__}: {error}".replace(type(engine).__name__, "engine")
        plain = isinstance(value, (int, float, str, bool, list, dict, tuple, torch.dtype, type(None)))
        # Bound methods and modules show the engine's class and addresses.
        found[name] = repr(value) if plain and "0x" not in repr(value) and "bound method" not in repr(value) else \
            type(value).__name__
    return found


@contextlib.contextmanager
def program(rank, world, schedule, tied, dropout):
    """The user's start, with his own optimizer and scheduler and DeepSpeed's loader."""
    ds_pipe_ext.install()
    torch.manual_seed(4)
    # Its two forked readers a rank take five seconds an engine to start.
    dataloader.DataLoader = lambda *args, **kwargs: torch.utils.data.DataLoader(*args, **{**kwargs, "num_workers": 0})
    try:
        net = neox.GPT2ModelPipe(PipeDataParallelTopology(num_pp=2, num_dp=world // 2), tied=tied, dropout=dropout,
                                 interval=1 if dropout else 0)
        decay = [p for p in net.parameters() if p.dim() > 1]
        others = [p for p in net.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES, "steps_per_print": 2,
                  "gradient_clipping": 0.0, "pipeline": {"schedule": schedule} if schedule else {}}
        engine, optimizer, loader, scheduler = deepspeed.initialize(
            args=argparse.Namespace(local_rank=rank), model=net, optimizer=optimizer, lr_scheduler=scheduler,
            training_data=neox.Tokens(), collate_fn=neox.collate, dist_init_required=False, config_params=config)
        assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler and loader is engine.training_dataloader
        engine.set_batch_fn(neox.get_batch_pipe)
        engine.set_has_attention_mask(True)
        yield engine
        engine.destroy()
        # Groups of engines that are over keep threads.
        gc.collect()
        ranks.drop_groups()
    finally:
        ds_pipe_ext.uninstall()
        dataloader.DataLoader = torch.utils.data.DataLoader


def _run(engine) -> list:
    """Training from DeepSpeed's loader, from the user's loader, from an iterator; a smaller batch; an evaluation."""
    seen = []

    def step(data=None):
        loss = engine.train_batch(data) if data is not None else engine.train_batch()
        extra = engine.get_additional_losses()
        seen.append((loss.item(), {name: value.item() for name, value in extra.items()}, engine.get_lr(), engine.global_steps,
                     engine.global_samples, engine.was_step_applied()))

    step()
    step()
    dataset = neox.Tokens(seed=1)
    assert engine.is_map_style_dataset(dataset) and not engine.is_iterable_style_dataset(dataset)
    loader = engine.deepspeed_io(dataset, num_local_io_workers=0)
    engine.set_data_post_process_func(None)
    engine.set_custom_curriculum_learning_schedule({})
    engine.set_dataloader(RepeatingLoader(loader))
    step()
    engine.set_dataiterator(iter(RepeatingLoader(loader)))
    engine.set_train_batch_size(2 * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    step()
    step(iter(loader))
    seen.append(engine.eval_batch(iter(engine.deepspeed_io(neox.Tokens(seed=2), num_local_io_workers=0))).item())
    engine.reset_activation_shape()
    engine.set_gradient_accumulation_boundary(True)
    engine.tput_log("throughput")
    engine.collect_python_gc()
    step()
    engine.set_train_micro_batch_size(1)
    seen.append((engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()))
    return seen


@case(4)
def neox_stock(rank, world):
    """tied, dropout -> schedule (None: upstream's) -> (engine, what the program saw, weights, answers of the other methods)."""
    found = {}
    for tied, dropout in ((True, 0.0), (False, 0.1)):
        for schedule in (None, "1f1b", "zb-h2") if tied else (None, "zb-h1"):
            with program(rank, world, schedule, tied, dropout) as engine:
                seen = _run(engine)
                norm = engine.get_global_grad_norm()
                found.setdefault((tied, dropout), {})[schedule] = (type(engine).__name__, seen, stage_state(engine.module),
                                                                   surface(engine), norm)
    return found


@case(2)
def neox_alone(rank, world):
    """float64 against one process: (case, error of the losses, of the additional losses, of the weights, of the norm)."""
    found = []
    for tied in (True, False):
        for schedule in SCHEDULES:
            def loss(logits, labels):
                lm_loss, z_loss = neox.cross_entropy(logits, labels)
                parts.append((lm_loss.item(), z_loss.item()))
                return lm_loss + 1e-2 * z_loss

            parts: list = []
            reference = Reference((neox.specs(tied, dtype=F64), loss),
                                  optimizer=lambda p: clipped(p, 0.05, lambda p: torch.optim.SGD(p, lr=0.5)))
            ds_pipe_ext.install()
            net = neox.GPT2ModelPipe(PipeDataParallelTopology(num_pp=2, num_dp=1), tied=tied, dtype=F64, interval=1)
            engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config={
                "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES, "gradient_clipping": 0.05,
                "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "pipeline": {"schedule": schedule}})
            ds_pipe_ext.uninstall()
            rows = neox.Tokens().rows.split(2)
            errors = [0.0] * 3
            for step in range(2):
                batches = [neox.get_batch_pipe({"text": rows[MICRO_BATCHES * step + i]}, F64) for i in range(MICRO_BATCHES)]
                parts.clear()
                own = engine.train_batch(iter(batches)).item()
                errors[0] = max(errors[0], abs(own - reference.step(batches)))
                means = [sum(column) / MICRO_BATCHES for column in zip(*parts)]
                errors[1] = max(errors[1], *(abs(a.item() - b) for a, b in zip(engine.get_additional_losses().values(), means)))
                errors[2] = max(errors[2], abs(engine.get_global_grad_norm() / reference.optimizer.norms[-1] - 1))
            found.append(((tied, schedule), *errors[:2], worst(stage_state(engine.module), reference.state()), errors[2]))
            engine.destroy()
            del engine, net
            gc.collect()
            ranks.drop_groups()
    return found
