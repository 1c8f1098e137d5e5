"""Experts whose weights are coded: what a module of experts holds in their place, and how it multiplies by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from torch_offload import _C
from torch_offload.errors import ConfigError, OffloadError, PageCorruptError
from torch_offload.moe.expert_predictor import NextExpertPredictor
from torch_offload.moe.operators import coded_linear, decode
from torch_offload.moe.ternary import SCALE_DTYPE, TernaryMatrix, coded
from torch_offload.runtime.process import PROCESS

ACTIVE_PLANES = ("base", "all", "resident")
"""Planes that a product uses: the first; all of them; without gradients the first and those that are in memory."""

UP, DOWN = 0, 1
"""Numbers of an expert's matrices in its blob: the one applied first (gate and up, where these are one), the last."""


@dataclass(frozen=True)
class ExpertShapes:
    """Experts of one module, all alike. Shapes are (rows, columns), as a linear layer has its weight."""

    count: int
    up: tuple[int, int]
    down: tuple[int, int]

    @property
    def weights_each(self) -> int:
        """Weights of one expert."""
        return self.up[0] * self.up[1] + self.down[0] * self.down[1]


class CodedPlane(nn.Module):
    """One term of each expert's weights: a coded blob for each expert, and the scales of all.

    Buffers: ``blob_0``, ``blob_1``, ... uint8, each paged by the engine on its own; ``up_row_scale``
    [experts, rows] and three more like it.
    """

    up_row_scale: Tensor
    up_column_scale: Tensor
    down_row_scale: Tensor
    down_column_scale: Tensor

    def __init__(
        self,
        shapes: ExpertShapes,
        blob_bytes: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        """Lay out buffers without values.

        Args:
            shapes: Of the experts.
            blob_bytes: Of each expert's blob.
            dtype: Of the scales.
            device: Where the buffers are; ``"meta"`` while a model is laid out.
        """
        super().__init__()
        for expert, size_bytes in enumerate(blob_bytes):
            self.register_buffer(blob_name(expert), torch.empty(size_bytes, dtype=torch.uint8, device=device))
        for name, width in scale_widths(shapes).items():
            self.register_buffer(name, torch.empty(shapes.count, width, dtype=dtype, device=device))

    def blob(self, expert: int) -> Tensor:
        """Both matrices of an expert."""
        return cast(Tensor, self._buffers[blob_name(expert)])

    def product(self, expert: int, matrix: int, x: Tensor) -> Tensor:
        """Multiply tokens by one matrix of an expert."""
        rows, columns = self.scales(matrix)
        return coded_linear(x, self.blob(expert), matrix, rows[expert], columns[expert])

    def scales(self, matrix: int) -> tuple[Tensor, Tensor]:
        """Scales of all experts' rows and columns."""
        if matrix == UP:
            return self.up_row_scale, self.up_column_scale
        return self.down_row_scale, self.down_column_scale

    def dense(self, expert: int, matrix: int) -> Tensor:
        """One matrix of an expert, float32 [rows, columns]."""
        rows, columns = self.scales(matrix)
        return rows[expert].float()[:, None] * decode(self.blob(expert), matrix) * columns[expert].float()


def blob_name(expert: int) -> str:
    """Name of an expert's blob among a plane's buffers."""
    return f"blob_{expert}"


def scale_widths(shapes: ExpertShapes) -> dict[str, int]:
    """Return the scales of a plane: how many there are for each expert."""
    return {
        "up_row_scale": shapes.up[0],
        "up_column_scale": shapes.up[1],
        "down_row_scale": shapes.down[0],
        "down_column_scale": shapes.down[1],
    }


Product = Callable[[int, Tensor], Tensor]
"""By one matrix of each expert: its number, tokens [tokens, columns] to [tokens, rows]."""


class CodedProjection(nn.Module):
    """All first, or all last matrices of coded experts: what an adapter is put on. Holds no tensors of its own."""

    def __init__(self, coded: "CodedExperts", matrix: int) -> None:
        """Take the experts that hold the weights, without becoming their owner."""
        super().__init__()
        self._coded = (coded,)  # in a tuple, so that it is no submodule
        self.matrix = matrix

    @property
    def coded(self) -> "CodedExperts":
        """The experts."""
        return self._coded[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of each matrix."""
        shapes = self.coded.shapes
        return shapes.up if self.matrix == UP else shapes.down

    @property
    def weight(self) -> Tensor:
        """A tensor with the device and the dtype of what the weights are made of: scales."""
        return self.coded.all_planes[0].scales(self.matrix)[0]

    def open(self) -> Product:
        """Return the product, for the experts of one call."""
        return lambda expert, x: self.coded.product(expert, self.matrix, x)


class CodedExperts(nn.Module):
    """The weights of several experts as sums of coded planes, the coarsest first.

    Attributes:
        shapes: Of the experts.
        planes: At least one :class:`CodedPlane`.
        up: The products by first matrices.
        down: The products by last matrices.
        active_planes: The planes that products use, one of ``ACTIVE_PLANES``.
        label: The module's name, for messages.
    """

    def __new__(cls, *args: Any, **options: Any) -> "CodedExperts":
        """Make one, or a copy of one: saving and adapters know of coded experts while it is alive."""
        module = super().__new__(cls)
        PROCESS.coded_experts.keep_for(module)
        return module

    def __init__(self, shapes: ExpertShapes, planes: Sequence[CodedPlane], *, label: str) -> None:
        """Take planes that are laid out already."""
        super().__init__()
        self.shapes = shapes
        self.planes = nn.ModuleList(planes)
        self.active_planes = "all"
        self.label = label
        self._before: tuple[CodedExperts, ...] = ()  # in tuples, so that they are no submodules
        self._following: tuple[CodedExperts, ...] = ()
        self._predictor: NextExpertPredictor | None = None
        self._chosen: list[int] = []
        self.up = CodedProjection(self, UP)
        self.down = CodedProjection(self, DOWN)

    @property
    def all_planes(self) -> list[CodedPlane]:
        """The planes, whichever are active."""
        return cast(list[CodedPlane], list(self.planes))

    def dense(self, expert: int, matrix: int) -> Tensor:
        """One matrix of an expert, float32 [rows, columns]. For what is done once; products do without."""
        return torch.stack([plane.dense(expert, matrix) for plane in self._planes()]).sum(0)

    def follow(self, before: "CodedExperts") -> None:
        """Be read ahead from now on by what `before` chooses, the experts of the layer before this one."""
        before._following = (self,)
        before._predictor = NextExpertPredictor(before.shapes.count, self.shapes.count)
        self._before = (before,)

    def on_routed(self, chosen: Sequence[int]) -> None:
        """Begin to read the experts that were chosen, then those that the next layer will probably choose."""
        self.prefetch(chosen)
        self._chosen = list(chosen)
        for before in self._before:
            if before._predictor is not None and before._chosen:
                before._predictor.learn(before._chosen, chosen)
        for following in self._following:
            if self._predictor is not None:
                following.prefetch(self._predictor.likely(chosen))

    def open(self) -> tuple[Product, Product]:
        """Return the products by first and by last matrices, for the experts of one call."""
        return self.up.open(), self.down.open()

    def product(self, expert: int, matrix: int, x: Tensor) -> Tensor:
        """Multiply tokens by one matrix of an expert, without adapters.

        Args:
            expert: Its number.
            matrix: ``UP`` or ``DOWN``.
            x: [tokens, columns]. Under autocast it is cast, as for a linear layer.

        Returns:
            [tokens, rows], in the dtype of x or of autocast.

        Raises:
            PageCorruptError: If a blob is damaged; the message names the module and the expert.
        """
        x = _autocast(x)
        planes = self._planes_for(expert)
        try:
            if len(planes) == 1:
                return planes[0].product(expert, matrix, x)
            exact = x.float()
            return torch.stack([plane.product(expert, matrix, exact) for plane in planes]).sum(0).to(x.dtype)
        except PageCorruptError as error:
            raise PageCorruptError(f"expert {expert} of {self.label}: {error}") from error

    def prefetch(self, experts: Sequence[int]) -> None:
        """Begin to read experts, and keep those that are in memory, which will be used in this order. A hint."""
        for expert in experts:
            for plane in self._planes():
                blob = plane.blob(expert)
                engine = _C.engine_of(blob)
                if engine is not None:
                    engine.prefetch(blob)

    def _planes(self) -> list[CodedPlane]:
        return self.all_planes[:1] if self.active_planes == "base" else self.all_planes

    def _planes_for(self, expert: int) -> list[CodedPlane]:
        planes = self._planes()
        if self.active_planes != "resident" or torch.is_grad_enabled():
            return planes
        return [plane for position, plane in enumerate(planes) if position == 0 or _is_here(plane.blob(expert))]


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _is_here(blob: Tensor) -> bool:
    engine = _C.engine_of(blob)
    return engine is None or engine.is_resident(blob)


ExpertForward = Callable[[int, Tensor], Tensor]
"""One expert's function of its tokens: its number, [tokens, width] to [tokens, width]."""


def mix(
    coded: CodedExperts, hidden: Tensor, index: Tensor, weights: Tensor, forward: ExpertForward, *, label: str
) -> Tensor:
    """Run each token through its routed experts and sum their weighted outputs, in the order of its choices.

    Every expert is read once, whatever tokens chose it; reading begins when the router has chosen. The result of a
    token does not depend on other tokens.

    Args:
        coded: The experts' weights.
        hidden: [tokens, width].
        index: int64 [tokens, choices], numbers of experts; a number beyond the last chooses none.
        weights: [tokens, choices].
        forward: What an expert does with its tokens.
        label: The module's name, for messages.

    Raises:
        RuntimeError: If a choice is negative.
        OffloadError: If experts do not return the width that they were given.
    """
    chosen = index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=coded.shapes.count).tolist() if chosen.numel() else []
    hit = [expert for expert, count in enumerate(counts[: coded.shapes.count]) if count]
    coded.on_routed(hit)
    token_of = order // index.shape[-1]
    parts = []
    begin = 0
    for expert in hit:
        end = begin + counts[expert]
        parts.append(forward(expert, hidden[token_of[begin:end]]))
        begin = end
    if begin < chosen.numel():  # choices of no expert
        parts.append(hidden.new_zeros(chosen.numel() - begin, hidden.shape[-1]))
    if not parts:
        return torch.zeros_like(hidden)
    outputs = torch.cat(parts)
    if outputs.shape[-1] != hidden.shape[-1]:
        raise OffloadError(
            f"{label}: expected expert outputs of the hidden size {hidden.shape[-1]}, got width {outputs.shape[-1]}"
        )
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    weighted = outputs[back] * weights.reshape(-1, 1)
    return weighted.view(*index.shape, hidden.shape[-1]).sum(dim=1).to(hidden.dtype)


def coded_blob(up: TernaryMatrix, down: TernaryMatrix, *, coder: str = "smallest") -> Tensor:
    """Code both matrices of an expert, one behind the other."""
    return torch.cat([coded(up, coder=coder), coded(down, coder=coder)])


ExpertTerms = tuple[Sequence[TernaryMatrix], Sequence[TernaryMatrix]]
"""One expert: terms of its first and of its last matrix, as many of each."""


def coded_experts(
    shapes: ExpertShapes, experts: Sequence[ExpertTerms], *, label: str, coder: str = "smallest"
) -> CodedExperts:
    """Code experts.

    Args:
        shapes: Of the experts.
        experts: Their terms; all as many.
        label: The module's name.
        coder: One of ``coded_linear.CODERS``.
    """
    counts = {len(terms) for expert in experts for terms in expert}
    if len(counts) != 1:
        raise ConfigError(f"{label}: experts have {sorted(counts)} terms, not all as many")
    planes = []
    for term in range(counts.pop()):
        up = [expert[0][term] for expert in experts]
        down = [expert[1][term] for expert in experts]
        planes.append(_plane(shapes, up, down, coder=coder))
    return CodedExperts(shapes, planes, label=label)


def _plane(
    shapes: ExpertShapes, up: Sequence[TernaryMatrix], down: Sequence[TernaryMatrix], *, coder: str
) -> CodedPlane:
    blobs = [coded_blob(*matrices, coder=coder) for matrices in zip(up, down, strict=True)]
    plane = CodedPlane(shapes, [blob.numel() for blob in blobs], dtype=SCALE_DTYPE)
    buffers = {blob_name(expert): blob for expert, blob in enumerate(blobs)} | {
        "up_row_scale": torch.stack([matrix.row_scale for matrix in up]),
        "up_column_scale": torch.stack([matrix.column_scale for matrix in up]),
        "down_row_scale": torch.stack([matrix.row_scale for matrix in down]),
        "down_column_scale": torch.stack([matrix.column_scale for matrix in down]),
    }
    for name, buffer in buffers.items():
        plane.register_buffer(name, buffer)
    return plane
