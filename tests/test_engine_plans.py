"""Schedules and modules of somebody else, and how a script gets the engine."""

import pytest
import suite
from deepspeed.pipe import LayerSpec
from engine_cases import SCHEDULES
from models import Block
from torch import nn

import ds_pipe_ext


@pytest.mark.parametrize("world", [2, 4])
def test_any_valid_order_gives_the_gradients_of_one_process(world):
    for rank, found in enumerate(suite.result(world, "others_schedules")):
        assert len(found) == 2 * 4 * 2 * 2 + 1
        for case, loss, weights in found:
            # fp64; W's in any order are another order of sums.
            assert loss < 1e-6, (rank, case)
            assert weights < 1e-12, (rank, case)


def test_one_stage():
    for schedule, errors in suite.result(1, "one_rank")[0]:
        assert max(errors) < 1e-6, (schedule, errors)


def test_install_and_uninstall():
    for rank, found in enumerate(suite.result(2, "installed")):
        stock = found["before"]
        assert stock[:3] == ("PipelineEngine", True, True)
        for name in ("before, with a schedule", "installed, no schedule", "after"):
            assert found[name] == stock, (rank, name)
        for schedule in SCHEDULES:
            assert found["installed", schedule] == ("PlanEngine", True, True, stock[3]), (rank, schedule)
        assert found["restored"] and not found["a module"]


def test_upstreams_module_is_accepted():
    for found, errors in suite.result(2, "stock_module"):
        kinds = [kind for kind, _ in found.values()]
        assert kinds == ["PipelineEngine", "PlanEngine", "PlanEngine", "PlanEngine"]
        assert len({tuple(losses) for _, losses in found.values()}) == 1
        assert "already split as [0, 2, 4]" in errors[0]
        assert "pipeline.stages is 1" in errors[1]
        assert "zb-h9" in errors[2] and "zb-h2" in errors[2]
        assert "pipeline.loss_chunk_tokens is 8, but the module was built without it" in errors[3]


def _specs():
    return [LayerSpec(Block, i) for i in range(4)]


@pytest.mark.parametrize("section,arguments,words", [
    ({"schedule": "zb-h1", "stages": 4}, {"num_stages": 2}, "pipeline.stages is 4, but the script gave num_stages=2"),
    ({"schedule": "zb-h1", "stages": 3}, {}, "does not divide the 4 ranks"),
    ({"schedule": "zb-h1", "partition": [0, 1, 4]}, {"num_stages": 2, "partition_method": "uniform"}, "give one of them"),
    ({"schedule": "zb-h1", "partition": [0, 4, 1]}, {"num_stages": 2}, "not above 4"),
    ({"schedule": "zb-h9"}, {}, "zb-h9"),
    ({"schedule": "zb-h1", "shedule": 1}, {}, "shedule"),
])
def test_configuration_errors_come_before_any_process_group(monkeypatch, section, arguments, words):
    monkeypatch.setenv("WORLD_SIZE", "4")

    def never(*args, **kwargs):
        raise AssertionError("a process group was about to be built")

    monkeypatch.setattr("deepspeed.comm.init_distributed", never)
    monkeypatch.setattr("torch.distributed.new_group", never)
    with pytest.raises(ValueError) as error:
        ds_pipe_ext.PipelineModule(_specs(), loss_fn=nn.MSELoss(), config={"pipeline": section}, **arguments)
    assert words in str(error.value)


@pytest.mark.parametrize("model,section,words", [
    (nn.Linear(2, 2), {"schedule": "zb-h1"}, "needs a ds_pipe_ext.PipelineModule"),
    (None, {"schedule": "zb-h1"}, "NoneType"),
    (nn.Linear(2, 2), {"schedule": {"name": "zb-h1", "warm": 3}}, "warm"),
    (nn.Linear(2, 2), {"schedule": "1f1b", "p2p_groups": 3}, "p2p_groups"),
])
def test_initialize_refuses_before_any_process_group(monkeypatch, model, section, words):
    def never(*args, **kwargs):
        raise AssertionError("a process group was about to be built")

    monkeypatch.setattr("deepspeed.comm.init_distributed", never)
    with pytest.raises(ValueError) as error:
        ds_pipe_ext.initialize(model=model, config={"train_batch_size": 4, "pipeline": section})
    assert words in str(error.value)
