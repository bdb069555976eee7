"""Loss scaling, overflow, numbers that are none; what the JSON names; groups, stages and steps that are empty; long runs."""

import math

import cases_groups
import cases_precision
import pytest
import suite
import torch


def assert_same(case, found, expected, norms=True):
    """As :func:`cases_precision.trained` gives them: the same bits."""
    for key in ("losses", "scales", "applied", "rates", "skipped", *(["norms"] if norms else [])):
        assert found[key] == expected[key], (case, key, found[key], expected[key])
    assert found["state"].keys() == expected["state"].keys()
    for name, value in found["state"].items():
        assert torch.equal(value, expected["state"][name]), (case, name)


def test_a_growing_loss_scale_changes_no_bit():
    """Scaling by powers of two is exact in fp16: each wrapper equals upstream's ZeRO-1 at a scale that stays.

    Upstream fails this: without ZeRO it does not multiply the loss, and everywhere it divides by the scale of the next step.
    """
    wrappers = {"unfused": "FP16_UnfusedOptimizer", "fused": "FP16_Optimizer"}
    for rank, cases in enumerate(suite.result(2, "growing_scale")):
        assert len(cases) == 1 + 2 * len(cases_precision.FP16)
        _, expected = cases[None, None]
        for (wrapper, schedule), (name, found) in cases.items():
            if wrapper is None:
                continue
            case = (rank, wrapper, schedule)
            assert name == wrappers.get(wrapper, "DeepSpeedZeroOptimizer"), case
            assert found["scales"] == [256, 512, 1024, 2048], case
            assert_same(case, {**found, "scales": expected["scales"]}, expected, norms=False)
            # Summed in another order: some ulps of fp32.
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6), case


def test_overflow_skips_the_step_and_the_warm_up_as_upstream():
    ranks = suite.result(2, "overflow")
    for rank, cases in enumerate(ranks):
        for (name, schedule), found in cases.items():
            case = (rank, name, schedule)
            other = ranks[1 - rank][name, schedule]
            for key in ("scales", "applied", "rates", "skipped", "norms"):
                assert found[key] == other[key], (case, key)
            assert not found["applied"][0] and found["applied"][-1], case
            assert found["skipped"] == found["applied"].count(False), case
            # Halved once for each overflow; the rate rises with the steps that were applied.
            assert found["scales"][-1] == 2.0**18 / 2**found["skipped"], case
            assert found["rates"][-1][0] == pytest.approx(0.1 * min(sum(found["applied"]) - 1, 4) / 4), case
            assert [math.isinf(norm) for norm in found["norms"]] == [not applied for applied in found["applied"]], case
            if name != "fp16":
                assert_same(case, found, cases[name, None])


def test_a_w_that_is_no_number_stops_every_stage():
    """It appears after I, on the last stage only. ZeRO and 16 bits skip the step; plain fp32 does as torch's clipping."""
    for rank, cases in enumerate(suite.result(2, "no_number")):
        assert set(cases) == set(cases_precision.BROKEN)
        for name, (rows, skipped) in cases.items():
            broken = (True, False, False) if name == "fp32" else (False, True, True)
            last = broken if name == "fp32" else (True, False, True)
            assert rows == [(True, False, True), broken, last], (rank, name, rows)
            assert skipped == (name != "fp32"), (rank, name)


def test_a_loss_that_is_no_number_is_treated_as_upstream_does_on_every_stage():
    for rank, cases in enumerate(suite.result(2, "no_number_in_the_loss")):
        for (name, schedule), rows in cases.items():
            applied = name == "fp32"
            expected = [(True, True, True), (applied, False, not applied), (True, not applied, not applied)]
            assert rows == expected, (rank, name, schedule, rows)


def test_named_optimizers_equal_upstream():
    _assert_named(suite.result(2, "named_optimizers"), {name: name.split(",")[0] for name in cases_precision.NAMED})


