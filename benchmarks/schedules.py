"""Step times of pipeline schedules with sleeping layers: stock DeepSpeed, torch.distributed.pipelining, ds_pipe_ext.

    python benchmarks/schedules.py --ranks 4 --microbatches 8 --json schedules.json

Every stage of every system sleeps F, I and W (the first stage's input gradient included), so a few cores run many ranks
truthfully. What is measured is the order of the operations and the cost of the engine around it: not a training
speed-up. All systems live in one group of processes and take turns, one isolated step or one steady series each; ratios
are taken inside a turn and their median is reported, so that a drift of the machine cancels.

isolated: a barrier before each step; from the first start to the last rank's end.
steady:   consecutive steps without a barrier; total time / steps.

`bare replay` runs the same lowered program with sleeps and plain isend/irecv. `autograd replay` runs the layers through
autograd and messages through shared memory: what an engine could reach here.
`ratio_to_stock` is a speed: stock's step time over this one, above 1 is faster. The other two ratios are times.
`simulated_s` is the plan's simulated time for as many steps, without any delay of communication.

Exit status: 0 if every system did its work (counts, order and duration of the sleeps; finite losses), else 1.
"""

import argparse
import fnmatch
import json
import os
import pathlib
import platform
import statistics
import sys
import time

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import launch

MODES = ("isolated", "steady")


def worker(context, options: dict) -> dict:
    """One rank: builds every system, checks two steps of each, then measures in rounds."""
    import torch.distributed as dist

    import sleeping
    import systems

    sleeping.precise_sleep()
    setting = systems.Setting(options["ranks"], options["microbatches"],
                              tuple(options[key] / 1000 for key in ("forward_ms", "input_ms", "weight_ms")))
    made = {}
    makers = systems.catalogue(setting)
    for key in options["systems"]:
        context.report(f"building {key}")
        made[key] = makers[key]()
    work = {key: [] for key in made}
    losses = {key: [] for key in made}
    for key, system in made.items():
        context.report(f"checking {key}")
        for number in range(2):
            sleeping.drain()
            loss = system.step()
            systems.check_step(system, setting, sleeping.drain(), loss)
            if loss is not None:
                losses[key].append(loss)
        dist.barrier()
    intervals = {key: {mode: [] for mode in MODES} for key in made}

    def timed(key: str, mode: str, steps: int) -> None:
        system = made[key]
        sleeping.drain()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            loss = system.step()
        end = time.perf_counter()
        slept = sleeping.drain()
        expected = 3 * setting.microbatches * len(system.stages) * steps
        if len(slept) != expected:
            raise AssertionError(f"{key}: slept {len(slept)} times in {steps} steps, expected {expected}")
        work[key].append(sum(seconds for *_, seconds in slept) / steps)
        if loss is not None:
            losses[key].append(loss)
        intervals[key][mode].append((start, end, steps))

    for number in range(options["rounds"]):
        # The order of the systems turns round, so that none always follows the same neighbour.
        for mode in options["modes"]:
            for turn in range(options["steps_per_round"] if mode == "isolated" else 1):
                for key in sorted(made, reverse=bool((number + turn) % 2)):
                    context.report(f"{mode}, round {number + 1}/{options['rounds']}: {key}")
                    timed(key, mode, 1 if mode == "isolated" else options["steps"])
    stages = {key: setting.ranks * len(system.stages) for key, system in made.items()}
    return {"intervals": intervals, "work": work, "losses": losses, "stages": stages}


def durations(ranks: list[dict], key: str, mode: str) -> list[float]:
    """Seconds per step of every measurement: from the first rank's start to the last rank's end."""
    result = []
    for samples in zip(*(rank["intervals"][key][mode] for rank in ranks)):
        result.append((max(end for _, end, _ in samples) - min(start for start, _, _ in samples)) / samples[0][2])
    return result


def rows_of(options: dict, ranks: list[dict]) -> list[dict]:
    """One row per system and mode."""
    from ds_pipe_ext.plan import Costs, simulate

    import systems

    seconds = tuple(options[key] / 1000 for key in ("forward_ms", "input_ms", "weight_ms"))
    setting = systems.Setting(options["ranks"], options["microbatches"], seconds)
    plans = systems.one_stage_plans(setting)
    rows = []
    for mode in options["modes"]:
        samples = {key: durations(ranks, key, mode) for key in options["systems"]}
        medians = {key: statistics.median(values) for key, values in samples.items()}

        def ratio(key: str, other: str) -> float | None:
            if key not in samples or other not in samples:
                return None
            return statistics.median(a / b for a, b in zip(samples[key], samples[other]))

        for key in options["systems"]:
            name, schedule = key.split(":")
            plan = plans[schedule] if name in (systems.OURS, systems.REPLAY, systems.AUTOGRAD) else None
            simulated = None
            if plan is not None:
                steps = options["steps"] if mode == "steady" else 1
                simulated = simulate(plan, Costs.uniform(plan, *seconds), steps=steps).makespan / steps
            work = [statistics.median(rank["work"][key]) for rank in ranks]
            losses = next((rank["losses"][key] for rank in ranks if rank["losses"][key]), [])
            rows.append({
                "system": name, "schedule": schedule, "ranks": setting.ranks, "microbatches": setting.microbatches,
                "mode": mode, "step_s": medians[key], "ratio_to_stock": ratio(f"{systems.STOCK}:1f1b", key),
                "simulated_s": simulated, "executed_over_simulated": medians[key] / simulated if simulated else None,
                "executed_over_replay": ratio(key, f"{systems.REPLAY}:{schedule}")
                if name in (systems.OURS, systems.AUTOGRAD) else None,
                "work_s": max(work), "work_s_min": min(work),
                "stages": ranks[0]["stages"][key], "samples_s": samples[key],
                "last_loss": losses[-1] if losses else None,
            })
    return rows


