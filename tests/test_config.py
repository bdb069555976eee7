"""The `pipeline` section: what is read, what is refused, and how."""

import base64
import json

import pytest

from ds_pipe_ext.config import PipeConfig, load, read_config
from ds_pipe_ext.registry import schedules


def read(**section) -> PipeConfig:
    return read_config({"train_batch_size": 8, "pipeline": section})


@pytest.mark.parametrize("source", [{}, {"pipeline": {}}, {"pipeline": {"schedule": None}}])
def test_defaults(source):
    config = read_config(source)
    assert not config.active
    assert config.model_dump() == {
        "stages": "auto", "schedule": None, "partition": None, "p2p_groups": 2, "p2p_transport": "auto",
        "check_samples": True, "loss_weighting": "micro_batch", "loss_chunk_tokens": None,
        "watchdog_seconds": 120,
        "pipe_partitioned": True, "grad_partitioned": True, "seed_layers": False, "activation_checkpoint_interval": 0,
        "use_reentrant": True}


def test_everything_given():
    config = read(stages=3, schedule={"name": "zb-h1"}, partition=[0, 3, 8, 10], p2p_groups=1, pipe_partitioned=False,
                  p2p_transport="process_group", watchdog_seconds=2.5, check_samples=False, loss_weighting="token", loss_chunk_tokens=8,
                  grad_partitioned=False, seed_layers=True, activation_checkpoint_interval=2, use_reentrant=False)
    assert config.active and config.schedule.name == "zb-h1" and config.schedule.options == {}
    assert (config.partition.name, config.partition.options) == ("boundaries", {"at": [0, 3, 8, 10]})
    assert (config.stages, config.p2p_groups, config.seed_layers, config.use_reentrant) == (3, 1, True, False)
    assert config.p2p_transport == "process_group"
    assert config.model_fields_set == set(PipeConfig.model_fields)


def test_it_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        read(schedule="gpipe").stages = 2


def test_a_name_is_short_for_an_object():
    assert read(schedule="zb-h1") == read(schedule={"name": "zb-h1"})
    assert read(partition="type:block") == read(partition={"name": "type", "regex": "block"})
    assert read(partition="best").partition is read().partition is None
    assert read(partition="parameters") == read(partition={"name": "parameters"})
    assert read(partition=[0, 2, 4]) == read(partition={"name": "boundaries", "at": [0, 2, 4]})


