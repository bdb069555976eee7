"""Lowering: transfers that cannot deadlock, order of messages, hoisting, windows, slots, the end of the step."""

import itertools
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_pipe_ext.plan import Costs, Instr, Op, PlanError, Program, check, facts, forward_only, lower, parse_csv
from ds_pipe_ext.plan.lower import LOAD, RECV_ACT, RECV_GRAD, REDUCE, REDUCE_TIED, SEND_ACT, SEND_GRAD, STEP
from ds_pipe_ext.schedules import Shape, build
from ds_pipe_ext.testing import check_plan, execute, random_plan

VEE, LOOP = (0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2)
PLACEMENTS = [(0, ), (0, 1), (0, 1, 2, 3), (0, 1, 1, 0), VEE, (0, 1, 0, 1), LOOP, (0, 1, 0, 1, 0, 1), (0, 0, 1), (2, 0, 1)]
ZBV_P2_M3 = ("0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,3F2,3I2,3W2,0I0,0W0,0I1,0W1,0I2,0W2\n"
             "1F0,2F0,1F1,2F1,1F2,2F2,2I0,1I0,2W0,2I1,1I1,1W0,2I2,1I2,2W1,2W2,1W1,1W2\n")
INTERLEAVED_P2_M2 = ("0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n"
                     "1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n")
plans = st.builds(lambda seed, placement, m, split: random_plan(random.Random(seed), placement, m, split),
                  st.integers(0, 2**32), st.sampled_from(PLACEMENTS), st.integers(1, 5), st.sampled_from([0, 0.5, 1]))


def kinds(program: Program) -> list[str]:
    return [instr.kind for instr in program.instrs]


@settings(max_examples=150, deadline=None)
@given(plans)
def test_any_plan_runs_under_blocking_transfers(plan):
    check_plan(plan)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_what_another_rank_waits_for_is_sent_before_receives_are_posted(name):
    for program in lower(build(name, Shape(4, 8))):
        pairs = list(itertools.pairwise(kinds(program)))
        assert not {(RECV_ACT, SEND_ACT), (RECV_ACT, SEND_GRAD), (RECV_GRAD, SEND_ACT), (RECV_GRAD, SEND_GRAD)} & set(pairs)


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(0, 2**32))
def test_whatever_the_costs(plan, seed):
    rng = random.Random(seed)
    costs = Costs(*(tuple(rng.choice([0, 0.1, 1, 7]) for _ in plan.placement) for _ in range(3)), hop=rng.choice([0, 0.5, 20]))
    for ahead in (0, 1, 3):
        execute(lower(plan, costs, ahead=ahead), plan.n_stages, posted=ahead > 0)


@pytest.mark.parametrize("text, placement", [(ZBV_P2_M3, (0, 1, 1, 0)), (INTERLEAVED_P2_M2, (0, 1, 0, 1))], ids=["vee", "loop"])
def test_several_stages_a_rank_by_hand(text, placement):
    plan = parse_csv(text)
    assert plan.placement == placement
    check_plan(plan)
    for program in lower(plan):
        own = plan.stages_of(program.rank)
        for instr in program.instrs:
            assert instr.stage in own or instr.stage == -1
            # Neighbouring stages of one rank hand over without a transfer.
            if instr.peer >= 0:
                assert instr.peer != program.rank


def test_a_program_by_hand():
    first, second = lower(parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), ahead=0)
    assert [str(i) for i in first.instrs] == [
        "0.load.0", "0F0", "0.send_act.0@1", "0.load.1", "0F1", "0.send_act.1@1", "0.recv_grad.0@1", "0B0",
        "0.recv_grad.1@1", "0B1", "reduce_tied", "reduce", "step"]
    assert [str(i) for i in second.instrs] == [
        "1.recv_act.0@0", "1.load.0", "1F0", "1.recv_act.1@0", "1B0", "1.send_grad.0@0", "1.load.1", "1F1", "1B1",
        "1.send_grad.1@0", "reduce_tied", "reduce", "step"]
    assert (first.slots, second.slots) == (2, 2)


