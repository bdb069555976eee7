"""The plan itself: text form, completeness, deadlocks, simulation, facts, drawings."""

import random
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_pipe_ext.plan import Costs, Op, Overlap, Plan, PlanError, check, draw, facts, forward_only, parse_csv, simulate
from ds_pipe_ext.plan.check import order
from ds_pipe_ext.plan.ir import gives, needs, parse_op
from ds_pipe_ext.plan.simulate import as_costs
from ds_pipe_ext.schedules import Shape, build
from ds_pipe_ext.testing import random_plan

PLACEMENTS = [(0, ), (0, 1), (0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 0, 1), (0, 1, 2, 0, 1, 2), (0, 0, 1), (2, 0, 1)]
plans = st.builds(lambda seed, placement, m, split: random_plan(random.Random(seed), placement, m, split),
                  st.integers(0, 2**32), st.sampled_from(PLACEMENTS), st.integers(1, 5), st.sampled_from([0, 0.5, 1]))


@settings(max_examples=150, deadline=None)
@given(plans)
def test_any_possible_order_passes_and_survives_text(plan):
    check(plan)
    assert parse_csv(plan.to_csv(), plan.name) == plan
    assert parse_csv(plan.to_csv(), plan.name, plan.placement) == plan


@settings(max_examples=100, deadline=None)
@given(plans, st.integers(0, 2**32))
def test_simulation_obeys_every_rule(plan, seed):
    rng = random.Random(seed)
    costs = Costs(*(tuple(rng.randint(0, 4) for _ in plan.placement) for _ in range(3)), hop=rng.choice([0, 1, 3]))
    made, free = {}, [0] * plan.n_ranks
    events = simulate(plan, costs).events
    for event in events:
        waits = [made[f] + (costs.hop if plan.placement[f.stage] != event.rank else 0) for f in needs(event.op, plan.n_stages)]
        # As soon as possible: at the end of the rank's previous operation or when the last input arrives, no later.
        assert event.start == max([free[event.rank], *waits])
        cost = {"F": costs.forward[event.op.stage], "I": costs.input_grad[event.op.stage],
                "W": costs.weight_grad[event.op.stage],
                "B": costs.input_grad[event.op.stage] + costs.weight_grad[event.op.stage]}[event.op.kind]
        assert event.end == event.start + cost
        free[event.rank] = event.end
        made |= {fact: event.end for fact in gives(event.op)}
    for rank in range(plan.n_ranks):
        assert tuple(e.op for e in events if e.rank == rank) == plan.ranks[rank]


@settings(max_examples=100, deadline=None)
@given(plans, st.data())
def test_a_missing_or_doubled_operation_is_found(plan, data):
    rank = data.draw(st.sampled_from([r for r, line in enumerate(plan.ranks) if line]))
    at = data.draw(st.integers(0, len(plan.ranks[rank]) - 1))
    line = plan.ranks[rank]
    for changed in (line[:at] + line[at + 1:], line[:at] + line[at:at + 1] + line[at:]):
        ranks = plan.ranks[:rank] + (changed, ) + plan.ranks[rank + 1:]
        with pytest.raises(PlanError, match=f"stage {line[at].stage}, micro-batch {line[at].mb}"):
            check(Plan("broken", ranks, plan.placement, plan.microbatches))


@settings(max_examples=100, deadline=None)
@given(plans, st.data())
def test_swapping_two_operations_either_runs_in_order_or_is_a_deadlock(plan, data):
    rank = data.draw(st.sampled_from([r for r, line in enumerate(plan.ranks) if len(line) > 1]))
    line = list(plan.ranks[rank])
    i, j = data.draw(st.tuples(*[st.integers(0, len(line) - 1)] * 2))
    line[i], line[j] = line[j], line[i]
    swapped = Plan("swapped", plan.ranks[:rank] + (tuple(line), ) + plan.ranks[rank + 1:], plan.placement, plan.microbatches)
    # Independent oracle: repeat over the ranks until nothing moves.
    made, at, moved = set(), [0] * plan.n_ranks, True
    while moved:
        moved = False
        for r, ops in enumerate(swapped.ranks):
            while at[r] < len(ops) and all(f in made for f in needs(ops[at[r]], plan.n_stages)):
                made.update(gives(ops[at[r]]))
                at[r] += 1
                moved = True
    if all(a == len(ops) for a, ops in zip(at, swapped.ranks)):
        assert len(order(swapped)) == sum(map(len, swapped.ranks))
    else:
        with pytest.raises(PlanError, match="deadlock"):
            check(swapped)


def test_deadlock_names_what_waits_for_what():
    plan = parse_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(PlanError) as error:
        check(plan)
    assert "rank 0 at 0B0 waits for I or B of stage 1, micro-batch 0 (rank 1)" in str(error.value)
    assert "rank 1 at 1F1 waits for F of stage 0, micro-batch 1 (rank 0)" in str(error.value)


@pytest.mark.parametrize("text, message", [
    ("0F0,0B0\n1F0\n", "0 B, 0 I, 0 W, expected one B, or one I and one W"),
    ("0F0,0B0,0W0\n", "1 B, 0 I, 1 W"),
    ("0F0,0I0\n", "0 B, 1 I, 0 W"),
    ("0F0,0F0,0B0\n", "2 forwards, expected 1"),
    ("0F0,0B0,0F2,0B2\n", "micro-batch 1 .* 0 forwards"),
    ("0F0,0B0\n0F1,0B1\n", "stage 0 appears on rank 0 and on rank 1"),
    ("0F0,2F0\n", "no operation names stage 1"),
    ("0F0\n0X1\n", "line 2: '0X1' is not an operation"),
    ("0F\n", "'0F' is not an operation"), ("0U3\n", "'0U3' is not an operation"), ("F0\n", "'F0' is not an operation"),
])
def test_unsound_text(text, message):
    with pytest.raises(PlanError, match=message):
        check(parse_csv(text))


