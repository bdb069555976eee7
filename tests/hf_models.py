"""Small causal LMs, batches for them, and a pipeline's layers run in one process."""

import torch
import transformers
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
    "granite": ("GraniteConfig", dict(embedding_multiplier=2.0, logits_scaling=1.5, residual_multiplier=0.5)),
    "glm4": ("Glm4Config", {}),
    "bloom": ("BloomConfig", dict(hidden_dropout=0.0, n_layer=3, n_head=4)),
    "falcon": ("FalconConfig", dict(new_decoder_architecture=True, num_kv_heads=2, head_dim=...)),
    "starcoder2": ("Starcoder2Config", dict(sliding_window=3, residual_dropout=0.0)),
    "cohere2": ("Cohere2Config", dict(logit_scale=0.5, **WINDOWED)),
    "stablelm": ("StableLmConfig", dict(use_parallel_residual=True)),
    "exaone4": ("Exaone4Config", WINDOWED),
    "nemotron": ("NemotronConfig", {}),
    "phi": ("PhiConfig", dict(resid_pdrop=0.0, embd_pdrop=0.0)),
    "gemma": ("GemmaConfig", {}),
    "olmo3": ("Olmo3Config", WINDOWED),
    "gpt_oss": ("GptOssConfig", dict(num_local_experts=4, num_experts_per_tok=2, **WINDOWED)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[1])),
    "olmoe": ("OlmoeConfig", dict(head_dim=4, num_experts=4, num_experts_per_tok=2)),
    "opt-projected": ("OPTConfig", dict(ffn_dim=24, dropout=0.0, word_embed_proj_dim=8, do_layer_norm_before=False)),
}
ROUTERS = dict(output_router_logits=True, router_aux_loss_coef=0.5)
MOE = ["gpt_oss", "mixtral", "qwen3_moe", "olmoe"]
# A head with a bias cannot be tied.
SPLIT = [(family, tied) for family in FAMILIES for tied in (True, False) if (family, tied) != ("phi", True)]


def config_of(family, tied=False, **changes):
    kind, extra = FAMILIES[family]
    settings = {**TINY, **extra, "tie_word_embeddings": tied, **changes}
    # An ellipsis: this family has no such setting.
    return getattr(transformers, kind)(**{name: value for name, value in settings.items() if value is not ...})


def model_of(family, tied=False, **changes):
    torch.manual_seed(0)
    config = config_of(family, tied, **changes)
    if family in MOE:  # grouped matrix products know no float64
        config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    with torch.no_grad():  # initial norms and biases are constants, which would hide errors
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(padding, batch=2, length=7):
    """Keyword arguments of a model; `padding`: none, left, right, or packed (several documents in a row)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (batch, length), generator=generator)
    result = {"input_ids": ids, "labels": ids.clone()}
    if padding == "packed":
        result["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]])[:batch, :length]
    elif padding != "none":
        mask = torch.ones_like(ids)
        mask[0, slice(0, 3) if padding == "left" else slice(-3, None)] = 0
        result["attention_mask"] = mask
        result["labels"][mask == 0] = -100
        if padding == "left":
            result["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return result


def assert_close(actual, expected, what, tolerance=1e-10):
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-30), what
