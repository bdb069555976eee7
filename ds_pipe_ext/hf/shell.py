"""The shell: a model's own forward with every module that has weights stubbed, run by each stage for the rest."""

from collections import OrderedDict
from functools import partial

import torch
from torch.utils._pytree import tree_map, tree_map_only
from transformers.loss.loss_utils import ForCausalLMLoss

from .routers import routers_of
from .structure import Structure, find_units, layer_result, refusal, trace

CACHE_ENTRIES = 2  # one-forward-one-backward alternates between two micro-batches at most


class _Captured(Exception):
    """Ends a pass through the shell as soon as the wanted value is known."""

    def __init__(self, value):
        self.value = value


class Shell:
    """One process's copy of a causal LM without weights.

    Stubs take the place of every module that owns weights. A pass hands some stubs a handler: a real module, a value
    to inject or a place to stop. So the model's own code makes masks, position tables and per-layer arguments, scales
    embeddings, adds positions and caps logits on whichever stage needs them.

    Args:
        model: a causal LM with its weights on the meta device and the buffers outside its units on a real one. The
            shell owns it from here on.

    Attributes:
        structure: what comes before and after the decoder layers.
        parameter_counts: trainable parameters of each unit.
        tensor_names: the tensors that a saved model has; filled in by `layers_of`, which knows of ties.
        loss_chunk_tokens: see `pipeline_module`; filled in by `layers_of`.
        routers: by decoder layer, the modules in it whose router logits its loss needs, see `routers_of`; empty unless
            config.output_router_logits asks for router losses.

    Raises:
        ValueError: the model cannot be cut into layers, with the reason.
    """

    tensor_names = ()
    loss_chunk_tokens = None

    def __init__(self, model):
        self.model = model
        self.units = find_units(model)
        self.dtype = model.get_submodule(self.units.embedding).weight.dtype
        self.parameter_counts = {name: self._count(name) for name in self.units.all}
        self._device = torch.device("cpu")
        self._handlers, self._routed = {}, []
        self._forwards = {}
        self._recorded = OrderedDict()
        self.routers = routers_of(model, self.units.layers)
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
        for name, routers in zip(self.units.layers, self.routers):
            for path, _ in routers:
                # Its hook then collects what is passed in.
                model.get_submodule(f"{name}.{path}").forward = _identity_function
        for name in self.units.all:
            module = model.get_submodule(name)
            self._forwards[name] = module.forward
            # Overriding forward on the instance keeps attributes that the model reads from its layers.
            module.forward = partial(self._stub, name)
        self.structure: Structure = trace(self)

    def _count(self, name):
        return sum(p.numel() for p in self.model.get_submodule(name).parameters() if p.requires_grad)

    # Passes that stages ask for.

    def layer_arguments(self, index, hidden, side, training):
        """The (args, kwargs) of decoder layer `index` besides its hidden states.

        Computed for all layers at once and kept for the last two combinations of shape and side tensors.
        Args:
            hidden: [batch, length, width]; only its shape, dtype and device matter.
            side: keyword arguments of the model's forward (attention_mask, position_ids).
        """
        key = (hidden.shape, hidden.dtype, hidden.device, training, torch.is_autocast_enabled(hidden.device.type))
        key += tuple((name, *_identity(tensor)) for name, tensor in side.items())
        if key not in self._recorded:
            # The entry holds the side tensors, so their storage cannot be reused for others while the key lives.
            self._recorded[key] = (self._record(hidden, side, training), tuple(side.values()))
            while len(self._recorded) > CACHE_ENTRIES:
                self._recorded.popitem(last=False)
        return self._recorded[key][0][index]

    def _record(self, hidden, side, training):
        calls = []
        layers, key = self.units.layers, self.structure.hidden_argument

        def recorder(*args, **kwargs):
            if isinstance(key, int):
                value, args = args[key], args[:key] + args[key + 1 :]
            else:
                value = kwargs.pop(key)
            calls.append((args, kwargs))
            if len(calls) == len(layers):
                raise _Captured(calls)
            return self._layer_output(value)

        with torch.no_grad():
            rewind = self._rng_rewind(hidden.device)
            recorded = self.run({name: recorder for name in layers}, self._blank_embeds(hidden), side, training)
            rewind()
        return recorded

    def prologue(self, embeds, side, modules, training):
        """What reaches the first decoder layer: [batch, length, width] from embeddings [batch, length, width].

        Args:
            modules: the real prologue modules by name, so that their weights get gradients.
        """

        def capture(*args, **kwargs):
            key = self.structure.hidden_argument
            raise _Captured(args[key] if isinstance(key, int) else kwargs[key])

        return self.run({**modules, self.units.layers[0]: capture}, embeds, side, training)

    def epilogue(self, hidden, side, modules, training):
        """What reaches the head, from the last decoder layer's output, through the real epilogue `modules`."""
        rewind = self._rng_rewind(hidden.device)

        def last_layer(*_, **__):
            rewind()
            return self._layer_output(hidden)

        def capture(value):
            raise _Captured(value)

        handlers = {**modules, self.units.layers[-1]: last_layer, self.units.head: capture}
        return self.run(handlers, self._blank_embeds(hidden), side, training)

    def head(self, hidden, side, project, training):
        """Logits [batch, length, vocabulary]: `project(hidden)` followed by the model's own capping or scaling."""
        rewind = self._rng_rewind(hidden.device)

        def real_head(_):
            rewind()
            return project(hidden)

        return self.run({self.units.head: real_head}, self._blank_embeds(hidden), side, training).logits

    @property
    def router_losses(self) -> bool:
        """Whether the model adds something to its loss that depends on the layers' router logits."""
        return any(self.routers)

    def loss_term(self, hidden, side, routed, training):
        """What the model's forward adds to its language modelling loss, a scalar.

        Args:
            hidden: [batch, length, width]; only its shape, dtype and device matter.
            routed: the router logits of all layers in order.
        """
        expected = sum(map(len, self.routers))
        if len(routed) != expected:
            raise ValueError(f"The head got {len(routed)} tensors of router logits; the layers of this model make {expected}.")

        def blank_head(hidden):
            return hidden.new_zeros(*hidden.shape[:2], 1)

        language_loss = self.model.loss_function
        self.model.loss_function = _no_loss
        self._routed = list(routed)
        rewind = self._rng_rewind(hidden.device)
        labels = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        try:
            loss = self.run({self.units.head: blank_head}, self._blank_embeds(hidden), side, training, labels=labels,
                            output_router_logits=True).loss
        finally:
            self.model.loss_function, self._routed = language_loss, []
        rewind()
        return loss

    def check_chunks(self):
        """Raises ValueError unless what follows the head treats every token for itself, and the loss can be summed."""
        if self.loss_function() is not ForCausalLMLoss:
            raise refusal(self.model, "loss_chunk_tokens needs transformers' ForCausalLMLoss; leave it out")
        logits = torch.randn(1, 7, self.vocab_size, generator=torch.Generator().manual_seed(0), dtype=self.dtype)

        def head(start, stop):
            return self.head(logits[:, start:stop], {}, lambda hidden: hidden, True)

        if not torch.equal(head(0, 7), torch.cat([head(0, 3), head(3, 7)], 1)):
            raise refusal(self.model, "its logits depend on more than their own token, so loss_chunk_tokens must be left out")

    def loss_function(self):
        """The model's own loss, as a function (logits, labels, vocab_size=...).

        Raises:
            ValueError: the model's forward computes another loss (unshifted labels, extra terms); found by comparing
                the two on random logits.
        """
        generator = torch.Generator().manual_seed(0)
        embeds, labels = torch.zeros(2, 4, 1, dtype=self.dtype), torch.tensor([[1, 2, 0, 1], [-100, 2, 1, 0]])

        def random_head(hidden):
            width = self.model.get_output_embeddings().weight.shape[0]
            return torch.rand(*hidden.shape[:2], width, generator=generator, dtype=self.dtype)

        with torch.no_grad():
            output = self.run({self.units.head: random_head}, self._blank_embeds(embeds), {}, labels=labels)
            expected = self.model.loss_function(output.logits, labels, vocab_size=self.vocab_size)
        if not torch.equal(output.loss, expected):
            raise refusal(self.model, "its forward computes another loss than its loss_function; pass loss_fn=")
        return self.model.loss_function

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    # Mechanics.

    def run(self, handlers, embeds, side, training=True, **arguments):
        """Run the model's forward with `handlers` behind the stubs; a captured value, or the model's output.

        Args:
            side: masks and positions as they travel.
            arguments: further keyword arguments of the model's forward.
        """
        self._move(embeds.device)
        if self.model.training != training:
            self.model.train(training)
        self._handlers = handlers
        arguments |= {name: _as_model_input(tensor) for name, tensor in side.items()}
        if self.router_losses:
            # Their sum over the layers is not there in a pass that has not all layers' logits.
            arguments.setdefault("output_router_logits", False)
        try:
            return self.model(inputs_embeds=embeds, use_cache=False, return_dict=True, **arguments)
        except _Captured as captured:
            return captured.value
        finally:
            self._handlers = {}

    def _stub(self, name, *args, **kwargs):
        if name in self._handlers:
            return self._handlers[name](*args, **kwargs)
        if name in self.units.layers:
            if self._routed:
                for path, _ in self.routers[self.units.layers.index(name)]:
                    self.model.get_submodule(f"{name}.{path}")(self._routed.pop(0))
            key = self.structure.hidden_argument
            return self._layer_output(args[key] if isinstance(key, int) else kwargs[key])
        return self.shape_only(name, args, kwargs)

    def shape_only(self, name, args, kwargs, requires_grad=False):
        """Zeros of the shape and dtype that module `name` would return: it runs on the meta device."""
        for tensor in self.model.get_submodule(name).parameters():
            if tensor.is_floating_point() and tensor.dtype != self._float_dtype(args):
                tensor.data = tensor.data.to(self._float_dtype(args))
        to_meta = partial(tree_map_only, torch.Tensor, lambda tensor: tensor.detach().to("meta"))
        with torch.no_grad():
            output = self._forwards[name](*to_meta(args), **to_meta(kwargs))

        def materialise(tensor):
            floating = tensor.is_floating_point()
            return torch.zeros(
                tensor.shape, dtype=tensor.dtype, device=self._device, requires_grad=requires_grad and floating
            )

        return tree_map(lambda leaf: materialise(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)

    def _float_dtype(self, args):
        floats = [arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()]
        return floats[0] if floats else self.dtype

    def _layer_output(self, hidden):
        return layer_result(hidden, self.structure.returned_values)

    def _blank_embeds(self, hidden):
        self.dtype = hidden.dtype
        width = self.model.get_submodule(self.units.embedding).weight.shape[-1]
        return torch.zeros(*hidden.shape[:2], width, dtype=hidden.dtype, device=hidden.device)

    def _move(self, device):
        """Buffers follow the stage's device; their dtype stays the model's own."""
        if device == self._device:
            return
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
        self._device = device

    def _rng_rewind(self, device):
        """A function that undoes random draws since this call (dropout in code that only serves for shapes)."""
        if not self.structure.draws_random:
            return lambda: None
        module = getattr(torch, device.type) if device.type != "cpu" else torch
        argument = () if device.type == "cpu" else (device,)
        state = module.get_rng_state(*argument)
        return lambda: module.set_rng_state(state, *argument)


def _identity_function(value):
    return value


def _no_loss(logits, *_, **__):
    """Takes the place of the language modelling loss; fp32 like it."""
    return logits.new_zeros((), dtype=torch.float32)


def _as_model_input(tensor):
    """Masks and positions in the dtype of a tokenizer's output; they travel in smaller ones."""
    narrow = tensor.dtype == torch.int32 or (tensor.dtype == torch.bool and tensor.dim() == 2)
    return tensor.to(torch.int64) if narrow else tensor


def _identity(tensor):
    """Equal for a tensor and its detached copies, different after an in-place change."""
    version = 0 if tensor.is_inference() else tensor._version
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        version,
    )
