"""The engine against upstream's (bit for bit) and against one process (float64)."""

import engine_cases
import pytest
import ranks
import torch


@pytest.mark.parametrize("world,m", [(2, 5), (4, 6)])
def test_losses_and_weights_equal_upstream_bit_for_bit(world, m):
    """W's of these schedules run in micro-batch order, so every sum has upstream's order: not a bit may differ.

    That holds for the tied model, too: each owner uses the shared weight once.
    """
    for rank, cases in enumerate(ranks.run(engine_cases.parity_with_stock, world, m)):
        for (kind, schedule), (engine, losses, state) in cases.items():
            expected_engine, expected, expected_state = cases[kind, None]
            assert expected_engine == "PipelineEngine"
            assert engine == ("PlanEngine" if schedule else "PipelineEngine")
            assert losses == expected, (rank, kind, schedule)
            for name, value in state.items():
                assert torch.equal(value, expected_state[name]), (rank, kind, schedule, name)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("schedule", engine_cases.SCHEDULES)
def test_losses_and_gradients_equal_one_process(world, schedule):
    """SGD with learning rate 1: an update is the gradient. float64 leaves 1e-12 for the order of sums."""
    for cases in ranks.run(engine_cases.parity_with_one_process, world, schedule):
        assert len(cases) == 4 * (3 * world + 1)
        for case, loss_error, weight_error in cases:
            assert loss_error < 1e-12, case
            assert weight_error < 1e-12, case
