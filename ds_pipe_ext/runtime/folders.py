"""Checkpoint folders: written aside, put in place at once, described by a manifest, checked before anything is read."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

#: beside DeepSpeed's files in the folder of a tag; written last, so that a folder that has it is complete
MANIFEST = "ds_pipe_ext.json"
SAVING, REPLACED = ".saving", ".replaced"
_FORMAT = 1
_WRITTEN = re.compile(r".*[-_](model|optim)_states\.pt|ds_pipe_ext[._].*|offloaded_tensors")


def begin(folder: Path) -> None:
    """Makes the place where the files of ``folder`` are written first; what a killed save left there is removed."""
    recover(folder)
    shutil.rmtree(aside(folder), ignore_errors=True)
    aside(folder).mkdir(parents=True)


def aside(folder: Path) -> Path:
    """Where the files of ``folder`` are until all of them are written."""
    return folder.with_name(folder.name + SAVING)


def finish(folder: Path, described: dict) -> None:
    """Puts complete files in place: all on disk, then the manifest, then two renames.

    Args:
        folder: of the tag.
        described: what else the manifest says.
    """
    new, old = aside(folder), folder.with_name(folder.name + REPLACED)
    files = sorted(path for path in new.rglob("*") if path.is_file())
    _to_disk(*files)
    sizes = {str(path.relative_to(new)): path.stat().st_size for path in files}
    (new / MANIFEST).write_text(json.dumps({"format": _FORMAT, **described, "files": sizes}, indent=1) + "\n")
    _to_disk(new / MANIFEST, new)
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    _to_disk(folder.parent)
    _drop(old, folder)


def recover(folder: Path) -> None:
    """Ends what a process that was killed while it replaced ``folder`` left half done."""
    old = folder.with_name(folder.name + REPLACED)
    if old.exists() and not folder.exists():
        os.rename(old, folder)
    else:
        _drop(old, folder)


def _drop(old: Path, folder: Path) -> None:
    """Removes a replaced checkpoint; files that a user put there move to the new one."""
    if not old.exists():
        return
    for path in old.iterdir():
        if not _WRITTEN.fullmatch(path.name) and not (folder / path.name).exists():
            os.rename(path, folder / path.name)
    shutil.rmtree(old)


def point(directory: Path, tag: str, name: str = "latest") -> None:
    """Makes ``tag`` the one that is loaded by default; the file is the old or the new one at any moment."""
    new = directory / f"{name}{SAVING}"
    new.write_text(tag)
    _to_disk(new)
    os.replace(new, directory / name)
    _to_disk(directory)


def _to_disk(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def manifest_of(folder: Path) -> dict | None:
    """The manifest; None for a checkpoint that DeepSpeed made without this package.

    Raises:
        ValueError: it is damaged, or of a newer release.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        newer = found["format"] > _FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); load another tag") from None
    if newer:
        raise ValueError(f"{path} has format {found['format']}, this release of ds_pipe_ext reads {_FORMAT}; update it")
    return found


def damages(folder: Path, manifest: dict) -> list[str]:
    """A sentence for every file that is missing or has not the length that was written."""
    result = []
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.exists():
            result.append(f"{path} is missing")
        elif path.stat().st_size != size:
            result.append(f"{path} is damaged: {path.stat().st_size} bytes, {size} were written")
    return result


class Writer:
    """DeepSpeed's checkpoint engine, which goes on after a failed write, so that all ranks come to the end together.

    Attributes:
        engine: the one behind it.
        error: the first failure; nothing is written after it.
    """

    def __init__(self, engine):
        self.engine = engine
        self.error: Exception | None = None

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def save(self, state_dict, path):
        self.attempt(path, lambda: self.engine.save(state_dict, path))

    def makedirs(self, path, exist_ok=False):
        self.attempt(path, lambda: self.engine.makedirs(path, exist_ok=exist_ok))

    def attempt(self, path, action) -> None:
        """Runs ``action``, which writes ``path``, unless something failed before."""
        if self.error is not None:
            return
        try:
            action()
        except Exception as error:
            self.error = RuntimeError(f"{path} was not written: {type(error).__name__}: {error}")
            self.error.__cause__ = error


class Reader:
    """DeepSpeed's checkpoint engine, whose errors name the file.

    Attributes:
        engine: the one behind it.
        last: the file that was read last.
    """

    def __init__(self, engine):
        self.engine = engine
        self.last = ""

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def load(self, path, map_location=None):
        self.last = path
        return read(path, lambda: self.engine.load(path, map_location=map_location))


def read(path, action):
    """What ``action`` reads from ``path``.

    Raises:
        ValueError: it cannot; names the file.
    """
    try:
        return action()
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}); load another tag") from error
