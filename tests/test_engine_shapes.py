"""Lengths and rows that change between steps, within a step, and in evaluation."""

import cases_shapes
import pytest
import suite


@pytest.mark.parametrize("world", [2, 4])
def test_changing_shapes_equal_one_process(world):
    for rank, found in enumerate(suite.result(world, "shapes")):
        assert [case for case, *_ in found] == [
            ("1f1b", 2, "auto"), ("1f1b", 1, "process_group"), ("gpipe", 2, "process_group"), ("zb-h1", 2, "process_group"),
            ("zb-h2", 2, "auto"), ("zb-h2", 1, "process_group"), ("zb-h2", 2, "process_group"), ("zb-h2", 1, "auto")]
        for case, loss, weights, ahead in found:
            # Losses travel as fp32: half an ulp below 8.
            assert loss < 1e-6, (rank, case)
            assert weights < 1e-11, (rank, case)
            _check_ahead(rank, case, ahead)


def _check_ahead(rank, case, ahead):
    """Receives are posted ahead from the second step of a shape on, and not right after a change."""
    if rank == 0 or case[1] == 1:
        # The first stage receives no activation; one group keeps every receive at its place.
        assert not any(ahead), (rank, case, ahead)
        return
    steps = [sizes for _, sizes in cases_shapes.STEPS]
    assert ahead[0] == 0 and ahead[2] == ahead[1] == len(steps[1]), (rank, case, ahead)
    assert ahead[7] == 4 and ahead[11] == 4 and ahead[18] == 4 and ahead[23] == 4, (rank, case, ahead)
    # After a step with mixed shapes the next one posts nothing ahead.
    assert ahead[9] == ahead[13] == 0, (rank, case, ahead)
