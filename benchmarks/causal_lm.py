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


def make_module(options: dict, partition: str):
    """A stock PipelineModule; partition is "cut:20" (first layer of every later stage) or a DeepSpeed method."""
    import torch
    from deepspeed.pipe import PipelineModule

    from ds_pipe_ext.hf import layers_of
    from ds_pipe_ext.hf.batch import CausalLMLoss
    from ds_pipe_ext.hf.layers import count_parameters

    class Module(PipelineModule):
        def _partition_layers(self, method="uniform"):
            if not method.startswith("cut:"):
                return super()._partition_layers(method)
            self.parts = [0, *(int(cut) for cut in method[4:].split(",")), len(self._layer_specs)]
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(self.parts[stage], self.parts[stage + 1])

        def _count_layer_params(self):
            return [count_parameters(spec) for spec in self._layer_specs]

    torch.manual_seed(0)
    layers = layers_of(model_source(options), dtype=torch.float32)
    if partition == "cut:auto":
        # The head of a small model weighs as much as many decoder layers: 20 | 13 for SmolLM2-135M.
        p, n = options["ranks"], len(layers)
        share = 20 / 33 if p == 2 else 1 / p
        cuts = [round(n * (share + (1 - share) * k / (p - 1))) for k in range(p - 1)]
        partition = "cut:" + ",".join(map(str, cuts))
    shell = layers[0].module_args[0]
    loss = CausalLMLoss(shell.model.loss_function, shell.model.config.get_text_config().vocab_size)
    return Module(layers, num_stages=options["ranks"], loss_fn=loss, partition_method=partition)
