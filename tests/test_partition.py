"""Partitioners: DeepSpeed's boundaries to the last tie, and the check that every result passes."""

import random

import pytest

from ds_pipe_ext.partition import Layer, resolve, solve, split
from ds_pipe_ext.registry import partitioners
from ds_pipe_ext.testing import check_partitioner

BLOCKS = [Layer("Embedding", 50), *[Layer("Block", 10)] * 6, Layer("Head", 30)]


def upstream():
    return pytest.importorskip("deepspeed.runtime.utils")


def test_uniform_is_deepspeeds():
    theirs = upstream().partition_uniform
    for items in range(1, 60):
        for stages in range(1, 12):
            assert solve.uniform(items, stages) == list(theirs(items, stages)), (items, stages)


@pytest.mark.parametrize("kind", ["ties", "zeros", "sizes", "fractions"])
def test_balanced_is_deepspeeds(kind):
    theirs = upstream().partition_balanced
    rng = random.Random(kind)
    draw = {"ties": lambda: rng.randint(1, 3), "zeros": lambda: int(rng.random() < 0.3),
            "sizes": lambda: rng.randint(0, 10**rng.randint(1, 10)), "fractions": rng.random}[kind]
    for _ in range(150):
        weights, stages = [draw() for _ in range(rng.randint(1, 16))], rng.randint(1, 6)
        assert solve.balanced(weights, stages) == [int(b) for b in theirs(weights, stages)], (weights, stages)


def test_balanced_of_a_real_size_is_quick():
    weights = [10**8, *[10**7] * 126, 10**8]
    boundaries = solve.balanced(weights, 32)
    loads = [sum(weights[a:b]) for a, b in zip(boundaries, boundaries[1:])]
    assert len(loads) == 32 and min(loads) > 0


@pytest.mark.parametrize("name, options", [("uniform", None), ("parameters", None), ("type", {"regex": "block|head"})])
def test_contract(name, options):
    assert check_partitioner(name, options=options) == 100


def test_boundaries_contract():
    assert check_partitioner("boundaries", options={"at": [0, 3, 5, 8]}, cases=[(BLOCKS, 3)]) == 1
    with pytest.raises(AssertionError, match="4 boundaries, but 2 stages need 3"):
        check_partitioner("boundaries", options={"at": [0, 3, 5, 8]}, cases=[(BLOCKS, 2)])


@pytest.mark.parametrize("choice, stages, expected", [
    ("uniform", 3, [0, 3, 6, 8]), ("uniform", 8, list(range(9))), ("parameters", 2, [0, 3, 8]), ("best", 2, [0, 3, 8]),
    ("type:block", 2, [0, 4, 8]), ("type:BLOCK$", 2, [0, 4, 8]), ({"name": "type", "regex": "block"}, 2, [0, 4, 8]),
    ([0, 1, 7, 8], 3, [0, 1, 7, 8]), ((0, 8), 1, [0, 8]),
])
def test_split(choice, stages, expected):
    result = split(choice, BLOCKS, stages)
    assert result == expected and all(type(boundary) is int for boundary in result)


@pytest.mark.parametrize("choice, stages, message", [
    ("uniform", 9, "the model has 8 layers, too few for 9 stages"), ("parameters", 9, "too few for 9 stages"),
    ("uniform", 0, "at least one stage, got 0"),
    ([0, 4, 8], 3, r"gave \[0, 4, 8\]: 3 boundaries, but 3 stages need 4"),
    ([0, 4, 7], 2, "must begin at 0 and end at 8, the number of layers"), ([0, 4, 4, 8], 3, "stage 1 would be empty"),
    ("type:conv", 2, "matches no layer; the layers are: Embedding, Block, Head"),
    ("unifrom", 2, r"unknown partitioner 'unifrom' \(did you mean 'uniform'\?\); known: best, boundaries"),
])
def test_refused(choice, stages, message):
    with pytest.raises(ValueError, match=message):
        split(choice, BLOCKS, stages)


def test_a_partitioner_of_ones_own_is_checked():
    results = iter([[0, 4, 4, 8], [0, 4, 8], [1, 2, 4, 8], [0, 2, 4, 9], [0, 5, 4, 8], [0, 2, 4, 8]])
    partitioners.register("mine", lambda layers, stages: next(results))
    try:
        for message in ("stage 1 is empty", "3 boundaries, but 3 stages need 4", "begin at 0", "end at 8", "stage 1 is empty"):
            with pytest.raises(ValueError, match=f"the partition 'mine' gave .*{message}"):
                split("mine", BLOCKS, 3)
        assert split("mine", BLOCKS, 3) == [0, 2, 4, 8]
    finally:
        partitioners.unregister("mine")


def test_the_contract_can_fail():
    def greedy(layers, stages):
        layers.pop()
        return solve.uniform(len(layers) + 1, stages)

    noise = random.Random(0)
    with pytest.raises(AssertionError, match="changed the list of layers"):
        check_partitioner(greedy)
    with pytest.raises(AssertionError, match="a second call cut elsewhere"):
        check_partitioner(lambda layers, stages: [0, noise.randint(1, 7), 8], cases=[(BLOCKS, 2)] * 20)
    with pytest.raises(AssertionError, match="it must begin at 0"):
        check_partitioner(lambda layers, stages: [1, *range(1, stages), len(layers)])


def test_resolve():
    assert resolve("best") == ("parameters", {}) and resolve("Best") == ("parameters", {})
    assert resolve("Type:A:b") == ("type", {"regex": "A:b"})
