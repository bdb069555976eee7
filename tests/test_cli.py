"""The commands: what they print, what they return, and that a wrong question gets one clear line."""

import json
import os
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ds_pipe_ext import doctor
from ds_pipe_ext.cli import count_microbatches, main
from ds_pipe_ext.plan import Plan, parse_csv
from ds_pipe_ext.registry import schedules
from ds_pipe_ext.schedules import Shape, build

ROOT = Path(__file__).parent.parent
SHAPE = ["--ranks", "2", "--microbatches", "4"]


@pytest.fixture
def broken():
    def stuck(shape):
        plan = build("1f1b", shape)
        return Plan("stuck", tuple(line[::-1] for line in plan.ranks), plan.placement, plan.microbatches)

    schedules.register("stuck", stuck)
    yield
    schedules.unregister("stuck")


@pytest.fixture
def configuration(tmp_path):
    def write(pipeline=None, **rest):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "pipeline": pipeline or {}} | rest))
        return str(path)

    return write


def test_show_text(capsys):
    assert main(["show", "zb-h1", *SHAPE]) == 0
    assert capsys.readouterr().out == ("rank 0 | F0 F1 .. I0 W0 F2 I1 W1 F3 I2 W2 I3 W3\n"
                                       "rank 1 | .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3\n")


def test_show_csv_reads_back(capsys):
    assert main(["show", "zb-h2", "--ranks", "3", "--microbatches", "5", "--format", "csv"]) == 0
    assert parse_csv(capsys.readouterr().out, "zb-h2") == build("zb-h2", Shape(3, 5))


def test_show_svg_to_a_file(tmp_path, capsys):
    path = tmp_path / "plan.svg"
    assert main(["show", "1f1b", *SHAPE, "--format", "svg", "-o", str(path), "--costs", "1,2,0.5", "--comm", "0.25"]) == 0
    assert ElementTree.parse(path).getroot().tag.endswith("svg") and capsys.readouterr().out == ""


