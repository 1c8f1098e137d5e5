"""Full state dicts of what `fully_shard` or `parallelize_module` divided, gathered and loaded in memory and paged."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import torch_offload
from support.bits import digest
from support.collectives import join_group
from support.sharded_training import PARAMETERS, Case, new_model, new_optimizer, shard, train
from torch_offload import _C
from torch_offload.runtime.process import PROCESS

FULL_BYTES = 3 * 4 * PARAMETERS
"""Weights and two moments of all ranks together."""


@dataclass(frozen=True)
class Gathered:
    """What a rank got, and the engine's figures while it had that."""

    digests: list[str]
    managed_bytes: int
    figures: dict[str, Any]


def tensors_in(states: Any) -> list[Tensor]:
    """Return those of a state dict, in its order."""
    if isinstance(states, dict):
        return [tensor for value in states.values() for tensor in tensors_in(value)]
    return [states] if isinstance(states, Tensor) else []


def gathered(rank: int, case: Case, folder: str, *, in_every_rank: bool) -> list[Gathered]:
    """Train in memory and paged and gather; the first rank saves what it gets, in folders `plain` and `paged`."""
    join_group(rank, folder, ranks=case.ranks)
    outcomes = []
    for name in ("plain", "paged"):
        model = new_model(case)
        shard(model, case)
        if name == "paged":
            torch_offload.wrap(model, config=case.config(folder))
        optimizer = new_optimizer(model, case)
        train(rank, model, case, optimizer)
        model.zero_grad()
        options = StateDictOptions(full_state_dict=True, cpu_offload=not in_every_rank)
        weights, states = get_state_dict(model, optimizer, options=options)
        tensors = [*tensors_in(weights), *tensors_in(states)]
        if rank == 0:
            save(weights, states, Path(folder) / name)
        outcomes.append(
            Gathered(
                digests=[digest(tensor) for tensor in tensors],
                managed_bytes=sum(tensor.nbytes for tensor in tensors if _C.is_managed(tensor)),
                figures=PROCESS.session.statistics() if name == "paged" else {},
            )
        )
    dist.destroy_process_group()
    return outcomes


def save(weights: dict[str, Any], states: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    torch.save({"model": weights, "optimizer": states}, folder / "full.pt")
    save_file(weights, folder / "model.safetensors")


def resumed(rank: int, case: Case, folder: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """Train paged, save a full state dict and train on; beside it what a fresh model and optimizer do that get it from
    the first rank.
    """
    join_group(rank, folder, ranks=case.ranks)
    results = []
    for is_fresh in (False, True):
        model = new_model(case)
        shard(model, case)
        torch_offload.wrap(model, config=case.config(folder))
        optimizer = new_optimizer(model, case)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
        if not is_fresh:
            train(rank, model, case, optimizer)
            model.zero_grad()
            weights, states = get_state_dict(model, optimizer, options=options)
        elif rank == 0:
            content = torch.load(Path(folder) / "saved" / "full.pt")
            weights, states = content.pop("model"), content.pop("optimizer")
        else:
            weights, states = {}, {}
        if is_fresh:
            set_model_state_dict(model, weights, options=options)
            set_optimizer_state_dict(model, optimizer, states, options=options)
        elif rank == 0:
            save(weights, states, Path(folder) / "saved")
        del weights, states
        results.append(train(rank, model, case, optimizer))
        figures = PROCESS.session.statistics()
        torch_offload.unwrap(model)
    dist.destroy_process_group()
    return *results, figures
