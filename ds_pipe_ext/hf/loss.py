"""What the head gives to the loss, and the loss: of whole logits, or of logits that are made piece by piece."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint


class HeadOutput(NamedTuple):
    """What the last layer returns if logits alone do not make the loss.

    Attributes:
        logits: [batch, length, vocabulary], or None while they are still to be made from `hidden`.
        term: what the model adds to its language modelling loss (router losses), a scalar, or None.
        hidden: [batch, length, width], what reaches the head.
        weights: the head's parameters under names of its own. They are outputs of the layer, so that DeepSpeed's hooks on
            a stage's outputs see every gradient of the loss before a parameter does.
        project: `project(hidden, weights) -> logits` for hidden of any [batch, length, width].
        preserve_rng_state: whether `project` may draw random numbers.
    """

    logits: torch.Tensor | None = None
    term: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    weights: dict | None = None
    project: Callable | None = None
    preserve_rng_state: bool = False


def logits_of(output):
    """The logits [batch, length, vocabulary] of what the last layer returned."""
    if not isinstance(output, HeadOutput):
        return output
    return output.project(output.hidden, output.weights) if output.logits is None else output.logits


class WithModelTerms:
    """A loss function of (logits, labels) plus what the model adds to its own loss (router losses).

    `pipeline.loss_weighting` "token" weights the sum of both by the targets that `loss_fn` counts.
    """

    def __init__(self, loss_fn):
        self.loss_fn = loss_fn
        # How targets are counted is told by attributes that not every loss function has.
        for name in ("count_targets", "ignore_index"):
            if hasattr(loss_fn, name):
                setattr(self, name, getattr(loss_fn, name))
        self.__name__ = getattr(loss_fn, "__name__", type(loss_fn).__name__)

    def __call__(self, output, labels):
        loss = self.loss_fn(output if output.logits is None else output.logits, labels)
        return loss + output.term.to(loss.device)


class CausalLMLoss:
    """DeepSpeed's `loss_fn(outputs, labels)` from the model's own loss function, which shifts the labels itself.

    A micro-batch without valid labels gives 0 and zero gradients instead of 0 / 0.

    Args:
        loss_function: transformers' `loss_function(logits, labels, vocab_size=...)`.
        chunk_tokens: make the logits of so many tokens at a time, again in the backward, where `outputs` allow it; needs
            `loss_function` to take `shift_labels` and `num_items_in_batch`. None: all at once.
    """

    def __init__(self, loss_function, vocab_size, ignore_index=-100, chunk_tokens=None):
        self.loss_function, self.vocab_size, self.ignore_index = loss_function, vocab_size, ignore_index
        self.chunk_tokens = chunk_tokens
        self.__name__ = getattr(loss_function, "__name__", type(loss_function).__name__)

    def __call__(self, outputs, labels):
        if isinstance(outputs, HeadOutput) and outputs.logits is None:
            return self._in_chunks(outputs, labels)
        loss = self.loss_function(outputs, labels, vocab_size=self.vocab_size)
        any_valid = (labels[..., 1:] != self.ignore_index).any().to(loss.device)
        return torch.where(any_valid, loss, torch.zeros_like(loss))

    def count_targets(self, labels) -> int:
        """Labels that the loss averages over: it shifts them, so the first of a row is never predicted."""
        return int((labels[..., 1:] != self.ignore_index).sum())

    def _in_chunks(self, output, labels):
        """The mean over valid tokens as a sum over chunks; a chunk's logits live no longer than its own work."""
        targets = pad(labels[..., 1:], (0, 1), value=self.ignore_index).reshape(-1).to(output.hidden.device)
        count = (targets != self.ignore_index).sum().clamp(min=1)

        def part(hidden, target):
            logits = output.project(hidden[None], output.weights)
            return self.loss_function(
                logits, None, vocab_size=self.vocab_size, num_items_in_batch=count, shift_labels=target[None]
            )

        total = 0
        for pair in zip(output.hidden.flatten(0, -2).split(self.chunk_tokens), targets.split(self.chunk_tokens)):
            if torch.is_grad_enabled():
                total += checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=output.preserve_rng_state)
            else:
                total += part(*pair)
        return total


def loss_of(shell, loss_fn=None):
    """The loss function of a pipeline's last stage: `loss_fn`, or the model's own, plus the model's router losses."""
    if loss_fn is None:
        loss_fn = CausalLMLoss(shell.loss_function(), shell.vocab_size, chunk_tokens=shell.loss_chunk_tokens)
    return WithModelTerms(loss_fn) if shell.router_losses else loss_fn
