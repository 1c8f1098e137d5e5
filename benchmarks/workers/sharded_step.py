"""A rank of workers/step.py: the same model and step, divided among ranks over gloo by `fully_shard`."""

import argparse

import torch
from harness.ranks import add_rank_options, join_group
from harness.worker_process import serve
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from workers.step import Worker, make_model, make_parser

import torch_offload


class ShardedWorker(Worker):
    """This rank's part of a model in training."""

    def __init__(self, options: argparse.Namespace) -> None:
        join_group(options)
        super().__init__(options)

    def new_model(self, options: argparse.Namespace) -> LlamaForCausalLM:
        """Return the model with each layer, and what is left, divided among the ranks."""
        return divided(make_model(options))

    def paged_model(self, options: argparse.Namespace) -> LlamaForCausalLM:
        """Return the same, which is paged before it is divided: a rank may have no memory for the whole."""
        with torch_offload.loading(config=self.config(options)) as block:
            model = block.wrap(make_model(options))
        return divided(model)

    def own_part(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard."""
        return weight.to_local() if isinstance(weight, DTensor) else weight


def divided(model: LlamaForCausalLM) -> LlamaForCausalLM:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


if __name__ == "__main__":
    parser = make_parser()
    add_rank_options(parser)
    serve(lambda: ShardedWorker(parser.parse_args()))
