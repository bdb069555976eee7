"""Cost of running one backward as I + W instead of at once, for one Llama-like block.

Each round times, in random order, the ordinary backward, I + W, the unsplit backward of the attached module ("fused") and
a second copy of the ordinary one ("control", whose ratio is the noise of the measurement); the result is the median over
rounds of the ratio to the ordinary one of the same round. Process time leaves out other work on the machine; it is right
for one thread. The gradients are compared bit for bit first.

    python benchmarks/split_backward.py --threads 1 --json split.json
"""

import argparse
import copy
import json
import random
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


def backward_seconds(model: nn.Module, x: torch.Tensor, dy: torch.Tensor, clock) -> float:
    out = model(x.detach().requires_grad_())
    start = clock()
    out.backward(dy)
    return clock() - start


def split_seconds(model: nn.Module, split: SplitBackward, x: torch.Tensor, dy: torch.Tensor, clock) -> tuple[float, float]:
    out = model(x.detach().requires_grad_())
    start = clock()
    with split.collecting(0):
        out.backward(dy)
    middle = clock()
    split.run(0)
    return middle - start, clock() - middle


def measure(args: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    clock = {"wall": time.perf_counter, "process": time.process_time}[args.clock]
    plain = LlamaBlock(args.hidden, args.ffn, args.heads, args.kv_heads).to(dtype)
    attached, fused, control = (copy.deepcopy(plain) for _ in range(3))
    split, unused = SplitBackward(), SplitBackward()
    split.attach(attached)
    unused.attach(fused)
    x, dy = (torch.randn(args.batch, args.tokens, args.hidden, dtype=dtype) for _ in range(2))
    passes = {
        "ordinary": lambda: (backward_seconds(plain, x, dy, clock), 0.0),
        "control": lambda: (backward_seconds(control, x, dy, clock), 0.0),
        "fused": lambda: (backward_seconds(fused, x, dy, clock), 0.0),
        "split": lambda: split_seconds(attached, split, x, dy, clock),
    }

    for _ in range(args.warmup):
        for run in passes.values():
            run()
    for parameters in zip(*(m.parameters() for m in (plain, attached, fused)), strict=True):
        if not all(torch.equal(p.grad, parameters[0].grad) for p in parameters):
            raise SystemExit("gradients differ: no time is reported")

    rng = random.Random(0)
    rounds = []
    for _ in range(args.rounds):
        order = rng.sample(list(passes), len(passes))
        rounds.append({name: passes[name]() for name in order})

    def ratios(name):
        return [sum(r[name]) / sum(r["ordinary"]) for r in rounds]

    quartiles = statistics.quantiles(ratios("split"), n=4)
    return {
        **{k: v for k, v in vars(args).items() if k != "json"},
        "torch": torch.__version__,
        "ratio_median": statistics.median(ratios("split")),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "ratio_fastest": min(sum(r["split"]) for r in rounds) / min(sum(r["ordinary"]) for r in rounds),
        "fused_ratio_median": statistics.median(ratios("fused")),
        "control_ratio_median": statistics.median(ratios("control")),
        "backward_ms": 1e3 * statistics.median(sum(r["ordinary"]) for r in rounds),
        "i_ms": 1e3 * statistics.median(r["split"][0] for r in rounds),
        "w_ms": 1e3 * statistics.median(r["split"][1] for r in rounds),
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
    parser.add_argument("--clock", choices=["process", "wall"], default="process")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    result = measure(args)
    percent = {k: f"{100 * (v - 1):+.1f} %" for k, v in result.items() if "ratio_" in k and k != "ratio_quartiles"}
    low, high = (f"{100 * (r - 1):+.1f} %" for r in result["ratio_quartiles"])
    print(
        f"I + W over one full backward: {percent['ratio_median']} (quartiles {low}, {high}; fastest {percent['ratio_fastest']}); "
        f"fused {percent['fused_ratio_median']}, control {percent['control_ratio_median']}; "
        f"full {result['backward_ms']:.2f} ms, I {result['i_ms']:.2f} ms, W {result['w_ms']:.2f} ms"
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
