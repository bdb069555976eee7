"""A GPT in the manner of Megatron-DeepSpeed: tensor-parallel layers of its own over the topology's model axis, an embedding
tied to the head through forward functions, (hidden, mask) tuples, lambdas between layers, its own random tracker.

Every weight is a slice of a full one that depends on its name only, so that one process with ``Alone()`` for the
model-parallel unit holds the same model.
"""

from __future__ import annotations

import zlib

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LENGTH = 56, 32, 4, 12


class Mpu:
    """The program's own model-parallel unit, with groups that it makes from the topology, by Megatron's names."""

    def __init__(self, topology):
        self._topology, self._rank = topology, torch.distributed.get_rank()
        self._coord = topology.get_coord(self._rank)
        self._groups = {axis: self._group(axis) for axis in ("model", "data")}

    def _group(self, axis):
        made = [(ranks, torch.distributed.new_group(ranks)) for ranks in self._topology.get_axis_comm_lists(axis)]
        return next((group for ranks, group in made if self._rank in ranks), torch.distributed.new_group([self._rank]))

    def topology(self):
        return self._topology

    def get_tensor_model_parallel_rank(self):
        return self._coord.model

    def get_tensor_model_parallel_world_size(self):
        return self._topology.get_dim("model")

    def get_tensor_model_parallel_group(self):
        return self._groups["model"]

    def get_data_parallel_rank(self):
        return self._coord.data

    def get_data_parallel_world_size(self):
        return self._topology.get_dim("data")

    def get_data_parallel_group(self):
        return self._groups["data"]

    def get_pipeline_model_parallel_rank(self):
        return self._coord.pipe


class Alone:
    """The model-parallel unit of one process."""

    def get_tensor_model_parallel_world_size(self):
        return 1

    def get_tensor_model_parallel_rank(self):
        return 0


class _Copy(torch.autograd.Function):
    """Identity; the gradient is summed over the model-parallel ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """Sum over the model-parallel ranks; the gradient passes."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copy_to_ranks(x, mpu):
    return x if mpu.get_tensor_model_parallel_world_size() == 1 else _Copy.apply(x, mpu.get_tensor_model_parallel_group())


def reduce_from_ranks(x, mpu):
    return x if mpu.get_tensor_model_parallel_world_size() == 1 else _Reduce.apply(x, mpu.get_tensor_model_parallel_group())


def weight(name, shape, mpu, dim=None, dtype=torch.float32):
    """The parameter ``name``; of a shape that is cut along ``dim`` this rank's slice, marked as Megatron marks it."""
    full = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.3 / shape[-1]**0.25
    if dim is not None:
        full = full.chunk(mpu.get_tensor_model_parallel_world_size(), dim)[mpu.get_tensor_model_parallel_rank()]
    parameter = nn.Parameter(full.to(dtype).clone())
    if dim is not None:
        parameter.model_parallel = True
    return parameter


