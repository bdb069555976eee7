"""Programs in the manner of GPT-NeoX: against upstream's engine bit for bit, and against one process."""

import math

import cases_neox
import suite
import torch
from engine_cases import SCHEDULES


def test_a_neox_program_trains_as_with_upstream_bit_for_bit():
    for rank, variants in enumerate(suite.result(4, "neox_stock")):
        assert len(variants) == 2
        for name, runs in variants.items():
            kind, expected, expected_state, answers, _ = runs.pop(None)
            assert kind == "PipelineEngine" and runs
            steps = [row for row in expected if isinstance(row, tuple) and len(row) > 2]
            assert len({loss for loss, *_ in steps}) == 6 and len(steps[0][1]) == 2
            for schedule, (kind, seen, state, own_answers, norm) in runs.items():
                assert kind == "PlanEngine"
                assert seen == expected, (rank, name, schedule)
                for parameter, value in state.items():
                    assert torch.equal(value, expected_state[parameter]), (rank, name, schedule, parameter)
                assert math.isfinite(norm) and norm > 0
                assert {k: (v, answers[k]) for k, v in own_answers.items() if v != answers[k]} == {}, (rank, schedule)


def test_every_public_method_of_upstream_is_looked_at():
    (_, runs), *_ = suite.result(4, "neox_stock")[0].items()
    _, _, _, answers, _ = runs["1f1b"]
    groups = [set(answers), cases_neox.CALLED, cases_neox.INTERNAL, cases_neox.SAVING]
    assert set.union(*groups) == cases_neox.public_methods()
    assert sum(map(len, groups)) == len(cases_neox.public_methods())


def test_a_neox_program_equals_one_process():
    for rank, found in enumerate(suite.result(2, "neox_alone")):
        assert len(found) == 2 * len(SCHEDULES)
        for case, loss, parts, weights, norm in found:
            # Losses that travel beside others do so as fp32.
            assert loss < 1e-6 and parts < 1e-5, (rank, case, loss, parts)
            assert weights < 1e-12 and norm < 1e-12, (rank, case, weights, norm)
