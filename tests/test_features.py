"""`docs/features.md` against the code: every refused key is refused, by the command too, and every supported one has its test."""

import json
import re
from pathlib import Path

import pytest
import suite

from ds_pipe_ext.cli import main
from ds_pipe_ext.features import check_features

ROOT = Path(__file__).resolve().parents[1]
ON = {"enabled": True}
REFUSED = {
    "nebula": ON, "compression_training": {}, "quantize_training": ON, "eigenvalue": ON,
    "sparse_attention": {"mode": "fixed"}, "elasticity": {"enabled": False}, "graph_harvesting": True,
    "curriculum_learning": ON, "progressive_layer_drop": ON, "autotuning.enabled": True, "hybrid_engine.enabled": True,
    "data_efficiency.data_routing.random_ltd.enabled": True,
    "data_efficiency.data_sampling.curriculum_learning.enabled": True, "tensor_parallel.autotp_size": 2,
    "expert_parallel.enabled": True, "sequence_parallel_size": 2, "compile.deepcompile": True,
}


def configuration(path: str, value) -> dict:
    for key in reversed(path.split(".")):
        value = {key: value}
    return {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "pipeline": {"schedule": "zb-h1"}, **value}


def rows() -> list[list[str]]:
    text = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_work_is_refused(path, tmp_path, capsys):
    config = configuration(path, REFUSED[path])
    with pytest.raises(ValueError, match=f"^{re.escape(path)} is {re.escape(repr(REFUSED[path]))}: .*(remove|set it to|use )"):
        check_features(config)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    assert main(["check", str(file), "--ranks", "2"]) == 1
    assert f"error: {path} is" in capsys.readouterr().err
    # Without a schedule the run is DeepSpeed's own.
    file.write_text(json.dumps(config | {"pipeline": {}}))
    assert main(["check", str(file), "--ranks", "2"]) == 0


@pytest.mark.parametrize("path", [path for path, value in REFUSED.items() if path.endswith("enabled") or value == 2])
def test_what_is_switched_off_is_not_refused(path):
    check_features(configuration(path, False if REFUSED[path] is True else 1))


def test_the_table_is_what_the_code_does():
    table = rows()
    refused = {name for first, state, *_ in table if state == "refused" for name in re.findall(r"`(.+?)`", first)}
    assert refused == set(REFUSED)
    for first, state, where in table:
        assert state in ("supported", "refused"), first
        named = re.findall(r"`(test_\w+\.py)::(\w+)`", where)
        assert named or state == "refused", first
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (first, name)


def test_supported_features_change_no_loss_and_do_their_work():
    for rank, found in enumerate(suite.result(2, "features")):
        expected, *_ = found.pop("plain")
        for name, (losses, output, worked) in found.items():
            assert losses == expected, (rank, name)
            assert worked, (rank, name, output[-2000:])


def test_compilation_is_refused():
    assert "engine.compile() is not supported with a pipeline.schedule" in suite.result(1, "compilation")[0]
