"""Whether a causal LM cut into pipeline layers equals the unsplit model, in one process."""

import copy

import torch
from deepspeed.pipe import TiedLayerSpec

from .batch import prepare_batch
from .layers import layers_of
from .loss import loss_of


class Chain:
    """The layers of a pipeline in one process, cut wherever one likes.

    Attributes:
        modules, functions: the built layer of each spec, and what is called in its place (another function where tied).
        tied: the tied modules by key.
        loss_fn: what `pipeline_module` would use.
    """

    def __init__(self, specs):
        self.tied, self.modules, self.functions = {}, [], []
        self.loss_fn = loss_of(specs[0].module_args[0])
        for spec in specs:
            if isinstance(spec, TiedLayerSpec):
                module = self.tied.get(spec.key) or self.tied.setdefault(spec.key, spec.build())
                function = module if spec.forward_fn is None else (lambda x, f=spec.forward_fn, m=module: f(m, x))
            else:
                module = function = spec.build()
            self.modules.append(module)
            self.functions.append(function)

    def forward(self, inputs, cuts=()):
        """The last layer's output, and for each cut (before the layer it names) the (sent, received) tensors that need a
        gradient. Received tensors are leaves, as on another rank."""
        boundaries = []
        for index, function in enumerate(self.functions):
            if index in cuts:
                sent = inputs if isinstance(inputs, tuple) else (inputs,)
                received = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in sent)
                boundaries.append([(s, r) for s, r in zip(sent, received) if s.requires_grad])
                inputs = received if isinstance(inputs, tuple) else received[0]
            inputs = function(inputs)
        return inputs, boundaries

    def backward(self, loss, boundaries):
        """The backward of `loss`, stage by stage from the last one."""
        loss.backward()
        for pairs in reversed(boundaries):
            torch.autograd.backward([s for s, _ in pairs], [torch.zeros_like(r) if r.grad is None else r.grad for _, r in pairs])

    def named(self):
        """The weights (and persistent buffers) by their names in the model."""
        return {name: tensor for module in self.modules for name, tensor in module.hf_named_parameters()}


def difference(actual, expected) -> float:
    """Largest absolute difference, relative to the largest expected value; a missing gradient counts as zero."""
    if actual is None or expected is None:
        present = actual if expected is None else expected
        return 0.0 if present is None or not present.any() else float("inf")
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def compare(model, batch, **options) -> dict[str, float]:
    """Cut `model` before every layer and run one forward and backward of it and of its layers.

    Args:
        model: a causal LM in training mode; its gradients are overwritten.
        batch: keyword arguments of its forward, labels included.
        options: of `layers_of`.

    Returns:
        Relative differences (see `difference`): of "loss", and of every parameter's gradient by name.

    Raises:
        ValueError: the model cannot be cut.
    """
    chain = Chain(layers_of(copy.deepcopy(model), **options))
    model.zero_grad()
    state = torch.get_rng_state()
    expected = model(**batch, use_cache=False).loss
    expected.backward()
    inputs, labels = prepare_batch(batch)
    torch.set_rng_state(state)  # for layers that draw random numbers
    output, boundaries = chain.forward(inputs, range(1, len(chain.functions)))
    loss = chain.loss_fn(output, labels)
    chain.backward(loss, boundaries)
    weights = chain.named()
    gradients = {name: difference(weights[name].grad, p.grad) for name, p in model.named_parameters()}
    return {"loss": difference(loss, expected), **gradients}
