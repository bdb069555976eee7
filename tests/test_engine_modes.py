"""Evaluation, activation checkpointing, seeds, and what is measured."""

import math

import pytest
import suite
import torch
from engine_cases import SCHEDULES


@pytest.mark.parametrize("world", [2, 4])
def test_evaluation_equals_one_process(world):
    for rank, found in enumerate(suite.result(world, "evaluation")):
        assert [schedule for schedule, *_ in found] == list(SCHEDULES)
        for schedule, errors, shown in found:
            # Losses travel as fp32: half an ulp below 8.
            assert max(errors) < 1e-6, (rank, schedule, errors)
            assert all(shown), (rank, schedule, shown)


def test_evaluation_leaves_no_trace():
    for rank, found in enumerate(suite.result(2, "evaluation_leaves_no_trace")):
        assert len(found) == 2 * len(SCHEDULES)
        for case, (without, with_evaluation, kept) in found.items():
            assert len(set(without)) == 4, case
            assert without == with_evaluation, (rank, case)
            assert kept == [(True, True, True, True)] * 3, (rank, case, kept)


def test_checkpointing_changes_no_bit_and_recomputes_once():
    for rank, found in enumerate(suite.result(2, "checkpointing")):
        assert len(found) == 4 * len(SCHEDULES)
        for case, runs in found.items():
            losses, state, calls = runs[0]
            assert calls == [8] * 4, (rank, case)
            for interval in (1, 2):
                assert runs[interval][0] == losses, (rank, case, interval)
                for name, value in runs[interval][1].items():
                    assert torch.equal(value, state[name]), (rank, case, interval, name)
                # Two steps of four micro-batches: each layer runs once more for each of them.
                assert runs[interval][2] == [16] * 4, (rank, case, interval)


def test_seeds_per_layer():
    results = suite.result(2, "seeds")
    whole = [{**results[0][0][split], **results[1][0][split]} for split in (0, 1)]
    assert whole[0].keys() == whole[1].keys() and len(whole[0]) == 8
    for name, value in whole[0].items():
        assert torch.equal(value, whole[1][name]), name
    assert not torch.equal(whole[0]["0.weight"], whole[0]["1.weight"])
    for _, losses in results:
        assert losses[None][0] != losses[None][1]
        for schedule in SCHEDULES:
            assert losses[schedule] == losses[None], schedule


def test_the_monitor_gets_what_a_step_measured():
    (rows, last), (other_rows, other) = suite.result(2, "monitoring")
    assert not other_rows
    names = ("bubble_measured", "bubble_predicted", "compute_s", "wait_s", "peak_activation_bytes", "in_flight",
             "tokens_per_s")
    for name in names:
        for rank in (0, 1):
            values = [float(value) for _, value in rows[f"pipe_{name}_rank{rank}"]]
            assert len(values) == 3 and all(math.isfinite(v) and v >= 0 for v in values), (name, values)
            if "bubble" in name:
                assert all(v < 1 for v in values)
    # 3 micro-batches of 2 rows of 5 tokens a step.
    assert [int(step) for step, _ in rows["pipe_in_flight_rank0"]] == [6, 12, 18]
    assert [float(v) for _, v in rows["pipe_in_flight_rank0"]] == [2, 2, 2]
    for report in (last, other):
        assert report["step"] == 3 and report["schedule"] == "zb-h1" and report["grad_norm"] > 0
        assert report["tokens_per_s"] == pytest.approx(30 / report["step_s"])
        assert report["samples_per_s"] == pytest.approx(6 / report["step_s"])
        for name in (*names[:-1], "forward_s", "input_grad_s", "weight_grad_s"):
            assert len(report[name]) == 2
        # Less is computed than the step takes.
        assert all(0 < c < report["step_s"] for c in report["compute_s"])
    assert last["in_flight"] == other["in_flight"] and last["peak_activation_bytes"] == other["peak_activation_bytes"]


def test_activation_bytes_are_those_counted_by_hand():
    """A block of 2 rows x 8 fp64 saves the output of its tanh, 128 bytes, and a stage its input; the loss its labels.

    Under a split backward a weight gradient that waits keeps its layer's input and output gradient instead.
    """
    for found in suite.result(2, "activation_bytes"):
        for schedule, (peaks, in_flight) in found.items():
            assert peaks[0] == [0, 0] and peaks[1] == peaks[2], schedule
            stage = [128 * 4, 128 * 5]
            expected = {"1f1b": [2 * stage[0], stage[1]], "gpipe": [4 * stage[0], 4 * stage[1]]}
            if schedule in expected:
                assert peaks[1] == expected[schedule], (schedule, peaks)
            else:
                assert all(peak >= n * one for peak, n, one in zip(peaks[1], in_flight, stage)), (schedule, peaks)


def test_wall_clock_breakdown_changes_nothing():
    for rank, found in enumerate(suite.result(2, "breakdown")):
        assert len(found) == 2 * len(SCHEDULES)
        for schedule, (plain, *others) in found:
            for losses in others:
                assert losses == plain, (rank, schedule)
