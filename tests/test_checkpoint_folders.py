"""Folders of checkpoints: whatever moment a process is killed at, the last good one or the new one is there as a whole."""

import contextlib
import itertools
import os
import shutil

import pytest

from ds_pipe_ext.runtime import folders


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the code that runs gets to clean up."""


def written(folder, content):
    """What the ranks do between ``begin`` and ``finish``."""
    folders.begin(folder)
    for name in ("mp_rank_00_model_states.pt", "layer_00-model_states.pt"):
        (folders.aside(folder) / name).write_text(content)


def save(folder, content):
    written(folder, content)
    folders.finish(folder, {"content": content})
    folders.point(folder.parent, folder.name)


@contextlib.contextmanager
def killed_at(moment, monkeypatch):
    """Raises before call number ``moment`` of what moves, removes or flushes; removals end half-way."""
    count = itertools.count()

    def dying(function, half=lambda *args: None):

        def call(*args, **kwargs):
            if next(count) == moment:
                half(*args)
                raise Killed
            return function(*args, **kwargs)

        return call

    def half_removed(path, *_):
        if os.path.isdir(path):
            os.unlink(next(os.scandir(path)))

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "fsync"):
            patch.setattr(os, name, dying(getattr(os, name)))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree, half_removed))
        yield count


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    seen = set()
    for moment in itertools.count():
        folder = tmp_path / str(moment) / "last"
        save(folder, "old")
        with killed_at(moment, monkeypatch) as count:
            try:
                save(folder, "new!")
                alive = True
            except Killed:
                alive = False
        folders.recover(folder)
        manifest = folders.manifest_of(folder)
        assert not folders.damages(folder, manifest), moment
        assert (folder.parent / "latest").read_text() == "last"
        seen.add(manifest["content"])
        assert manifest["content"] == (folder / "layer_00-model_states.pt").read_text()
        # The next save is not disturbed by what lies around.
        save(folder, "third")
        assert folders.manifest_of(folder)["content"] == "third"
        assert sorted(path.name for path in folder.parent.iterdir()) == ["last", "latest"]
        if alive:
            assert next(count) <= moment
            break
    assert moment > 8 and seen == {"old", "new!"}


def test_latest_names_the_old_tag_until_the_new_one_is_there(tmp_path, monkeypatch):
    for moment in itertools.count():
        directory = tmp_path / str(moment)
        save(directory / "one", "1")
        with killed_at(moment, monkeypatch):
            try:
                save(directory / "two", "2")
                alive = True
            except Killed:
                alive = False
        named = directory / (directory / "latest").read_text()
        assert not folders.damages(named, folders.manifest_of(named))
        if alive:
            assert named.name == "two"
            break
    assert moment > 6


def test_replacing_drops_stale_files_and_keeps_those_of_others(tmp_path):
    folder = tmp_path / "step"
    save(folder, "old")
    for name in ("layer_07-model_states.pt", "mp_rank_03_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
                 "ds_pipe_ext_rank_00003.pt"):
        (folder / name).write_text("of an older layout")
    (folder / "notes.txt").write_text("mine")
    save(folder, "new")
    assert sorted(path.name for path in folder.iterdir()) == [
        "ds_pipe_ext.json", "layer_00-model_states.pt", "mp_rank_00_model_states.pt", "notes.txt"]
    assert (folder / "notes.txt").read_text() == "mine"


def test_damages_are_named(tmp_path):
    folder = tmp_path / "step"
    save(folder, "whole")
    manifest = folders.manifest_of(folder)
    assert folders.damages(folder, manifest) == []
    (folder / "layer_00-model_states.pt").write_text("who")
    (folder / "mp_rank_00_model_states.pt").unlink()
    assert folders.damages(folder, manifest) == [
        f"{folder}/layer_00-model_states.pt is damaged: 3 bytes, 5 were written",
        f"{folder}/mp_rank_00_model_states.pt is missing"]
    for text, found in (('{"format": 1', "is damaged"), ("[]", "is damaged"), ('{"format": 2}', "has format 2.*reads 1")):
        (folder / "ds_pipe_ext.json").write_text(text)
        with pytest.raises(ValueError, match=f"ds_pipe_ext.json {found}"):
            folders.manifest_of(folder)
