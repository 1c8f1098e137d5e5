"""Training with `fully_shard` or `replicate`, with matrices divided among ranks, or both, in memory and paged."""

import gc
import logging
import weakref
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import torch_offload
from support.bits import digest
from support.collectives import in_each_rank, join_group
from torch_offload import _C, Config
from torch_offload._compat import paged_part
from torch_offload.runtime.process import PROCESS

WIDTH, BLOCKS, ROWS, STEPS = 128, 16, 128, 3
LAYERS = 6
"""Of the language model."""
WEIGHTS = 2 * BLOCKS
"""Tensors whose shards are large enough to be paged."""
PARAMETERS = BLOCKS * (8 * WIDTH * WIDTH + 5 * WIDTH)
SHARDS_BYTES = 4 * BLOCKS * 8 * WIDTH * WIDTH
"""Of these, on all ranks together."""
STATE_BYTES = 4 * 4 * PARAMETERS
"""Weights, gradients and two moments of all ranks together."""

ACTIVATION_BYTES = 4 * ROWS * BLOCKS * (WIDTH + 4 * WIDTH)
"""What the forward of one rank saves beside weights: the input of each matrix."""


@dataclass(frozen=True)
class Case:
    """A way to train."""

    ranks: int = 2
    optimizer: str = "fused"
    clips: bool = True
    micro_steps: int = 1
    holds_gradients: bool = False
    """Whole gradients wait for the last micro step to be reduced."""
    holds_sums: bool = False
    """Gradients of shards wait for it to be summed over replicas."""
    is_mixed: bool = False
    dtype: torch.dtype = torch.float32
    wraps_first: bool = False
    is_on_meta: bool = False
    """The model has no memory until it is sharded and wrapped."""
    is_partly_frozen: bool = False
    activations: str = "page"
    resharded: bool | int | None = None
    """What `reshard_after_forward` is: among how many ranks what was gathered is divided until the backward. None:
    torch's default.
    """
    layout: str = "shards"
    """Or "shards of blocks": the model around them has none; "replicated shards": of each half of the ranks;
    "replicas": what torch calls `replicate`; "tensor parallel": each matrix is divided; "both": shards of what pairs of
    ranks have divided.
    """

    def data_of(self, rank: int) -> int:
        """Return the number of the rows that a rank trains on: who divides a matrix shares them."""
        return {"tensor parallel": 0, "both": rank // 2}.get(self.layout, rank)

    @property
    def parts(self) -> int:
        """How many ranks have different weights."""
        return {"replicas": 1, "replicated shards": self.ranks // 2}.get(self.layout, self.ranks)

    @property
    def budget_bytes(self) -> int:
        """40 % of a rank's state, activations where they stay, and weights where they stay gathered."""
        activation_bytes = ACTIVATION_BYTES if self.activations == "keep" else 0
        gathered_bytes = 4 * PARAMETERS if self.resharded is False else 0
        return int(0.4 * STATE_BYTES / self.parts) + activation_bytes + gathered_bytes

    def config(self, folder: str) -> Config:
        return Config(
            ram=self.budget_bytes,
            ssd=folder,
            page_elements=1 << 13,
            min_paged_bytes=1 << 14,
            activations=self.activations,
        )


class Block(nn.Module):
    """What is gathered at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(torch.relu(self.up(value)))


def new_model(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("meta" if case.is_on_meta else "cpu"):
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    model.to(case.dtype)
    for block in model if case.is_partly_frozen else ():
        block.up.requires_grad_(False)
    return model


def meshes(case: Case) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the ranks that divide each matrix, and those that torch's `fully_shard` or `replicate` gets."""
    if case.layout in ("shards", "shards of blocks", "replicas"):
        return None, init_device_mesh("cpu", (case.ranks,))
    if case.layout == "tensor parallel":
        return init_device_mesh("cpu", (case.ranks,)), None
    mesh = init_device_mesh("cpu", (2, case.ranks // 2), mesh_dim_names=("outer", "inner"))
    return (None, mesh) if case.layout == "replicated shards" else (mesh["inner"], mesh["outer"])


def shard(model: nn.Sequential, case: Case) -> None:
    matrices, shards = meshes(case)
    for block in model if matrices is not None else ():
        parallelize_module(block, matrices, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if shards is None:
        return
    divide = replicate if case.layout == "replicas" else fully_shard
    options: dict[str, Any] = {"mesh": shards}
    if case.is_mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.resharded is not None:
        options["reshard_after_forward"] = case.resharded
    for block in model:
        divide(block, **options)
    if case.layout != "shards of blocks":
        divide(model, **options)


def fill(model: nn.Module, rank: int) -> None:
    """Give the shards of a model without memory some, and this rank's numbers."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(std=0.05, generator=generator)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def new_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    if case.optimizer == "own":
        return torch_offload.AdamW(model.parameters(), lr=1e-3, max_grad_norm=0.5)
    kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}, "default": {"foreach": False}}
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **kinds[case.optimizer])


def new_rows(case: Case, generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=generator).to(case.dtype)


def train(rank: int, model: nn.Sequential, case: Case, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """Return what there is to compare: of each step loss and norm, then weights, gradients and states."""
    optimizer = optimizer or new_optimizer(model, case)
    generator = torch.Generator().manual_seed(case.data_of(rank))
    seen: list[Tensor] = []
    for _ in range(STEPS):
        for micro_step in range(case.micro_steps):
            if case.holds_gradients:
                model.set_requires_gradient_sync(micro_step + 1 == case.micro_steps)
            if case.holds_sums:
                model.set_requires_all_reduce(micro_step + 1 == case.micro_steps)
            loss = model(new_rows(case, generator)).float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        if case.clips:
            seen.append(local(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    loss = model(new_rows(case, generator)).float().square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            states = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
            seen += [local(tensor) for tensor in (parameter, parameter.grad, *states)]
        return [digest(tensor) for tensor in seen if tensor is not None]


def run(rank: int, case: Case, folder: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """Train in memory and paged; the figures are of the latter, with what is paged before the first forward."""
    join_group(rank, folder, ranks=case.ranks)
    model = new_model(case)
    shard(model, case)
    if case.is_on_meta:
        fill(model, rank)
    plain = train(rank, model, case)
    model = new_model(case)
    if not case.wraps_first:
        shard(model, case)
    torch_offload.wrap(model, config=case.config(folder))
    if case.wraps_first:
        shard(model, case)
    if case.is_on_meta:
        fill(model, rank)
    shards_bytes = sum(local(weight).nbytes for weight in model.parameters() if _C.is_managed(paged_part(weight)))
    paged = train(rank, model, case)
    figures = PROCESS.session.statistics() | {"shards_bytes": shards_bytes}
    dist.destroy_process_group()
    return plain, paged, figures


@dataclass(frozen=True)
class Unwrapped:
    """What was left when training in memory and training that began paged had ended."""

    plain: list[str]
    paged: list[str]
    managed_count: int
    was_replaced: bool
    """Torch's function that gathers parameters, before unwrapping."""
    is_replaced: bool
    """The same, afterwards."""


def run_unwrapped(rank: int, case: Case, folder: str) -> Unwrapped:
    """Train, unwrap and train on."""
    gathering = vars(FSDPParam)["init_all_gather_outputs"]
    join_group(rank, folder, ranks=case.ranks)
    results = []
    for is_paged in (False, True):
        model = new_model(case)
        shard(model, case)
        if is_paged:
            torch_offload.wrap(model, config=case.config(folder))
            engine = PROCESS.session.engine
        optimizer = new_optimizer(model, case)
        trained = train(rank, model, case, optimizer)
        if is_paged:
            was_replaced = vars(FSDPParam)["init_all_gather_outputs"] is not gathering
            torch_offload.unwrap(model)
            is_replaced = vars(FSDPParam)["init_all_gather_outputs"] is not gathering
        results.append([*trained, *train(rank, model, case, optimizer)])
    dist.destroy_process_group()
    return Unwrapped(*results, engine.managed_count(), was_replaced=was_replaced, is_replaced=is_replaced)


def saved_and_loaded(
    rank: int, case: Case, folder: str, *, in_background: bool = False
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Train paged, save with torch.distributed.checkpoint, and load into a model in memory; returns figures too.

    What is saved in the background is changed before it is waited for: the copy is of the time of the call.
    """
    join_group(rank, folder, ranks=case.ranks)
    model, loaded = new_model(case), new_model(case)
    for module in (model, loaded):
        shard(module, case)
    torch_offload.wrap(model, config=case.config(folder))
    train(rank, model, case)
    checkpoint = f"{folder}/checkpoint"
    with torch.no_grad():
        paged = [digest(local(weight)) for weight in model.parameters()]
    if in_background:
        saving = distributed_checkpoint.async_save(model.state_dict(), checkpoint_id=checkpoint)
        with torch.no_grad():
            for weight in model.parameters():
                local(weight).zero_()
        saving.result()
    else:
        distributed_checkpoint.save(model.state_dict(), checkpoint_id=checkpoint)
    distributed_checkpoint.load(state := loaded.state_dict(), checkpoint_id=checkpoint)
    loaded.load_state_dict(state)
    figures = PROCESS.session.statistics()
    with torch.no_grad():
        plain = [digest(local(weight)) for weight in loaded.parameters()]
    dist.destroy_process_group()
    return paged, plain, figures


def loaded_from_safetensors(rank: int, case: Case, folder: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """Load a model that has no memory yet from one file of whole parameters, and train, in memory and paged."""
    join_group(rank, folder, ranks=case.ranks)
    checkpoint = Path(folder, "checkpoint")
    if rank == 0:
        checkpoint.mkdir()
        save_file(new_model(replace(case, is_on_meta=False)).state_dict(), checkpoint / "model.safetensors")
    dist.barrier()
    results = []
    for is_paged in (False, True):
        model = new_model(case)
        shard(model, case)
        if is_paged:
            torch_offload.wrap(model, config=case.config(folder))
        model.to_empty(device="cpu")
        reader = distributed_checkpoint.HuggingFaceStorageReader(str(checkpoint))
        distributed_checkpoint.load(model.state_dict(), storage_reader=reader)
        with torch.no_grad():
            loaded = [digest(local(weight)) for weight in model.parameters()]
        results.append([*loaded, *train(rank, model, case)])
    figures = PROCESS.session.statistics()
    dist.destroy_process_group()
    return *results, figures


def resumed(rank: int, case: Case, folder: str) -> tuple[list[str], list[str], dict[str, Any]]:
    """Train paged, save and train on; beside it what a fresh model and optimizer do that load what was saved."""
    join_group(rank, folder, ranks=case.ranks)
    checkpoint = f"{folder}/checkpoint"
    results = []
    for is_fresh in (False, True):
        model = new_model(case)
        shard(model, case)
        torch_offload.wrap(model, config=case.config(folder))
        optimizer = new_optimizer(model, case)
        if not is_fresh:
            train(rank, model, case, optimizer)
            model.zero_grad()
        weights, states = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": states}
        if is_fresh:
            distributed_checkpoint.load(content, checkpoint_id=checkpoint)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        else:
            distributed_checkpoint.save(content, checkpoint_id=checkpoint)
        del weights, states, content
        results.append(train(rank, model, case, optimizer))
        figures = PROCESS.session.statistics()
        torch_offload.unwrap(model)
    dist.destroy_process_group()
    return *results, figures


def said_of_8_bit_moments(rank: int, case: Case, folder: str) -> str:
    """Return the error with which they are refused."""
    join_group(rank, folder, ranks=case.ranks)
    model = new_model(case)
    shard(model, case)
    try:
        torch_offload.AdamW(model.parameters(), moments="8bit")
    except TypeError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def lives_on_after_wrapping(rank: int, case: Case, folder: str) -> bool:
    """Whether something keeps a module that was sharded, wrapped, run and let go."""
    join_group(rank, folder, ranks=case.ranks)
    model = new_model(case)
    shard(model, case)
    torch_offload.wrap(model, config=Config(ram="64MiB", ssd=folder, min_paged_bytes=1 << 14))
    train(rank, model, case)
    module = weakref.ref(model)
    del model
    gc.collect()
    dist.destroy_process_group()
    return module() is not None


def train_language_model(rank: int, modes: tuple[str, str], folder: str) -> tuple[list[str], int, int]:
    """Return losses and norms of a sharded Llama on two ranks, each with a setting for activations of its own ("": in
    memory); how many layers recompute, and the bytes that passes saved as pages.
    """
    join_group(rank, folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": 2 * WIDTH}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if modes[rank]:
        config = Config(ram="24MiB", ssd=folder, page_elements=1 << 13, min_paged_bytes=1 << 13)
        torch_offload.wrap(model, config=config.replace(activations=modes[rank]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seen = []
    for step in range(STEPS):
        ids = torch.randint(0, 2 * WIDTH, (2, 64), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen += [digest(loss.detach()), digest(norm.full_tensor())]
        optimizer.step()
        optimizer.zero_grad()
    saved_bytes = PROCESS.session.statistics()["saved_bytes"] if modes[rank] else 0
    dist.destroy_process_group()
    return seen, sum(layer.gradient_checkpointing for layer in model.model.layers), saved_bytes


def said_of_room(rank: int, case: Case, folder: str, units: float) -> str:
    """Return the error or the warning with which a module is wrapped in so many times what one block gathers."""
    join_group(rank, folder, ranks=case.ranks)
    model = new_model(case)
    shard(model, case)
    said = StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("torch_offload").addHandler(handler)
    try:
        torch_offload.wrap(model, config=case.config(folder), ram=int(units * 4 * PARAMETERS / BLOCKS))
    except torch_offload.OutOfTierMemory as error:
        said.write(f"refused: {error}")
    finally:
        dist.destroy_process_group()
    return said.getvalue()


def run_ranks(case: Case, folder: str) -> list[tuple[list[str], list[str], dict[str, Any]]]:
    return in_each_rank(run, case, folder, ranks=case.ranks)
