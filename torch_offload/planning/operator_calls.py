"""One call of an operator as shapes: equal calls cost the same, and none holds a tensor."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

_METADATA_ONLY = frozenset({"prim.device", "aten.detach", "aten._unsafe_view", "aten.lift_fresh", "aten.alias"})
_WITHOUT_READING = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones"}
)


class TensorShape(NamedTuple):
    """A tensor without its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size_bytes(self) -> int:
        """Size of its elements."""
        count = 1
        for length in self.size:
            count *= length
        return count * self.dtype.itemsize


class Items(NamedTuple):
    """A list of arguments, which has to be a list again when the operator is called."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """An operator and its arguments, tensors as shapes.

    Attributes:
        operator: The overload.
        arguments: Positional ones.
        keywords: The others.
        output_bytes: Memory that the results take.
        flops: Multiplications and additions, 0 where there is no formula.
    """

    operator: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    output_bytes: int = field(compare=False)
    flops: int = field(compare=False)

    @classmethod
    def of(cls, operator: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> "Call":
        """Describe a call that was made on tensors of any kind, fake ones included."""
        output_bytes = sum(shape.size_bytes for shape in tensor_shapes(described(output)))
        return cls(
            operator,
            tuple(described(value) for value in arguments),
            tuple((name, described(value)) for name, value in sorted(keywords.items())),
            output_bytes,
            _flops(operator, arguments, keywords, output),
        )

    @property
    def input_bytes(self) -> int:
        """Size of the tensors among the arguments."""
        return sum(shape.size_bytes for shape in tensor_shapes((self.arguments, self.keywords)))

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that computes it, None where a processor does."""
        shapes = tensor_shapes((self.arguments, self.keywords))
        return next((shape.device for shape in shapes if shape.device.type == "cuda"), None)

    def __str__(self) -> str:
        """Return the operator with the sizes of its tensors."""
        sizes = ", ".join("x".join(map(str, shape.size)) for shape in tensor_shapes((self.arguments, self.keywords)))
        return f"{self.operator}({sizes})"


def described(value: Any) -> Any:
    """Return an argument as something that can be compared and holds no memory."""
    if isinstance(value, Tensor):
        return TensorShape(tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, list | tuple):
        return Items(tuple(described(item) for item in value))
    return value


def tensor_shapes(value: Any) -> list[TensorShape]:
    """Return all tensors in what :func:`described` returned."""
    if isinstance(value, TensorShape):
        return [value]
    if isinstance(value, tuple):
        return [shape for item in value for shape in tensor_shapes(item)]
    return []


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors among arguments or results, lists and tuples included."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    return []


def is_passing(operator: Any) -> bool:
    """Whether an operator touches no bytes: views, and questions about a tensor."""
    return bool(getattr(operator, "is_view", False)) or packet_name(operator) in _METADATA_ONLY


def reads_arguments(operator: Any) -> bool:
    """Whether the bytes of its arguments matter to an operator that is not passing."""
    return packet_name(operator).split(".")[-1] not in _WITHOUT_READING


def rows_looked_up(operator: Any, arguments: Any) -> int:
    """Return how many rows of its first argument an embedding reads, 0 for another operator."""
    return int(arguments[1].numel()) if packet_name(operator) == "aten.embedding" else 0


def packet_name(operator: Any) -> str:
    """Return the name of an operator without its overload, such as ``aten.mm``."""
    return str(getattr(operator, "overloadpacket", operator))


def _flops(operator: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> int:
    """Return the count of multiplications and additions, after torch's own formulas."""
    from torch.utils.flop_counter import flop_registry

    name = packet_name(operator)
    if name.startswith("aten._scaled_dot_product_flash_attention_for_cpu"):
        return _attention_flops(arguments, is_backward=name.endswith("_backward"))
    formula = flop_registry.get(getattr(operator, "overloadpacket", None))
    return 0 if formula is None else int(formula(*arguments, **keywords, out_val=output))


def _attention_flops(arguments: Any, *, is_backward: bool) -> int:
    """Torch has no formula for its attention on processors: two products forward, five backward."""
    query, key = arguments[1:3] if is_backward else arguments[:2]
    batch, heads, queries, width = query.shape
    product = 2 * batch * heads * queries * key.shape[-2] * width
    return int(product * (5 if is_backward else 2))
