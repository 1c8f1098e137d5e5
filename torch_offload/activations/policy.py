"""Decides, layer by layer, whether activations are paged or computed again, from steps that were measured."""

import logging
import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torch_offload.activations.recompute import (
    ActivationChoice,
    LayerCost,
    StepTraffic,
    layers_of,
    set_recomputed,
    worth_recomputing,
)
from torch_offload.config import format_size
from torch_offload.errors import ConfigError
from torch_offload.hooks.module_hooks import ModuleHook

logger = logging.getLogger(__name__)

FIRST_STEPS = 2  # not measured: memory is filled and the order of uses learned
MEASURED_STEPS = 2
MIN_STALL_SHARE = 0.05  # of a step; where less is waited, nothing is to be gained
MAX_DRIFT = 0.25  # of the seconds of a step, until the choice is made anew
STEPS_OF_DRIFT = 3  # in a row; as many tell how long a step takes after a choice

Counters = Callable[[], Mapping[str, Any]]


@dataclass
class Measured:
    """Measurements of a layer."""

    seconds: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True)
class Totals:
    """Counters of the engine at one moment."""

    seconds: float
    stalled: float
    activation_bytes: int
    other_bytes: int
    saved_bytes: int

    @classmethod
    def now(cls, counters: Counters) -> "Totals":
        counted = counters()
        moved = _moved_by_kind(counted)
        return cls(
            seconds=time.perf_counter(),
            stalled=sum(counted["stall_seconds"].values()),
            activation_bytes=moved.pop("activation"),
            other_bytes=sum(moved.values()),
            saved_bytes=counted["saved_bytes"],
        )


