"""Random configurations train with the numbers of one process or are refused: see fuzz.py."""

import os

import fuzz
import pytest
import ranks

_NUMBERS = [int(n) for n in os.environ.get("FUZZ", "").split(",") if n]
#: cases of one process group
_GROUP = 25


def _problems(world, numbers):
    for found in ranks.run(fuzz.run_numbers, world, _NUMBERS or list(numbers), limit=60 + 12 * len(numbers)):
        assert not found, "\n".join(f"{problem}\n  {case}" for case, problem in found)


def test_a_case_follows_from_its_number():
    drawn = [str(fuzz.draw(n, 4)) for n in range(50)]
    assert drawn == [str(fuzz.draw(n, 4)) for n in range(50)] and len(set(drawn)) == 50


@pytest.mark.parametrize("world,numbers", [(2, range(8)), (3, range(5)), (4, range(5))])
def test_some_configurations(world, numbers):
    _problems(world, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("start", range(1000, 1250, _GROUP))
def test_a_thousand_configurations(world, start):
    _problems(world, range(start, start + _GROUP))
