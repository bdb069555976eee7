"""What must not stop or hang a run for want of something beside it: a tracker, a clean build folder."""

from __future__ import annotations

from importlib.util import find_spec

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
