"""Programs in the manner of Megatron-DeepSpeed: against upstream's engine bit for bit, and against one process."""

import cases_megatron
import suite
import torch
from engine_cases import SCHEDULES


def test_a_megatron_program_trains_as_with_upstream_bit_for_bit():
    for rank, variants in enumerate(suite.result(4, "megatron_stock")):
        assert set(variants) == set(cases_megatron.VARIANTS)
        for name, runs in variants.items():
            kind, expected, expected_state = runs.pop(None)
            assert kind == "PipelineEngine" and len(runs) >= 2
            losses = [row[0] for row in expected if isinstance(row, tuple)]
            assert len(set(losses)) == 3
            for schedule, (kind, seen, state) in runs.items():
                assert kind == "PlanEngine"
                assert seen == expected, (rank, name, schedule)
                for parameter, value in state.items():
                    assert torch.equal(value, expected_state[parameter]), (rank, name, schedule, parameter)


def test_a_megatron_program_equals_one_process_with_whole_weights():
    """float64, with a sequence-length curriculum: losses, weights and the norm over all tensor-parallel ranks."""
    for rank, found in enumerate(suite.result(4, "megatron_alone")):
        assert len(found) == 2 * len(SCHEDULES)
        for case, losses, evaluation, weights, norms in found:
            assert max(losses) < 1e-12, (rank, case, losses)
            # A mean of evaluation travels as fp32.
            assert evaluation < 1e-6, (rank, case)
            assert weights < 1e-12, (rank, case)
            assert max(norms) < 1e-12, (rank, case, norms)
