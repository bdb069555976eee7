"""Checkpoints of engines: either way with DeepSpeed's own, moved to other splits, resumed bit for bit, refused by name."""

import math

import cases_checkpoints
import pytest
import suite


def test_deepspeed_loads_ours_and_we_load_its():
    for rank, found in enumerate(suite.result(2, "stock_checkpoints")):
        assert set(found) == set(cases_checkpoints.STOCK)
        for name, rows in found.items():
            assert len(rows) == (2 if name == "fp32" else 4)
            for expected, resumed, mine, global_steps, loaded in rows:
                assert resumed == expected, (rank, name)
                assert (mine, global_steps, loaded) == (7, 2 + 2, True), (rank, name)


@pytest.mark.parametrize("world", [2, 4])
def test_a_resumed_run_is_the_run_bit_for_bit(world):
    for rank, found in enumerate(suite.result(world, "resumed")):
        assert len(found) == (8 if world == 2 else 2)
        for case, (whole, resumed) in found.items():
            assert resumed == whole, (rank, case)
            # Three steps of three micro-batches, whatever the epochs.
            assert resumed[2] == 9, (rank, case)
            assert all(map(math.isfinite, whole[0])) and len(set(whole[0])) == 3, (rank, case)


@pytest.mark.parametrize("world", [2, 4])
def test_optimizer_state_moves_to_any_split(world):
    """Moments, master weights and step counts at the same bits; the next losses but for the order of sums over replicas."""
    ranks = suite.result(world, "moved")
    assert len(ranks[0]) == (5 if world == 2 else 4)
    for name in ranks[0]:
        whole: dict = {}
        for found in ranks:
            for _, saved, _ in found[name].values():
                whole |= saved
        first = cases_checkpoints.LAYOUTS[world][0]
        expected = ranks[0][name][tuple(first)][2]
        assert len(whole) == 7, name
        for boundaries in cases_checkpoints.LAYOUTS[world]:
            loaded: dict = {}
            for rank, found in enumerate(ranks):
                state, _, losses = found[name][tuple(boundaries)]
                loaded |= state
                case = (name, boundaries, rank)
                assert all(state[parameter] == whole[parameter] for parameter in state), case
                if len(boundaries) == len(first):
                    assert losses == expected, case
                else:
                    assert losses == pytest.approx(expected, rel=2e-2 if "bf16" in name else 1e-5), case
            assert set(loaded) == set(whole), (name, boundaries)
            assert {step for _, step in loaded.values()} == {2.0}, (name, boundaries)


def test_every_slice_of_a_tensor_parallel_run_gets_its_own_state():
    for rank, (own, differs, count, files, told) in enumerate(suite.result(4, "slices_moved")):
        assert own and differs and (count, files) == (2 if rank < 2 else 6, 8), rank
        assert told["fp32"] is None
        assert "tensor parallelism 2, ZeRO 1" in told["zero-1 fp32"] and "ds-pipe convert" in told["zero-1 fp32"]


def test_groups_and_step_counts_move():
    for runs in suite.result(2, "groups_moved"):
        (expected, _), *others = runs
        assert all(losses == expected for losses, _ in others)
    counts = [counts for runs in suite.result(2, "groups_moved") for _, counts in runs]
    assert {c["3.linear.bias"] for c in counts if "3.linear.bias" in c} == {1.0}
    assert {c["3.linear.weight"] for c in counts if "3.linear.weight" in c} == {2.0}
    assert sum("3.linear.bias" in c for c in counts) == 4


def test_tied_layers_that_are_functions_are_saved():
    for rank, found in enumerate(suite.result(2, "tied_by_functions")):
        assert len(found) == 6
        for (what, boundaries), (worst, goes_on, files) in found.items():
            if what == "shared":
                # Once, though both stages hold it.
                assert files == [f"layer_{i:02d}-model_states.pt" for i in range(4)]
            assert worst == 0.0 and goes_on, (rank, what, boundaries)


def test_a_hundred_layers():
    for worst, files in suite.result(2, "many_layers"):
        assert worst == 0.0 and files == 103


