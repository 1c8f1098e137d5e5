"""Everything that depends on the version of torch.

`setup.py` runs this file by its path before the package can be imported, so it imports nothing outside the standard
library at the top and nothing of this package.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)

BUILD_COMMAND = "pip install --no-build-isolation --editable ."
REBUILD_COMMAND = "pip install --force-reinstall --no-deps --no-cache-dir torch-offload"

VECTOR_FUNCTIONS: Final = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "floor", "frac"),
    *("lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sigmoid", "sin", "sinh", "sqrt"),
    *("tan", "tanh", "trunc"),
)


def parse_version(version: str) -> tuple[int, int]:
    """Return major and minor of a torch version such as ``2.13.0+cpu`` or ``2.15.0a0+git1a2b3c4``."""
    parts = version.split(".")
    if len(parts) < 2 or not parts[0].isdigit() or not parts[1].isdigit():
        raise ValueError(f"not a torch version: {version!r} (expected MAJOR.MINOR...)")
    return int(parts[0]), int(parts[1])


def supported_range() -> str:
    """Return the supported torch versions in words."""
    return "{}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TORCH)


def requirement() -> str:
    """Return the supported torch versions as packaging tools write them, ``torch>=2.11,<2.16``."""
    major, minor = NEWEST_TORCH
    return "torch>={}.{},<{}.{}".format(*OLDEST_TORCH, major, minor + 1)


def unsupported_reason(version: str) -> str | None:
    """Say why torch `version` cannot be used, or return None where it can."""
    if OLDEST_TORCH <= parse_version(version) <= NEWEST_TORCH:
        return None
    return f"torch_offload supports torch {supported_range()}, found {version}; install one of these and rebuild"


def mismatch_reason(*, built_against: str, found: str) -> str | None:
    """Say why an extension built against one torch cannot run on another, or return None where it can."""
    if parse_version(built_against) == parse_version(found):
        return None
    return (
        f"torch_offload was built against torch {built_against}, found {found}; "
        f"build it again for this torch: {REBUILD_COMMAND} (in its source tree, `.` in place of the name)"
    )


def _build_info() -> ModuleType:
    """Import what setup.py has written.

    Raises:
        ImportError: If the extension has not been built. The message names the command.
    """
    try:
        return importlib.import_module("torch_offload._build_info")
    except ModuleNotFoundError:
        raise ImportError(
            f"the extension of torch_offload is not built; run in its source tree: {BUILD_COMMAND}"
        ) from None


def built_against_torch() -> str:
    """Return the version of torch that the extension was compiled against."""
    return str(_build_info().BUILT_AGAINST_TORCH)


def package_version() -> str:
    """Return the version of this package, as pyproject.toml had it when the extension was built."""
    return str(_build_info().VERSION)


def check_torch() -> None:
    """Refuse a torch that the extension cannot run on, before its symbols fail to resolve.

    Raises:
        ImportError: If torch is missing or out of the supported range, or the extension is not built or was built
            against another minor version. The message names the command that helps.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(f"torch_offload needs torch {supported_range()}: pip install torch, then {BUILD_COMMAND}")
    import torch

    built_against = built_against_torch()
    reason = unsupported_reason(torch.__version__)
    reason = reason or mismatch_reason(built_against=built_against, found=torch.__version__)
    if reason is not None:
        raise ImportError(reason)


def settle_vector_math() -> None:
    """Call each of torch's vector functions once, on one element: 12 ms.

    The MKL in torch's wheels (2024.2) chooses a function's kernel at its first call. Where that call is made by
    several threads at once, one of them may compute its part with the kernel of the lowest accuracy
    (https://github.com/pytorch/pytorch/issues/188792): two runs of one program then differ from the first step on.
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        element = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(element)


# --- Names of torch.distributed that are its own ----------------------------------------------------------------------
SHARDING_MODULE: Final = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""Makes the shards of `fully_shard`."""
STATE_DICT_MODULE: Final = "torch.distributed._state_dict_utils"
"""Gathers the full state dicts of `torch.distributed.checkpoint.state_dict`."""
STORE_PATIENCE_SECONDS: Final = 5


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor, of which each rank has a part."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def paged_part(tensor: "Tensor") -> "Tensor":
    """Return the tensor that has the memory of one: itself; of a DTensor, this rank's part.

    The very one is returned, where `to_local` may make a view.
    """
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return paged_part(local)


def set_local_part(tensor: Any, local: Any) -> None:
    """Give a DTensor other memory with the same numbers."""
    tensor._local_tensor = local


def first_of_ranks(key: str, text: str) -> str:
    """Keep a text for all ranks of the default group, and return it, or what another rank had kept before.

    Raises:
        RuntimeError: If the store does not answer in time.
        ValueError: If the group has none.
    """
    with _store() as store:
        kept: bytes = store.compare_set(key, "", text)
    return kept.decode(errors="replace")


def kept_of_ranks(key: str) -> str | None:
    """Return what a rank of the default group has kept, None where none has.

    Raises:
        RuntimeError: If the store does not answer in time.
        ValueError: If the group has none.
    """
    with _store() as store:
        kept: bytes | None = store.get(key) if store.check([key]) else None
    return None if kept is None else kept.decode(errors="replace")


@contextmanager
def _store() -> Iterator[Any]:
    """Have what the ranks of the default group found one another by, with little patience: its process may be gone."""
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    usual = store.timeout
    store.set_timeout(timedelta(seconds=STORE_PATIENCE_SECONDS))
    try:
        yield store
    finally:
        store.set_timeout(usual)


