"""Any causal LM cut into pipeline layers equals the unsplit model: loss and every gradient, at every cut."""

import copy

import pytest
import torch
import transformers
from hf_models import FAMILIES, MOE, ROUTERS, SPLIT, assert_close, batch_of, config_of, model_of
from torch.utils.checkpoint import checkpoint

from ds_pipe_ext.hf import layers_of, pipeline_module, prepare_batch
from ds_pipe_ext.hf.families import tiny
from ds_pipe_ext.hf.loss import CausalLMLoss, WithModelTerms
from ds_pipe_ext.hf.parity import Chain, compare, difference
from ds_pipe_ext.runtime.data import count_targets


def loss_of(model):
    return CausalLMLoss(model.loss_function, model.config.vocab_size)


@pytest.mark.parametrize("family,tied", SPLIT)
def test_loss_and_gradients_equal_the_unsplit_model_at_every_cut(family, tied):
    model = model_of(family, tied)
    chain = Chain(layers_of(copy.deepcopy(model)))
    assert len(chain.tied) == int(tied)
    every = range(1, len(chain.functions))
    for padding in ("none", "left", "right", "packed"):
        if family == "bloom" and padding in ("left", "packed"):
            continue  # it has no position ids
        batch = batch_of(padding)
        if family == "gemma2" and padding == "left":
            # Its eager attention gives NaN in float64 for rows without any key, in the unsplit model too.
            for module in (model, *chain.modules):
                module.float()
        model.zero_grad()
        expected = model(**batch, use_cache=False)
        expected.loss.backward()
        inputs, labels = prepare_batch(batch)
        # Single cuts as well: what is wrong between two neighbours may cancel if every layer is cut off.
        for cuts in [()] + [(cut,) for cut in every if padding == "left"] + [tuple(every)]:
            for module in chain.modules:
                module.zero_grad()
            logits, boundaries = chain.forward(inputs, cuts)
            loss = chain.loss_fn(logits, labels)
            chain.backward(loss, boundaries)
            assert all(len(pairs) == 1 for pairs in boundaries)  # hidden states alone have gradients
            assert_close(logits, expected.logits, (padding, cuts))
            assert_close(loss, expected.loss, (padding, cuts))
            weights = {name: tensor for name, tensor in chain.named().items() if isinstance(tensor, torch.nn.Parameter)}
            assert weights.keys() == dict(model.named_parameters()).keys()
            for name, parameter in model.named_parameters():
                assert difference(weights[name].grad, parameter.grad) < 1e-10, (name, padding, cuts)


@pytest.mark.parametrize("family", MOE)
def test_router_losses_equal_the_unsplit_model(family):
    """Every layer's router logits reach the last stage; their loss is masked as the model masks it."""
    model = model_of(family, **ROUTERS)
    for padding in ("none", "left", "right", "packed"):
        differences = compare(copy.deepcopy(model), batch_of(padding))
        assert max(differences.values()) < 1e-10, (padding, max(differences.items(), key=lambda item: item[1]))
    with torch.no_grad():
        losses = [model_of(family, **changes)(**batch_of("none")).loss for changes in ({}, ROUTERS)]
    assert losses[1] - losses[0] > 0.1  # or nothing was compared


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("family,tied,changes", [("llama", True, {}), ("llama", False, {}), ("gemma2", True, {}),
                                                 ("cohere2", True, {}), ("phi", False, {}), ("mixtral", False, ROUTERS)])
def test_a_chunked_loss_equals_the_unsplit_model(family, tied, changes, chunk):
    """With capped, scaled and biased heads, ties and padding; chunks end within rows. transformers computes losses in fp32."""
    # gemma2's unsplit forward gives NaN in float64 where its window holds padding only.
    for padding in ("none", "right")[: 1 + (family != "gemma2")]:
        differences = compare(model_of(family, tied, **changes), batch_of(padding), loss_chunk_tokens=chunk)
        assert differences.pop("loss") < 1e-6, padding
        assert max(differences.values()) < 1e-10, (padding, max(differences.items(), key=lambda item: item[1]))


