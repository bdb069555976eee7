"""Small models cut into layers, weights by global layer index, and their one-process reference."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Linear and tanh; weights depend on the layer index only."""

    def __init__(self, index: int, width: int = 8, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        self.linear = nn.Linear(width, width, dtype=dtype)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(width, width, generator=generator) / width**0.5)
            self.linear.bias.copy_(torch.randn(width, generator=generator) * 0.1)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class TupleBlock(Block):
    """(x, scale, mask, count): a differentiable pair beside a bool and an integer tensor."""

    def forward(self, value):
        if not isinstance(value, tuple):
            value = (value, value.mean(-1, keepdim=True), value > 0, torch.arange(value.shape[0]))
        x, scale, mask, count = value
        y = torch.tanh(self.linear(x)) * (1 + 0.1 * scale)
        return y, scale + y.mean(-1, keepdim=True), mask ^ (y > 0), count + 1


class TupleEnd(nn.Module):
    """Folds the tuple back into a tensor."""

    def forward(self, value):
        x, scale, mask, count = value
        return x + scale + mask.to(x.dtype) * 0.01 + count.to(x.dtype)[:, None] * 0.001


class Embed(nn.Module):
    """Token embedding whose weight the head shares."""

    def __init__(self, vocab: int = 11, width: int = 8, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, width, generator=torch.Generator().manual_seed(7)).to(dtype))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight)


def project(embed: Embed, x):
    """The tied head."""
    return x @ embed.weight.t()


def cross_entropy(logits, labels):
    """Mean over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def layers(kind: str, count: int, dtype=torch.float32) -> tuple[list, object]:
    """``(specs, loss)`` of a model of about ``count`` layers; specs build on the rank that owns them."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if kind == "mlp":
        return [LayerSpec(Block, i, dtype=dtype) for i in range(count)], nn.MSELoss()
    if kind == "tuple":
        return [LayerSpec(TupleBlock, i, dtype=dtype) for i in range(count - 1)] + [LayerSpec(TupleEnd)], nn.MSELoss()
    if kind == "tied":
        return [TiedLayerSpec("embed", Embed, dtype=dtype), *(LayerSpec(Block, i, dtype=dtype) for i in range(count - 2)),
                TiedLayerSpec("embed", Embed, dtype=dtype, forward_fn=project)], cross_entropy
    raise ValueError(kind)


def batch(kind: str, index: int, rows: int = 2, dtype=torch.float32):
    """Micro-batch number ``index``: (inputs, labels)."""
    generator = torch.Generator().manual_seed(1000 + index)
    if kind == "tied":
        return (torch.randint(0, 11, (rows, 5), generator=generator), torch.randint(0, 11, (rows, 5), generator=generator))
    return torch.randn(rows, 8, generator=generator).to(dtype), torch.randn(rows, 8, generator=generator).to(dtype)


class Reference:
    """The same model in one process, trained by plain torch."""

    def __init__(self, kind, count: int = 0, dtype=torch.float64, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)):
        """``kind``: what :func:`layers` takes, or its result."""
        from deepspeed.pipe import LayerSpec, TiedLayerSpec

        specs, self.loss_fn = layers(kind, count, dtype) if isinstance(kind, str) else kind
        self.tied: dict = {}
        self.layers = []
        for spec in specs:
            if isinstance(spec, TiedLayerSpec):
                module = self.tied.setdefault(spec.key, None) or spec.build()
                self.tied[spec.key] = module
                self.layers.append(module if spec.forward_fn is None else
                                   (lambda x, m=module, f=spec.forward_fn: f(m, x)))
            else:
                self.layers.append(spec.build() if isinstance(spec, LayerSpec) else spec)
        self.optimizer = optimizer(self.parameters())

    def parameters(self):
        modules = [*self.tied.values(), *(layer for layer in self.layers if isinstance(layer, nn.Module))]
        unique = {id(p): p for module in modules for p in module.parameters()}
        return list(unique.values())

    def loss(self, inputs, labels):
        for layer in self.layers:
            inputs = layer(inputs)
        return self.loss_fn(inputs, labels)

    def step(self, batches) -> float:
        """One step over micro-batches; the mean loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for inputs, labels in batches:
            loss = self.loss(inputs, labels) / len(batches)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters by layer name, as :func:`stage_state` names them."""
        modules = {f"tied.{key}": module for key, module in self.tied.items()}
        modules.update({str(index): layer for index, layer in enumerate(self.layers)
                        if isinstance(layer, nn.Module) and layer not in self.tied.values()})
        return {f"{prefix}.{name}": p.detach().clone() for prefix, module in modules.items()
                for name, p in module.named_parameters()}


def stage_state(module) -> dict[str, torch.Tensor]:
    """Parameters of this rank's layers by layer name."""
    result = {}
    for name, p in module.named_parameters():
        result[name.replace("tied_modules.", "tied.")] = p.detach().clone()
    return result