@settings(max_examples=80, deadline=None)
@given(plans, st.integers(1, 3))
def test_hoisting_moves_only_receives_and_only_up(plan, ahead):
    for still, hoisted in zip(lower(plan, ahead=0), lower(plan, ahead=ahead)):
        bare = [[i[:3] + i[4:5] for i in program.instrs] for program in (still, hoisted)]
        assert sorted(map(str, bare[0])) == sorted(map(str, bare[1]))
        rest = [[i for i in line if i[0] not in (RECV_ACT, RECV_GRAD)] for line in bare]
        assert rest[0] == rest[1]
        peers = {(i.kind, i.peer) for i in still.instrs if i.kind in (RECV_ACT, RECV_GRAD)}
        for kind, peer in peers:
            order = [[i[1:3] for i in line if (i[0], i[3]) == (kind, peer)] for line in bare]
            assert order[0] == order[1]
        for instr in still.instrs:
            if instr.kind in (RECV_ACT, RECV_GRAD):
                assert _before(hoisted, instr) <= _before(still, instr)


@settings(max_examples=80, deadline=None)
@given(plans, st.integers(1, 3))
def test_a_receive_waits_until_the_one_ahead_of_it_was_used(plan, ahead):
    for still, program in zip(lower(plan, ahead=0), lower(plan, ahead=ahead)):
        used = {(RECV_ACT if i.kind == "F" else RECV_GRAD, *i[1:3]): at for at, i in enumerate(program.instrs)
                if i.kind in ("F", "B", "I")}
        queues = {}
        for at, instr in enumerate(program.instrs):
            if instr.kind in (RECV_ACT, RECV_GRAD):
                queue = queues.setdefault((instr.kind, instr.peer), [])
                queue.append(instr)
                if len(queue) > ahead and _before(still, instr) != _before(program, instr):
                    assert used[queue[-1 - ahead][:3]] < at


def _before(program, receive):
    """Instructions other than receives that come before a receive."""
    at = next(at for at, i in enumerate(program.instrs) if i[:3] == receive[:3])
    return sum(i.kind not in (RECV_ACT, RECV_GRAD) for i in program.instrs[:at])


def test_receives_are_posted_ahead_of_need():
    still, hoisted = (lower(build("1f1b", Shape(3, 6)), ahead=ahead)[1] for ahead in (0, 2))
    gap = [[_distance(program, mb) for mb in range(6)] for program in (still, hoisted)]
    assert all(h >= s for s, h in zip(*gap)) and sum(gap[1]) > sum(gap[0])


def _distance(program, mb):
    at = {(i.kind, i.mb): n for n, i in enumerate(program.instrs)}
    return at[("F", mb)] - at[(RECV_ACT, mb)]


@settings(max_examples=80, deadline=None)
@given(plans, st.integers(0, 3))
def test_a_gradient_is_received_only_after_its_forward(plan, ahead):
    for program in lower(plan, ahead=ahead):
        done = set()
        for instr in program.instrs:
            if instr.kind == "F":
                done.add(instr[1:3])
            if instr.kind == RECV_GRAD:
                assert instr[1:3] in done


@settings(max_examples=80, deadline=None)
@given(plans, st.integers(0, 3))
def test_windows_count_what_the_receiver_has_posted(plan, ahead):
    programs = lower(plan, ahead=ahead)
    sent = {(i.stage + 1, i.mb): i.window for p in programs for i in p.instrs if i.kind == SEND_ACT}
    for program in programs:
        for stage in plan.stages_of(program.rank):
            queue = [(at, i) for at, i in enumerate(program.instrs) if i.kind == RECV_ACT and i.stage == stage]
            used = {i.mb: at for at, i in enumerate(program.instrs) if i.kind == "F" and i.stage == stage}
            for number, (_, instr) in enumerate(queue):
                # Headers are read in order, so this one is read when it or any later one is first needed.
                read = min(used[later.mb] for _, later in queue[number:])
                assert instr.window == sum(at < read for at, _ in queue[number + 1:]) == sent[(stage, instr.mb)]