class ColumnParallelLinear(nn.Module):
    """Each rank computes its share of the output features."""

    def __init__(self, name, mpu, inputs, outputs, dtype):
        super().__init__()
        self.mpu = mpu
        self.weight = weight(f"{name}.weight", (outputs, inputs), mpu, 0, dtype)
        self.bias = weight(f"{name}.bias", (outputs, ), mpu, 0, dtype)

    def forward(self, x):
        return F.linear(copy_to_ranks(x, self.mpu), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Each rank has its share of the input features; the bias is added once, after the sum."""

    def __init__(self, name, mpu, inputs, outputs, dtype):
        super().__init__()
        self.mpu = mpu
        self.weight = weight(f"{name}.weight", (outputs, inputs), mpu, 1, dtype)
        self.bias = weight(f"{name}.bias", (outputs, ), mpu, None, dtype)

    def forward(self, x):
        return reduce_from_ranks(F.linear(x, self.weight), self.mpu) + self.bias


class EmbeddingPipe(nn.Module):
    """(tokens, positions, mask) -> (hidden [batch, length, width], mask); the vocabulary is cut over the ranks."""

    def __init__(self, mpu, dropout, dtype):
        super().__init__()
        self.mpu, self.dropout = mpu, dropout
        self.word_embeddings = nn.Module()
        self.word_embeddings.weight = weight("word", (VOCAB, WIDTH), mpu, 0, dtype)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH, dtype=dtype)
        self.position_embeddings.weight = weight("position", (LENGTH, WIDTH), mpu, None, dtype)

    @property
    def word_embeddings_weight(self):
        """For the tie."""
        return self.word_embeddings.weight

    def forward(self, inputs):
        tokens, positions, mask = inputs
        share = self.word_embeddings.weight.shape[0]
        own = tokens - self.mpu.get_tensor_model_parallel_rank() * share
        foreign = (own < 0) | (own >= share)
        hidden = F.embedding(own.masked_fill(foreign, 0), self.word_embeddings.weight)
        hidden = reduce_from_ranks(hidden.masked_fill(foreign[..., None], 0.0), self.mpu)
        hidden = hidden + self.position_embeddings(positions)
        return F.dropout(hidden, self.dropout, self.training), mask


class ParallelTransformerLayerPipe(nn.Module):
    """(hidden [length, batch, width], mask) -> the same."""

    def __init__(self, mpu, number, dropout, dtype):
        super().__init__()
        self.mpu, self.dropout = mpu, dropout
        self.input_layernorm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.query_key_value = ColumnParallelLinear(f"{number}.qkv", mpu, WIDTH, 3 * WIDTH, dtype)
        self.dense = RowParallelLinear(f"{number}.dense", mpu, WIDTH, WIDTH, dtype)
        self.post_attention_layernorm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.dense_h_to_4h = ColumnParallelLinear(f"{number}.up", mpu, WIDTH, 4 * WIDTH, dtype)
        self.dense_4h_to_h = RowParallelLinear(f"{number}.down", mpu, 4 * WIDTH, WIDTH, dtype)

    def attention(self, x, mask):
        length, rows, _ = x.shape
        heads = HEADS // self.mpu.get_tensor_model_parallel_world_size()
        # Head by head, as Megatron stores them: a slice of the weight is a group of heads.
        q, k, v = self.query_key_value(x).view(length, rows * heads, 3 * WIDTH // HEADS).transpose(0, 1).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / (WIDTH // HEADS)**0.5).view(rows, heads, length, length)
        shares = scores.masked_fill(mask, -10000.0).softmax(-1).view(rows * heads, length, length)
        if self.dropout:
            with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
                shares = F.dropout(shares, self.dropout, self.training)
        return self.dense((shares @ v).transpose(0, 1).reshape(length, rows, heads * WIDTH // HEADS))

    def forward(self, inputs):
        x, mask = inputs
        x = x + F.dropout(self.attention(self.input_layernorm(x), mask), self.dropout, self.training)
        inner = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))
        return x + F.dropout(inner, self.dropout, self.training), mask


def logits_helper(embedding, hidden):
    """The tied head: each rank computes the logits of its share of the vocabulary."""
    return F.linear(copy_to_ranks(hidden, embedding.mpu), embedding.word_embeddings_weight)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss of each token from logits [..., share of the vocabulary]."""

    @staticmethod
    def forward(ctx, logits, target, group, first):
        largest = logits.max(-1)[0]
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        logits = logits - largest[..., None]
        own = target - first
        foreign = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(foreign, 0)
        predicted = logits.gather(-1, own[..., None])[..., 0].masked_fill(foreign, 0.0)
        torch.distributed.all_reduce(predicted, group=group)
        exp = logits.exp()
        total = exp.sum(-1)
        torch.distributed.all_reduce(total, group=group)
        ctx.save_for_backward(exp / total[..., None], foreign, own)
        return total.log() - predicted

    @staticmethod
    def backward(ctx, grad):
        softmax, foreign, own = ctx.saved_tensors
        softmax = softmax.scatter_add(-1, own[..., None], (~foreign).to(softmax.dtype).neg()[..., None])
        return softmax * grad[..., None], None, None, None


def loss_of(mpu):
    """``loss(logits, (labels, loss mask))``: the mean over tokens that count."""

    def gpt_loss(logits, labels):
        labels, counts = labels
        if mpu.get_tensor_model_parallel_world_size() == 1:
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        else:
            first = mpu.get_tensor_model_parallel_rank() * logits.shape[-1]
            losses = _VocabParallelCrossEntropy.apply(logits, labels, mpu.get_tensor_model_parallel_group(), first)
        return (losses * counts).sum() / counts.sum()

    return gpt_loss


def specs(mpu, layers=4, dropout=0.0, dtype=torch.float32) -> list:
    """The list that Megatron-DeepSpeed's GPTModelPipe builds."""
    tie = {"tied_weight_attr": "word_embeddings_weight"}
    return [
        TiedLayerSpec("embed", EmbeddingPipe, mpu, dropout, dtype, **tie),
        lambda x: (x[0].transpose(0, 1).contiguous(), *x[1:]),
        *(LayerSpec(ParallelTransformerLayerPipe, mpu, number, dropout, dtype) for number in range(layers)),
        lambda x: x[0].transpose(0, 1).contiguous(),
        LayerSpec(nn.LayerNorm, WIDTH, dtype=dtype),
        TiedLayerSpec("embed", EmbeddingPipe, mpu, dropout, dtype, forward_fn=logits_helper, **tie),
    ]


class GPTModelPipe(PipelineModule):
    """The user's own subclass of DeepSpeed's PipelineModule."""

    def __init__(self, mpu, layers=4, dropout=0.0, dtype=torch.float32, interval=0):
        super().__init__(layers=specs(mpu, layers, dropout, dtype), loss_fn=loss_of(mpu), topology=mpu.topology(),
                         activation_checkpoint_interval=interval, partition_method="type:transformer")


def sample(number, rows=2):
    """What the user's data loader yields: a mapping with tokens [rows, length + 1]."""
    generator = torch.Generator().manual_seed(5000 + number)
    return {"text": torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=generator)}


def split_batch(data, dtype=torch.float32):
    """((tokens, positions, mask), (labels, loss mask)); True in the mask hides a key, a token 0 ends what counts."""
    tokens, labels = data["text"][:, :-1].contiguous(), data["text"][:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    return (tokens, positions, mask), (labels, (labels % 7 != 0).to(dtype))


def own_slice(full, own, mpu):
    """The slice of ``full`` that a rank holds in the shape of ``own``."""
    for dim, (whole, part) in enumerate(zip(full.shape, own.shape)):
        if whole != part:
            return full.chunk(mpu.get_tensor_model_parallel_world_size(), dim)[mpu.get_tensor_model_parallel_rank()]
    return full
