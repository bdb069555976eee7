"""Memory and time of head and loss, forward and backward, with logits made at once or in chunks of tokens.

The head of a Llama-like model (tied or not, it is the same work) with the model's own loss, on one CPU. Every setting runs in
a process of its own; the peak is the growth of its resident memory (VmHWM, reset before) over hidden states, weight and
weight gradient, which are there before. Loss and weight gradient are compared with those of whole logits.

    python benchmarks/chunked_loss.py --vocab 49152 --width 576 --tokens 2048 --chunks 1024 256 64
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from ds_pipe_ext.hf import layers_of
from ds_pipe_ext.hf.loss import loss_of


def status(key):
    """Bytes of one line of the process's status."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def measure(vocab, width, tokens, chunk, dtype, threads):
    """Peak bytes, seconds (best of three), loss, and sum and norm of the weight gradient."""
    torch.set_num_threads(threads)
    config = LlamaConfig(vocab_size=vocab, hidden_size=width, intermediate_size=width, num_hidden_layers=1, num_attention_heads=8,
                         max_position_embeddings=tokens)  # fmt: skip
    specs = layers_of(config, dtype=getattr(torch, dtype), loss_chunk_tokens=chunk)
    head, loss_fn = specs[-1].build(), loss_of(specs[0].module_args[0])
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, width, generator=generator).to(head.only().weight.dtype).requires_grad_()
    labels = torch.randint(0, vocab, (1, tokens), generator=generator)
    weight = head.only().weight
    weight.grad = torch.zeros_like(weight)
    times = []
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = status("VmRSS")
    for _ in range(3):
        weight.grad.zero_()
        hidden.grad = None
        start = time.perf_counter()
        loss = loss_fn(head(hidden), labels)
        loss.backward()
        times.append(time.perf_counter() - start)
    grad = weight.grad.double()
    return {"peak": status("VmHWM") - before, "seconds": min(times), "loss": loss.item(), "norm": grad.norm().item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 256, 64])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = options.vocab, options.width, options.tokens
    if options.one:
        print(json.dumps(measure(*shape, json.loads(options.one), options.dtype, options.threads)))
        return
    print("chunk     peak MB   seconds  loss - whole  gradient norm / whole - 1")
    whole = None
    for chunk in (None, *options.chunks):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", json.dumps(chunk)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        whole = whole or found
        print(f"{chunk or 'whole':<8} {found['peak'] / 1e6:>8.0f} {found['seconds']:>9.2f} {found['loss'] - whole['loss']:>13.1e} "
              f"{found['norm'] / whole['norm'] - 1:>26.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
