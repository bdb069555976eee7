"""Things beside a run that must neither stop it nor hang it."""

import os

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.monitor.config import DeepSpeedMonitorConfig

import ds_pipe_ext
from ds_pipe_ext import doctor
from ds_pipe_ext.runtime import guards


@pytest.mark.parametrize("installed", [True, False])
def test_training_goes_on_without_the_tracker(installed, monkeypatch):
    monkeypatch.setattr(guards, "find_spec", lambda name: object() if installed else None)
    config = DeepSpeedMonitorConfig(wandb={"enabled": True})
    guards.drop_missing_tracker(config)
    assert config.wandb.enabled is installed and config.enabled is installed
    csv = DeepSpeedMonitorConfig(wandb={"enabled": True}, csv_monitor={"enabled": True})
    guards.drop_missing_tracker(csv)
    assert csv.enabled and csv.csv_monitor.enabled and csv.wandb.enabled is installed


@pytest.mark.skipif(get_accelerator().device_name() != "cpu", reason="only CPUs build the shared-memory operator")
@pytest.mark.parametrize("age,operator", [(3600, "deepspeed_shm_comm"), (0, "deepspeed_shm_comm"), (3600, "fused_adam")])
def test_a_stale_build_lock_is_told_before_anything_waits_for_it(age, operator, tmp_path, monkeypatch):
    """A build that was killed leaves its lock, and every later run waits for it without a word."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "_live_compiler", lambda: None)
    lock = tmp_path / operator / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (lock.stat().st_mtime - age, ) * 2)
    if not age or operator == "fused_adam":
        guards.check_build_locks()
        return
    with pytest.raises(RuntimeError, match=f"{lock}.*no compiler runs.*rm '{lock}'"):
        ds_pipe_ext.PipelineModule([torch.nn.Linear(2, 2)], num_stages=1)
    assert not torch.distributed.is_initialized()
