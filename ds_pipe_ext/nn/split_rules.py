"""The layers that `split_backward` can split: output, dX, dW and db of each, in the form ATen computes them.

Shapes: x (..., in), y and dy (..., out), dX as x, dW as W, db as b. Each product is the one that ATen's derivatives of
`mm`, `addmm` and `embedding` run (torch: tools/autograd/derivatives.yaml, FunctionsManual.cpp), so results are bitwise equal.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def _rows(t: Tensor) -> Tensor:
    """(..., n) -> (rows, n); explicit, because reshape(-1, n) is ambiguous for empty tensors."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _mm_input_grad(dy: Tensor, x: Tensor, weight_io: Tensor) -> Tensor:
    """dX (shape of x) of y = x @ weight_io, weight_io of shape (in, out)."""
    x2, dy2 = _rows(x), _rows(dy)
    # ATen computes the transpose for a column-major input: the same product, rounded differently.
    column_major = x2.stride(0) == 1 and x2.stride(1) == x2.shape[0]
    dx = weight_io.mm(dy2.t()).t() if column_major else dy2.mm(weight_io.t())
    return dx.reshape(x.shape)


class LinearRule:
    """y = x @ W^T + b with W (out, in), x (..., in), y (..., out)."""

    saves_weight = True

    @staticmethod
    def output(x, weight, bias):
        return F.linear(x, weight, bias)

    @staticmethod
    def input_grad(dy, x, weight):
        return _mm_input_grad(dy, x, weight.t())

    @staticmethod
    def weight_grad(dy, x):
        return _rows(dy).t().mm(_rows(x))

    @staticmethod
    def bias_grad(dy, x):
        if dy.dim() == 1:
            return dy.clone()
        # ATen flattens these inputs before its addmm; others get their bias added afterwards.
        if x.dim() == 2 or (x.dim() == 3 and x.is_contiguous()):
            return _rows(dy).sum(0)
        return dy.sum(tuple(range(dy.dim() - 1)))


class Conv1DRule:
    """y = x @ W + b with W (in, out): Hugging Face `Conv1D`."""

    saves_weight = True

    @staticmethod
    def output(x, weight, bias):
        return torch.addmm(bias, x.view(-1, x.size(-1)), weight).view(x.size()[:-1] + (weight.shape[1],))

    input_grad = staticmethod(_mm_input_grad)

    @staticmethod
    def weight_grad(dy, x):
        return _rows(x).t().mm(_rows(dy))

    @staticmethod
    def bias_grad(dy, x):
        return _rows(dy).sum(0)


@dataclass(frozen=True, slots=True)
class EmbeddingRule:
    """y = W[x] with W (num, dim), integer x (...), y (..., dim); no gradient of x."""

    num: int
    padding_idx: int
    scale_grad_by_freq: bool
    saves_weight = False

    def output(self, x, weight, bias):
        return torch.embedding(weight, x, self.padding_idx, self.scale_grad_by_freq, False)

    def weight_grad(self, dy, x):
        return torch.ops.aten.embedding_dense_backward(dy, x, self.num, self.padding_idx, self.scale_grad_by_freq)
