"""Things beside a run that must neither stop it nor hang it."""

import os
import resource
import threading
import time

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


class _Looked:
    """Stands for a monitor; counts how often the watcher looked."""

    looks = 0

    def look(self, interrupted_at):
        self.looks += 1


def test_an_engine_that_is_collected_while_another_is_made_does_not_block(monkeypatch):
    """The collection may come anywhere, so also where the watching thread is started."""
    from ds_pipe_ext.runtime.watcher import Watcher

    watcher, old, new, start = Watcher(), _Looked(), _Looked(), threading.Thread.start

    def collecting(thread):
        watcher.remove(old)
        start(thread)

    done = threading.Thread(target=lambda: (monkeypatch.setattr(threading.Thread, "start", collecting), watcher.add(new)),
                            daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()
    monkeypatch.undo()
    watcher.remove(new)


def test_watching_goes_on_with_more_than_1024_descriptors(monkeypatch):
    from ds_pipe_ext.runtime import watcher as watching

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2000, hard)), hard))
    monkeypatch.setattr(watching, "POLL_S", 0.01)
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    watcher, monitor = watching.Watcher(), _Looked()
    try:
        watcher.add(monitor)
        deadline = time.monotonic() + 10
        while monitor.looks < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert monitor.looks >= 3
    finally:
        watcher.remove(monitor)
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
