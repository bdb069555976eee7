"""`docs/families.md` is what the installed transformers give."""

import re
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_pipe_ext.hf.families import attempt, table

TEXT = (Path(__file__).resolve().parents[1] / "docs/families.md").read_text(encoding="utf-8")
MARKED = re.search(r"## Pass\n\n(.*?)\.\n", TEXT, re.S)[1].replace("\n", " ").split(", ")
PASSING = [name.rstrip("*") for name in MARKED]
REASONS = dict(re.findall(r"^\| ([\w-]+) \| (.*) \|$", TEXT, re.M))


def test_the_table_has_every_family_once():
    assert len(PASSING) >= 110
    assert sorted([*PASSING, *REASONS]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("name", ["cohere", "doge", "flex_olmo", "helium", "olmo", "persimmon", "rwkv", "zamba2"])
def test_rows_of_the_table_are_current(name):
    outcome, told = attempt(name)
    assert (outcome == "passes") == (name in PASSING), (outcome, told)
    assert ("router loss" in told) == (f"{name}*" in MARKED)
    assert f"1 {dict(passes='pass', refused='are refused').get(outcome)}" in table({name: (outcome, told)})


@pytest.mark.slow
def test_every_row_of_the_table_is_current():
    found = {name: attempt(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    assert sorted(name + "*" * bool(told) for name, (outcome, told) in found.items() if outcome == "passes") == sorted(MARKED)
