"""The pipeline layers of a causal LM: embedding, prologue if any, decoder layers, epilogue (final norm), head.

A layer takes and returns `hidden` or a tuple `(hidden, side tensors...)`, see `batch`; the head returns logits, or a
`HeadOutput` if they alone do not make the loss.
"""

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.func import functional_call

from .batch import pack, side_arguments, split_routed, unpack
from .loss import HeadOutput
from .routers import watching
from .shell import Shell
from .sources import open_source, without_weights


class PipelineLayer(nn.Module):
    """A layer that owns some of the model's own modules.

    Attributes:
        hf_prefixes: the model's name of each child module, by the child's name here; saving renames by it.

    Args:
        shell: the process's `Shell`.
        source: where the weights come from.
        names: the owned modules by their names in the model.
    """

    def __init__(self, shell: Shell, source, names: tuple[str, ...]):
        super().__init__()
        self.shell, self.source = shell, source
        self.hf_prefixes = {name.replace(".", "-"): name for name in names}
        for child, name in self.hf_prefixes.items():
            self.add_module(child, source.build_unit(name))

    def owned(self) -> dict:
        """The owned modules by their names in the model."""
        return {name: self.get_submodule(child) for child, name in self.hf_prefixes.items()}

    def only(self) -> nn.Module:
        (module,) = self.owned().values()
        return module

    def hf_named_parameters(self):
        """(name in the model, parameter) pairs, persistent buffers included."""
        for child, name in self.hf_prefixes.items():
            for key, tensor in self.get_submodule(child).state_dict(keep_vars=True).items():
                yield f"{name}.{key}", tensor

    def finish(self, inputs, head):
        """What the loss function gets: logits through the module `head`, or what makes them and the loss."""
        hidden, side = unpack(inputs)
        side, routed = split_routed(side)
        shell, training, arguments = self.shell, self.training, side_arguments(side)
        term = shell.loss_term(hidden, arguments, routed, training) if shell.router_losses else None
        if shell.loss_chunk_tokens is None:
            logits = shell.head(hidden, arguments, head, training)
            return logits if term is None else HeadOutput(logits=logits, term=term)

        def project(hidden, weights):
            return shell.head(hidden, {}, lambda x: functional_call(head, weights, x), training)

        weights = {name: parameter.view_as(parameter) for name, parameter in head.named_parameters()}
        return HeadOutput(None, term, hidden, weights, project, shell.structure.draws_random)


class Embedding(PipelineLayer):
    """Token ids [batch, length] to embeddings [batch, length, width].

    Args:
        tied: the head uses this layer's weight.
    """

    def __init__(self, shell, source, names, tied=False):
        super().__init__(shell, source, names)
        if tied:
            # A Linear over the same Parameter, so that the head's weight gradient can be deferred like any other.
            weight = self.only().weight
            self.tied_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            self.tied_head.weight = weight

    def forward(self, inputs):
        input_ids, side = unpack(inputs)
        side_arguments(side)  # refuses unprepared batches here, on the first stage
        return pack(self.only()(input_ids), side)

    def logits(self, inputs):
        """The head of a model with tied weights, as `Head`."""
        return self.finish(inputs, self.tied_head)


class Prologue(PipelineLayer):
    """What the model does between embedding and first decoder layer: positions, scaling, projection, dropout."""

    def forward(self, inputs):
        hidden, side = unpack(inputs)
        return pack(self.shell.prologue(hidden, side_arguments(side), self.owned(), self.training), side)


class DecoderLayer(PipelineLayer):
    """One decoder layer, called with the arguments that the model itself would pass.

    Args:
        index: position among the decoder layers.
    """

    def __init__(self, shell, source, names, index):
        super().__init__(shell, source, names)
        self.index = index

    def forward(self, inputs):
        hidden, side = unpack(inputs)
        arguments = side_arguments(split_routed(side)[0])
        args, kwargs = self.shell.layer_arguments(self.index, hidden, arguments, self.training)
        key = self.shell.structure.hidden_argument
        with watching(self.only(), self.shell.routers[self.index]) as routed:
            if isinstance(key, int):
                output = self.only()(*args[:key], hidden, *args[key:], **kwargs)
            else:
                output = self.only()(*args, **{key: hidden}, **kwargs)
        return pack(output[0] if isinstance(output, (tuple, list)) else output, (*side, *routed))


class Epilogue(PipelineLayer):
    """What the model does between last decoder layer and head: final norm, projection."""

    def forward(self, inputs):
        hidden, side = unpack(inputs)
        arguments = side_arguments(split_routed(side)[0])
        return pack(self.shell.epilogue(hidden, arguments, self.owned(), self.training), side)


class Head(PipelineLayer):
    """Hidden [batch, length, width] to logits [batch, length, vocabulary], with the model's capping or scaling."""

    def forward(self, inputs):
        return self.finish(inputs, self.only())


class _Counted:
    """A spec that knows its layer's trainable parameters without building it."""

    def parameter_count(self) -> int:
        shell, _, names = self.module_args
        return sum(shell.parameter_counts[name] for name in names)


class Spec(_Counted, LayerSpec):
    """A LayerSpec of a `PipelineLayer`."""


class TiedSpec(_Counted, TiedLayerSpec):
    """A TiedLayerSpec of a `PipelineLayer`."""


def layers_of(model_or_source, *, dtype=None, gguf_file=None, seed=None, loss_chunk_tokens=None) -> list:
    """A causal LM as a list of `LayerSpec` and `TiedLayerSpec`; a rank that builds some reads only their weights.

    Args:
        model_or_source: a PreTrainedModel, a PretrainedConfig (random weights), a directory, or an open source.
        dtype, gguf_file, seed, loss_chunk_tokens: see `pipeline_module`.

    Returns:
        [Embedding, (Prologue), DecoderLayer * n, Epilogue, Head]. With tied weights, embedding and head are
        `TiedLayerSpec`s of key "embedding" over one `Embedding` and `forward_fn` is `Embedding.logits` at the end.

    Raises:
        ValueError: the model cannot be cut into layers, or its weights are incomplete.
    """
    source = model_or_source
    if not hasattr(source, "build_unit"):
        source = open_source(source, dtype=dtype, gguf_file=gguf_file, seed=seed)
    shell = Shell(without_weights(source.template))
    structure, units = shell.structure, shell.units
    source.check(units)
    if loss_chunk_tokens is not None:
        shell.check_chunks()
        shell.loss_chunk_tokens = loss_chunk_tokens

    def spec(kind, *names, **extra):
        return Spec(kind, shell, source, names, **extra)

    tied = source.tied_head(units)
    saved = [name for name in units.all if not (tied and name == units.head)]
    shell.tensor_names = tuple(
        f"{name}.{key}" for name in saved for key in shell.model.get_submodule(name).state_dict()
    )
    ends = [spec(Embedding, units.embedding), spec(Head, units.head)]
    if tied:
        attribute = units.embedding.replace(".", "-") + ".weight"
        ends = [
            TiedSpec(
                "embedding",
                Embedding,
                shell,
                source,
                (units.embedding,),
                tied=True,
                tied_weight_attr=attribute,
                forward_fn=function,
            )
            for function in (None, Embedding.logits)
        ]
    prologue = [spec(Prologue, *structure.prologue)] if structure.has_prologue else []
    layers = [spec(DecoderLayer, name, index=index) for index, name in enumerate(units.layers)]
    return [ends[0], *prologue, *layers, spec(Epilogue, *structure.epilogue), ends[1]]
