"""From a checkpoint with ZeRO 1 or bf16 to DeepSpeed's universal format, which loads into any split."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, OPTIMIZER_STATE_DICT

from . import folders, layout


def convert(directory: str | Path, tag: str | None = None, workers: int = 1) -> Path:
    """Runs DeepSpeed's converter on one checkpoint and adds what it leaves out: layer files and the manifest.

    Args:
        directory: what was given to ``save_checkpoint``.
        tag: default: what ``latest`` says.
        workers: processes that read and merge.

    Returns:
        The folder ``TAG_universal`` beside the tag, there as a whole or not at all; ``latest_universal`` names it.

    Raises:
        ValueError: there is no such checkpoint, its files are damaged, or its optimizer cannot be converted.
    """
    directory = Path(directory)
    if tag is None:
        if not (directory / "latest").is_file():
            raise ValueError(f"there is no file {directory / 'latest'}; give --tag")
        tag = (directory / "latest").read_text().strip()
    source, target = directory / tag, directory / f"{tag}_universal"
    _check(source)
    folders.begin(target)
    work = folders.aside(target)
    # In a folder of its own: the converter writes its `latest_universal` beside its output.
    ds_to_universal.main(argparse.Namespace(
        input_folder=str(source), output_folder=str(work / "parts" / target.name), num_extract_workers=workers,
        num_merge_workers=workers, keep_temp_folder=False, strict=True, inject_missing_state=True))
    for path in (work / "parts" / target.name).iterdir():
        os.rename(path, work / path.name)
    shutil.rmtree(work / "parts")
    for pattern in ("layer_*", "ds_pipe_ext_rank_*"):
        for path in source.glob(pattern):
            shutil.copy2(path, work / path.name)
    manifest = folders.manifest_of(source)
    if manifest is not None:
        folders.finish(target, {key: value for key, value in manifest.items() if key not in ("format", "files")})
    else:
        os.rename(work, target)
    folders.point(directory, target.name, "latest_universal")
    return target


def _check(source: Path) -> None:
    if not source.is_dir():
        raise ValueError(f"there is no checkpoint {source}")
    manifest = folders.manifest_of(source)
    if manifest is not None and (damages := folders.damages(source, manifest)):
        raise ValueError("; ".join(damages))
    shards = sorted(source.glob("*_optim_states.pt"))
    if not shards:
        raise ValueError(f"{source} has no optimizer files of ZeRO: saved by ds_pipe_ext in fp32 without ZeRO it loads into "
                         "any split as it is; saved by DeepSpeed alone, it does not move")
    for path in shards:
        saved = layout.opened(path)[OPTIMIZER_STATE_DICT]
        base = saved[BASE_OPTIMIZER_STATE]
        states = list(base["state"].values()) if isinstance(base, dict) else base
        if not states or any(not {"exp_avg", "exp_avg_sq"} <= set(state) for state in states):
            found = sorted({key for state in states for key in state}) or "no state yet"
            raise ValueError(f"{path} has {found} in its optimizer's state; DeepSpeed's universal format is for Adam's exp_avg "
                             "and exp_avg_sq, after at least one step")
