"""Coded ternary matrices as tensors: coding, decoding and linear layers over them.

A coded blob is a uint8 tensor that holds the extents of csrc/codec/FORMAT.md, one behind the other. A weight is
``W = diag(row_scale) @ T @ diag(column_scale)`` with T of -1, 0 and +1 in the blob; it is multiplied by without ever
being expanded. The kernels are operators (``torch.ops.torch_offload``), so a blob may be paged by the engine, and
autograd and ``torch.compile`` know them.

With the CUDA build, products and ``decode`` also take tensors on a GPU; coding and ``extents`` are the CPU's. The first
use of a blob on a GPU copies it to the host, which waits, checks it and makes tables that stay on the GPU while the
blob's storage lives: at most 64 KiB for each class of columns and coder, and 4 bytes for each row. Later uses are
queued on the current stream and wait for nothing. A blob there must not be changed but by operators of torch, begins on
a multiple of 16 bytes, and is of TUN12 and RANS4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_offload import _C as _C  # the operators are defined in it

CODERS = ("smallest", "tun12", "rans4", "qmoe")
"""``smallest`` codes each tile of rows with TUN12 or RANS4; ``qmoe`` is there to be compared with."""

_FORWARD = "torch_offload::coded_linear"
_TRANSPOSED = "torch_offload::coded_linear_transposed"


@dataclass(frozen=True)
class CodedExtent:
    """One matrix of a blob. Sizes in bytes; ``coded_bytes`` leaves out what fills the extent to 4 KiB.

    Tiles are rows that are coded by themselves, each by one coder.
    """

    offset_bytes: int
    size_bytes: int
    coded_bytes: int
    rows: int
    columns: int
    classes: int
    tun12_tiles: int
    rans4_tiles: int
    qmoe_tiles: int


def encode(values: Tensor, *, classes: Sequence[int] = (0,), coder: str = "smallest", most_classes: int = 1) -> Tensor:
    """Code a matrix; the same bytes on every machine and for any number of threads.

    Args:
        values: int8 [rows, columns] of -1, 0 and +1; at least one of each.
        classes: First column of each class of columns of like odds, at most 16; the first is 0.
        coder: One of ``CODERS``.
        most_classes: More than 1 sorts the columns into up to so many classes, at most 16, if that takes fewer bytes
            than `classes`. What is decoded and multiplied by has its columns where they were.

    Returns:
        The extent, uint8, a multiple of 4096.

    Raises:
        ConfigError: If a value is none of the three, or the classes are no cut of the columns.
    """
    blob: Tensor = torch.ops.torch_offload.encode_ternary(values, list(classes), coder, most_classes)
    return blob


def decode(blob: Tensor, matrix: int = 0) -> Tensor:
    """Return matrix number `matrix` of a blob, int8 [rows, columns].

    Raises:
        PageCorruptError: Unless the extent is, to the byte, what was written.
    """
    values: Tensor = torch.ops.torch_offload.decode_ternary(blob, matrix)
    return values


def count_zeros(blob: Tensor, matrix: int) -> int:
    """Decode all of matrix number `matrix`, a few rows at a time, and return how many of its values are zero.

    Raises:
        PageCorruptError: Unless the extent is, to the byte, what was written.
    """
    zeros: int = torch.ops.torch_offload.count_zeros(blob, matrix)
    return zeros


def extents(blob: Tensor) -> list[CodedExtent]:
    """Check a blob and list its matrices.

    Raises:
        PageCorruptError: Unless every extent is, to the byte, what was written.
    """
    return [CodedExtent(*line) for line in torch.ops.torch_offload.coded_extents(blob).tolist()]


def coded_linear(x: Tensor, blob: Tensor, matrix: int, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """Return ``x @ W.T`` with the dtype of x. Gradients flow to x.

    A token's values times their scales become integers of 30 bits below the largest of them, of 22 bits if x has 16;
    their sums are exact. So a token has the same bits on every device and in every batch. A token that has an infinity
    or a not-a-number has no other results.

    Args:
        x: float32, bfloat16 or float16, [..., columns].
        blob: The coded blob.
        matrix: Which of its matrices.
        row_scale: [rows], of any of these types.
        column_scale: [columns].

    All tensors are on one device.

    Raises:
        PageCorruptError: If the blob is damaged.
        ConfigError: If the blob is on a GPU and coded with ``qmoe``.
        ValueError: If shapes or devices do not fit.
    """
    product: Tensor = torch.ops.torch_offload.coded_linear(x, blob, matrix, row_scale, column_scale)
    return product


def _shape_of_linear(x: Tensor, blob: Tensor, matrix: int, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], row_scale.shape[0]))


def _shape_of_transposed(g: Tensor, blob: Tensor, matrix: int, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    return g.new_empty((*g.shape[:-1], column_scale.shape[0]))


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, blob, matrix, row_scale, column_scale = inputs
    if any(ctx.needs_input_grad[1:]):
        raise RuntimeError(
            "the scales of a coded weight are frozen and get no gradient; train an adapter over it, or detach them"
        )
    ctx.save_for_backward(blob, row_scale, column_scale)
    ctx.matrix = matrix


def _backward_of_linear(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    blob, row_scale, column_scale = ctx.saved_tensors
    back = torch.ops.torch_offload.coded_linear_transposed(gradient, blob, ctx.matrix, row_scale, column_scale)
    return back, None, None, None, None


def _backward_of_transposed(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    blob, row_scale, column_scale = ctx.saved_tensors
    forth = torch.ops.torch_offload.coded_linear(gradient, blob, ctx.matrix, row_scale, column_scale)
    return forth, None, None, None, None


torch.library.register_fake(_FORWARD, _shape_of_linear)
torch.library.register_fake(_TRANSPOSED, _shape_of_transposed)
torch.library.register_autograd(_FORWARD, _backward_of_linear, setup_context=_save_weight)
torch.library.register_autograd(_TRANSPOSED, _backward_of_transposed, setup_context=_save_weight)
