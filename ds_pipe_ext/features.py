"""Keys of the DeepSpeed JSON, beside `pipeline`, that cannot work with a schedule: refused before anything is built.

DeepSpeed ignores some of them in a pipeline, refuses others late, and waits in the rest for a method that a pipeline
never calls. `docs/features.md` lists what works. For optimizers, ZeRO and precisions see `training`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import value_at

_ABSENT = object()
_REMOVED = "this release of DeepSpeed has removed it and refuses the key; remove the key"

#: (key path, what is refused, why and what to do); a truthy value that is not "auto" is refused, `...` any value
_REFUSED = (
    ("nebula", ..., _REMOVED),
    ("compression_training", ..., _REMOVED),
    ("quantize_training", ..., _REMOVED),
    ("eigenvalue", ..., _REMOVED),
    ("sparse_attention", ..., _REMOVED),
    ("elasticity", ..., f"{_REMOVED}, and write the batch sizes themselves"),
    ("graph_harvesting", ..., _REMOVED),
    ("curriculum_learning", ..., f"{_REMOVED}: in a pipeline, let the script shorten its batches (any length is allowed in any "
     "step)"),
    ("progressive_layer_drop", ..., _REMOVED),
    ("autotuning.enabled", True, "DeepSpeed's experiments end in engine.step(), which a pipeline never calls, so they would "
     "run for ever; set it to false"),
    ("hybrid_engine.enabled", True, "DeepSpeed's hybrid engine is another engine, and a pipeline does not get it; set it to "
     "false"),
    ("data_efficiency.data_routing.random_ltd.enabled", True, "it counts the layers of the whole model, of which a stage has "
     "only its own; set it to false"),
    ("data_efficiency.data_sampling.curriculum_learning.enabled", True, "its index is made on rank 0 and "
     "broadcast from there to the replicas of every stage, of which it is in the first only; set it to false, and let the script "
     "choose samples and lengths (any length is allowed in any step)"),
    ("tensor_parallel.autotp_size", 2, "AutoTP cuts whole Hugging Face models and does not know the pipeline's topology; use "
     "topology=PipeModelDataParallelTopology(...) with tensor-parallel layers of your own, and remove it"),
    ("expert_parallel.enabled", True, "AutoEP looks for whole Hugging Face models; set it to false"),
    ("sequence_parallel_size", 2, "a pipeline is not given DeepSpeed's sequence-parallel groups; remove it"),
    ("compile.deepcompile", True, "DeepCompile of stages is not supported; set it to false"),
)


def check_features(config: Mapping[str, Any]) -> None:
    """Refuses what cannot work in a pipeline with a schedule.

    Args:
        config: the whole DeepSpeed configuration.

    Raises:
        ValueError: names the key path, the value and what to do.
    """
    for path, refused, why in _REFUSED:
        value = value_at(config, path, _ABSENT)
        if value is not _ABSENT and _matches(value, refused):
            raise ValueError(f"{path} is {value!r}: {why}")


def _matches(value, refused) -> bool:
    if refused is ...:
        return True
    if refused is True:
        return value is True
    return isinstance(value, int) and not isinstance(value, bool) and value >= refused
