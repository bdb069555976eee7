"""What the ranks of the Hugging Face pipeline tests run: all families in one process group."""

from __future__ import annotations

from pathlib import Path

import ranks
import torch
from hf_models import batch_of, model_of

import ds_pipe_ext
from ds_pipe_ext import hf


def config(schedule, micro_batches, **pipeline):
    """SGD with learning rate 1 and no clipping: an update is the gradient."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**6,
        "pipeline": {"schedule": schedule, **pipeline},
    }


def batches_of(padding):
    """Three micro-batches of different tokens and one length."""
    result = []
    for shift in range(3):
        batch = batch_of(padding)
        for name in ("input_ids", "labels"):
            tokens = batch[name]
            batch[name] = torch.where(tokens >= 3, (tokens + 5 * shift) % 61 + 3, tokens)
        result.append(batch)
    return result


def reference(family, tied, batches):
    """The unsplit model after one SGD step, in float64: (loss, state dict)."""
    model = model_of(family, tied)
    losses = [model(**batch).loss for batch in batches]
    (sum(losses) / len(losses)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    return torch.stack(losses).mean().item(), model.state_dict()


def train_and_save(rank, world, cases, schedule, folder):
    """For every (family, tied, padding): loss error, worst relative weight error, errors of the saved directory."""
    result = {}
    for family, tied, padding in cases:
        batches = batches_of(padding)
        whole = config(schedule, len(batches))
        module = hf.pipeline_module(model_of(family, tied), config=whole, num_stages=world)
        engine, *_ = ds_pipe_ext.initialize(model=module, model_parameters=[p for p in module.parameters()
                                                                            if p.requires_grad], config=whole)
        loss = engine.train_batch(iter(batches)).item()
        expected, state = reference(family, tied, batches)
        worst = 0.0
        for layer in module.modules():
            for name, value in getattr(layer, "hf_named_parameters", dict)() or ():
                error = (value - state[name]).abs().max() / state[name].abs().max().clamp(min=1e-30)
                worst = max(worst, error.item())
        target = Path(folder) / f"{family}-{tied}-{padding}"
        evaluated = engine.eval_batch(iter(batches), num_micro_batches=len(batches)).item()
        hf.save_pretrained(engine, target)
        result[family, tied, padding] = (loss, expected, worst, evaluated)
        engine.destroy()
        del engine, module
        ranks.drop_groups()
    return result
