"""From a Hugging Face causal LM to a `ds_pipe_ext.PipelineModule` in one call."""

from functools import cache

from ds_pipe_ext.config import read_config

from .batch import prepare_batch
from .layers import DecoderLayer, layers_of
from .loss import logits_of, loss_of
from .sources import open_source


def pipeline_module(
    model_or_directory,
    config=None,
    *,
    num_stages=None,
    topology=None,
    dtype=None,
    gguf_file=None,
    seed=None,
    loss_fn=None,
    loss_chunk_tokens=None,
    **pipeline_module_kwargs,
):
    """Cut a causal LM into pipeline stages; each rank reads and holds the weights of its own layers only.

    Args:
        model_or_directory: a transformers PreTrainedModel, whose modules the layers take over; a PretrainedConfig, for
            random initial weights that do not depend on the split; or a directory with config.json and safetensors
            (one file or shards), or with a GGUF file.
        config: the DeepSpeed configuration, a dict or a path; its "pipeline" section sets stages and partition.
        num_stages, topology: as for deepspeed.pipe.PipelineModule; they take precedence over `config`.
        dtype: of the weights; by default the model's, or the configuration's.
        gguf_file: name of the GGUF file in the directory; needed if there are several or also a config.json.
        seed: of random initial weights; 1234 by default.
        loss_fn: `loss_fn(logits, labels)`; by default the model's own loss. Router losses are added to either if the
            model's config.output_router_logits is set.
        loss_chunk_tokens: make logits and loss of so many tokens at a time, and again in the backward, so that the logits
            of a whole micro-batch are never in memory; also `pipeline.loss_chunk_tokens` in the JSON. The head's weight
            gradient is then part of the input gradient's pass in schedules that split the backward.
        **pipeline_module_kwargs: further arguments of deepspeed.pipe.PipelineModule.

    Returns:
        A PipelineModule whose `prepare_batch` turns the batches of a Hugging Face data loader into its inputs.

    Raises:
        ValueError: the model cannot be cut, or weights are missing; the message says which and what to do.
    """
    chunk = _chunk_tokens(loss_chunk_tokens, config, loss_fn)
    source = open_source(model_or_directory, dtype=dtype, gguf_file=gguf_file, seed=seed)
    layers = layers_of(source, loss_chunk_tokens=chunk)
    loss_fn = loss_of(layers[0].module_args[0], loss_fn)
    # Reentrant checkpointing around the embedding would lose its gradient: its inputs are integers.
    pipeline_module_kwargs.setdefault("checkpointable_layers", [DecoderLayer.__name__])
    module = _module_class()(
        layers, num_stages=num_stages, topology=topology, loss_fn=loss_fn, config=config, **pipeline_module_kwargs
    )
    source.release()
    module.loss_chunk_tokens = chunk
    return module


def _chunk_tokens(given, config, loss_fn):
    """The option from argument and JSON."""
    written = read_config(config if config is not None else {}).loss_chunk_tokens
    if given is not None:
        given = read_config({"pipeline": {"schedule": "1f1b", "loss_chunk_tokens": given}}).loss_chunk_tokens
        if written not in (None, given):
            raise ValueError(
                f"loss_chunk_tokens is {given}, but pipeline.loss_chunk_tokens in the JSON is {written}; give one of them."
            )
    chunk = written if given is None else given
    if chunk is not None and loss_fn is not None:
        raise ValueError(
            f"loss_chunk_tokens is {chunk}, but a loss_fn is given, which needs the logits of the whole micro-batch; leave "
            "one of them out."
        )
    return chunk


@cache
def _module_class():
    from ds_pipe_ext.runtime.module import PipelineModule

    class CausalLMPipelineModule(PipelineModule):
        """A PipelineModule over `layers_of` a causal LM."""

        prepare_batch = staticmethod(prepare_batch)
        logits_of = staticmethod(logits_of)

    return CausalLMPipelineModule
