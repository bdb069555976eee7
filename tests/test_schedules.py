"""Orders, idle times and peaks of the registered schedules."""

import random
import textwrap
from pathlib import Path

import pytest

from ds_pipe_ext.plan import Costs, draw, facts, parse_csv, simulate
from ds_pipe_ext.registry import schedules
from ds_pipe_ext.schedules import Shape, build, per_rank
from ds_pipe_ext.testing import check_schedule

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*-p?-m?.csv"))
COSTS = [(1, 1, 1), (1, 1.25, 0.75), (2, 3, 1), (1, 1, 1.5), (1, 1.5, 1.25), (1, 3, 2), (2, 1, 1)]


@pytest.mark.parametrize("name", schedules.names())
def test_contract(name):
    assert check_schedule(name) > 0


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_orders_are_those_of_the_papers(path):
    name, p, m = path.stem.rsplit("-", 2)
    assert build(name, Shape(int(p[1:]), int(m[1:]))) == parse_csv(path.read_text(), name)


def test_every_schedule_has_a_golden_order():
    assert {path.stem.rsplit("-", 2)[0] for path in GOLDEN} >= {"gpipe", "1f1b", "zb-h1", "zb-h2"}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_the_drawing_in_the_docstring_is_true(name):
    drawn = textwrap.dedent(schedules.get(name).__doc__.split("::\n")[1]).strip()
    text = draw.text(simulate(build(name, Shape(2, 4)))).strip()
    assert drawn.splitlines() == text.splitlines()


# Smallest number of micro-batches, bubble and stall by name; see the docstrings. The published (p-1) max(F, F+I-W) of
# zb-h1 and (p-1)(F+I-2W) of zb-h2 are these for F >= I: with a longer I, the chain of I's itself is the limit.
FORMULAS = {
    "gpipe": (lambda p: 1, lambda F, I, W: F + I + W, None),
    "1f1b": (lambda p: 1, lambda F, I, W: F + I + W, None),
    "zb-h1": (lambda p: p, lambda F, I, W: max(F, I, F + I - W), None),
    "zb-h2": (lambda p: 2 * p - 1, lambda F, I, W: max(F, I - F, F + I - 2 * W), lambda F, I, W: max(0, I - F, F + I - 2 * W)),
}


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_idle_time(name, costs):
    least, bubble, stall = FORMULAS[name]
    for p in range(1, 7):
        for m in (least(p), least(p) + 1, 3 * p + 1):
            plan = build(name, Shape(p, m))
            sim = simulate(plan, Costs.uniform(plan, *costs))
            assert sim.bubble == pytest.approx((p - 1) * bubble(*costs), abs=1e-9), (p, m)
            if stall:
                assert sim.stall == pytest.approx((p - 1) * stall(*costs), abs=1e-9), (p, m)


@pytest.mark.parametrize("name, published", [("zb-h1", lambda F, I, W: max(F, F + I - W)),
                                             ("zb-h2", lambda F, I, W: max(F, F + I - 2 * W))])
def test_published_bubble_holds_where_the_forward_is_longest(name, published):
    rng = random.Random(5)
    for _ in range(60):
        i, w, p = rng.randint(1, 8) / 4, rng.randint(1, 8) / 4, rng.randint(2, 5)
        f = i + rng.randint(0, 4) / 4
        plan = build(name, Shape(p, 2 * p + rng.randint(0, 5)))
        assert simulate(plan, Costs.uniform(plan, f, i, w)).bubble == pytest.approx((p - 1) * published(f, i, w))


@pytest.mark.parametrize("name, held, in_flight", [
    ("gpipe", lambda p, r, m: m, lambda p, r, m: m),
    ("1f1b", lambda p, r, m: min(p - r, m), lambda p, r, m: min(p - r, m)),
    ("zb-h1", lambda p, r, m: min(p, m), lambda p, r, m: min(p - r, m)),
    ("zb-h2", lambda p, r, m: min(2 * p - 1, m), lambda p, r, m: min(2 * (p - r) - 1, m)),
])
def test_peaks(name, held, in_flight):
    for p in range(1, 7):
        for m in range(1, 3 * p + 2):
            plan = build(name, Shape(p, m))
            assert facts.held(plan) == [held(p, r, m) for r in range(p)], (p, m)
            assert facts.in_flight(plan) == [in_flight(p, r, m) for r in range(p)], (p, m)


def test_known_idle_shares():
    measured = {(name, p, m): round(100 * simulate(build(name, Shape(p, m))).bubble_ratio, 1)
                for name in ("1f1b", "zb-h1") for p, m in ((4, 8), (8, 16))}
    assert measured == {("1f1b", 4, 8): 27.3, ("1f1b", 8, 16): 30.4, ("zb-h1", 4, 8): 11.1, ("zb-h1", 8, 16): 12.7}


def test_zb_h2_needs_steps_without_a_barrier_to_gain():
    h1, h2 = build("zb-h1", Shape(4, 12)), build("zb-h2", Shape(4, 12))
    assert simulate(h2).makespan == simulate(h1).makespan
    assert simulate(h2, steps=10).makespan < simulate(h1, steps=10).makespan


def test_a_schedule_of_ones_own():
    @per_rank
    def one_at_a_time(r, p, m, backwards=False):
        for i in range(m):
            yield from build("gpipe", Shape(p, m)).ranks[r][i::m]

    schedules.register("one-at-a-time", one_at_a_time)
    try:
        plan = build("one-at-a-time", Shape(2, 2), backwards=True)
        assert plan.to_csv() == "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
        assert check_schedule("one-at-a-time", options={"backwards": True}, shapes=[(1, 3), (3, 1), (3, 5)]) == 3
        with pytest.raises(ValueError, match=r"has no option 'backward' \(did you mean 'backwards'\?\)"):
            build("one-at-a-time", Shape(2, 2), backward=True)
    finally:
        schedules.unregister("one-at-a-time")


@pytest.mark.parametrize("shape", [(0, 1), (1, 0), (-1, 3)])
def test_impossible_shape(shape):
    with pytest.raises(ValueError, match="at least one rank and one micro-batch"):
        build("gpipe", Shape(*shape))


@pytest.mark.parametrize("flaw, message", [
    ("wrong-shape", "planned 3 ranks"), ("random", "another plan"), ("incomplete", "0 forwards"),
    ("stuck", "deadlock"), ("refuses", "refused every shape"),
])
def test_the_contract_can_fail(flaw, message):
    state = random.Random(0)

    def schedule(shape):
        plan = build("1f1b", shape)
        if flaw == "wrong-shape":
            return build("1f1b", Shape(3, shape.microbatches))
        if flaw == "refuses":
            raise ValueError("not for me")
        lines = list(plan.ranks)
        if flaw == "incomplete":
            lines[0] = lines[0][1:]
        elif flaw == "stuck":
            lines[0] = lines[0][::-1]
        else:
            lines[0] = tuple(half for op in lines[0] for half in (
                (op._replace(kind="I"), op._replace(kind="W")) if op.kind == "B" and state.random() < 0.5 else (op, )))
        return type(plan)("flawed", tuple(lines), plan.placement, plan.microbatches)

    with pytest.raises(AssertionError, match=message):
        check_schedule(schedule)
