"""Features of the DeepSpeed JSON in a pipeline: losses as without them, and what they write."""

from __future__ import annotations

import contextlib
import gc
import io
import tempfile
import time
from pathlib import Path

from deepspeed import comm
from engine_cases import engine
from models import batch
from suite import case


def _throughput(output, seconds):
    """Whether the printed samples per second agree with the clock around train_batch, to a tenth."""
    told = [float(line.rsplit("samples/sec: ", 1)[1]) for line in output.splitlines() if "samples/sec: " in line]
    return len(told) == len(seconds) and all(abs(rate * s / 6 - 1) < 0.1 for rate, s in zip(told[1:], seconds[1:]))


FEATURES = {
    "plain": ({}, lambda output, folder, seconds: True),
    "steps_per_print": ({"steps_per_print": 1}, lambda output, folder, seconds: _throughput(output, seconds)),
    "wall_clock_breakdown": ({"wall_clock_breakdown": True, "steps_per_print": 3},
                             lambda output, folder, seconds: "step_microstep: " in output),
    "breakdown, steps_per_print unset": ({"wall_clock_breakdown": True, "steps_per_print": None},
                                         lambda output, folder, seconds: "steps: " not in output),
    "flops_profiler": ({"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": "flops.txt"}},
                       lambda output, folder, seconds: "fwd flops per GPU" in (folder / "flops.txt").read_text()),
    "dump_state, memory_breakdown": ({"dump_state": True, "memory_breakdown": True},
                                     lambda output, folder, seconds: True),
    "comms_logger": ({"comms_logger": {"enabled": True, "verbose": False, "prof_all": True}},
                     lambda output, folder, seconds: bool(comm.comm.comms_logger.comms_dict)),
    "disable_python_gc": ({"disable_python_gc": True}, lambda output, folder, seconds: not gc.isenabled()),
}


@case(2)
def features(rank, world):
    """name -> (losses, what was printed, whether the feature did its work)."""
    found = {}
    for name, (config, worked) in FEATURES.items():
        with tempfile.TemporaryDirectory() as folder:
            config = {key: {**value, "output_file": f"{folder}/{value['output_file']}"} if "output_file" in (
                value if isinstance(value, dict) else {}) else value for key, value in config.items()}
            printed, seconds, losses = io.StringIO(), [], []
            with contextlib.redirect_stdout(printed):
                made = engine("mlp", 4, world, "zb-h1", 3, **config)
                for step in range(3):
                    started = time.perf_counter()
                    losses.append(made.train_batch(batch("mlp", 3 * step + i) for i in range(3)).item())
                    seconds.append(time.perf_counter() - started)
                # Rank 0 prints and writes.
                found[name] = losses, printed.getvalue(), bool(rank) or worked(printed.getvalue(), Path(folder), seconds)
            made.destroy()
            comm.comm.comms_logger.enabled = False
            gc.enable()
    return found


@case(1)
def compilation(rank, world):
    """The error of engine.compile()."""
    made = engine("mlp", 2, world, "zb-h1", 1)
    try:
        made.compile()
    except ValueError as error:
        return str(error)
    finally:
        made.destroy()
    return ""
