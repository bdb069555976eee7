"""What must not stop or hang a run for want of something beside it: a tracker, a clean build folder."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from .. import doctor


def drop_missing_tracker(monitor_config) -> None:
    """Switches W&B off in DeepSpeed's monitor configuration if the package is missing; upstream ends the run instead."""
    if monitor_config.wandb.enabled and find_spec("wandb") is None:
        logger.warning("wandb.enabled is true in the configuration, but the package wandb is not installed: training goes "
                       "on without it; pip install wandb")
        monitor_config.wandb.enabled = False
        monitor_config.check_enabled()


def check_build_locks() -> None:
    """Raises RuntimeError if starting communication would wait for ever for the lock of a build that was killed.

    DeepSpeed compiles its shared-memory operator when a process group is made on CPUs.
    """
    for finding in doctor.build_locks():
        if finding.level != "error":
            continue
        message = f"{finding.what}: {finding.found}; {finding.advice}"
        if get_accelerator().device_name() == "cpu" and "deepspeed_shm_comm" in finding.found:
            raise RuntimeError(message)
        logger.warning(message)


def release_shared_memory() -> None:
    """Unlinks this rank's segment of DeepSpeed's shared-memory all-reduce, which upstream leaves behind: 69 MB a rank and run.

    To be called when every rank has opened all segments; what is mapped stays usable.
    """
    address = f"{os.environ.get('MASTER_ADDR')}_{os.environ.get('MASTER_PORT')}"
    segment = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{os.environ.get('RANK')}")
    segment.unlink(missing_ok=True)
