"""A model run block by block over the same batches, so that each block sees what the ones before it, as coded, say.

The model's own forward runs each time and makes masks and positions; blocks that have been passed answer with what
they returned before, and nothing is computed behind the block that is asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_offload.errors import UnsupportedModelError

Batch = Mapping[str, Tensor]


class _Reached(Exception):
    """Ends a forward at the block that is asked for."""


class BlockWalk:
    """Outputs of the blocks passed last, for each batch. Memory: the hidden states of all batches."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        """Start before the first block."""
        self._model = model
        self._batches = batches
        self._passed: dict[nn.ModuleList, tuple[int, list[Any]]] = {}

    def run(self, block: str) -> None:
        """Run the model up to a block, and this block, for what its modules then see."""
        self._outputs(block)

    def go_past(self, block: str) -> None:
        """Run the same and have later runs begin behind the block."""
        outputs = self._outputs(block)
        blocks, position = _position(self._model, block)
        self._passed[blocks] = position, outputs

    def _outputs(self, block: str) -> list[Any]:
        blocks, position = _position(self._model, block)
        outputs: list[Any] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            raise _Reached

        handle = blocks[position].register_forward_hook(keep)
        try:
            for number, batch in enumerate(self._batches):
                with self._answering(number), torch.no_grad():
                    _run_until_reached(self._model, batch, block)
        finally:
            handle.remove()
        return outputs

    @contextmanager
    def _answering(self, number: int) -> Iterator[None]:
        """Have passed blocks answer for one batch."""
        replaced: list[tuple[nn.Module, Any]] = []
        try:
            for blocks, (last, outputs) in self._passed.items():
                for module in list(blocks)[: last + 1]:
                    replaced.append((module, vars(module).get("forward")))
                    module.forward = _answer(outputs[number])
            yield
        finally:
            for module, forward in reversed(replaced):
                del module.forward
                if forward is not None:
                    module.forward = forward


def _answer(output: Any) -> Any:
    def forward(*args: Any, **options: Any) -> Any:
        return output

    return forward


def _run_until_reached(model: nn.Module, batch: Batch, block: str) -> None:
    try:
        model(**batch, use_cache=False)
    except _Reached:
        return
    raise UnsupportedModelError(f"the model did not run {block} for a batch")


def block_of(module: str, model: nn.Module) -> str:
    """Return the name of the repeated block that a module belongs to: the outermost member of a ``ModuleList``.

    Raises:
        UnsupportedModelError: If it belongs to none; the message names it.
    """
    parts = module.split(".")
    for length in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:length])), nn.ModuleList):
            return ".".join(parts[: length + 1])
    raise UnsupportedModelError(f"{module} is in no list of blocks that could be run one by one")


def _position(model: nn.Module, block: str) -> tuple[nn.ModuleList, int]:
    parent, _, position = block.rpartition(".")
    blocks = model.get_submodule(parent)
    if not isinstance(blocks, nn.ModuleList):
        raise UnsupportedModelError(f"{block} is no member of a list of blocks")
    return blocks, int(position)