@pytest.mark.parametrize("world", [2, 4])
def test_a_failed_save_is_told_on_every_rank_and_harms_nothing(world):
    for rank, found in enumerate(suite.result(world, "failed_saves")):
        for name, (told, changed, (whole, failing), resumed) in found.items():
            for place, tag, message in told:
                case = (rank, name, place, message)
                if place == "tags":
                    assert message.startswith("ValueError: save_checkpoint got different tags: 'tag0' on rank 0, 'tag1'"), case
                elif place == "folder":
                    assert "RuntimeError: save_checkpoint failed: NotADirectoryError" in message, case
                else:
                    assert message.startswith("RuntimeError: save_checkpoint failed: "), case
                    assert f"{tag}.saving/{place}" in message and "No space left on device" in message, case
            assert not changed, (rank, name, changed)
            assert whole == failing == resumed, (rank, name)


#: what -> what the error must say, None if there must be none
REFUSED = {
    "missing layer_02-model_states.pt": ("layer_02-model_states.pt is missing", ),
    "short layer_02-model_states.pt": ("layer_02-model_states.pt is damaged: ", "were written"),
    "missing mp_rank_01_model_states.pt": ("mp_rank_01_model_states.pt is missing", ),
    "short mp_rank_01_model_states.pt": ("mp_rank_01_model_states.pt is damaged: ", ),
    "stock missing": ("there is no file", "layer_02-model_states.pt"),
    "stock left over": ("was saved by 2 model-parallel ranks and has 3 files", "left over from another layout"),
    "no such tag": ("there is no checkpoint", "global_step9; there are ['global_step1']"),
    "other model": ("has 4 layers, the model has 5", "load_module_strict"),
    "other zero": ("boundaries [0, 2, 4], 1 data-parallel replica", "ZeRO 0 with AdamW, and this engine has", "ZeRO 1"),
    "sharded elsewhere": ("boundaries [0, 2, 4]", "boundaries [0, 1, 4]", "`ds-pipe convert", "load_universal"),
    "stock elsewhere": ("saved by DeepSpeed with other parameters on this rank", "boundaries [0, 1, 4]"),
    "stock sharded elsewhere": ("saved by DeepSpeed with the parameters 0.linear.weight", "boundaries [0, 3, 4]"),
    "stock with ZeRO": ("saved by DeepSpeed with ZeRO, and this engine has", "ZeRO 0"),
    "stock without ZeRO": ("saved by DeepSpeed with no ZeRO, and this engine has", "ZeRO 1"),
    "frozen while it was saved": ("no optimizer state of 3.linear.weight", "load_optimizer_states=False"),
    "universal without ZeRO": ("checkpoint.load_universal is true, but AdamW without ZeRO",  "set it to false"),
    "not universal": ("is no universal checkpoint", "ds-pipe convert"),
    "weights only": None,
    "weights only, with counters": None,
    "weights only from stock": None,
    "weights only from stock, with counters": None,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_loaded_is_named_on_every_rank(what):
    for found in suite.result(2, "refused_loads"):
        assert set(found) == set(REFUSED)
        if REFUSED[what] is None:
            assert found[what] is None
        else:
            assert found[what].startswith("ValueError: load_checkpoint failed: "), found[what]
            assert all(part in found[what] for part in REFUSED[what]), found[what]


def test_weights_without_optimizer_state_outlive_the_next_step():
    for found in suite.result(2, "weights_alone"):
        assert len(found) == 14 and all(found.values()), found


def test_a_file_with_wrong_bytes_is_named():
    for rank, told in enumerate(suite.result(2, "spoiled_inside")):
        assert f"layer_0{2 * rank}-model_states.pt cannot be read" in told, told


def test_options_of_loading_are_those_of_upstream():
    for rank, found in enumerate(suite.result(2, "options")):
        for name in ("fp32", "zero-1 bf16"):
            stock, ours = found[name, None], found[name, "zb-h1"]
            for expected, row in zip(stock, ours, strict=True):
                assert row == expected, (rank, name)
            assert stock[:3] == [(None, None), (None, None), "global_step2"]


def test_frozen_weights_and_buffers_survive_the_conversion():
    for found in suite.result(2, "frozen_stage_converted"):
        for (expected, before), (losses, after) in found:
            assert losses == expected
            assert set(before) == set(after) == {4.0} and len(before) != len(after)
