"""A GPT in the manner of GPT-NeoX: a list of layer specs and functions, rotary positions, parallel residual, an embedding tied
to the head through forward functions at both ends (or an own head), losses beside the loss."""

from __future__ import annotations

import zlib
from collections import OrderedDict

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LENGTH = 48, 32, 4, 10


def _named(module: nn.Module, name: str) -> None:
    """Weights that depend on the layer's name only."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for key, p in module.named_parameters():
            if p.dim() > 1 or key.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1]**0.5)


class EmbeddingPipe(nn.Module):
    """(tokens, positions, mask) -> (hidden, mask)."""

    def __init__(self, dropout, dtype):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        _named(self, "embedding")

    @property
    def word_embeddings_weight(self):
        return self.word_embeddings.weight

    def forward(self, args):
        tokens, _, mask = args
        return self.dropout(self.word_embeddings(tokens)), mask


def embed(embedding, args):
    """Forward function of the first end of the tie."""
    return embedding(args)


def logits_helper(embedding, hidden):
    """Forward function of the other end."""
    return F.linear(hidden, embedding.word_embeddings_weight)


def pre_transformer_block(args):
    """[batch, length, width] -> [length, batch, width]."""
    assert len(args) == 2
    return (args[0].transpose(0, 1).contiguous(), *args[1:])


def post_transformer_block(args):
    """Back, without the mask."""
    assert len(args) == 2
    return args[0].transpose(0, 1).contiguous()


def rotary(x):
    """Rotary positions over dimension 0 of [length, ..., even width]."""
    half = x.shape[-1] // 2
    frequencies = 10000.0**(-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[0], dtype=x.dtype)[:, None] * frequencies
    shape = (x.shape[0], *[1] * (x.dim() - 2), half)
    cos, sin = angles.cos().view(shape), angles.sin().view(shape)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class ParallelTransformerLayerPipe(nn.Module):
    """Attention and MLP side by side (`gpt_j_residual`)."""

    def __init__(self, number, dropout, dtype):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.dense = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.dense_h_to_4h = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype)
        self.dense_4h_to_h = nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        _named(self, f"layer {number}")

    def attention(self, x, mask):
        length, rows, _ = x.shape
        q, k, v = self.query_key_value(x).view(length, rows, HEADS, 3 * WIDTH // HEADS).chunk(3, -1)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (rotary(q), rotary(k), v))
        scores = (q @ k.transpose(2, 3) / (WIDTH // HEADS)**0.5).masked_fill(mask, -10000.0)
        return self.dense((scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(length, rows, WIDTH))

    def forward(self, args):
        x, mask = args
        normed = self.input_layernorm(x)
        inner = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(normed)))
        return x + self.dropout(self.attention(normed, mask) + inner), mask


class NormPipe(nn.Module):
    """The final norm."""

    def __init__(self, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)

    def forward(self, x):
        return self.norm(x)


class ParallelLinearPipe(nn.Module):
    """A head of its own."""

    def __init__(self, dtype):
        super().__init__()
        self.final_linear = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)
        _named(self, "head")

    def forward(self, x):
        return self.final_linear(x)


def cross_entropy(logits, labels):
    """(mean over tokens that count, mean squared log of the partition function)."""
    labels, counts = labels
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    total = counts.sum()
    return (losses * counts).sum() / total, (logits.logsumexp(-1).square() * counts).sum() / total


def specs(tied=True, layers=4, dropout=0.0, dtype=torch.float32) -> list:
    """The list that GPT2ModelPipe.init_specs builds."""
    tie = {"tied_weight_attr": "word_embeddings_weight"}
    first = TiedLayerSpec("embed", EmbeddingPipe, dropout, dtype, forward_fn=embed, **tie) if tied else \
        LayerSpec(EmbeddingPipe, dropout, dtype)
    last = TiedLayerSpec("embed", EmbeddingPipe, dropout, dtype, forward_fn=logits_helper, **tie) if tied else \
        LayerSpec(ParallelLinearPipe, dtype)
    return [first, pre_transformer_block, *(LayerSpec(ParallelTransformerLayerPipe, n, dropout, dtype) for n in range(layers)),
            post_transformer_block, LayerSpec(NormPipe, dtype), last]


class GPT2ModelPipe(PipelineModule):
    """GPT-NeoX's class: DeepSpeed knows the name and expects a mask as the last tensor. Adds a z-loss, reported beside it."""

    def __init__(self, topology, tied=True, dropout=0.0, dtype=torch.float32, interval=0, z_loss=1e-2):
        self.z_loss = z_loss
        self.last_losses = OrderedDict((name, torch.zeros(())) for name in ("lm_loss", "z_loss"))
        super().__init__(layers=specs(tied, 4, dropout, dtype), loss_fn=self.loss, topology=topology,
                         partition_method="type:transformer|linear", activation_checkpoint_interval=interval,
                         checkpointable_layers=["ParallelTransformerLayerPipe"])

    def loss(self, logits, labels):
        lm_loss, z_loss = cross_entropy(logits, labels)
        self.last_losses["lm_loss"], self.last_losses["z_loss"] = lm_loss.detach(), z_loss.detach()
        return lm_loss + self.z_loss * z_loss

    def get_additional_losses(self):
        return self.last_losses if self.z_loss else None


class Tokens(torch.utils.data.Dataset):
    """``count`` samples of LENGTH + 1 tokens."""

    def __init__(self, count=64, seed=0):
        self.rows = torch.randint(0, VOCAB, (count, LENGTH + 1), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"text": self.rows[index]}


def collate(samples):
    """What the loader yields: a mapping."""
    return {"text": torch.stack([sample["text"] for sample in samples])}


def get_batch_pipe(data, dtype=torch.float32):
    """Batch function: ((tokens, positions, mask), (labels, loss mask))."""
    tokens, labels = data["text"][:, :-1].contiguous(), data["text"][:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    return (tokens, positions, mask), (labels, (labels % 5 != 0).to(dtype))
