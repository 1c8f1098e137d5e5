"""Equality of bits, for paged beside plain training. NaNs with equal payloads are equal, -0.0 is not 0.0."""

import hashlib
from typing import Any

import torch
from torch.utils._pytree import tree_flatten


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the elements of a strided tensor, in order, to a flat tensor of bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """Hash dtype, shape and bytes."""
    header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(header + raw_bytes(tensor).cpu().numpy().tobytes()).hexdigest()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtypes, shapes and bytes are equal, wherever the tensors are."""
    return digest(one) == digest(other)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtypes, shapes and elements are equal, where -0.0 is 0.0: for what is computed in another way."""
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach().coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def fingerprint(value: Any) -> list[Any]:
    """Describe a nest of results, so that two are equal exactly if every leaf is: bits of tensors, `repr` of others."""
    leaves, structure = tree_flatten(value)
    described: list[Any] = [str(structure)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            described += [str(leaf.layout), tuple(leaf.shape), *(digest(part) for part in _strided_parts(leaf))]
        else:
            described.append(repr(leaf))
    return described
