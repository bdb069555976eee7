"""Random sleeps around every instruction and sends that return only when matched change no bit and hang nowhere."""

import cases_stress
import pytest
import ranks
import suite


def _check(results, steps, ways):
    for rank, found in enumerate(results):
        assert len(found) == 2 * ways
        for case, (undisturbed, disturbed) in found.items():
            assert len(set(undisturbed)) == steps, (rank, case)
            assert disturbed == undisturbed, (rank, case)


def test_random_sleeps():
    _check(suite.result(3, "random_sleeps"), 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_fifty_steps_with_random_sleeps(world):
    _check(ranks.run(cases_stress.disturbed_steps, world, 50, cases_stress.WAYS, limit=1500), 50, len(cases_stress.WAYS))
