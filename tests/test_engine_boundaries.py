"""What crosses a stage boundary arrives as it was, or is refused on every rank."""

import cases_boundaries
import pytest
import ranks
import suite
import torch

from ds_pipe_ext.runtime.wire import describe


def _equal(case, errors):
    loss, weights, evaluation, kept = errors
    # Losses travel as fp32: half an ulp below 8.
    assert loss < 1e-6 and evaluation < 1e-6, case
    assert weights < 1e-12, case
    assert kept, case


def test_every_kind_of_payload_equals_one_process():
    for rank, found in enumerate(suite.result(2, "payloads")):
        assert len(found) == 6 * 4 + 3 * 2
        for case, errors in found:
            _equal((rank, *case), errors)


def test_tensors_without_gradient_cross_middle_stages():
    for rank, found in enumerate(suite.result(4, "tables")):
        for case, errors in found:
            _equal((rank, *case), errors)


def test_model_parallel_ranks_send_their_share():
    found = suite.result(4, "shares")
    for rank, cases in enumerate(found):
        sizes = {}
        for case, error, sent in cases:
            assert error < 1e-6, (rank, case)
            sizes[case] = sent
        # The first stage sends activations, the second gradients; 64 bytes of each activation are its header.
        kind = 0 if rank < 2 else 1
        whole, half = 3 * 4001 * 8 * 8, 3 * (4001 * 8 * 8 // 2)
        for acts in (False, True):
            for grads in (False, True):
                expected = half if (acts, grads)[kind] else whole
                assert expected <= sizes[4001, acts, grads][kind] <= expected + 3 * 256, (rank, acts, grads)
                assert sizes[4001, acts, grads][1 - kind] == 0


@pytest.mark.parametrize("value,words", [
    ({"x": torch.zeros(1)}, "returned dict"),
    (None, "returned NoneType"),
    ((torch.zeros(1), None), "returned NoneType at position 1"),
    ((torch.zeros(1), [torch.zeros(1)]), "returned list at position 1"),
    ((torch.zeros(1), 2.0), "returned float at position 1"),
    ((torch.eye(2).to_sparse(), ), "layout torch.sparse_coo at position 0"),
])
def test_what_cannot_cross_is_named(value, words):
    with pytest.raises(TypeError) as error:
        describe(value, 3, 1)
    assert words in str(error.value) and "stage 3" in str(error.value)


def test_a_refused_payload_ends_every_rank_with_the_reason():
    codes, _, logs, _ = ranks.run_raw(cases_boundaries.refused, 2, limit=150)
    assert all(code not in (0, -9) for code in codes), codes
    for log in logs:
        assert "returned NoneType at position 1 of its tuple" in log
