"""Registries: in-process entries, entry points of other packages, duplicates."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ds_pipe_ext.registry import Registry, nearest

ROOT = Path(__file__).parent.parent


def install(site: Path, package: str, entries: str, source: str = "") -> None:
    """Writes an installed package as pip leaves it: a module and its .dist-info."""
    (site / f"{package}.py").write_text(textwrap.dedent(source))
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(entries))


def python(site: Path, code: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=60)


SOURCE = """
    from ds_pipe_ext.plan import Op
    from ds_pipe_ext.schedules import per_rank

    @per_rank
    def eager(r, p, m, extra=0):
        yield from (Op(r, kind, i) for kind in "FB" for i in range(m))

    def halves(layers, stages, first=1):
        return [0, *range(first, first + stages - 1), len(layers)]
"""


def test_schedule_and_partitioner_of_another_package(tmp_path):
    install(tmp_path, "elsewhere", """
        [ds_pipe_ext.schedules]
        eager = elsewhere:eager
        [ds_pipe_ext.partitioners]
        halves = elsewhere:halves
    """, SOURCE)
    done = python(tmp_path, """
        import sys
        from ds_pipe_ext.registry import schedules, partitioners
        assert "eager" in schedules.names() and "elsewhere" not in sys.modules, "listed without being loaded"
        from ds_pipe_ext.config import read_config
        from ds_pipe_ext.partition import Layer, split
        from ds_pipe_ext.testing import check_schedule
        config = read_config({"pipeline": {"schedule": {"name": "eager", "extra": 3}, "partition": {"name": "halves", "first": 2}}})
        assert config.plan(2, 2).to_csv() == "0F0,0F1,0B0,0B1\\n1F0,1F1,1B0,1B1\\n"
        assert split({"name": "halves", "first": 2}, [Layer("x", 1)] * 5, 2) == [0, 2, 5]
        check_schedule("eager", shapes=[(2, 3)])
        print("fine")
    """)
    assert done.stdout == "fine\n", done.stderr


def test_entry_point_that_cannot_be_loaded(tmp_path):
    install(tmp_path, "elsewhere", "[ds_pipe_ext.schedules]\nbroken = elsewhere:missing\n")
    done = python(tmp_path, """
        from ds_pipe_ext.registry import schedules
        assert schedules.get("gpipe")
        try:
            schedules.get("broken")
        except ValueError as error:
            print(error)
    """)
    assert "'broken' of entry point elsewhere:missing cannot be loaded: AttributeError" in done.stdout, done.stderr


@pytest.mark.parametrize("packages, what", [
    (["one", "two"], ["one:f", "two:f", "uninstall one of the packages"]),
    (["gpipe"], ["ds_pipe_ext.schedules.gpipe.gpipe and entry point gpipe:f"]),
])
def test_two_owners_of_a_name(tmp_path, packages, what):
    name = "gpipe" if packages == ["gpipe"] else "mine"
    for package in packages:
        install(tmp_path, package, f"[ds_pipe_ext.schedules]\n{name} = {package}:f\n")
    done = python(tmp_path, """
        from ds_pipe_ext.registry import schedules
        schedules.names()
    """)
    assert done.returncode != 0
    assert f"ValueError: the schedule '{name}' is registered twice" in done.stderr
    assert all(part in done.stderr for part in what)


def test_in_process():
    registry = Registry("thing", "ds_pipe_ext.no_such_group")

    @registry.register("a")
    def first():
        pass

    assert registry.register("a", first) is first
    with pytest.raises(ValueError, match="the thing 'a' is registered twice: .*first and .*lambda"):
        registry.register("a", lambda: None)
    registry.unregister("a")
    with pytest.raises(KeyError):
        registry.unregister("a")
    assert registry.names() == []


def test_unknown_name_lists_what_is_known():
    registry = Registry("thing", "ds_pipe_ext.no_such_group")
    registry.register("zebra", lambda: None)
    with pytest.raises(ValueError, match=r"unknown thing 'zebre' \(did you mean 'zebra'\?\); known: zebra"):
        registry.get("zebre")
    assert nearest("xyz", ["abc"]) == ""


def test_options_are_compared_with_the_signature():
    registry = Registry("thing", "ds_pipe_ext.no_such_group")
    registry.register("f", lambda shape, needed, *, depth=1: None)
    registry.register("any", lambda shape, **options: None)
    registry.check_options("f", {"needed": 1, "depth": 2})
    registry.check_options("any", {"whatever": 1})
    with pytest.raises(ValueError, match=r"^a.b: the thing 'f' has no option 'dept' \(did you mean 'depth'\?\); it takes needed, depth"):
        registry.check_options("f", {"needed": 1, "dept": 2}, where="a.b")
    with pytest.raises(ValueError, match="^the thing 'f' needs the option 'needed'"):
        registry.check_options("f", {})
    with pytest.raises(ValueError, match="has no option 'shape'"):
        registry.check_options("f", {"needed": 1, "shape": 2})
