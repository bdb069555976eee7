"""A PipelineModule that takes its split from the DeepSpeed JSON."""

from __future__ import annotations

import os

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from deepspeed.pipe import PipelineModule as UpstreamModule
from deepspeed.runtime.utils import set_random_seed
from deepspeed.utils import logger

from ..config import PipeConfig, read_config
from ..partition import Layer, resolve, split
from .agree import starting


class PipelineModule(UpstreamModule):
    """DeepSpeed's PipelineModule whose stages and partition come from the ``pipeline`` section of the JSON.

    Args:
        layers: sequence of modules, ``LayerSpec``, ``TiedLayerSpec`` or functions, as upstream.
        num_stages: pipeline ranks; may be left to ``pipeline.stages``, and must agree with it if both are given.
        topology: process topology with a ``pipe`` axis, as upstream.
        config: the DeepSpeed configuration: a dict or the path of the JSON file.
        partition_method: as upstream (default ``"parameters"``), or a list of boundaries; must agree with
            ``pipeline.partition`` if both are given.
        seed_layers: as upstream; ``pipeline.seed_layers`` in the JSON switches it on too.
        **kwargs: upstream's other arguments (``loss_fn``, ``base_seed``, ``activation_checkpoint_interval``, ...).

    Raises:
        ValueError: if configuration and arguments contradict each other or the split is impossible; before any process
            group of the pipeline is built.
    """

    def __init__(self, layers, num_stages=None, topology=None, *, config=None, partition_method=None, seed_layers=False,
                 **kwargs):
        with starting() as start:
            self._start(start, layers, num_stages, topology, config, partition_method, seed_layers, kwargs)

    def _start(self, start, layers, num_stages, topology, config, partition_method, seed_layers, kwargs):
        self.pipe_config: PipeConfig = read_config(config if config is not None else {})
        # The launcher says how many ranks there are before any process group does.
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        if topology is not None:
            width = topology.get_dim("pipe")
            if num_stages is not None and num_stages != width:
                raise ValueError(f"num_stages is {num_stages}, but the topology's pipe axis has {width} ranks")
            # For agreement only: a topology already says how many ranks the pipeline has.
            self.pipe_config.resolve_stages(width, world)
        else:
            num_stages = self.pipe_config.resolve_stages(num_stages, world)
        choice = resolve(partition_method if partition_method is not None else "parameters", "partition_method")
        chosen = self.pipe_config.partition
        if chosen is not None:
            if partition_method is not None and choice != (chosen.name, chosen.options):
                raise ValueError(f"partition_method is {partition_method!r}, but pipeline.partition in the JSON is "
                                 f"{chosen}; give one of them")
            choice = (chosen.name, chosen.options)
        if not dist.is_initialized():
            # Upstream's constructor needs the ranks; deepspeed.initialize would do the same a moment later.
            dist.init_distributed(dist_backend=get_accelerator().communication_backend_name())
        self._split_choice = {"name": choice[0], **choice[1]}
        layers = list(layers)
        start.agree({"number of layers": len(layers), "pipeline.partition": str(self._split_choice),
                     "pipeline stages": num_stages if topology is None else str(topology)})
        super().__init__(layers=layers,
                         num_stages=None if topology is not None else num_stages,
                         topology=topology,
                         partition_method=choice[0],
                         seed_layers=seed_layers or bool(self.pipe_config.seed_layers),
                         **kwargs)

    def _partition_layers(self, method="parameters"):
        layers = [Layer(self._layer_name(spec), count) for spec, count in
                  zip(self._layer_specs, self._parameter_counts())]
        self.parts = split(self._split_choice, layers, self.num_stages)
        if self.global_rank == 0:
            for stage in range(self.num_stages):
                start, stop = self.parts[stage:stage + 2]
                own = layers[start:stop]
                logger.info(f"pipeline stage {stage}: layers {start}..{stop - 1} ({stop - start}), "
                            f"{sum(layer.parameters for layer in own) / 1e6:.3f} M parameters")
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def forward(self, forward_input):
        """As upstream's, but a layer's seed follows from its own index, not from its place in a checkpointed block."""
        if not (self.activation_checkpoint_interval or self.seed_layers):
            for layer in self.forward_funcs:
                forward_input = layer(forward_input)
            return forward_input
        self.micro_offset += 1
        # Kept here: a recomputation must see the offset of its forward.
        offset = self.micro_offset + 1

        def block(start, end):

            def run(*inputs):
                value = inputs[0] if len(inputs) == 1 else inputs
                for index in range(start, end):
                    self.curr_layer = self._local_start + index
                    if self.seed_layers:
                        (self.seed_fn or set_random_seed)(self.base_seed * offset + self.curr_layer)
                    value = self.forward_funcs[index](value)
                return value

            return run

        count, interval = len(self.forward_funcs), self.activation_checkpoint_interval
        if interval == 0:
            return block(0, count)(forward_input)
        value = forward_input
        for start, checkpointed in zip(range(0, count, interval), self.is_checkpointable_results):
            inputs = value if isinstance(value, tuple) else (value, )
            run = block(start, min(start + interval, count))
            value = self.activation_checkpoint_func(run, *inputs) if checkpointed else run(*inputs)
        return value

    @torch.no_grad()
    def _synchronize_tied_weights(self):
        # Upstream's in-place broadcast of a trainable weight is seen by autograd, which then warns in every backward.
        super()._synchronize_tied_weights()

    def _parameter_counts(self) -> list[int]:
        if all(hasattr(spec, "parameter_count") for spec in self._layer_specs):
            return [spec.parameter_count() for spec in self._layer_specs]
        # Upstream's count, which builds the layers: the random state moves as it does there.
        return self._count_layer_params()

    @staticmethod
    def _layer_name(spec) -> str:
        if isinstance(spec, LayerSpec):
            return spec.typename.__name__
        if isinstance(spec, torch.nn.Module):
            return type(spec).__name__
        return getattr(spec, "__name__", type(spec).__name__)
