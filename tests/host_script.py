"""What a user's script looks like on several hosts: nothing in it knows of them."""

import argparse
import itertools
import json

import deepspeed
from models import batch, layers

import ds_pipe_ext


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    deepspeed.init_distributed()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.0,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": 10**6,
              "pipeline": {"schedule": "zb-h1"}}
    specs, loss_fn = layers("tied", 6)
    net = ds_pipe_ext.PipelineModule(specs, loss_fn=loss_fn, config=config)
    engine, *_ = ds_pipe_ext.initialize(args, model=net, model_parameters=list(net.parameters()), config=config)
    data = (batch("tied", number) for number in itertools.count())
    losses = [engine.train_batch(data).item() for _ in range(args.steps)]
    print("LOSSES", engine.global_rank, json.dumps(losses), flush=True)


if __name__ == "__main__":
    main()
