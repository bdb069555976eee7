"""Which causal LMs of the installed transformers can be cut into stages: each configuration, made tiny, is tried.

    python -m ds_pipe_ext.hf.families docs/families.md

writes the table; without a file it is printed. `--only NAME...` tries some.
"""

import argparse
import copy
import sys
import textwrap
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .parity import compare
from .structure import UnsupportedModelError

DEPTH, LENGTH = 4, 8
#: what an attempt may end with, and how the table says it
OUTCOMES = {"passes": "pass", "refused": "are refused", "fails": "fail", "not tried": "were not tried"}
#: relative, by dtype
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}

#: what a size is in a tiny configuration, by the name that configurations give it
SIZES = {
    2: "num_key_value_heads swa_num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k "
       "n_group num_expert_group topk_group mamba_n_groups n_groups mamba_ngroups linear_num_key_heads index_topk_blocks "
       "num_dense_layers loop_num_passes loop_layer_index_start ngram_size num_hidden_layers_per_stack n_mamba_heads "
       "num_query_groups cca_time0 cca_time1",
    4: "num_attention_heads swa_num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
       "attention_heads num_decoder_attention_heads num_encoder_attention_heads num_experts n_routed_experts num_local_experts "
       "moe_num_experts index_n_heads linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads "
       "loop_layer_index_end zero_expert_num mamba_dt_rank index_topk window_size patch_size num_mem_blocks index_block_size "
       "heads_per_ngram attn_layer_period attn_layer_offset short_conv_kernel_size split_ngram_parts o_groups",
    8: "head_dim swa_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim linear_head_dim linear_key_head_dim "
       "linear_value_head_dim mamba_d_head mamba_head_dim d_head dim_head kv_channels q_lora_rank kv_lora_rank o_lora_rank "
       "gated_norm_rank loop_gate_rank hc_lowrank adapter_rank laurel_rank rotary_dim d_rel router_hidden_size hidden_size_per_"
       "layer_input ple_embed_dim chunk_size mamba_chunk_size state_size mamba_d_state ssm_state_size query_pre_attn_scalar "
       "rel_extent sliding_window sliding_window_size attention_chunk_size local_attention attention_window_size block_size "
       "attention_head_size",
    16: "qk_head_dim attention_head_dim",
    32: "hidden_size d_model n_embd emb_dim embedding_size embedding_dim lru_width attention_hidden_size word_embed_proj_dim "
        "prompt_mid_dim mamba_d_ssm input_embedding_size output_embedding_size dim_model_base",
    48: "intermediate_size moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size "
        "ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff d_inner ffn_hidden_size expert_ffn_hidden_size feed_forward_size "
        "n_inner",
    64: "vocab_size max_position_embeddings n_positions n_ctx max_seq_len unpadded_vocab_size vocab_size_per_layer_input "
        "decoder_vocab_size max_target_positions context_length ngram_vocab_size_base pronunciation_vocab_size "
        "shape_vocab_size model_max_length original_max_position_embeddings",
}  # fmt: skip
DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers num_decoder_layers "
    "num_blocks"
).split()
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY = {name: size for size, names in SIZES.items() for name in names.split()} | dict.fromkeys(DEPTHS, DEPTH) | TOKENS


#: what the rules do not make consistent
CHANGES = {
    "bamba": {"mamba_d_head": 16},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granitemoehybrid": {"mamba_d_head": 16},
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 2]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny(kind, **changes):
    """The configuration of class `kind` with small sizes, no dropout, and lists of one entry a layer cut to the depth."""
    default = kind()
    known = default.to_dict()
    depth = next((known[name] for name in DEPTHS if isinstance(known.get(name), int)), None)
    settings = {}
    for name, value in known.items():
        if name in default.sub_configs or name in ("rope_parameters", "rope_scaling"):
            continue
        if isinstance(value, list) and depth and len(value) == depth:
            settings[name] = value[:DEPTH]
        elif isinstance(value, float) and ("dropout" in name or "pdrop" in name):
            settings[name] = 0.0
        elif name == "head_dim" or (name in TINY and value is not None):
            settings[name] = TINY[name]
    heads = settings.get("num_attention_heads")
    if heads and known.get("num_key_value_heads") == known.get("num_attention_heads"):
        settings["num_key_value_heads"] = heads
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            settings[name] = tiny(type(part)).to_dict()
    if "is_decoder" in known:
        settings["is_decoder"] = True
    return kind(**settings | changes)