def test_windows_of_1f1b():
    programs = lower(build("1f1b", Shape(2, 4)), ahead=0)
    assert {i.window for p in programs for i in p.instrs if i.kind != RECV_ACT and i.kind != SEND_ACT} == {0}
    hoisted = [i.window for i in lower(build("1f1b", Shape(2, 6)), ahead=2)[1].instrs if i.kind == RECV_ACT]
    assert max(hoisted) >= 1 and hoisted[-1] == 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_slots_follow_the_schedule_not_the_number_of_microbatches(name):
    slots = [[program.slots for program in lower(build(name, Shape(4, m)), ahead=0)] for m in (12, 24)]
    if name == "gpipe":
        assert slots == [[12] * 4, [24] * 4]
    else:
        assert slots[0] == slots[1]
        # A transfer in the air may need one slot beside those that facts counts.
        held = facts.held(build(name, Shape(4, 24)))
        assert all(h <= s <= h + 2 for h, s in zip(held, slots[1])), (held, slots)


def test_w_directly_behind_i_on_the_first_stage_is_fused():
    first, second = lower(parse_csv("0F0,0I0,0W0,0F1,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"))
    assert [k for k in kinds(first) if len(k) == 1] == ["F", "B", "F", "B"]
    assert [k for k in kinds(second) if len(k) == 1] == ["F", "I", "W", "F", "I", "W"]
    apart = lower(parse_csv("0F0,0F1,0I0,0I1,0W0,0W1\n"))[0]
    assert [k for k in kinds(apart) if len(k) == 1] == ["F", "F", "I", "I", "W", "W"]


def test_updates_at_the_end_become_the_step():
    plain, written = (lower(parse_csv(text)) for text in ("0F0,0B0\n1F0,1B0\n", "0F0,0B0,0U\n1F0,1B0,1U\n"))
    assert plain == written
    with pytest.raises(PlanError, match="rank 0 updates stage 0 in the middle of the step"):
        lower(parse_csv("0F0,0B0,0U,0F1,0B1\n"))


def test_unsound_plans_are_refused():
    with pytest.raises(PlanError, match="0 B, 0 I, 0 W"):
        lower(parse_csv("0F0\n"))
    with pytest.raises(PlanError, match="deadlock"):
        lower(parse_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"))


@pytest.mark.parametrize("placement", [(0, ), (0, 1, 2), VEE, LOOP, (0, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("m", [1, 2, 5])
def test_evaluation(placement, m):
    plan = forward_only(placement, m)
    check(plan, backward=False)
    for ahead in (0, 2):
        programs = lower(plan, backward=False, ahead=ahead)
        ran = execute(programs, plan.n_stages, posted=ahead > 0)
        assert sorted(op for _, op in ran) == sorted(Op(s, "F", i) for s in range(len(placement)) for i in range(m))
        assert not {REDUCE, REDUCE_TIED, STEP, SEND_GRAD} & {k for p in programs for k in kinds(p)}


def test_the_last_stage_loads_its_labels_once():
    for program in lower(parse_csv(ZBV_P2_M3)):
        loads = [i.mb for i in program.instrs if i.kind == LOAD]
        # Rank 0 holds the first and the last stage: one load serves both.
        assert loads == ([0, 1, 2] if program.rank == 0 else [])


def test_execute_finds_deadlocks():
    send, recv = Instr(SEND_ACT, 0, 0, peer=1), Instr(RECV_ACT, 1, 0, peer=0)
    a = Program(0, (Instr(LOAD, 0, 0), Instr("F", 0, 0), send), 1)
    with pytest.raises(AssertionError, match=r"deadlock: rank 0 at 0.send_act.0@1"):
        execute([a, Program(1, (), 1)], 2, posted=False)
    with pytest.raises(AssertionError, match="expects"):
        execute([a, Program(1, (recv._replace(mb=1), recv), 1)], 2, posted=True)
    with pytest.raises(AssertionError, match="window"):
        execute([a, Program(1, (recv._replace(window=1), ), 1)], 2, posted=False)
    with pytest.raises(AssertionError, match="before its data are loaded"):
        execute([Program(0, a.instrs[1:], 1), Program(1, (recv, ), 1)], 2, posted=False)


def test_large_shapes_are_quick():
    """64 ranks x 1024 micro-batches take seconds; the quadratic version took ten times as long on a quarter of it."""
    small, large = (_work(m) for m in (64, 256))
    assert large < 4.6 * small


def _work(m):
    """Number of Python calls that lowering makes: time without noise."""
    plan, calls = build("zb-h1", Shape(4, m)), 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        lower(plan)
    finally:
        sys.setprofile(None)
    return calls
