"""What ``ds-pipe doctor`` looks at. torch and deepspeed are only asked in a process of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import Requirement

PACKAGE = "ds-pipe-ext"
#: requirements to report, and whether a run works without them.
_LOOKED_AT = {"torch": False, "deepspeed": False, "transformers": True, "triton": True, "wandb": True}
_STALE_SECONDS = 60
_COMPILERS = ("ninja", "cc1plus", "c++", "g++", "gcc", "clang", "clang++", "nvcc", "cicc", "ptxas", "hipcc", "icpx")
_PORT = 29500
_PROBE = """
import json
from deepspeed.accelerator import get_accelerator
a = get_accelerator()
print(json.dumps({"name": a.device_name(), "count": a.device_count(), "backend": a.communication_backend_name()}))
"""


class Finding(NamedTuple):
    """One thing looked at: ``level`` is ok, warning or error; ``advice`` is empty if there is nothing to do."""

    level: str
    what: str
    found: str
    advice: str = ""


def examine(ranks: int) -> list[Finding]:
    """Everything, for a run of ``ranks`` processes on this machine."""
    return [*versions(), accelerator(), *build_locks(), cores(ranks), port()]


def requirements() -> dict[str, Requirement]:
    """Supported ranges by package, from the installed metadata or, in a source checkout, pyproject.toml."""
    try:
        lines = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        path = Path(__file__).parent.parent / "pyproject.toml"
        if not path.is_file():
            return {}
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def versions() -> list[Finding]:
    """Installed versions against the supported ranges."""
    ranges = requirements()
    result = []
    for name, optional in _LOOKED_AT.items():
        wanted = str(ranges[name].specifier) if name in ranges else ""
        install = f'pip install "{name}{wanted}"'
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            result.append(Finding("ok", name, "not installed (optional)") if optional else
                          Finding("error", name, "not installed", install))
            continue
        if wanted and not ranges[name].specifier.contains(found, prereleases=True):
            result.append(Finding("warning" if optional else "error", name, f"{found}, supported: {wanted}", install))
        else:
            result.append(Finding("ok", name, f"{found} (supported: {wanted or 'any'})"))
    return result


def accelerator(timeout: float = 120.0) -> Finding:
    """Which accelerator and communication backend DeepSpeed finds; seconds to wait for the answer."""
    try:
        answer = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Finding("error", "accelerator", f"no answer in {timeout:g} s",
                       "see whether `python -c 'import deepspeed'` returns")
    lines = answer.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding("error", "accelerator", last, "see what `python -c 'import deepspeed'` says")
    return Finding("ok", "accelerator", f"{found['count']} x {found['name']}, backend {found['backend']}")


def build_locks() -> list[Finding]:
    """Lock files that a killed build of a C++ operator left behind: every later run waits for them without a word."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    stale = []
    for lock in sorted(root.rglob("lock")):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            continue
        if age > _STALE_SECONDS:
            stale.append((lock, age))
    if not stale:
        return [Finding("ok", "build locks", f"none older than {_STALE_SECONDS} s in {root}")]
    compiler = _live_compiler()
    if compiler:
        return [Finding("ok", "build lock", f"{lock}, {age / 60:.0f} min old; {compiler} is running") for lock, age in stale]
    return [Finding("error", "build lock", f"{lock}, {age / 60:.0f} min old and no compiler runs: runs that need this "
                    "operator wait for ever", f"rm '{lock}'") for lock, age in stale]


def _live_compiler() -> str | None:
    for process in psutil.process_iter(["name"]):
        if process.info["name"] in _COMPILERS:
            return process.info["name"]
    return None


def cores(ranks: int) -> Finding:
    """Cores against processes x threads."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(setting) if setting.isdigit() and int(setting) else available
    shown = f"OMP_NUM_THREADS={setting}" if setting else f"OMP_NUM_THREADS not set, so {threads} threads each"
    found = f"{available} cores, {ranks} ranks, {shown}"
    if ranks * threads > available and ranks > 1:
        return Finding("warning", "cores", found, f"export OMP_NUM_THREADS={available // ranks}" if ranks <= available else
                       "more ranks than cores: they take turns, so times say nothing; use fewer ranks for speed, and "
                       "export OMP_NUM_THREADS=1")
    return Finding("ok", "cores", found)


def port() -> Finding:
    """Is DeepSpeed's default port free?"""
    with socket.socket() as probe:
        try:
            probe.bind(("", _PORT))
            return Finding("ok", "port", f"{_PORT} is free")
        except OSError:
            pass
    with socket.socket() as probe:
        probe.bind(("", 0))
        return Finding("warning", "port", f"{_PORT} is taken", f"deepspeed --master_port {probe.getsockname()[1]} ...")