def batch_of(padding):
    """Two sequences of tokens that are no special ones, the second one padded on the right if asked for."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, TINY["vocab_size"], (2, LENGTH), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if not padding:
        return {"input_ids": ids, "labels": labels}
    mask[1, -3:] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def attempt(name) -> tuple[str, str]:
    """(one of OUTCOMES, explanation) for the configuration of model type `name`."""
    try:
        model, dtype = tiny_model(name)
    except Exception as error:
        return "not tried", told(error)
    coefficient = _router_coefficient(model)
    try:
        for padding, routers in [(False, False), (True, False)] + [(True, True)] * bool(coefficient):
            tried = copy.deepcopy(model)
            if routers:
                tried.config.output_router_logits = True
                setattr(tried, coefficient, 1.0)
            worst = max(compare(tried, batch_of(padding)).items(), key=lambda item: item[1])
            if not worst[1] <= TOLERANCES[dtype]:
                return "fails", f"{worst[0]} differs by {worst[1]:.1e} (padding: {padding}, router loss: {routers})"
    except UnsupportedModelError as error:
        return "refused", str(error).split(": ", 1)[1].split(". Only decoder-only")[0]
    except Exception as error:
        return "fails", told(error)
    return "passes", "with its router loss" if coefficient else ""


def told(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def tiny_model(name):
    """A causal LM of model type `name` and its dtype: float64, or float32 if its code insists on that."""
    config = tiny(CONFIG_MAPPING[name], **CHANGES.get(name, {}))
    for dtype in TOLERANCES:
        torch.manual_seed(0)
        # Grouped matrix products know no float64.
        eager = {"experts_implementation": "eager"} if _has_experts(config) else {}
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **eager).train()
        with torch.no_grad():  # initial norms and biases are constants, which would hide errors
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        try:
            copy.deepcopy(model)(**batch_of(False), use_cache=False)
            return model, dtype
        except RuntimeError as error:
            refused = error
    raise refused


def _router_coefficient(model) -> str | None:
    """The attribute that weights the unsplit model's router loss; None if it makes none even when asked to."""
    name = next((name for name in ("router_aux_loss_coef", "aux_loss_coef") if hasattr(model, name)), None)
    if name is None:
        return None
    output = copy.deepcopy(model)(**batch_of(False), use_cache=False, output_router_logits=True)
    return name if output.get("router_logits") and isinstance(output.get("aux_loss"), torch.Tensor) else None


def _has_experts(config):
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._can_set_experts_implementation()


def table(results) -> str:
    """The document: what `attempt` said of every model type, by outcome."""
    counts = Counter(outcome for outcome, _ in results.values())
    lines = [
        "# Causal language models that can be cut into stages",
        "",
        f"Written by `python -m ds_pipe_ext.hf.families docs/families.md` with transformers {transformers.__version__}: every",
        "configuration that it maps to a causal LM, made tiny, with random weights, cut before every layer, in one process. Loss",
        "and every gradient are compared with the unsplit model's, without and with padding, to 1e-6 in float64 (1e-4 where the",
        "model's own code insists on fp32). Models that can add a router loss are also compared with it, at weight 1, and marked",
        "with *. Not tried: no tiny model could be built or run here, so nothing is known.",
        "",
        ", ".join(f"{counts[outcome]} {word}" for outcome, word in OUTCOMES.items()) + ".",
        "",
    ]
    passing = [name + "*" * bool(told) for name, (outcome, told) in results.items() if outcome == "passes"]
    lines += ["## Pass", "", textwrap.fill(", ".join(passing) + ".", 124), ""]
    for outcome, title in (("refused", "Refused"), ("fails", "Fail"), ("not tried", "Not tried")):
        if counts[outcome]:
            lines += [f"## {title}", "", "| model type | reason |", "|---|---|"]
            lines += [f"| {name} | {told.replace('|', '/')} |" for name, (found, told) in results.items() if found == outcome]
            lines.append("")
    return "\n".join(lines)


def main(arguments=None) -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), metavar="NAME")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    results = {}
    for name in options.only:
        results[name] = attempt(name)
        print(name, *results[name], file=sys.stderr, flush=True)
    text = table(results)
    if options.file is None:
        print(text)
    else:
        options.file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
