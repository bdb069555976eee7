"""Data that ends, loaders, and losses weighted by tokens."""

import cases_data
import pytest
import suite
import torch
from engine_cases import SCHEDULES


def same(one, other):
    """Losses and weights are equal in every bit."""
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("world", [2, 3])
def test_data_that_ends_is_the_same_signal_on_every_rank(world):
    for rank, found in enumerate(suite.result(world, "data_ends")):
        assert len(found) == 4 * len(cases_data.ENDS) * (2 if world == 2 else 1)
        for case, (message, evaluated, loss_error, weight_error, changed, steps) in found.items():
            short = 4 - min(cases_data.ENDS[case[-1]])
            expected = f"the data ended {short} micro-batch{'es' * (short > 1)} short of the 4 of this call"
            assert message.startswith(expected), (rank, case, message)
            assert evaluated.startswith("the data ended "), (rank, case, evaluated)
            assert loss_error < 1e-12 and weight_error < 1e-12, (rank, case, loss_error, weight_error)
            assert changed == [] and steps == 1, (rank, case)


def test_data_that_ends_on_one_replica_ends_on_all():
    for found in suite.result(4, "data_ends_on_one_replica"):
        for schedule, (message, plain, interrupted) in found.items():
            assert message.startswith("the data ended 1 micro-batch short of the 2"), schedule
            assert same(plain, interrupted), schedule


def test_a_dropped_step_leaves_nothing_in_any_optimizer():
    for found in suite.result(2, "data_ends_under_every_optimizer"):
        for name, (messages, plain, interrupted) in found.items():
            assert len(messages) == 2 and all("1 micro-batch short of the 3" in m for m in messages), name
            assert same(plain, interrupted), name


def test_loaders_are_read_on_and_begin_anew():
    for rank, (by_loader, by_iterator) in enumerate(suite.result(2, "loaders_of_the_user")):
        assert by_loader[0] == by_iterator[0], rank
        assert by_loader[1] == by_iterator[1] and "did not end" not in str(by_loader[1]), rank
        assert by_loader[2:4] == (2, 2), rank
        assert "the data is a list" in by_loader[4] and "iter(the_list)" in by_loader[4]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_token_weights_equal_one_loss_over_all_tokens(world):
    """Micro-batches without targets and steps without any included: no NaN. Replicas (4 ranks) train in fp32, which has 1e-7
    of values and steps of up to 5."""
    for rank, found in enumerate(suite.result(world, "token_weights")):
        assert set(found) == set(SCHEDULES)
        for schedule, (errors, evaluations) in found.items():
            # Upstream's broadcast of an evaluation's loss is in fp32.
            assert max(evaluations) < 1e-6, (rank, schedule, evaluations)
            assert max(errors) < (5e-6 if world == 4 else 1e-12), (rank, schedule, errors)


def test_both_weightings_of_a_known_sum():
    for found in suite.result(2, "token_weights_of_a_known_sum"):
        assert found == pytest.approx([4.4, 3.5], abs=1e-6)


def test_labels_that_cannot_be_counted_are_named():
    assert "pipeline.loss_weighting is \"token\", but the labels are float32" in suite.result(2, "token_weights_refused")[1]
