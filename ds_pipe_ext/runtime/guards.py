"""What must not stop or hang a run for want of something beside it: a tracker, a clean build folder."""

from __future__ import annotations

import contextlib
import os
from importlib.util import find_spec

import torch.distributed as dist
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


def unlink_shared_buffers() -> None:
    """Removes the name of this rank's shared-memory buffer, so that the memory goes when the run ends, however it ends.

    On CPUs DeepSpeed maps 66 MiB a rank under a name made of the master port and removes it never: a machine that starts
    many runs fills up. Collective over all ranks; every rank has mapped all buffers once the process group is there.
    """
    if get_accelerator().device_name() != "cpu" or not dist.is_initialized():
        return
    dist.barrier()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.get_rank()}"
    with contextlib.suppress(OSError):
        os.unlink(f"/dev/shm/{name}")
