"""The causal LM, its tokens and its stages, for `real_model.py`."""

import importlib.util
import pathlib


def package_folder(name: str) -> pathlib.Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {name} is not installed; give --model and --text instead")
    return pathlib.Path(spec.origin).parent


def text_of(options: dict) -> str:
    """All Markdown and plain text below a folder (or one file), in order of the names."""
    path = pathlib.Path(options["text"])
    files = [path] if path.is_file() else sorted([*path.rglob("*.md"), *path.rglob("*.txt")])
    if not files:
        raise SystemExit(f"no .md or .txt below {path}")
    return "\n\n".join(file.read_text("utf-8") for file in files[:8])


def token_ids(options: dict, count: int) -> list[int]:
    """The first `count` tokens of the text; bytes for the tiny model."""
    text = text_of(options)
    if options["tiny"]:
        ids = list(text.encode()[:count])
    else:
        from transformers import AutoTokenizer

        folder = pathlib.Path(options["model"])
        gguf = {} if (folder / "config.json").exists() else {"gguf_file": next(folder.glob("*.gguf")).name}
        ids = AutoTokenizer.from_pretrained(folder, **gguf)(text[:count * 8])["input_ids"][:count]
    if len(ids) < count:
        raise SystemExit(f"the text has {len(ids)} tokens, {count} are needed")
    return ids


def model_source(options: dict):
    """What `layers_of` reads."""
    if not options["tiny"]:
        return options["model"]
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=4,
                       num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True)


def boundaries(options: dict) -> list[int]:
    """First layer of every stage and the number of layers, as the partition `boundaries` takes it.

    By default a small model's head weighs as much as many decoder layers: 20 | 13 of SmolLM2-135M's 33.
    """
    from ds_pipe_ext.hf import layers_of

    n, p = len(layers_of(model_source(options))), options["ranks"]
    if options["boundaries"] != "auto":
        return [0, *(int(cut) for cut in options["boundaries"].split(",")), n]
    share = 20 / 33 if p == 2 else 1 / p
    return [0, *(round(n * (share + (1 - share) * k / (p - 1))) for k in range(p - 1)), n]


def make_module(options: dict, partition):
    """The pipeline module, the same for every system; partition is a list of boundaries or "parameters"."""
    import torch

    from ds_pipe_ext.hf import pipeline_module

    torch.manual_seed(0)
    config = {"pipeline": {"stages": options["ranks"], "partition": partition}}
    return pipeline_module(model_source(options), config=config, dtype=torch.float32)
