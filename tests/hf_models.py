"""Small causal LMs, batches for them, and a pipeline's layers run in one process."""

import torch
import transformers
from deepspeed.pipe import TiedLayerSpec
from transformers import AutoModelForCausalLM

TINY = dict(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    attention_dropout=0.0,
)  # fmt: skip
WINDOWED = dict(sliding_window=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", dict(use_sliding_window=True, max_window_layers=1, **WINDOWED)),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", dict(sliding_window=3)),
    "gemma2": ("Gemma2Config", dict(query_pre_attn_scalar=8, **WINDOWED)),
    "gemma3": ("Gemma3TextConfig", dict(query_pre_attn_scalar=8, **WINDOWED)),
    "phi3": ("Phi3Config", dict(sliding_window=None)),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", dict(no_rope_layers=[1, 1, 0])),
    "gpt_neox": ("GPTNeoXConfig", dict(hidden_dropout=0.0)),
    "gpt2": ("GPT2Config", dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "opt": ("OPTConfig", dict(ffn_dim=24, dropout=0.0)),
    "opt-projected": ("OPTConfig", dict(ffn_dim=24, dropout=0.0, word_embed_proj_dim=8, do_layer_norm_before=False)),
}
SPLIT = [(family, tied) for family in FAMILIES for tied in (True, False)]


def config_of(family, tied=False, **changes):
    kind, extra = FAMILIES[family]
    return getattr(transformers, kind)(**{**TINY, **extra, "tie_word_embeddings": tied, **changes})


def model_of(family, tied=False, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, tied, **changes), dtype=torch.float64).train()
    with torch.no_grad():  # initial norms and biases are constants, which would hide errors
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(padding, batch=2, length=7):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (batch, length), generator=generator)
    result = {"input_ids": ids, "labels": ids.clone()}
    if padding != "none":
        mask = torch.ones_like(ids)
        mask[0, slice(0, 3) if padding == "left" else slice(-3, None)] = 0
        result["attention_mask"] = mask
        result["labels"][mask == 0] = -100
        if padding == "left":
            result["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return result


class Chain:
    """The layers of a pipeline in one process, cut wherever a test likes."""

    def __init__(self, specs):
        self.tied, self.modules, self.functions = {}, [], []
        for spec in specs:
            if isinstance(spec, TiedLayerSpec):
                module = self.tied.get(spec.key) or self.tied.setdefault(spec.key, spec.build())
                function = module if spec.forward_fn is None else (lambda x, f=spec.forward_fn, m=module: f(m, x))
            else:
                module = function = spec.build()
            self.modules.append(module)
            self.functions.append(function)

    def forward(self, inputs, cuts=()):
        """Logits, and the (sent, received) hidden states at the cuts, each before the layer it names."""
        boundaries = []
        for index, function in enumerate(self.functions):
            if index in cuts:
                sent = inputs if isinstance(inputs, tuple) else (inputs,)
                assert all(isinstance(tensor, torch.Tensor) for tensor in sent)
                assert [tensor.requires_grad for tensor in sent] == [True] + [False] * (len(sent) - 1)
                received = tuple(tensor.detach().clone() for tensor in sent)
                received[0].requires_grad_()
                boundaries.append((sent[0], received[0]))
                inputs = received if isinstance(inputs, tuple) else received[0]
            inputs = function(inputs)
        return inputs, boundaries

    def named(self):
        return {name: tensor for module in self.modules for name, tensor in module.hf_named_parameters()}


def assert_close(actual, expected, what, tolerance=1e-10):
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-30), what
