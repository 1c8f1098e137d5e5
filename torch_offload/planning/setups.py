"""The ways to train one step that a search chooses among: rows, accumulation, activations, updates, precision."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from torch_offload.config import Activations, Config, OptimizerDevice
from torch_offload.errors import ConfigError

Precision = Literal["bf16", "8bit-moments"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "8bit-moments")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train a step.

    Attributes:
        rows: Of a micro-batch: ``per_device_train_batch_size`` of a ``Trainer``.
        accumulation: Micro-batches of a step: ``gradient_accumulation_steps``.
        activations: The setting of this package.
        checkpointing: Whether the model itself computes its layers again: ``gradient_checkpointing``.
        optimizer_device: The setting of this package; ``auto`` without a GPU.
        precisions: What differs from the numbers of the model as it is: names of :data:`PRECISIONS`.
    """

    rows: int
    accumulation: int
    activations: Activations
    checkpointing: bool = False
    optimizer_device: OptimizerDevice = "auto"
    precisions: tuple[Precision, ...] = ()

    @property
    def recomputes(self) -> bool:
        """Whether every layer that can be is computed again in the backward pass."""
        return self.checkpointing or self.activations == "recompute"

    @property
    def split(self) -> str:
        """Rows and accumulation as they are shown."""
        return f"{self.rows} x {self.accumulation}"

    @property
    def way(self) -> str:
        """Everything but rows and accumulation, in words."""
        words = [f"{self.activations}, checkpointing" if self.checkpointing else self.activations]
        words += [] if self.optimizer_device == "auto" else [f"updates on {self.optimizer_device}"]
        return ", ".join([*words, *self.precisions])

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.split}, {self.way}"


def setups_of(
    rows: int, *, config: Config, has_layers: bool, is_checkpointed: bool, allow: Iterable[Precision] = ()
) -> Iterator[Setup]:
    """Yield every setup for a step of so many rows, the largest micro-batches first.

    Args:
        rows: Of a step, all micro-batches together.
        config: What it sets itself is not searched: ``activations``, ``optimizer_device``.
        has_layers: Whether the model has layers that can be computed again.
        is_checkpointed: Whether it does so already.
        allow: Precisions that may be chosen.
    """
    ways = list(_ways_of_activations(config, can_recompute=has_layers and not is_checkpointed))
    for precisions in _precisions(tuple(allow)):
        for count in divisors(rows) if config.update == "step" else [1]:
            for activations, checkpointing in ways:
                for device in _optimizer_devices(config):
                    yield Setup(
                        rows=rows // count,
                        accumulation=count,
                        activations=activations,
                        checkpointing=checkpointing,
                        optimizer_device=device,
                        precisions=precisions,
                    )


def divisors(count: int) -> list[int]:
    """Return what divides a count, ascending."""
    return [number for number in range(1, count + 1) if count % number == 0]


def rows_of_step(tokens_per_step: int, sequence: int) -> int:
    """Return the rows that a step has.

    Raises:
        ConfigError: If the tokens are no whole number of rows; the message names the two nearest that are.
    """
    if tokens_per_step < 1 or sequence < 1:
        raise ConfigError(f"tokens-per-step and sequence must be at least 1, got {tokens_per_step} and {sequence}")
    below = tokens_per_step // sequence * sequence
    if below == tokens_per_step:
        return tokens_per_step // sequence
    nearest = f"{below} or {below + sequence}" if below else f"{sequence} or {2 * sequence}"
    raise ConfigError(
        f"--tokens-per-step {tokens_per_step} is no multiple of --sequence {sequence}; the nearest are {nearest}"
    )


def rows_in(batch: Mapping[str, Any]) -> int:
    """Return the rows of a batch: the length of its tensors.

    Raises:
        ConfigError: If there is no tensor, or they differ in it.
    """
    lengths = {value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim}
    if len(lengths) != 1:
        raise ConfigError(
            f"batch: expected tensors with as many rows each as a step has, got {sorted(lengths) or 'no tensor'}"
        )
    return int(lengths.pop())


def first_rows(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a micro-batch of a step's batch."""
    return {name: value[:rows] if isinstance(value, Tensor) and value.ndim else value for name, value in batch.items()}


def precisions_named(names: Iterable[str]) -> tuple[Precision, ...]:
    """Return the precisions of these names.

    Raises:
        ConfigError: If one is not known.
    """
    given = tuple(names)
    for name in given:
        if name not in PRECISIONS:
            raise ConfigError(f"allow: {name!r} is not known; there are: {', '.join(PRECISIONS)}")
    return tuple(known for known in PRECISIONS if known in given)


def _ways_of_activations(config: Config, *, can_recompute: bool) -> Iterator[tuple[Activations, bool]]:
    """Yield settings of activations, and whether the model checkpoints its layers beside them."""
    if "activations" in config.model_fields_set:
        yield config.activations, False
        return
    yield "page", False
    yield "keep", False
    if config.gpu is not None:
        yield "ram", False
    if can_recompute:
        yield "recompute", False
        yield "page", True


def _optimizer_devices(config: Config) -> tuple[OptimizerDevice, ...]:
    if config.gpu is None or config.optimizer_device != "auto":
        return (config.optimizer_device,)
    if config.update == "backward":
        return ("gpu",)
    return ("gpu", "cpu")


def _precisions(allow: tuple[Precision, ...]) -> Iterator[tuple[Precision, ...]]:
    yield ()
    if "bf16" in allow:
        yield ("bf16",)
    if "8bit-moments" in allow:
        yield ("8bit-moments",)
    if len(allow) > 1:
        yield ("bf16", "8bit-moments")