def test_simulate_json(capsys):
    assert main(["simulate", "zb-h1", "--ranks", "4", "--microbatches", "8", "--costs", "1,1,1", "--comm", "0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is True and result["bubble_ratio"] == pytest.approx(1 / 9)
    assert {key: result[key] for key in ("schedule", "ranks", "stages", "microbatches", "makespan", "bubble", "stall", "in_flight",
                                         "held", "pending_weight_grads", "costs", "comm", "options")} == {
        "schedule": "zb-h1", "ranks": 4, "stages": 4, "microbatches": 8, "makespan": 27, "bubble": 3, "stall": 3,
        "in_flight": [4, 3, 2, 1], "held": [4, 4, 4, 4], "pending_weight_grads": [1, 2, 3, 4], "costs": [1, 1, 1], "comm": 0,
        "options": {}}


def test_costs_and_comm_count(capsys):
    times = []
    for extra in ([], ["--comm", "0.5"], ["--costs", "2,2,2"]):
        main(["simulate", "1f1b", *SHAPE, "--json", *extra])
        times.append(json.loads(capsys.readouterr().out)["makespan"])
    assert times[0] == 15 and times[1] > 15 and times[2] == 30


def test_simulate_table(capsys):
    assert main(["simulate", "zb-h1", *SHAPE]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("makespan", "13", "bubble_ratio", "pending_weight_grads", "1, 2"))


def test_a_plan_that_cannot_run(broken, capsys):
    assert main(["simulate", "stuck", *SHAPE, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is False and "deadlock" in result["error"] and result["schedule"] == "stuck"
    assert main(["simulate", "stuck", *SHAPE]) == 1
    assert "deadlock" in capsys.readouterr().out
    assert main(["show", "stuck", *SHAPE]) == 1
    assert "cannot run" in capsys.readouterr().err


def test_options_reach_the_schedule(capsys):
    seen = []

    def noting(shape, depth=1, mode="a", flags=()):
        seen.append((depth, mode, flags))
        return schedules.get("gpipe")(shape)

    schedules.register("noting", noting)
    try:
        assert main(["show", "noting", *SHAPE, "--option", "depth=3", "--option", "mode=b=c", "--option", "flags=[1,2]"]) == 0
        assert seen == [(3, "b=c", [1, 2])]
        assert main(["show", "noting", *SHAPE, "--option", "dept=3"]) == 2
        assert "did you mean 'depth'?" in capsys.readouterr().err
    finally:
        schedules.unregister("noting")


@pytest.mark.parametrize("argv, message", [
    (["show", "zb-h3", *SHAPE], "unknown schedule 'zb-h3' (did you mean 'zb-h2'?); known: 1f1b"),
    (["show", "gpipe", "--ranks", "0", "--microbatches", "4"], "--ranks and --microbatches must be at least 1, got 0 and 4"),
    (["simulate", "gpipe", *SHAPE, "--costs", "1,2"], "--costs '1,2': expected three finite numbers F,I,W"),
    (["simulate", "gpipe", *SHAPE, "--costs", "1,x,2"], "--costs '1,x,2'"),
    (["simulate", "gpipe", *SHAPE, "--costs=-1,1,1"], "none negative"), (["simulate", "gpipe", *SHAPE, "--costs", "1,1,nan"], "finite"),
    (["simulate", "gpipe", *SHAPE, "--comm", "-1"], "--comm must be finite and not negative"),
    (["simulate", "gpipe", *SHAPE, "--comm", "inf"], "--comm must be finite"),
    (["show", "gpipe", *SHAPE, "--option", "x"], "--option 'x': expected key=value"),
    (["show", "gpipe", *SHAPE, "--option", "x=1"], "has no option 'x'; it takes no options"),
    (["show", "gpipe", *SHAPE, "-o", "/no/such/folder/x"], "No such file"),
    (["check", "/no/such/file.json", "--ranks", "2"], "there is no configuration file /no/such/file.json"),
    (["doctor", "--ranks", "0"], "--ranks must be at least 1"),
])
def test_wrong_questions(argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"ds-pipe {argv[0]}: error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["shwo"], ["show", "gpipe"], ["show", "gpipe", "--ranks", "a", "--microbatches", "1"]])
def test_arguments_that_do_not_parse(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_check_of_a_sound_configuration(configuration, capsys):
    path = configuration({"schedule": "zb-h1", "stages": 2, "partition": [0, 3, 8]}, zero_optimization={"stage": 1})
    assert main(["check", path, "--ranks", "4"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("zb-h1", "pipeline ranks", "data-parallel replicas", "boundaries at=[0, 3, 8]", "7.7%"))
    assert main(["check", configuration({"stages": 2}), "--ranks", "2"]) == 0
    assert "DeepSpeed's own engine runs" in capsys.readouterr().out


@pytest.mark.parametrize("pipeline, rest, message", [
    ({"schedule": "zb-h3"}, {}, "pipeline.schedule: unknown schedule 'zb-h3'"),
    ({"schedule": "zb-h1", "stages": 3}, {}, "pipeline.stages is 3, which does not divide the 4 ranks"),
    ({"schedule": "zb-h1", "partition": [0, 1, 2]}, {}, "write 5 boundaries"),
    ({"schedule": "zb-h1"}, {"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2"),
    ({"schedule": "zb-h1"}, {"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3"),
    ({"schedule": "zb-h1"}, {"gradient_accumulation_steps": 3}, "train_batch_size 8 is not"),
    ({"shedule": "zb-h1"}, {}, "pipeline.shedule: unknown key (did you mean 'schedule'?)"),
])
def test_check_of_an_unsound_configuration(configuration, capsys, pipeline, rest, message):
    assert main(["check", configuration(pipeline, **rest), "--ranks", "4"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and message in err and "Traceback" not in err


def test_check_knows_num_stages(configuration, capsys):
    assert main(["check", configuration({"schedule": "1f1b", "stages": 2}), "--ranks", "4", "--stages", "4"]) == 1
    assert "num_stages=4" in capsys.readouterr().err


@pytest.mark.parametrize("total, micro, steps, replicas, expected", [
    (8, 1, None, 2, 4), (8, 2, 2, 2, 2), (None, 1, 6, 2, 6), (8, None, 4, 2, 4), (8, None, None, 2, 1), (None, 4, None, 2, 1),
    (None, None, 5, 1, 5), ("auto", "auto", 3, 2, 3), (8, 1, "auto", 2, 4)])
def test_batch_arithmetic(total, micro, steps, replicas, expected):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert count_microbatches(dict(zip(keys, (total, micro, steps))), replicas) == expected


@pytest.mark.parametrize("source, message", [
    ({}, "not determined"), ({"train_batch_size": "auto"}, "not determined"),
    ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "7 is not a multiple of train_micro_batch_size_per_gpu 2 x 2"),
    ({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 2}, "is not a multiple"),
    ({"train_batch_size": 6, "gradient_accumulation_steps": 4}, "6 is not a multiple of gradient_accumulation_steps 4 x 2"),
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}, "8 is not .* = 6"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"), ({"gradient_accumulation_steps": True}, "is True"),
    ({"train_batch_size": "8"}, "train_batch_size is '8'"),
])
def test_batch_arithmetic_that_fails(source, message):
    with pytest.raises(ValueError, match=message):
        count_microbatches(source, 2)


def findings(*what):
    return [finding for finding in what if finding.level != "ok"]


def test_supported_versions_come_from_the_package(monkeypatch):
    assert str(doctor.requirements()["deepspeed"].specifier) == "<0.20,>=0.19.8"
    assert {"torch", "transformers", "wandb"} <= set(doctor.requirements())
    found = {"torch": "2.13.0+cpu", "deepspeed": "0.18.0", "transformers": "4.50.0"}

    def version(name):
        try:
            return found[name]
        except KeyError:
            raise doctor.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(doctor.metadata, "version", version)
    levels = {finding.what: finding.level for finding in doctor.versions()}
    assert levels == {"torch": "ok", "deepspeed": "error", "transformers": "warning", "triton": "ok", "wandb": "ok"}
    assert any('pip install "deepspeed<0.20,>=0.19.8"' == finding.advice for finding in doctor.versions())
    found.clear()
    assert {f.what for f in doctor.versions() if f.level == "error"} == {"torch", "deepspeed"}


def test_stale_build_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))
    assert not findings(*doctor.build_locks())
    lock = tmp_path / "ext" / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setattr(doctor, "_live_compiler", lambda: None)
    assert not findings(*doctor.build_locks()), "a build may just have begun"
    os.utime(lock, (time.time() - 600, ) * 2)
    finding, = findings(*doctor.build_locks())
    assert finding.level == "error" and str(lock) in finding.found and finding.advice == f"rm '{lock}'"
    monkeypatch.setattr(doctor, "_live_compiler", lambda: "ninja")
    assert not findings(*doctor.build_locks())
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(doctor.Path, "home", lambda: tmp_path)
    other = tmp_path / ".cache" / "torch_extensions" / "py311_cpu" / "op" / "lock"
    other.parent.mkdir(parents=True)
    other.touch()
    os.utime(other, (0, 0))
    monkeypatch.setattr(doctor, "_live_compiler", lambda: None)
    assert [finding.advice for finding in doctor.build_locks()] == [f"rm '{other}'"]


def test_a_running_compiler_is_seen(tmp_path):
    fake = tmp_path / "ninja"
    fake.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(fake), "30"])
    try:
        assert doctor._live_compiler() is not None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("available, ranks, threads, level", [
    (8, 4, "2", "ok"), (8, 4, "4", "warning"), (8, 4, None, "warning"), (8, 1, None, "ok"), (2, 4, "1", "warning")])
def test_cores(monkeypatch, available, ranks, threads, level):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(available)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    finding = doctor.cores(ranks)
    assert finding.level == level and (level == "ok" or "export OMP_NUM_THREADS=" in finding.advice)


def test_port_in_use(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(doctor, "_PORT", taken.getsockname()[1])
        finding = doctor.port()
    assert finding.level == "warning" and "--master_port" in finding.advice


def test_doctor_says_what_to_do_and_fails_on_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "accelerator", lambda: doctor.Finding("ok", "accelerator", "1 x cpu, backend gloo"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(doctor, "versions", lambda: [])
    assert main(["doctor"]) == 0
    assert "1 x cpu" in capsys.readouterr().out
    lock = tmp_path / ("a-long-folder-name" * 6) / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))
    monkeypatch.setattr(doctor, "_live_compiler", lambda: None)
    assert main(["doctor"]) == 1
    assert f"rm '{lock}'" in capsys.readouterr().out


def test_accelerator_of_this_machine():
    pytest.importorskip("deepspeed")
    finding = doctor.accelerator()
    assert finding.level == "ok" and "backend" in finding.found


def test_accelerator_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(doctor, "_PROBE", "import time; time.sleep(60)")
    assert "no answer" in doctor.accelerator(timeout=0.5).found
    monkeypatch.setattr(doctor, "_PROBE", "raise RuntimeError('no driver')")
    finding = doctor.accelerator()
    assert finding.level == "error" and "no driver" in finding.found


def test_as_a_program():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ds_pipe_ext.cli"]
    done = subprocess.run([*command, "simulate", "1f1b", *SHAPE, "--json"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["makespan"] == 15
    done = subprocess.run([*command, "show", "x", *SHAPE], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_what_cannot_be_converted_is_named(tmp_path, capsys):
    import torch

    def error(*arguments):
        assert main(["convert", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "there is no file" in error(tmp_path) and "give --tag" in error(tmp_path)
    assert f"there is no checkpoint {tmp_path}/step" in error(tmp_path, "--tag", "step")
    (tmp_path / "step").mkdir()
    (tmp_path / "latest").write_text("step")
    assert "--workers must be at least 1, got 0" in error(tmp_path, "--workers", 0)
    assert "no optimizer files of ZeRO" in error(tmp_path) and "any split as it is" in error(tmp_path)
    for state, found in (({0: {"momentum_buffer": torch.zeros(2)}}, "momentum_buffer"), ({}, "no state yet")):
        torch.save({"optimizer_state_dict": {"base_optimizer_state": {"state": state}}},
                   tmp_path / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        assert found in error(tmp_path) and "Adam's exp_avg" in error(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step"]