@pytest.mark.slow
def test_optimizers_that_are_compiled_at_first_use_equal_upstream():
    import ranks

    _assert_named(ranks.run(cases_precision.compiled_optimizers, 2, limit=900.0),
                  {"Muon": "MuonWithAuxAdam", "Muon, zero-1": "MuonWithAuxAdam", "Muon, zero-1 bf16": "MuonWithAuxAdam",
                   "FusedAdam": "FusedAdam", "FusedAdam, zero-1 fp16": "FusedAdam", "DeepSpeedCPUAdam": "DeepSpeedCPUAdam",
                   "DeepSpeedCPUAdam, bf16": "DeepSpeedCPUAdam"})


def _assert_named(results, classes):
    for rank, cases in enumerate(results):
        assert {name for name, _ in cases} == set(classes)
        for (name, schedule), (made, found) in cases.items():
            assert made == classes[name], (rank, name, made)
            # Without ZeRO and in fp32 upstream knows no norm.
            known = any(word in name for word in ("zero-1", "CPUAdam"))
            assert_same((rank, name, schedule), found, cases[name, None][1], norms=known)


def test_averaging_over_replicas_equals_upstream():
    for rank, cases in enumerate(suite.result(4, "averaged")):
        assert {name for name, _ in cases} == set(cases_precision.AVERAGED)
        for (name, schedule), found in cases.items():
            assert_same((rank, name, schedule), found, cases[name, None], norms="zero-1" in name)


def test_autocast_equals_upstream():
    for rank, cases in enumerate(suite.result(2, "autocast")):
        for (stage, schedule), found in cases.items():
            assert_same((rank, stage, schedule), found, cases[stage, None], norms=bool(stage))


def test_the_impossible_is_refused_before_process_groups():
    for found in suite.result(2, "refused"):
        (zero, *made), (lamb, *made_too), (managed, *made_last) = found
        assert "zero_optimization.stage is 2" in zero and "optimizer.type is 'Lamb'" in lamb
        assert "managed_gradient_accumulation is false" in managed
        assert made == made_too == made_last == [0]


#: relative rounding of the parameters' type: of an update, and of the norm
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-24}


def _rounding(name):
    return next(ulp for dtype, ulp in ROUNDING.items() if dtype in name)


def test_groups_that_are_empty_on_a_stage():
    """Matrices decay and biases do not, each with its own rate; the first stage has no bias. Clipped by the whole norm."""
    results = suite.result(2, "groups")
    for rank, cases in enumerate(results):
        assert len(cases) == 3 * len(cases_groups.PRECISIONS) + 2
        for (name, way), (weights, norm, rates) in cases.items():
            case = (rank, name, way, weights, norm)
            if name == "fp16":
                # DeepSpeed counts one step of AdamW before the first one there.
                assert weights < 0.02 and norm < 0.02, case
            else:
                # Four steps of Adam move a weight by 0.08 at most; its denominators amplify what was rounded.
                assert weights < 20 * _rounding(name) and norm < 20 * _rounding(name), case
            if "only what is not empty" not in way:
                # There the ranks have other groups.
                assert rates == results[1 - rank][name, way][2], case
                assert all(len(pair) == 2 for pair in rates) and rates[-1][0] != rates[-1][1], case


def test_stages_and_steps_without_gradients():
    for rank, cases in enumerate(suite.result(2, "odd_stages")):
        assert len(cases) == len(cases_groups.ODD) * (len(cases_groups.odd_models(torch.float32)) - 1) + 1
        for (name, kind), (weights, norm, kept) in cases.items():
            case = (rank, name, kind, weights, norm)
            # Weights and losses below 4: half an ulp each, four times.
            assert weights < 8 * _rounding(name) and norm < 8 * _rounding(name), case
            assert kept, case


def test_nothing_grows_in_two_hundred_steps():
    for rank, cases in enumerate(suite.result(2, "two_hundred_steps")):
        for schedule, ((tensors, objects, resident), after) in cases.items():
            case = (rank, schedule, cases[schedule])
            assert after[0] == tensors, case
            # Less than one object a step. The allocator keeps some pages; one lost ZeRO bucket a step would be 72 MB.
            assert after[1] - objects < 180, case
            assert after[2] - resident < 6e6, case
