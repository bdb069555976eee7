"""Cost of running one backward as I + W instead of at once, for one Llama-like block.

Interleaved pairs (ordinary, split; the order alternates), so that other work on the machine hits both; the result is the median of
the ratios. The gradients of both are compared bit for bit first.

    python benchmarks/split_backward.py --threads 1 --json split.json
"""

import argparse
import copy
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

from ds_pipe_ext.nn.split_backward import SplitBackward


class LlamaBlock(nn.Module):
    """RMSNorm, grouped-query attention without position tables, SwiGLU MLP; x (batch, tokens, hidden)."""

    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (self.q(h), self.k(h), self.v(h)))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def prepare(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    return x, model(x)


def backward_seconds(model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> float:
    _, out = prepare(model, x)
    start = time.perf_counter()
    out.backward(dy)
    return time.perf_counter() - start


def split_seconds(model: nn.Module, split: SplitBackward, x: torch.Tensor, dy: torch.Tensor) -> tuple[float, float]:
    _, out = prepare(model, x)
    start = time.perf_counter()
    with split.collecting(0):
        out.backward(dy)
    middle = time.perf_counter()
    split.run(0)
    return middle - start, time.perf_counter() - middle


def measure(args: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    plain = LlamaBlock(args.hidden, args.ffn, args.heads, args.kv_heads).to(dtype)
    attached, split = copy.deepcopy(plain), SplitBackward()
    split.attach(attached)
    x, dy = (torch.randn(args.batch, args.tokens, args.hidden, dtype=dtype) for _ in range(2))

    for _ in range(args.warmup):
        backward_seconds(plain, x, dy)
        split_seconds(attached, split, x, dy)
    for p, q in zip(plain.parameters(), attached.parameters(), strict=True):
        if not torch.equal(p.grad, q.grad):
            raise SystemExit("gradients differ: no time is reported")

    full, i_times, w_times = [], [], []
    for pair in range(args.pairs):
        if pair % 2:
            i, w = split_seconds(attached, split, x, dy)
        full.append(backward_seconds(plain, x, dy))
        if not pair % 2:
            i, w = split_seconds(attached, split, x, dy)
        i_times.append(i)
        w_times.append(w)

    ratios = [(i + w) / b for i, w, b in zip(i_times, w_times, full, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        **{k: v for k, v in vars(args).items() if k != "json"},
        "torch": torch.__version__,
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "backward_ms": 1e3 * statistics.median(full),
        "i_ms": 1e3 * statistics.median(i_times),
        "w_ms": 1e3 * statistics.median(w_times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--ffn", type=int, default=1536)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    result = measure(args)
    print(
        f"I + W over one full backward: {100 * (result['ratio_median'] - 1):+.1f} % "
        f"(quartiles {', '.join(f'{100 * (r - 1):+.1f} %' for r in result['ratio_quartiles'])}); "
        f"full {result['backward_ms']:.2f} ms, I {result['i_ms']:.2f} ms, W {result['w_ms']:.2f} ms"
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
