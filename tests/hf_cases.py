"""What the ranks of the Hugging Face pipeline tests run: all families in one process group."""

from __future__ import annotations

from pathlib import Path

import ranks
import torch
from hf_models import ROUTERS, batch_of, model_of

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
        # Other numbers of targets in every micro-batch.
        batch["labels"][1, : 2 * shift] = -100
        result.append(batch)
    return result


#: what is changed: of the model's configuration, of the pipeline section
VARIANTS = {
    "plain": ({}, {}),
    "routers": (ROUTERS, {}),
    "chunks": ({}, {"loss_chunk_tokens": 3}),
    "routers and chunks": (ROUTERS, {"loss_chunk_tokens": 5}),
    "tokens": ({}, {"loss_weighting": "token"}),
    "tokens and routers": (ROUTERS, {"loss_weighting": "token"}),
    "tokens and chunks": ({}, {"loss_weighting": "token", "loss_chunk_tokens": 4}),
}


def reference(family, tied, batches, variant):
    """The unsplit model after one SGD step, in float64: (loss, state dict)."""
    changes, pipeline = VARIANTS[variant]
    model = model_of(family, tied, **changes)
    losses, weights = [model(**batch).loss for batch in batches], [1] * len(batches)
    if "loss_weighting" in pipeline:
        weights = [(batch["labels"][:, 1:] != -100).sum().item() for batch in batches]
    loss = sum(loss * weight for loss, weight in zip(losses, weights)) / sum(weights)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    return loss.item(), model.state_dict()


def train_and_save(rank, world, cases, schedule, folder):
    """For every (family, tied, padding, variant): loss, the reference's, worst relative weight error, evaluation, whether
    logits came with it that equal the reference's."""
    result = {}
    for family, tied, padding, variant in cases:
        batches = batches_of(padding)
        changes, pipeline = VARIANTS[variant]
        whole = config(schedule, len(batches), **pipeline)
        module = hf.pipeline_module(model_of(family, tied, **changes), config=whole, num_stages=world)
        engine, *_ = ds_pipe_ext.initialize(model=module, model_parameters=[p for p in module.parameters()
                                                                            if p.requires_grad], config=whole)
        loss = engine.train_batch(iter(batches)).item()
        expected, state = reference(family, tied, batches, variant)
        worst = 0.0
        for layer in module.modules():
            for name, value in getattr(layer, "hf_named_parameters", dict)() or ():
                error = (value - state[name]).abs().max() / state[name].abs().max().clamp(min=1e-30)
                worst = max(worst, error.item())
        target = Path(folder) / f"{family}-{tied}-{padding}-{variant}"
        evaluated, logits = engine.eval_batch(iter(batches), num_micro_batches=len(batches), return_logits=True)
        hf.save_pretrained(engine, target)
        result[family, tied, padding, variant] = loss, expected, worst, evaluated.item(), logits
        engine.destroy()
        del engine, module
        ranks.drop_groups()
    return result