def other_engine_of(held: Any) -> str | None:
    """Return the name of the engine that a module is, or that puts a parameter into memory of its own, if one does."""
    if getattr(held, "_is_flat_param", False) or getattr(held, "_fsdp_flattened", False):
        return "FullyShardedDataParallel (FSDP1)"
    if hasattr(held, "ds_id") or hasattr(held, "_hp_mapping") or type(held).__module__.startswith("deepspeed."):
        return "DeepSpeed"
    return None


def _sharded_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def sharded_parameters(module: Any) -> list[Any]:
    """Return what `fully_shard` keeps of each parameter of the group, or groups, of a module."""
    return [parameter for group in _sharded_groups(module) for parameter in group.fsdp_params]


def left_gathered(module: Any, *, is_outermost: bool) -> list[Any]:
    """Return those parameters of a module that are gathered for its forward and stay so until its backward.

    `reshard_after_forward` says so; where it is not given, they do of the outermost module, which torch finds out in
    the first forward.
    """
    state = module._get_fsdp_state()
    is_root = is_outermost if state._is_root is None else state._is_root
    stays = state._auto_reshard_after_forward and is_root
    groups = [group for group in _sharded_groups(module) if stays or group.post_forward_mesh_info is None]
    return [parameter for group in groups for parameter in group.fsdp_params]


def gathered_bytes(parameter: Any) -> int:
    """Return what the whole of a sharded parameter takes where it is gathered, in the dtype of its products."""
    return int(
        parameter._orig_size.numel() * (parameter.mp_policy.param_dtype or parameter.sharded_param.dtype).itemsize
    )


def reduced_bytes(parameter: Any) -> int:
    """Return what its whole gradient takes as it is sent to the other ranks."""
    policy = parameter.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
    return int(parameter._orig_size.numel() * dtype.itemsize)


def resharded_part(parameter: Any) -> Any:
    """Return what a rank keeps of a gathered parameter from a forward to its backward, where `reshard_after_forward` is
    a number of ranks: the memory that the next gathering reads, flat.
    """
    return parameter._sharded_post_forward_param_data


def owners_of_sharded(parameter: Any) -> Iterator[tuple[Any, str]]:
    """Yield the modules that hold a sharded parameter, and its name in each."""
    info = parameter._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def forget_reduced(group: Any) -> None:
    """Have a group of sharded parameters keep no gradients that it has summed over groups of ranks."""
    group._all_reduce_state = None


def held_gradients(group: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter of a group whose whole gradient waits for a later backward to be reduced, and that; with
    the largest the gradients of all shards of the group, in one tensor, that wait to be summed over its replicas.
    """
    if group._partial_reduce_output is not None:
        yield max(group.fsdp_params, key=gathered_bytes), group._partial_reduce_output
    for parameter in group.fsdp_params:
        if not hasattr(parameter, "_unsharded_param"):  # was never gathered
            continue
        held = parameter.unsharded_accumulated_grad
        held = parameter._unsharded_param.grad if held is None else held
        if held is not None:
            yield parameter, held


def padded_shard(parameter: Any) -> Any:
    """Return what all ranks have equally much of: the memory of a shard, flat."""
    return parameter._sharded_param_data


# --- Names of torch.distributed.pipelining that are its own -----------------------------------------------------------
class NotedStage:
    """Stands for a stage of a pipeline, computes and sends nothing, and notes what its schedule calls it for.

    The lists that schedules show are not enough: that of 1F1B numbers the micro-batches of the last rank otherwise than
    the schedule runs them.
    """

    def __init__(self, index: int, *, stages: int, rank: int, ranks: int, calls: list[tuple[str, int, int]]) -> None:
        """Stand for one of `stages` on one of `ranks`; calls are added to `calls`: what for, stage and micro-batch."""
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.submod = self.group = None
        self.device = "cpu"
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[Any]] = {}
        self._calls = calls

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        """Note a forward."""
        self._calls.append(("forward", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        """Note a backward."""
        self._calls.append(("backward", self.stage_index, micro_batch))

    def perform_reduce_grad(self, *_: Any) -> None:
        """Note that gradients are divided by the number of micro-batches."""
        self._calls.append(("scale", self.stage_index, -1))

    def clear_runtime_states(self) -> None:
        """Have nothing to clear."""

    def _nothing(self, *_: Any, **__: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    release_fwd_send_outputs = _nothing  # newer than torch 2.13


def calls_of_stages(
    schedule: Any, *, rank: int, ranks: int, stages: int, micro_batches: int, has_one_stage: bool
) -> list[tuple[str, int, int]]:
    """Return what a step of a schedule calls the stages of a rank for: what, the stage and the micro-batch.

    Raises:
        ValueError: If the schedule does not work for these numbers.
    """
    import torch

    calls: list[tuple[str, int, int]] = []
    held = [
        NotedStage(index, stages=stages, rank=rank, ranks=ranks, calls=calls) for index in range(rank, stages, ranks)
    ]

    class NotedSchedule(schedule):  # type: ignore[misc]
        """Begins without asking stages for shapes and other ranks for their addresses."""

        def _initialize_stage(self, *_: Any, **__: Any) -> None:
            """Leave the stage as it is."""

        _initialize_stages = _initialize_stage

    made = NotedSchedule(held[0] if has_one_stage else held, micro_batches, loss_fn=lambda *_: None)
    with torch.enable_grad():
        made.step(target=torch.empty(micro_batches), return_outputs=False)
    return calls
