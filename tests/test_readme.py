"""What the README states about keys, schedules and commands is what the code has."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_pipe_ext.cli import main
from ds_pipe_ext.config import PipeConfig, read_config
from ds_pipe_ext.registry import schedules
from ds_pipe_ext.testing import check_schedule

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> set[str]:
    return {name for line in text.splitlines() if line.startswith("| `") for name in re.findall(r"`(.+?)`", line.split("|")[1])}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_tables_are_complete():
    assert first_column(section("The `pipeline` section")) == set(PipeConfig.model_fields)
    assert first_column(section("Schedules")) == set(schedules.names())


def test_the_drawing_is_what_the_command_prints(capsys):
    drawing = README.split("$ ds-pipe show zb-h1 --ranks 2 --microbatches 4\n")[1].split("```")[0]
    assert main("show zb-h1 --ranks 2 --microbatches 4".split()) == 0
    assert capsys.readouterr().out == drawing


@pytest.mark.parametrize("name,share", [("gpipe", 27.3), ("1f1b", 27.3), ("zb-h1", 11.1), ("zb-h2", 11.1)])
def test_idle_shares(name, share, capsys):
    assert main(f"simulate {name} --ranks 4 --microbatches 8 --json".split()) == 0
    assert round(100 * json.loads(capsys.readouterr().out)["bubble_ratio"], 1) == share
    assert f"{share} %" in section("Schedules")


def test_the_schedule_of_ones_own_passes_the_contract():
    (code, ) = [block for block in blocks("python") if "one-at-a-time" in block]
    exec(compile(code, "README", "exec"), {})
    try:
        check_schedule("one-at-a-time", options={"together": 2})
        chosen = re.search(r'`("schedule": \{.*?\})`', README).group(1)
        config = read_config({"pipeline": json.loads(f"{{{chosen}}}")})
        assert config.plan(2, 4).name == "one-at-a-time"
    finally:
        schedules.unregister("one-at-a-time")


def test_commands_are_known():
    for command in re.findall(r"^ds-pipe (\w+)", "\n".join(blocks("")), re.MULTILINE):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.name)
def test_configurations_pass_the_check(path):
    assert main(["check", str(path), "--ranks", "2"]) == 0
    done = subprocess.run([sys.executable, "-m", "ds_pipe_ext.cli", "check", path.name, "--ranks", "3"], cwd=path.parent,
                          env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)
    # Two stages are written in `partition`.
    assert done.returncode == 1 and "pipeline.partition" in done.stderr


@pytest.mark.parametrize("document,least", [("cases.md", 30), ("optimizers.md", 20)])
def test_tests_named_by_the_documents_exist(document, least):
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", (ROOT / "docs" / document).read_text(encoding="utf-8"))
    assert len(named) > least
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, name)
