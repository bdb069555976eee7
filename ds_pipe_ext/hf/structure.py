"""Where a causal LM can be cut: its decoder layers and the modules around them, found without per-model code."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Units:
    """The modules that own every weight of a model, by their names in it.

    `layers` are the decoder layers in order; `others` are the largest modules with weights that contain neither a
    decoder layer nor another one's input embedding or head (embedding, positions, projections, final norm, head), in the
    order of the module tree.
    """

    embedding: str
    layers: tuple[str, ...]
    head: str
    others: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        return self.layers + self.others


@dataclass(frozen=True)
class Structure:
    """What one traced forward of the stubbed model says about a model.

    Attributes:
        prologue: modules used between the embedding and the first decoder layer.
        epilogue: modules used between the last decoder layer and the head.
        has_prologue: whether anything happens between the embedding and the first layer, weights or not.
        hidden_argument: position (int) or keyword (str) under which a decoder layer receives the hidden states.
        returned_values: length of the tuple that the model's forward expects from a decoder layer; 0 for a bare tensor.
        draws_random: whether the model's own forward, layers excluded, draws random numbers in training mode.
    """

    units: Units
    prologue: tuple[str, ...]
    epilogue: tuple[str, ...]
    has_prologue: bool
    hidden_argument: int | str
    returned_values: int
    draws_random: bool


class UnsupportedModelError(ValueError):
    """A model that cannot be turned into pipeline layers."""


def refusal(model, reason: str) -> UnsupportedModelError:
    """The error for a model that cannot be turned into pipeline layers."""
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be turned into pipeline layers: {reason}. Only decoder-only causal language "
        "models whose layers pass nothing but their hidden states to each other are supported; use another model or "
        "write its layer list by hand with ds_pipe_ext.PipelineModule."
    )


def _check_kind(model) -> None:
    """Raise ValueError for encoder-decoders, models that are not causal, and configurations with cross-layer terms."""
    config = model.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(model, "it is an encoder-decoder (config.is_encoder_decoder)")
    if model.get_output_embeddings() is None:
        raise refusal(model, "it has no language-model head (get_output_embeddings() is None)")
    loss_type = getattr(model, "loss_type", None)
    if loss_type not in (None, "ForCausalLM"):
        raise refusal(model, f"its loss is {loss_type}, not ForCausalLM")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise refusal(model, "its attention is not causal")
    if getattr(config, "layerdrop", 0):
        raise refusal(model, "config.layerdrop skips layers at random; set it to 0")


def find_units(model) -> Units:
    """The decoder layers and the other modules with weights.

    Raises:
        ValueError: another kind of model, no single list of `num_hidden_layers` modules, weights outside every unit,
            or weights shared by two units other than embedding and head.
    """
    _check_kind(model)
    modules = dict(model.named_modules())
    config = model.config.get_text_config()
    # Some count two sublayers as two hidden layers.
    depths = {getattr(config, "num_hidden_layers", None), getattr(config, "num_layers", None)} - {None}
    lists = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and len(module) in depths and all(_has_weights(child) for child in module)
    ]
    lists = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    if len(lists) != 1:
        depths = " or ".join(map(str, sorted(depths)))
        raise refusal(
            model, f"expected one list of {depths} decoder layers (config.num_hidden_layers), found {lists or 'none'}"
        )
    (layer_list,) = lists
    depth = len(modules[layer_list])
    for name, module in modules.items():
        if name.startswith(layer_list + ".") and getattr(module, "is_causal", True) is False:
            raise refusal(model, f"{name} ({type(module).__name__}) attends to later tokens (is_causal is False)")

    layers = tuple(f"{layer_list}.{index}" for index in range(depth))
    names = {id(module): name for name, module in modules.items()}
    embedding, head = names.get(id(model.get_input_embeddings())), names.get(id(model.get_output_embeddings()))
    others = tuple(_units_around(model, [name for name in (layer_list, embedding, head) if name]))
    loose = [key for key in model.state_dict() if not any(key.startswith(unit + ".") for unit in layers + others)]
    if loose:
        raise refusal(model, f"it holds tensors outside its submodules: {loose}")
    for role, name in (("input embedding", embedding), ("head", head)):
        if name not in others:
            raise refusal(model, f"its {role} is not a module of its own ({name})")
    _check_sharing(model, layers + others, embedding, head)
    return Units(embedding, layers, head, others)


def _has_weights(module) -> bool:
    return next(module.parameters(), None) is not None


def _units_around(module, kept_apart, prefix=""):
    """The largest modules with weights that contain none of `kept_apart`: layer list, embedding, head."""
    for name, child in module.named_children():
        path = prefix + name
        if any(apart.startswith(path + ".") for apart in kept_apart):
            yield from _units_around(child, kept_apart, path + ".")
        elif path != kept_apart[0] and _has_weights(child):
            yield path


def _check_sharing(model, units, embedding, head):
    owner = {}
    for unit in units:
        for parameter in model.get_submodule(unit).parameters():
            first = owner.setdefault(id(parameter), unit)
            if first != unit and {first, unit} != {embedding, head}:
                raise refusal(model, f"{first} and {unit} share a weight")


def trace(shell) -> Structure:
    """Run the stubbed model once in training mode and read the structure off its calls.

    Raises:
        ValueError: layers called out of order or not once each, layers that receive more than their predecessor's
            hidden states (other tensors that depend on weights or activations, caches, containers to fill), weights
            that the forward does not use, or uses on both sides of the layers.
    """
    failures = []
    for returned_values in range(4):
        calls = []
        try:
            return _trace(shell, returned_values, calls)
        except UnsupportedModelError as error:
            failures.append((len(calls), error))
        except Exception as error:
            reason = f"its forward fails when its layers are replaced by stubs ({type(error).__name__}: {error})"
            failures.append((len(calls), refusal(shell.model, reason)))
    # What a forward makes of a result of the wrong kind is not worth reporting: the attempt that got furthest tells most.
    raise max(reversed(failures), key=lambda failure: failure[0])[1]


def layer_result(hidden, values, rest=None):
    """What a decoder layer returns: `hidden`, or a tuple of `values` entries whose others (attention weights) are `rest`."""
    return (hidden, *[rest] * (values - 1)) if values else hidden


def _trace(shell, returned_values, calls) -> Structure:
    model, units = shell.model, shell.units
    hidden_keys, returned, by_the_way = [], [], object()
    batch, length, width = 2, 4, model.get_submodule(units.embedding).weight.shape[-1]
    # No leaf, because some models scale their embeddings in place.
    embeds = torch.zeros(batch, length, width, dtype=shell.dtype, requires_grad=True).clone()

    def layer_stub(name):
        def stub(*args, **kwargs):
            calls.append(name)
            key = 0 if args else "hidden_states"
            hidden = args[0] if args else kwargs.get(key)
            if not isinstance(hidden, torch.Tensor):
                raise refusal(model, f"{name} is not called with hidden states as first argument or hidden_states=")
            if returned and hidden is not returned[-1]:
                raise refusal(model, f"{name} does not receive exactly what the layer before it returned")
            rest = list(args[1:]) + [value for keyword, value in kwargs.items() if keyword != key]
            if any(value is by_the_way for value in tree_leaves(rest)):
                raise refusal(model, f"{name} receives more than hidden states from the layer before it")
            if "input_ids" in kwargs:
                raise refusal(model, f"{name} receives the token ids besides its hidden states")
            _check_side_arguments(model, name, rest)
            hidden_keys.append(key)
            returned.append(torch.zeros(hidden.shape, dtype=hidden.dtype, requires_grad=True))
            if len(returned) == 1:
                returned.insert(0, hidden)
            return layer_result(returned[-1], returned_values, by_the_way)

        return stub

    def other_stub(name):
        def stub(*args, **kwargs):
            calls.append(name)
            return shell.shape_only(name, args, kwargs, requires_grad=True)

        return stub

    handlers = {name: layer_stub(name) for name in units.layers}
    handlers |= {name: other_stub(name) for name in units.others}
    state = torch.get_rng_state()
    model.train()
    logits = shell.run(handlers, embeds, {}).logits
    drawn = not torch.equal(state, torch.get_rng_state())
    torch.set_rng_state(state)

    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise refusal(model, "its forward returns no logits of shape [batch, length, vocabulary]")
    layer_calls = [name for name in calls if name in units.layers]
    if layer_calls != list(units.layers):
        raise refusal(model, f"its layers are not called once each in order (called: {layer_calls})")
    start, stop = calls.index(units.layers[0]), calls.index(units.layers[-1])
    if calls[start : stop + 1] != list(units.layers):
        raise refusal(
            model,
            f"modules with weights are called between layers: {sorted(set(calls[start:stop]) - set(units.layers))}",
        )
    before, after = calls[:start], calls[stop + 1 :]
    if units.embedding in calls:
        raise refusal(model, f"its forward uses {units.embedding} although inputs_embeds is given")
    if not after or after[-1] != units.head or after.count(units.head) != 1:
        raise refusal(model, f"its head {units.head} is not the last module called")
    both = sorted(set(before) & set(after))
    unused = sorted(set(units.others) - set(calls) - {units.embedding})
    if both or unused:
        raise refusal(model, f"modules used before and after the layers: {both}, not used at all: {unused}")
    if any(key != hidden_keys[0] for key in hidden_keys):
        raise refusal(model, "its layers are called in different ways")
    return Structure(
        units=units,
        prologue=tuple(dict.fromkeys(before)),
        epilogue=tuple(name for name in dict.fromkeys(after) if name != units.head),
        has_prologue=returned[0] is not embeds or embeds._version > 0,
        hidden_argument=hidden_keys[0],
        returned_values=returned_values,
        draws_random=drawn,
    )


def _check_side_arguments(model, name, values):
    """Side arguments must follow from masks and positions alone: every stage recomputes them for itself."""
    for value in values:
        if isinstance(value, (dict, list)) and not value:
            raise refusal(model, f"{name} receives an empty container, which layers fill for each other")
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                raise refusal(
                    model,
                    f"{name} receives a tensor of shape {list(leaf.shape)} that depends on weights or activations "
                    "besides its hidden states",
                )
        elif leaf is not None and not isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
            raise refusal(model, f"{name} receives an object of unknown meaning ({type(leaf).__name__})")
