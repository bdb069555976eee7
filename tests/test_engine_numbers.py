"""Numbers that go wrong in silence: replicas, ties, frozen weights, the gradient norm, accumulation."""

import pytest
import suite
import torch
from engine_cases import SCHEDULES


def test_two_stages_times_two_replicas_equal_one_process():
    for found in suite.result(4, "data_parallel"):
        assert len(found) == 3 * len(SCHEDULES) * 2
        for case, loss, weights, norm in found:
            # fp32 against fp64, two updates of learning rate 1: some tens of ulps of values below 4 (2.4e-7 each).
            assert loss < 5e-6, case
            assert weights < 5e-6, case
            assert norm < 5e-6, case


def test_copies_of_a_tied_weight_stay_bit_equal():
    first, second = suite.result(2, "ties")
    assert len(first) == 3 * len(SCHEDULES)
    for case, (copies, error, norm_error) in first.items():
        others = second[case][0]
        assert len(copies) == len(others) == 20
        names = {"two ties": {"tied.a.weight", "tied.b.weight"}}.get(case[0], {"tied.embed.weight"})
        for step, (mine, theirs) in enumerate(zip(copies, others)):
            assert set(mine) == set(theirs) == names
            for name in names:
                assert torch.equal(mine[name], theirs[name]), (case, step, name)
        moved = not torch.equal(copies[0][min(names)], copies[-1][min(names)])
        assert moved == (case[0] != "frozen tie"), case
        # DeepSpeed's Adam is torch's; 20 steps in fp64 amplify rounding by 1 / (sqrt(v) + 1e-8) at most.
        assert max(error, second[case][1]) < 1e-8, case
        assert max(norm_error, second[case][2]) < 1e-8, case


def test_frozen_and_empty_stages():
    found = suite.result(2, "frozen")
    for rank, cases in enumerate(found):
        for (name, schedule, zero, clip), error, kept, sent in cases:
            case = (rank, name, schedule, zero, clip)
            # The update is the gradient, in fp64; ZeRO keeps its own weights in fp32.
            assert error < (1e-6 if zero else 1e-12), case
            assert kept, case
            # The first stage sends 4 activations; gradients return only to a stage that trains something.
            expected = ["act"] * 4 if rank == 0 else [] if name.startswith("first") else ["grad"] * 4
            assert sent == expected, case


@pytest.mark.parametrize("world", [2, 4])
def test_clipping_uses_the_norm_of_the_whole_model(world):
    for found in suite.result(world, "clipping"):
        assert len(found) == 2 * len(SCHEDULES)
        for case, norm, errors in found:
            assert norm > 0.2, case
            # Both clip by 0.1 / (norm + 1e-6): up to 1e-6 / norm of an update of at most 0.1; the rest is rounding.
            assert errors[0] < 1e-12 and errors[3] < 1e-6, (case, errors)
            # The norm is the full one before clipping, with and without; without clipping it crosses ranks as fp64.
            assert max(errors[1:3] + errors[4:]) < 1e-12, (case, errors)


def test_accumulation_is_scaled_once():
    for found in suite.result(2, "accumulation"):
        assert len(found) == 3 * len(SCHEDULES) * 5
        for case, error in found:
            assert error < 1e-12, case