def problems(rows: list[dict], options: dict) -> list[str]:
    """What is wrong with the result: work that deviates, losses that are missing or not those of the same model."""
    import systems

    share = options["microbatches"] * sum(options[key] for key in ("forward_ms", "input_ms", "weight_ms")) / 1000
    found = []
    for row in rows:
        name = f"{row['system']} {row['schedule']}"
        if not share * 0.999 <= row["work_s_min"] <= row["work_s"] <= share * (1 + options["tolerance"]):
            found.append(f"{name}: slept {row['work_s_min']:.4f} to {row['work_s']:.4f} s a step, expected {share:.4f}")
        if row["system"] != systems.REPLAY and row["last_loss"] is None:
            found.append(f"{name}: no rank knows the loss")
    # The same model after the same steps: whoever has as many stages must have the same loss.
    for stages in {row["stages"] for row in rows}:
        known = [row for row in rows if row["stages"] == stages and row["last_loss"] is not None]
        for row in known[1:]:
            if not abs(row["last_loss"] - known[0]["last_loss"]) <= 1e-5 * abs(known[0]["last_loss"]):
                found.append(f"{row['system']} {row['schedule']}: loss {row['last_loss']}, but {known[0]['system']} "
                             f"{known[0]['schedule']} has {known[0]['last_loss']}")
    return sorted(set(found))


def show(rows: list[dict], console: Console) -> None:
    """The table people read."""
    for mode in dict.fromkeys(row["mode"] for row in rows):
        table = Table(title=f"{mode}: p = {rows[0]['ranks']}, m = {rows[0]['microbatches']}", box=box.SIMPLE)
        table.add_column("system and schedule", no_wrap=True)
        for column in ("step s", "x stock", "simulated", "/ sim.", "/ replay", "work s"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in (row for row in rows if row["mode"] == mode):
            cells = [(row["step_s"], 4), (row["ratio_to_stock"], 3), (row["simulated_s"], 4),
                     (row["executed_over_simulated"], 3), (row["executed_over_replay"], 3), (row["work_s"], 4)]
            table.add_row(f"{row['system']} {row['schedule']}",
                          *("" if value is None else f"{value:.{digits}f}" for value, digits in cells))
        console.print(table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per system and mode, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, nargs="+", default=[10.0], metavar="MS",
                        help="one number, or F I W: milliseconds of one rank's whole share of a micro-batch")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--systems", default="*", help="comma-separated patterns of system:schedule, such as "
                        "'deepspeed:*,ds_pipe_ext:zb-*'")
    parser.add_argument("--list", action="store_true", help="print the systems and stop")
    parser.add_argument("--tolerance", type=float, default=0.1, help="how much longer than asked the sleeps may be")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without progress that count as a hang")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    args.modes = [mode for mode in MODES if mode in args.modes.split(",")]
    if not args.modes:
        parser.error(f"--modes: choose from {', '.join(MODES)}")
    if len(args.ms) not in (1, 3):
        parser.error("--ms takes one number or three")
    if "steady" in args.modes and args.steps < 10:
        parser.error("--steps: steady needs at least 10 consecutive steps")
    if args.ranks < 2:
        parser.error("--ranks: a pipeline needs at least 2")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 110)
    forward, input_grad, weight_grad = args.ms * 3 if len(args.ms) == 1 else args.ms
    options = {"ranks": args.ranks, "microbatches": args.microbatches, "steps": args.steps, "rounds": args.rounds,
               "steps_per_round": -(-args.steps // args.rounds), "modes": args.modes, "tolerance": args.tolerance,
               "forward_ms": forward, "input_ms": input_grad, "weight_ms": weight_grad}
    launch.build_deepspeed_op()

    import systems

    known = list(systems.catalogue(systems.Setting(args.ranks, args.microbatches, (1, 1, 1))))
    patterns = args.systems.split(",")
    options["systems"] = [key for key in known if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]
    unknown = [pattern for pattern in patterns if not fnmatch.filter(known, pattern)]
    if args.list or unknown:
        console.print("\n".join(known))
        if unknown:
            console.print(f"[red]no system matches {', '.join(unknown)}; known are those above")
        return 1 if unknown else 0
    started, load = time.time(), os.getloadavg()[0]
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1 + len(options["systems"]) * (2 + args.rounds * (
            ("steady" in args.modes) + ("isolated" in args.modes) * options["steps_per_round"])))
        try:
            ranks = launch.run(worker, args.ranks, (options, ), patience=args.patience,
                               progress=lambda text: progress.update(task, description=text, advance=1))
        except launch.LaunchError as error:
            console.print(f"{error}", markup=False, style="red")
            return 1
    rows = rows_of(options, ranks)
    wrong = problems(rows, options)
    show(rows, console)
    if args.json:
        import deepspeed
        import torch

        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({
            "benchmark": "schedules", "options": options, "rows": rows, "problems": wrong,
            "seconds": round(time.time() - started, 1), "load_average": [load, os.getloadavg()[0]],
            "versions": {"python": platform.python_version(), "torch": torch.__version__,
                         "deepspeed": deepspeed.__version__},
        }, indent=1) + "\n", "utf-8")
        console.print(f"written to {args.json}")
    for text in wrong:
        console.print(f"WRONG: {text}", style="red", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
