"""Hugging Face causal language models as DeepSpeed pipelines, without per-model code.

The only package of ds_pipe_ext that imports transformers.
"""

from .batch import prepare_batch
from .layers import layers_of
from .module import pipeline_module
from .save import save_pretrained

__all__ = ["layers_of", "pipeline_module", "prepare_batch", "save_pretrained"]