BAD = [
    (dict(schedule="zb-h3"), r"pipeline.schedule: unknown schedule 'zb-h3' \(did you mean 'zb-h[12]'\?\); known: 1f1b, gpipe"),
    (dict(schedule={"name": "1f1"}), r"pipeline.schedule.name: unknown schedule '1f1' \(did you mean '1f1b'\?\)"),
    (dict(schedule={"lag": 3}), "pipeline.schedule.name is None; allowed: 1f1b"),
    (dict(schedule={"name": ["1f1b"]}), r"pipeline.schedule.name is \['1f1b'\]; allowed"),
    (dict(schedule={"name": "zb-h1", "lag": 3}), "pipeline.schedule: the schedule 'zb-h1' has no option 'lag'; it takes no options"),
    (dict(schedule=3), "pipeline.schedule is 3; allowed: the name of a schedule"),
    (dict(schedule=True), "pipeline.schedule is True; allowed"),
    (dict(schedule=["1f1b"]), r"pipeline.schedule is \['1f1b'\]; allowed"),
    (dict(schedule=""), "pipeline.schedule: unknown schedule ''"),
    (dict(stages=0), "pipeline.stages is 0; allowed: an int of at least 1"),
    (dict(stages=True), "pipeline.stages is True; allowed"), (dict(stages=2.0), "pipeline.stages is 2.0; allowed"),
    (dict(stages="2"), "pipeline.stages is '2'; allowed"), (dict(stages="Auto"), "pipeline.stages is 'Auto'; allowed"),
    (dict(stages=None), "pipeline.stages is None; allowed"),
    (dict(p2p_groups=3), "pipeline.p2p_groups is 3; allowed: 1 or 2"), (dict(p2p_groups=True), "pipeline.p2p_groups is True"),
    (dict(p2p_groups="2"), "pipeline.p2p_groups is '2'"), (dict(p2p_groups=1.0), "pipeline.p2p_groups is 1.0"),
    (dict(watchdog_seconds=-1), "pipeline.watchdog_seconds is -1; allowed: a number of at least 0"),
    (dict(watchdog_seconds=True), "pipeline.watchdog_seconds is True"), (dict(watchdog_seconds="9"), "watchdog_seconds is '9'"),
    (dict(watchdog_seconds=float("inf")), "pipeline.watchdog_seconds is inf"),
    (dict(loss_chunk_tokens=0), "pipeline.loss_chunk_tokens is 0; allowed: an int of at least 1, or null"),
    (dict(loss_chunk_tokens=True), "pipeline.loss_chunk_tokens is True"),
    (dict(schedule=None, loss_chunk_tokens=8), "pipeline.loss_chunk_tokens is 8, but there is no pipeline.schedule"),
    (dict(loss_weighting="tokens"), "pipeline.loss_weighting is 'tokens'; allowed: \"micro_batch\".* or \"token\""),
    (dict(schedule=None, loss_weighting="token"), "pipeline.loss_weighting is \"token\", but there is no pipeline.schedule"),
    (dict(p2p_transport="gloo"), "pipeline.p2p_transport is 'gloo'; allowed: \"auto\".* or \"process_group\""),
    (dict(partition="profil"), "pipeline.partition: unknown partitioner 'profil'.*known: best, boundaries, parameters, type, uniform"),
    (dict(partition="uniforms"), r"did you mean 'uniform'\?"), (dict(partition="bst"), r"did you mean 'best'\?"),
    (dict(partition=None), "pipeline.partition is None; allowed"), (dict(partition=3), "pipeline.partition is 3; allowed"),
    (dict(partition="type:["), r"pipeline.partition: 'type' needs a regular expression, as in 'type:block', got '\['"),
    (dict(partition="type:"), "needs a regular expression behind the colon"),
    (dict(partition={"name": "type", "regex": 3}), "needs a regular expression"),
    (dict(partition="type"), "pipeline.partition: the partitioner 'type' needs the option 'regex'"),
    (dict(partition={"regex": "x"}), "pipeline.partition.name must be the name of a partitioner, got None"),
    (dict(partition={"name": "uniform", "regex": "x"}), "the partitioner 'uniform' has no option 'regex'; it takes no options"),
    (dict(partition={"name": "type", "regx": "x"}), r"has no option 'regx' \(did you mean 'regex'\?\); it takes regex"),
    (dict(partition=[0, 3, 3]), r"pipeline.partition\[2\] is 3, not above 3 before it \(stage 1 would be empty\)"),
    (dict(partition=[0, 5, 3]), r"pipeline.partition\[2\] is 3, not above 5"),
    (dict(partition=[1, 5]), r"pipeline.partition is \[1, 5\]; boundaries are one int more than stages"),
    (dict(partition=[0]), r"pipeline.partition is \[0\]"), (dict(partition=[]), r"pipeline.partition is \[\]"),
    (dict(partition=[0, True]), r"pipeline.partition\[1\] is True, not an int"),
    (dict(partition=[0, 2.5]), r"pipeline.partition\[1\] is 2.5, not an int"),
    (dict(partition={"name": "boundaries", "at": "0,3"}), "boundaries are one int more than stages"),
    (dict(partition=[0, 3, 8, 10], stages=2), "has 4 boundaries, which make 3 stages, but pipeline.stages is 2; write 3 boundaries"),
    (dict(partition=[0, 3, 8, 10], stages=2, schedule="1f1b"), "write 3 boundaries"),
    (dict(partition=[0, 1, 2, 3, 4], stages=2), "write 3 boundaries"),
    (dict(pipe_partitioned=1), "pipeline.pipe_partitioned is 1; allowed: true or false"),
    (dict(grad_partitioned="true"), "pipeline.grad_partitioned is 'true'; allowed"),
    (dict(seed_layers=0), "pipeline.seed_layers is 0; allowed"), (dict(use_reentrant=None), "pipeline.use_reentrant is None"),
    (dict(activation_checkpoint_interval=-1), "pipeline.activation_checkpoint_interval is -1; allowed: an int of at least 0"),
    (dict(activation_checkpoint_interval=True), "pipeline.activation_checkpoint_interval is True"),
    (dict(activation_checkpoint_interval=1.5), "pipeline.activation_checkpoint_interval is 1.5"),
    (dict(schedule="1f1b", colour="red"), "pipeline.colour: unknown key; known: stages, schedule, partition"),
    (dict(schedule="1f1b", stage=2), r"pipeline.stage: unknown key \(did you mean 'stages'\?\)"),
    (dict(shedule="1f1b"), r"pipeline.shedule: unknown key \(did you mean 'schedule'\?\)"),
    (dict(Schedule="1f1b"), r"pipeline.Schedule: unknown key \(did you mean 'schedule'\?\)"),
    (dict(partitions="uniform"), r"did you mean 'partition'\?"),
]