def _moved_by_kind(counted: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes by kind over the link of activations: the SSD's, or a device's where none go further."""
    read, written = counted["read_bytes"], counted["written_bytes"]
    if written["activation"] == 0 and "device" in counted:
        read, written = counted["device"]["to_device_bytes"], counted["device"]["to_host_bytes"]
    return {kind: read[kind] + written[kind] for kind in read}


class ActivationPolicy:
    """Follows the layers of wrapped modules and switches them between paging and recomputing at the end of a step.

    Threads: the one that trains.
    """

    def __init__(self, counters: Counters, *, recompute_all: bool = False) -> None:
        """Follow no layer before :meth:`follow`.

        Args:
            counters: Returns what ``Engine.statistics`` returns.
            recompute_all: Decide nothing; every layer computes its activations again.
        """
        self._counters = counters
        self._recompute_all = recompute_all
        self._layers: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._measured: dict[str, Measured] = {}
        self._hooks: list[RemovableHandle] = []
        self._started: list[Totals] = []
        self._steps = 0
        self._at_start: Totals | None = None
        self._reference: list[float] = []  # seconds of the first steps after a choice
        self._drifted = 0
        self.choice = ActivationChoice()

    def follow(self, module: nn.Module) -> None:
        """Take the module's layers into account.

        Raises:
            ConfigError: If every layer is to be recomputed and none can be.
        """
        found = dict(layers_of(module))
        if self._recompute_all and not found:
            raise ConfigError(
                f"activations='recompute': {type(module).__name__} has no layers that transformers can checkpoint; "
                "use activations='page', or checkpoint its parts with torch.utils.checkpoint"
            )
        for name, layer in found.items():
            self._layers[layer] = name
            if self._recompute_all:
                set_recomputed(layer, on=True)
        if self._recompute_all:
            names = sorted(self._layers.values())
            self.choice = ActivationChoice(recomputed=names, explanation="every layer is recomputed, as asked for")
        else:
            self._begin()

    def release(self, module: nn.Module) -> None:
        """Leave the module's layers as they were."""
        for layer in module.modules():
            if layer in self._layers:
                set_recomputed(layer, on=False)
                del self._layers[layer]

    def end_step(self) -> None:
        """Count a step; decide when enough were measured, and again when the link has become another."""
        if self._recompute_all or not self._layers:
            return
        self._steps += 1
        now = Totals.now(self._counters)
        if self._steps == FIRST_STEPS:
            self._measure(now)
        elif self._steps == FIRST_STEPS + MEASURED_STEPS:
            self._decide(now)
        elif self._steps > FIRST_STEPS + MEASURED_STEPS:
            self._watch(now)

    def _begin(self) -> None:
        self._stop_measuring()
        self._steps = 0
        self._reference = []
        self._drifted = 0
        for layer in self._layers:
            set_recomputed(layer, on=False)
        self.choice = ActivationChoice(paged=sorted(self._layers.values()))

    def _measure(self, now: Totals) -> None:
        self._measured = {name: Measured() for name in self._layers.values()}
        self._at_start = now
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(_Before(self)))
            self._hooks.append(layer.register_forward_hook(_After(self)))

    def _stop_measuring(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._started = []

    def before(self, layer: nn.Module) -> None:
        """A layer's forward begins."""
        if layer not in self._layers:  # of a copy
            return
        self._started.append(Totals.now(self._counters))

    def after(self, layer: nn.Module) -> None:
        """It has ended."""
        if layer not in self._layers:
            return
        started, now = self._started.pop(), Totals.now(self._counters)
        measured = self._measured[self._layers[layer]]
        if torch.is_grad_enabled():
            measured.seconds += now.seconds - started.seconds - (now.stalled - started.stalled)
            measured.saved_bytes += now.saved_bytes - started.saved_bytes

    def _decide(self, now: Totals) -> None:
        self._stop_measuring()
        start, self._at_start = self._at_start, now
        if start is None:
            return
        seconds, stalled = now.seconds - start.seconds, now.stalled - start.stalled
        moved = now.activation_bytes - start.activation_bytes + now.other_bytes - start.other_bytes
        if moved == 0 or stalled < MIN_STALL_SHARE * seconds:
            self._settle([], f"a step waits {stalled / seconds:.0%} of its time: traffic hides behind computing")
            return
        rate = moved / seconds
        traffic = StepTraffic(
            compute_seconds=(seconds - stalled) / MEASURED_STEPS,
            other_bytes=(now.other_bytes - start.other_bytes) / MEASURED_STEPS,
            activation_bytes=(now.activation_bytes - start.activation_bytes) / MEASURED_STEPS,
            bytes_per_second=rate,
        )
        costs = [
            LayerCost(name, measured.seconds / MEASURED_STEPS, measured.saved_bytes // MEASURED_STEPS)
            for name, measured in self._measured.items()
        ]
        chosen = worth_recomputing(costs, traffic)
        saved = sum(cost.saved_bytes for cost in chosen)
        self._settle(
            [cost.name for cost in chosen],
            f"a step waited {stalled / seconds:.0%} of its time for {format_size(int(moved / MEASURED_STEPS))} at "
            f"{format_size(int(rate))}/s; computing {format_size(saved)} again takes "
            f"{sum(cost.seconds for cost in chosen):.3g} s and saves their way out and back",
        )

    def _settle(self, recomputed: list[str], reason: str) -> None:
        for layer, name in self._layers.items():
            set_recomputed(layer, on=name in recomputed)
        paged = sorted(name for name in self._layers.values() if name not in recomputed)
        explanation = f"{len(recomputed)} of {len(self._layers)} layers are recomputed: {reason}"
        self.choice = ActivationChoice(recomputed=sorted(recomputed), paged=paged, explanation=explanation)
        logger.info("activations: %s", explanation)

    def _watch(self, now: Totals) -> None:
        """Begin anew when steps have come to take another time than they did after the choice: a link has changed."""
        last, self._at_start = self._at_start, now
        if last is None:
            return
        seconds = now.seconds - last.seconds
        if len(self._reference) < STEPS_OF_DRIFT:
            self._reference.append(seconds)
            return
        usual = statistics.median(self._reference)
        self._drifted = self._drifted + 1 if abs(seconds / usual - 1) > MAX_DRIFT else 0
        if self._drifted == STEPS_OF_DRIFT:
            logger.info("activations: steps take %.3g s instead of %.3g; the next ones are measured", seconds, usual)
            self._begin()


class _Before(ModuleHook[ActivationPolicy]):
    def run(self, owner: ActivationPolicy, module: nn.Module, arguments: tuple[Any, ...], more: Any) -> None:
        owner.before(module)


class _After(ModuleHook[ActivationPolicy]):
    def run(self, owner: ActivationPolicy, module: nn.Module, arguments: tuple[Any, ...], more: Any) -> None:
        owner.after(module)
