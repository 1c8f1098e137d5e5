"""A rank of workers/step.py: the same model and step, divided among ranks over gloo by `fully_shard`."""

import argparse

import torch
from harness.ranks import add_rank_options, join_group
from harness.worker_process import serve
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from workers.step import Worker, make_model, make_parser


class ShardedWorker(Worker):
    """This rank's part of a model in training."""

    def __init__(self, options: argparse.Namespace) -> None:
        join_group(options)
        super().__init__(options)

    def new_model(self, options: argparse.Namespace) -> LlamaForCausalLM:
        """Return the model with each layer, and what is left, divided among the ranks."""
        model = make_model(options)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model

    def own_part(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard."""
        return weight.to_local() if isinstance(weight, DTensor) else weight


if __name__ == "__main__":
    parser = make_parser()
    add_rank_options(parser)
    serve(lambda: ShardedWorker(parser.parse_args()))
