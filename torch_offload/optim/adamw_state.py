"""States of the engine's AdamW: how masters and moments are kept, made and taken over from a checkpoint."""

from typing import Any, cast

import torch
from torch import Tensor

from torch_offload import _C
from torch_offload._compat import paged_part

PACKED_BLOCK = 2048
"""Elements of an 8-bit moment that share a scale."""

MIN_PACKED_ELEMENTS = 4096
"""Smaller parameters keep fp32 moments: there is nothing to gain."""

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Names of states, as in ``torch.optim.AdamW``."""


def master_name(group: dict[str, Any]) -> str:
    return "master_low" if group["master"] == "split" else "master"


def _moment_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype is torch.bfloat16 else parameter.dtype


def _is_packed(parameter: Tensor, group: dict[str, Any]) -> bool:
    is_large = parameter.numel() >= MIN_PACKED_ELEMENTS
    return group["moments"] == "8bit" and is_large and parameter.dtype is not torch.float64


@torch.no_grad()
def unpacked_moment(parameter: Tensor, name: str, state: Tensor) -> Tensor:
    """Return a moment in its wide form, as a tensor of its own."""
    if state.dtype is not torch.uint8:
        return state.detach().clone()
    wide = torch.ops.torch_offload.unpack_moment(state.cpu(), parameter.cpu(), name == "exp_avg_sq")
    return cast(Tensor, wide.to(state.device))


def _zero_moment(parameter: Tensor, group: dict[str, Any], name: str) -> Tensor:
    if not _is_packed(parameter, group):
        return torch.zeros_like(parameter, dtype=_moment_dtype(parameter))
    blocks = -(-parameter.numel() // PACKED_BLOCK)
    zeros = torch.zeros(blocks * PACKED_BLOCK, dtype=torch.uint8, device=parameter.device)
    return _paged_with(parameter, zeros, name)


def _new_master(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Return the master of a bf16 parameter that begins with its own value."""
    if group["master"] == "split":
        return {"master_low": torch.zeros_like(parameter, dtype=torch.int16)}
    return {"master": parameter.detach().to(torch.float32)}


def joined_master(parameter: Tensor, low: Tensor) -> Tensor:
    """Return the float32 master of a bf16 parameter and its low half."""
    wide = parameter.detach().float()
    return (wide.view(torch.int32) + low.to(torch.int32)).view(torch.float32)


def _low_of(parameter: Tensor, master: Tensor) -> Tensor:
    """Return the low half of a master; zeros where the parameter is not the master's rounding any more."""
    low = (master.view(torch.int32) & 0xFFFF).to(torch.int16)
    return torch.where(joined_master(parameter, low) == master, low, 0).to(torch.int16)


def new_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    names = MOMENTS if group["amsgrad"] else MOMENTS[:2]
    state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
    state.update({name: _zero_moment(parameter, group, name) for name in names})
    return state | (_new_master(parameter, group) if parameter.dtype is torch.bfloat16 else {})


def loaded_state(parameter: Tensor, loaded: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Return loaded values as states of this parameter; names that are not known stay as they are.

    The count of steps is on the CPU, wherever it was: kernels take it as a number, for which a GPU would be waited for.
    """
    state = dict(loaded)
    state["step"] = torch.as_tensor(loaded["step"]).to("cpu", torch.float32).reshape(()).clone()
    for name in MOMENTS:
        if name in state:
            state[name] = _paged_with(parameter, _as_moment(parameter, name, state[name], group), name)
    masters: dict[str, Tensor] = {name: state.pop(name) for name in ("master_low", "master") if name in state}
    if parameter.dtype is torch.bfloat16:
        for name, value in _loaded_master(parameter, masters, group).items():
            state[name] = _paged_with(parameter, value, name)
    return state


@torch.no_grad()
def _loaded_master(parameter: Tensor, masters: dict[str, Tensor], group: dict[str, Any]) -> dict[str, Tensor]:
    """Return the master in the form that the group asks for, a new one if none was saved."""
    name = master_name(group)
    if name in masters:
        dtype = torch.int16 if name == "master_low" else torch.float32
        return {name: _as_state(parameter, name, masters[name], dtype)}
    if "master_low" in masters:
        low = _as_state(parameter, "master_low", masters["master_low"], torch.int16)
        return {name: joined_master(parameter, low)}
    if "master" in masters:
        return {name: _low_of(parameter, _as_state(parameter, "master", masters["master"], torch.float32))}
    return _new_master(parameter, group)


def _is_packed_for(parameter: Tensor, value: Tensor) -> bool:
    return value.dtype is torch.uint8 and value.numel() == -(-parameter.numel() // PACKED_BLOCK) * PACKED_BLOCK


def _as_moment(parameter: Tensor, name: str, value: Tensor, group: dict[str, Any]) -> Tensor:
    """Return a loaded moment in the form that the group asks for."""
    is_packed = _is_packed_for(parameter, value)
    if is_packed and _is_packed(parameter, group):
        return value.to(parameter.device)
    wide = unpacked_moment(parameter, name, value) if is_packed else value
    state = _as_state(parameter, name, wide, _moment_dtype(parameter))
    if not _is_packed(parameter, group):
        return state
    packed = torch.ops.torch_offload.pack_moment(state.cpu(), name == "exp_avg_sq")
    return cast(Tensor, packed.to(state.device))


def _as_state(parameter: Tensor, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.shape != parameter.shape:
        raise ValueError(f"{name} of shape {tuple(value.shape)} loaded for a parameter of {tuple(parameter.shape)}")
    with torch.no_grad():
        if value.stride() == torch.empty_like(parameter, device="meta").stride():
            return value.to(device=parameter.device, dtype=dtype)
        return torch.empty_like(parameter, dtype=dtype).copy_(value)


def _paged_with(parameter: Tensor, state: Tensor, name: str) -> Tensor:
    """Page a state if its parameter is paged."""
    own, part = paged_part(parameter), paged_part(state)
    engine = _C.engine_of(own)
    if engine is not None and not _C.is_managed(part):
        engine.manage(part, kind="state", label=f"optimizer state {name}", anchor=own)
    return state