@pytest.mark.parametrize("section, message", BAD, ids=[json.dumps(section) for section, _ in BAD])
def test_refused(section, message):
    with pytest.raises(ValueError, match=message) as error:
        read(**section)
    assert type(error.value) is ValueError and str(error.value).startswith("pipeline.")


@pytest.mark.parametrize("section", [None, [], "zb-h1", 3])
def test_the_section_must_be_an_object(section):
    with pytest.raises(ValueError, match="^pipeline is .*; it must be an object"):
        read_config({"pipeline": section})


def test_keys_that_deepspeed_ignores_stay_ignored_without_a_schedule():
    assert not read(colour="red", micro="x").active


def test_files(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"pipeline": {"schedule": "1f1b", "stages": 2}}')
    assert read_config(path) == read_config(str(path)) == read(schedule="1f1b", stages=2)
    path.write_text('{\n  // as DeepSpeed reads it\n  pipeline: {schedule: "1f1b", stages: 2,}\n}')
    assert read_config(path) == read(schedule="1f1b", stages=2)
    encoded = base64.urlsafe_b64encode(b'{"pipeline": {"schedule": "1f1b", "stages": 2}}').decode()
    assert read_config(encoded) == read(schedule="1f1b", stages=2)


@pytest.mark.parametrize("text, message", [
    ('{"pipeline": {"stages": 2, "stages": 3}}', "the key 'stages' twice"), ('{"a": 1, "a": 1}', "the key 'a' twice"),
    ('{a: 1, a: 2}', "the key 'a' twice"), ('{"a": ', "is not JSON"), ("[1, 2]", "holds a list"),
])
def test_unsound_files(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("name", ["no/such/file.json", "nosuchfile"])
def test_no_such_file(name):
    with pytest.raises(ValueError, match=f"there is no configuration file {name}|base64"):
        load(name)


def test_plan_is_built_once_and_checked():
    config = read(schedule="zb-h1")
    plan = config.plan(2, 4)
    assert config.plan(2, 4) is plan and plan.name == "zb-h1" and (plan.n_ranks, plan.microbatches) == (2, 4)
    assert config.plan(4, 4) is not plan
    with pytest.raises(ValueError, match="pipeline.schedule is not given.*schedules: 1f1b, gpipe"):
        read().plan(2, 4)
    with pytest.raises(ValueError, match="pipeline.partition has 4 boundaries, but 1f1b on 2 ranks has 2 stages; write 3"):
        read(schedule="1f1b", partition=[0, 3, 8, 10]).plan(2, 4)


def test_options_reach_the_schedule():
    def with_depth(shape, depth: int = 1):
        if depth > shape.ranks:
            raise ValueError(f"depth {depth} is more than {shape.ranks} ranks")
        return schedules.get("gpipe" if depth == 1 else "1f1b")(shape)

    schedules.register("with-depth", with_depth)
    try:
        assert read(schedule={"name": "with-depth", "depth": 2}).plan(2, 3).ranks == read(schedule="1f1b").plan(2, 3).ranks
        with pytest.raises(ValueError, match="depth 3 is more than 2 ranks"):
            read(schedule={"name": "with-depth", "depth": 3}).plan(2, 3)
        with pytest.raises(ValueError, match="pipeline.schedule: with-depth cannot be planned with the options {'depth': 'x'}"):
            read(schedule={"name": "with-depth", "depth": "x"}).plan(2, 3)
        with pytest.raises(ValueError, match=r"has no option 'dept' \(did you mean 'depth'\?\); it takes depth"):
            read(schedule={"name": "with-depth", "dept": 2})
    finally:
        schedules.unregister("with-depth")


@pytest.mark.parametrize("stages, num_stages, world, expected", [
    ("auto", None, 4, 4), ("auto", 2, 4, 2), (2, None, 4, 2), (2, 2, 4, 2), (1, None, 3, 1), (4, None, 4, 4)])
def test_stages(stages, num_stages, world, expected):
    assert read(stages=stages).resolve_stages(num_stages, world) == expected


@pytest.mark.parametrize("stages, num_stages, world, message", [
    (2, 4, 4, "pipeline.stages is 2, but the script gave num_stages=4; remove one of the two"),
    (3, None, 4, "pipeline.stages is 3, which does not divide the 4 ranks; allowed: 1, 2, 4"),
    ("auto", 3, 4, "num_stages is 3, which does not divide the 4 ranks"), (8, None, 4, "does not divide"),
    ("auto", 0, 4, "num_stages is 0, which does not divide"),
])
def test_stages_that_cannot_be(stages, num_stages, world, message):
    with pytest.raises(ValueError, match=message):
        read(stages=stages).resolve_stages(num_stages, world)