def test_a_chunked_loss_of_nothing_and_of_a_frozen_head():
    model = model_of("llama")
    model.lm_head.requires_grad_(False)
    differences = compare(model, batch_of("right"), loss_chunk_tokens=4)
    assert differences.pop("loss") < 1e-6 and max(differences.values()) < 1e-10
    assert model.lm_head.weight.grad is None
    chain = Chain(layers_of(copy.deepcopy(model), loss_chunk_tokens=4))
    batch = batch_of("none")
    batch["labels"][:] = -100
    inputs, labels = prepare_batch(batch)
    assert chain.loss_fn(chain.forward(inputs)[0], labels) == 0.0


def test_a_chunked_loss_makes_no_logits_of_the_whole_micro_batch():
    """Rows of the largest tensor with a vocabulary axis that forward and backward make; the head's weight has 16."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == 61:
                    self.rows = max(self.rows, tensor.numel() // 61)
            return result

    found = []
    for chunk in (None, 2):
        chain = Chain(layers_of(model_of("llama", vocab_size=61), loss_chunk_tokens=chunk))
        batch = {name: tensor % 61 for name, tensor in batch_of("none", batch=4).items()}
        inputs, labels = prepare_batch(batch)
        with Largest() as largest:
            chain.loss_fn(chain.forward(inputs)[0], labels).backward()
        found.append(largest.rows)
    assert found == [28, 16]


def test_packed_documents_do_not_see_each_other():
    model = model_of("llama")
    chain = Chain(layers_of(copy.deepcopy(model)))
    batch = batch_of("packed")
    packed = chain.forward(prepare_batch(batch)[0])[0]
    for row, cut in ((0, 4), (1, 2)):
        for part in (slice(0, cut), slice(cut, 7)):
            alone = model(input_ids=batch["input_ids"][row : row + 1, part], use_cache=False).logits
            assert_close(packed[row : row + 1, part], alone, (row, part))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_eager_attention_and_position_ids_travel(family):
    model = model_of(family, attn_implementation="eager").float()
    chain = Chain(layers_of(copy.deepcopy(model)))
    batch = batch_of("right")
    batch["position_ids"] = torch.arange(7).expand(2, -1) + 3
    inputs, _ = prepare_batch(batch)
    assert [tensor.dtype for tensor in inputs] == [torch.int64, torch.bool, torch.int32]
    logits, _ = chain.forward(inputs, range(1, len(chain.functions)))
    assert torch.equal(logits, model(**batch, use_cache=False).logits)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt"])
def test_dropout_draws_the_same_numbers_as_the_unsplit_model(family):
    rates = {
        "gpt2": dict(resid_pdrop=0.2, embd_pdrop=0.2),
        "gpt_neox": dict(hidden_dropout=0.2),
        "opt": dict(dropout=0.2),
    }
    model = model_of(family, **rates[family])
    chain = Chain(layers_of(copy.deepcopy(model)))
    batch = batch_of("right")
    torch.manual_seed(5)
    expected = model(**batch, use_cache=False).logits
    torch.manual_seed(5)
    assert torch.equal(chain.forward(prepare_batch(batch)[0])[0], expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_run_under_checkpointing(reentrant):
    model = model_of("gpt2", resid_pdrop=0.2)
    chain = Chain(layers_of(copy.deepcopy(model)))
    inputs, labels = prepare_batch(batch_of("right"))
    gradients = []
    for wrapped in (False, True):
        torch.manual_seed(3)
        functions = chain.functions
        for module in chain.modules:
            module.zero_grad()
        x = inputs
        for index, function in enumerate(functions):
            if wrapped and 2 <= index < len(functions) - 2:
                x = checkpoint(lambda *parts, f=function: f(parts), *x, use_reentrant=reentrant)
            else:
                x = function(x)
        loss_of(model)(x, labels).backward()
        gradients.append({name: tensor.grad.clone() for name, tensor in chain.named().items()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_masks_of_one_micro_batch_never_serve_another():
    model = model_of("llama")
    chain = Chain(layers_of(copy.deepcopy(model)))
    mask = batch_of("right")["attention_mask"]
    ids = batch_of("none")["input_ids"]
    buffer = mask.bool()
    for changed in (mask, 1 - mask.flip(1) * 0, mask.flip(1)):
        buffer.copy_(changed)  # the same tensor, new contents
        expected = model(input_ids=ids, attention_mask=changed, use_cache=False).logits
        assert torch.equal(chain.forward((ids, buffer))[0], expected)
    for length in range(3, 8):
        chain.forward(prepare_batch(batch_of("right", length=length))[0])
    assert len(chain.modules[0].shell._recorded) <= 2


def test_bfloat16_layers_match_the_model():
    model = model_of("llama")
    for parameter in model.parameters():  # not buffers: transformers keeps rotary frequencies in float32
        parameter.data = parameter.data.bfloat16()
    chain = Chain(layers_of(copy.deepcopy(model)))
    batch = batch_of("left")
    assert torch.equal(chain.forward(prepare_batch(batch)[0])[0], model(**batch, use_cache=False).logits)
    late = Chain(layers_of(model_of("llama")))
    for module in late.modules:
        module.bfloat16()  # as the engine does, after the layers were made
    assert torch.equal(late.forward(prepare_batch(batch)[0])[0], model(**batch, use_cache=False).logits)


def test_a_micro_batch_without_labels_gives_zero():
    model = model_of("llama")
    chain = Chain(layers_of(model))
    inputs, labels = prepare_batch(batch_of("none"))
    loss = loss_of(model)(chain.forward(inputs)[0], torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0
    assert all((tensor.grad == 0).all() for tensor in chain.named().values())


SMALL = dict(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
PER_LAYER = dict(SMALL, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8)
REFUSED = {
    "T5Config": ({}, "no causal language model"),
    "BartConfig": (
        dict(d_model=16, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4, is_encoder_decoder=False),
        "BartForCausalLM .*encoder_attn .*is_causal is False",
    ),
    "DeepseekV4Config": (dict(tiny(transformers.DeepseekV4Config).to_dict()), "receives the token ids"),
    "GlmMoeDsaConfig": (dict(tiny(transformers.GlmMoeDsaConfig).to_dict()), "GlmMoeDsaForCausalLM .* layer before it"),
    "RwkvConfig": (dict(tiny(transformers.RwkvConfig).to_dict()), "receives more than hidden states from the layer before"),
    "BertConfig": ({}, "BertLMHeadModel .*is_causal is False"),
    "GPT2Config": (dict(n_embd=16, n_head=4, n_layer=2, add_cross_attention=True), "crossattention .*is_causal is"),
    "OPTConfig": (dict(layerdrop=0.1, hidden_size=16, num_attention_heads=4), "OPTForCausalLM .* config.layerdrop"),
    "LlamaConfig": (dict(SMALL, num_hidden_layers=1, is_causal=False), "LlamaForCausalLM .* not causal"),
    "PhiConfig": (dict(SMALL, num_hidden_layers=2, tie_word_embeddings=True), "PhiForCausalLM .* head has a bias"),
    "Qwen3MoeConfig": (
        dict(SMALL, num_hidden_layers=2, mlp_only_layers=[0, 1], output_router_logits=True),
        "output_router_logits is set, but none",
    ),
    "Zamba2Config": ({}, "Zamba2ForCausalLM .* depends on weights or activations"),
    "Gemma3nTextConfig": (
        dict(PER_LAYER, num_hidden_layers=5, num_kv_shared_layers=0, laurel_rank=4, activation_sparsity_pattern=None),
        "Gemma3nForCausalLM cannot be turned into pipeline layers",
    ),
    "Gemma4TextConfig": (dict(PER_LAYER, num_hidden_layers=2), "Gemma4ForCausalLM cannot be turned into pipeline"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_cut_are_refused(kind):
    settings, reason = REFUSED[kind]
    with pytest.raises(ValueError, match=reason):
        layers_of(getattr(transformers, kind)(**settings))


def test_a_loss_that_is_not_the_loss_function_is_refused():
    settings = dict(d_model=16, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=24, vocab_size=64)
    shell = layers_of(transformers.TrOCRConfig(**settings))[0].module_args[0]  # its labels are not shifted
    with pytest.raises(ValueError, match="another loss"):
        shell.loss_function()
    for family in FAMILIES:
        layers_of(config_of(family))[0].module_args[0].loss_function()


@pytest.mark.parametrize(
    "batch,reason",
    [
        ({"input_ids": torch.ones(1, 2)}, "no 'labels'"),
        ({"labels": torch.ones(1, 2)}, "no 'input_ids'"),
        (
            {"input_ids": torch.ones(1, 2), "labels": torch.ones(1, 2), "token_type_ids": torch.ones(1, 2)},
            "token_type_ids",
        ),
        (torch.ones(1, 2), "must be a mapping"),
    ],
)
def test_batches_that_cannot_travel_are_refused(batch, reason):
    with pytest.raises(ValueError, match=reason):
        prepare_batch(batch)


def test_an_unprepared_mask_is_refused_by_the_first_layer():
    chain = Chain(layers_of(config_of("llama")))
    batch = batch_of("right")
    with pytest.raises(ValueError, match="prepare_batch"):
        chain.forward((batch["input_ids"], batch["attention_mask"]))


@pytest.mark.parametrize("quantised", ["directory", "model"])
def test_quantised_weights_are_refused(quantised, tmp_path):
    """As bitsandbytes leaves them."""
    source = model_of("llama")
    if quantised == "model":
        source.quantization_method = "bitsandbytes"
    else:
        source.save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace("{", '{"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true},',
                                                 1))
        source = tmp_path
    with pytest.raises(ValueError, match="quantised"):
        layers_of(source)


def test_chunks_need_the_models_own_loss_and_one_number():
    config = {"train_micro_batch_size_per_gpu": 1, "pipeline": {"schedule": "1f1b", "loss_chunk_tokens": 4}}
    with pytest.raises(ValueError, match="loss_chunk_tokens is 8, but pipeline.loss_chunk_tokens in the JSON is 4"):
        pipeline_module(config_of("llama"), config=config, loss_chunk_tokens=8)
    with pytest.raises(ValueError, match="loss_chunk_tokens is 4, but a loss_fn is given"):
        pipeline_module(config_of("llama"), config=config, loss_fn=torch.nn.functional.cross_entropy)
    with pytest.raises(ValueError, match="pipeline.loss_chunk_tokens is 0; allowed: an int of at least 1"):
        pipeline_module(config_of("llama"), config={}, loss_chunk_tokens=0)


@pytest.mark.parametrize(
    "loss_of_logits", [CausalLMLoss(None, 64), torch.nn.CrossEntropyLoss(ignore_index=7), lambda o, l: o.sum()]
)
def test_router_losses_change_no_count_of_targets(loss_of_logits):
    labels = torch.tensor([[1, 7, -100, 2], [7, -100, 3, -100]])
    assert count_targets(WithModelTerms(loss_of_logits), labels) == count_targets(loss_of_logits, labels)


def test_logits_that_depend_on_other_tokens_are_not_made_in_chunks(monkeypatch):
    forward = transformers.LlamaForCausalLM.forward

    def centred(self, *args, labels=None, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits - output.logits.mean(1, keepdim=True)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, vocab_size=self.config.vocab_size)
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", centred)
    layers_of(config_of("llama"))
    with pytest.raises(ValueError, match="depend on more than their own token"):
        layers_of(config_of("llama"), loss_chunk_tokens=4)
