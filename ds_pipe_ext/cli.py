"""``ds-pipe``: look at schedules, check a configuration, convert a checkpoint, examine the machine.

Imports neither torch nor deepspeed, but to convert."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import doctor, training
from .config import PipeConfig, count_microbatches, load, read_config
from .features import check_features
from .plan import Plan, PlanError, Simulation, draw, simulate
from .plan.simulate import as_costs
from .registry import schedules
from .schedules.base import Shape, build, check_options


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns 0, 1 if what was looked at is not sound, 2 if the question was not."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        print(f"ds-pipe {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds-pipe", description="Pipeline schedules for DeepSpeed.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    show = commands.add_parser("show", help="draw the timeline of a schedule")
    _plan_arguments(show)
    show.add_argument("--format", choices=("text", "csv", "svg"), default="text")
    show.add_argument("-o", "--output", metavar="FILE", help="write there instead of to the terminal")
    show.set_defaults(run=_show)

    measure = commands.add_parser("simulate", help="predict times and memory of a schedule")
    _plan_arguments(measure)
    measure.add_argument("--json", action="store_true", help="print one JSON object")
    measure.set_defaults(run=_simulate)

    check = commands.add_parser("check", help="check a DeepSpeed configuration without starting anything")
    check.add_argument("config", help="path of the DeepSpeed JSON")
    check.add_argument("--ranks", type=int, required=True, help="number of processes in all")
    check.add_argument("--stages", type=int, help="what the script gives to the module as num_stages")
    check.set_defaults(run=_check)

    convert = commands.add_parser("convert", help="make a universal checkpoint, which ZeRO 1 and bf16 load into any split")
    convert.add_argument("directory", help="what was given to save_checkpoint")
    convert.add_argument("--tag", help="default: what the file `latest` says")
    convert.add_argument("--workers", type=int, default=1, metavar="N", help="processes that read and merge (default 1)")
    convert.set_defaults(run=_convert)

    examine = commands.add_parser("doctor", help="look at versions, accelerator, build locks, cores, ports")
    examine.add_argument("--ranks", type=int, default=1, help="processes that will run on this machine")
    examine.set_defaults(run=_doctor)
    return parser


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of a schedule")
    parser.add_argument("--ranks", type=int, required=True, help="ranks along the pipeline")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches of one step")
    parser.add_argument("--costs", default="1,1,1", metavar="F,I,W",
                        help="time of forward, input gradient and weight gradient of one rank's share (default 1,1,1)")
    parser.add_argument("--comm", type=float, default=0.0, help="delay of one hop, in the unit of the costs (default 0)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE",
                        help="option of the schedule; may be repeated")


def _show(args: argparse.Namespace) -> int:
    options = _prepare(args)
    try:
        sim = _run(args, options)
    except PlanError as error:
        print(f"ds-pipe show: the schedule {args.name!r} wrote a plan that cannot run: {error}", file=sys.stderr)
        return 1
    drawing = {"text": draw.text, "csv": draw.csv, "svg": draw.svg}[args.format](sim)
    if args.output:
        Path(args.output).write_text(drawing, encoding="utf-8")
    else:
        sys.stdout.write(drawing)
    return 0


def _simulate(args: argparse.Namespace) -> int:
    options = _prepare(args)
    given = {"schedule": args.name, "ranks": args.ranks, "microbatches": args.microbatches,
             "costs": _numbers(args.costs), "comm": args.comm, "options": options}
    try:
        result = given | _run(args, options).summary() | {"valid": True}
    except PlanError as error:
        result = given | {"valid": False, "error": str(error)}
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(f"{args.name} on {args.ranks} ranks, {args.microbatches} micro-batches", result)
    return 0 if result["valid"] else 1


def _check(args: argparse.Namespace) -> int:
    if args.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {args.ranks}")
    if not Path(args.config).is_file():
        raise ValueError(f"there is no configuration file {args.config}")
    result: dict[str, Any] = {}
    problems = []
    try:
        source = load(args.config)
        problems.extend(training.problems(source))
        config = read_config(source)
        result["partition"] = str(config.partition or "parameters")
        result["pipeline ranks"] = stages = config.resolve_stages(args.stages, args.ranks)
        result["data-parallel replicas"] = replicas = args.ranks // stages
        result["micro-batches a step"] = microbatches = count_microbatches(source, replicas)
        if config.active:
            check_features(source)
            result |= _describe(config, config.plan(stages, microbatches))
        else:
            result["schedule"] = "none: DeepSpeed's own engine runs"
    except ValueError as error:
        problems.append(str(error))
    if result:
        _print_table(args.config, result)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _describe(config: PipeConfig, plan: Plan) -> dict[str, Any]:
    summary = simulate(plan).summary()
    return {"schedule": config.schedule.name, "schedule options": config.schedule.options or "none",
            "stages": plan.n_stages, "idle share at F = I = W": f"{summary['bubble_ratio']:.1%}",
            "micro-batches held by each stage": summary["held"]}


def _convert(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {args.workers}")
    # torch and DeepSpeed are loaded by this command only.
    from .runtime.universal import convert

    target = convert(args.directory, args.tag, args.workers)
    print(f'{target}: load it with "checkpoint": {{"load_universal": true}} in the DeepSpeed JSON')
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, got {args.ranks}")
    findings = doctor.examine(args.ranks)
    table = Table("", "what", "found", title="ds-pipe doctor")
    style = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in findings:
        table.add_row(f"[{style[finding.level]}]{finding.level}[/]", finding.what, _plain(finding.found))
    _console().print(table)
    # Outside the table, so that a command to paste is never wrapped.
    for finding in findings:
        if finding.advice:
            print(f"{finding.level}: {finding.what}: {finding.advice}")
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _prepare(args: argparse.Namespace) -> dict[str, Any]:
    """The schedule's options, after everything in the question has been checked."""
    if args.ranks < 1 or args.microbatches < 1:
        raise ValueError(f"--ranks and --microbatches must be at least 1, got {args.ranks} and {args.microbatches}")
    _numbers(args.costs)
    if not 0 <= args.comm < float("inf"):
        raise ValueError(f"--comm must be finite and not negative, got {args.comm}")
    schedules.get(args.name)
    options = {}
    for text in args.option:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--option {text!r}: expected key=value")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    check_options(args.name, options, where="--option")
    return options


def _run(args: argparse.Namespace, options: dict[str, Any]) -> Simulation:
    plan = build(args.name, Shape(args.ranks, args.microbatches), **options)
    return simulate(plan, as_costs(_numbers(args.costs), plan, args.comm))


def _numbers(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or not all(0 <= value < float("inf") for value in values):
        raise ValueError(f"--costs {text!r}: expected three finite numbers F,I,W, none negative, such as 1,1,1")
    return values


def _print_table(title: str, rows: Mapping[str, Any]) -> None:
    table = Table(title=_plain(title), show_header=False)
    for key, value in rows.items():
        shown = f"{value:g}" if isinstance(value, float) else ", ".join(map(str, value)) if isinstance(value, list) \
            else str(value)
        table.add_row(key, _plain(shown))
    _console().print(table)


def _console() -> Console:
    # Written to a file or a pipe, a table must not be cut to a guessed width.
    return Console(width=None if sys.stdout.isatty() else 140)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
