"""Where the passes of a program begin that no optimizer step ends: evaluation, generation, a reference model.

The engine predicts a pass from the last one of the same program. A forward with gradients belongs to a training step,
which the optimizer ends, and so does a forward without them that comes after it: DPO's reference model, a teacher.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from torch_offload import _C

TRAINING = 0  # the number of the program that optimizer steps end
# Forwards without gradients, one after the other, that a training step may have inside; with more it is over, or was
# none: who evaluates a single time with gradients never steps.
MAX_INSIDE_A_STEP = 8


class Module(Protocol):
    """What a pass is the forward of."""

    def expected_uses(self) -> Iterable[torch.Tensor]:
        """Return what a forward is likely to use, in this order."""


class Passes:
    """Tells the engine of each pass as it begins.

    Threads: any; of those that run programs at the same time the engine predicts the one that began last.
    """

    def __init__(self, engine: _C.Engine) -> None:
        """Begin nothing.

        Args:
            engine: Records and predicts.
        """
        self._engine = engine
        self._is_in_step = False  # a forward with gradients has run since the last step
        self._forwards_inside = 0  # without gradients, since that forward
        self._is_without_gradients = False  # the pass that runs
        self._seen: set[int] = set()  # programs without gradients

    def begin_forward(self, module: Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A wrapped module is called.

        Args:
            module: Which of them.
            arguments: The positional arguments of the call.
            options: Its keyword arguments.
        """
        if torch.is_grad_enabled():
            if self._is_without_gradients:
                self._engine.begin_pass(TRAINING)
            self._is_without_gradients = False
            self._is_in_step = True
            self._forwards_inside = 0
            return
        self._forwards_inside += 1
        if self._is_in_step and self._forwards_inside <= MAX_INSIDE_A_STEP:
            return
        self._is_in_step = False
        self._is_without_gradients = True
        program = _program_of(module, arguments, options)
        if program not in self._seen:
            self._seen.add(program)
            self._engine.expect_pass(program, list(module.expected_uses()))
        self._engine.begin_pass(program)

    def end_step(self) -> None:
        """An optimizer has stepped."""
        self._is_in_step = False
        self._forwards_inside = 0
        self._is_without_gradients = False


def _program_of(module: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Return a number for the module and the order of magnitude of its rows.

    A prompt, a token and an evaluation use the same weights, with other times between them. Two programs of one number
    are predicted worse, no more.
    """
    tensors = (value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor))
    first = next(tensors, None)
    rows = 0 if first is None else first.shape[:2].numel()
    return hash((id(module), rows.bit_length())) & 0x7FFF_FFFF_FFFF_FFFF or TRAINING + 1