def test_placement_that_does_not_fit():
    with pytest.raises(PlanError, match="stage 1 is placed on rank 3; there are 1 ranks"):
        check(Plan("x", ((Op(0, "F", 0), ), ), (0, 3), 1))
    with pytest.raises(PlanError, match="rank 0 runs 1F0, but does not hold stage 1"):
        check(Plan("x", ((Op(1, "F", 0), ), ()), (0, 1), 1))
    with pytest.raises(PlanError, match="micro-batches are 0 .. 0"):
        check(Plan("x", ((Op(0, "F", 7), ), ), (0, ), 1))


def test_text_form_of_torch():
    plan = parse_csv("0F0,,(0F1;0B0)OVERLAP_F_B,0B1,0U\n")
    assert plan.ranks[0] == (Op(0, "F", 0), Overlap((Op(0, "F", 1), Op(0, "B", 0))), Op(0, "B", 1), Op(0, "U"))
    assert plan.to_csv() == "0F0,(0F1;0B0),0B1,0U\n"
    check(plan)
    assert str(parse_op("12W34")) == "12W34"


def test_facts():
    plan = parse_csv("0F0,0F1,0I0,0I1,0F2,0W0,0W1,0B2\n")
    assert (facts.in_flight(plan), facts.held(plan), facts.pending_weight_grads(plan)) == ([2], [3], [2])
    assert facts.splits_backward(plan) and not facts.splits_backward(build("1f1b", Shape(2, 2)))


def test_forward_only_is_checked_as_such():
    plan = forward_only((0, 1, 1, 0), 3)
    check(plan, backward=False)
    with pytest.raises(PlanError, match="expected one B"):
        check(plan)
    with pytest.raises(PlanError, match="expected no backward"):
        check(build("1f1b", Shape(2, 2)), backward=False)


def test_measures_by_hand():
    sim = simulate(parse_csv("0F0,0B0\n1F0,1B0\n"), Costs((1, 2), (3, 4), (5, 6), hop=10))
    # 0F0 0..1, hop, 1F0 11..13, 1B0 13..23, hop, 0B0 33..41
    assert (sim.makespan, sim.bubble, sim.stall, sim.busy(0), sim.busy(1)) == (41, 41 - 9, 32, 9, 12)
    assert sim.bubble_ratio == 1 - 21 / 82
    assert [round(e.start) for e in sim.events if e.rank == 0] == [0, 33]


def test_steps_follow_without_a_barrier():
    plan = build("zb-h2", Shape(3, 6))
    assert simulate(plan, steps=3).makespan < 3 * simulate(plan).makespan
    assert [e.step for e in simulate(plan, steps=2).events].count(1) == 3 * 18


@pytest.mark.parametrize("make", [lambda: Costs((1, ), (1, 2), (1, )), lambda: Costs((-1, ), (1, ), (1, )),
                                  lambda: Costs((1, ), (1, ), (float("nan"), )), lambda: Costs((1, ), (1, ), (1, ), float("inf")),
                                  lambda: as_costs([1, 2], build("gpipe", Shape(1, 1))),
                                  lambda: simulate(build("gpipe", Shape(2, 1)), Costs((1, ), (1, ), (1, )))])
def test_impossible_costs(make):
    with pytest.raises(ValueError, match="costs"):
        make()


def test_drawings():
    plan = build("zb-h1", Shape(3, 4))
    sim = simulate(plan, Costs.uniform(plan, 1, 1.2, 0.8, hop=0.1))
    assert draw.csv(sim) == plan.to_csv()
    root = ElementTree.fromstring(draw.svg(sim))
    boxes = [g.find("{*}rect") for g in root.iter("{http://www.w3.org/2000/svg}g")]
    assert len(boxes) == 3 * 3 * 4
    assert sum(float(box.get("width")) for box in boxes) == pytest.approx(
        float(root.findall("{*}rect")[1].get("width")) * (1 - sim.bubble_ratio) * 3, rel=1e-3)
    assert {box.get("fill") for box in boxes} == {draw.COLOURS[kind] for kind in "FIW"}
    words = "".join(root.itertext())
    assert all(word in words for word in ("rank 2", "F forward", "W weight gradient", "zb-h1: 3 ranks, 4 micro-batches"))


def test_text_drawing_scales_and_names_stages():
    assert draw.text(simulate(parse_csv("0F0,0B0\n"), Costs((8, ), (8, ), (8, )))) == "rank 0 | F0 B0 B0\n"
    text = draw.text(simulate(forward_only((0, 1, 1, 0), 2)))
    assert text.splitlines()[0].split()[3:] == ["0F0", "0F1", "..", "..", "3F0", "3F1"]
    halfway = simulate(parse_csv("0F0,0B0\n1F0,1B0\n"), Costs((1, 1), (1, 1), (1, 1), hop=0.6))
    assert draw.text(halfway) == ("rank 0 | F0 .. .. .. .. B0 B0\n"
                                  "rank 1 | .. .. F0 B0 B0 .. ..\n")
    # Operations that take no or hardly any time do not appear and do not stretch the rest.
    assert set(draw.text(simulate(parse_csv("0F0,0I0,0W0\n"), Costs((1, ), (0, ), (1000, )))).split()[3:]) == {"W0"}


def test_names_cannot_break_the_svg():
    plan = Plan("<a&b>", build("gpipe", Shape(1, 1)).ranks, (0, ), 1)
    assert "<a&b>" in "".join(ElementTree.fromstring(draw.svg(simulate(plan))).itertext())
