"""Checksums of what the first and the last stage read."""

import pytest
import torch

from ds_pipe_ext.runtime.samples import compare, fingerprint

BATCH = ({"input_ids": torch.arange(6).view(2, 3), "mask": None}, [torch.tensor(1.5), "a text", 7])


@pytest.mark.parametrize("value", [BATCH, torch.zeros(0), torch.tensor(True), torch.ones(3, dtype=torch.bfloat16), (), "x",
                                   torch.arange(6).view(2, 3).t(), torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.cfloat),
                                   torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(2, dtype=torch.cfloat).conj().imag])
def test_equal_batches_have_equal_fingerprints(value):
    assert fingerprint(value) == fingerprint(value)


@pytest.mark.parametrize("other", [
    ({"input_ids": torch.arange(6).view(3, 2), "mask": None}, [torch.tensor(1.5), "a text", 7]),
    ({"input_ids": torch.arange(6, dtype=torch.int32).view(2, 3), "mask": None}, [torch.tensor(1.5), "a text", 7]),
    ({"input_ids": torch.arange(1, 7).view(2, 3), "mask": None}, [torch.tensor(1.5), "a text", 7]),
    ({"input_ids": torch.arange(6).view(2, 3), "mask": torch.ones(1)}, [torch.tensor(1.5), "a text", 7]),
    ({"input_ids": torch.arange(6).view(2, 3), "mask": None}, [torch.tensor(1.25), "a text", 7]),
    ({"input_ids": torch.arange(6).view(2, 3), "mask": None}, [torch.tensor(1.5), "a Text", 7]),
    ({"input_ids": torch.arange(6).view(2, 3), "mask": None}, [torch.tensor(1.5), "a text", 8])])
def test_any_difference_changes_the_fingerprint(other):
    assert fingerprint(other) != fingerprint(BATCH)


@pytest.mark.parametrize("first,last,said", [
    ([1, 2, 3], [1, 2, 4], "for micro-batch 2 of this step, so"), ([1, 2, 3], [9, 2, 8], "for micro-batches 0, 2 of this step"),
    ([1, 2, 3], [1, 3, 2], r"micro-batches 1, 2 of this step \(the same samples in another order\)")])
def test_what_differs_is_named(first, last, said):
    compare(first, first)
    with pytest.raises(ValueError, match=said):
        compare(first, last)
