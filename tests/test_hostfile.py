"""Two hosts of a hostfile, both of them this machine: the launcher's own way without ssh, one command a host."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from models import Reference, batch

HERE = Path(__file__).parent
HOSTS = ("host-a", "host-b")


def launch(folder, script, *arguments):
    """Starts the command of every host; returns (exit code, output) of each."""
    hostfile, port = folder / "hostfile", ranks.free_port()
    hostfile.write_text("".join(f"{host} slots=2\n" for host in HOSTS))
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    commands = [[str(Path(sys.executable).with_name("deepspeed")), "--hostfile", str(hostfile), "--no_ssh", "--node_rank",
                 str(node), "--master_addr", "127.0.0.1", "--master_port", str(port), str(HERE / script), *arguments]
                for node in range(len(HOSTS))]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for command in commands]
    outputs = []
    try:
        for process in running:
            output, _ = process.communicate(timeout=200)
            outputs.append((process.returncode, output))
    finally:
        for process in running:
            process.kill()
    return outputs


@pytest.mark.slow
def test_a_pipeline_over_two_hosts(tmp_path):
    found = {}
    for code, output in launch(tmp_path, "host_script.py"):
        assert code == 0, output
        found.update({int(rank): json.loads(losses) for rank, losses in re.findall(r"LOSSES (\d) (\[.*?\])", output)})
    reference = Reference("tied", 6, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    expected = [reference.step([batch("tied", 4 * step + i) for i in range(4)]) for step in range(3)]
    assert sorted(found) == [0, 1, 2, 3]
    for losses in found.values():
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_failure_on_one_host_ends_the_other(tmp_path, rank):
    outputs = launch(tmp_path, "fault_cases.py", "train", "backward", str(rank), "1", "raise")
    assert all(code != 0 for code, _ in outputs), outputs
    assert all("boom on purpose" in output for _, output in outputs), outputs
