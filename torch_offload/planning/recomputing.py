"""Which layers a run would have compute their activations again, decided from a recording instead of measured steps."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from torch_offload.activations.policy import MIN_STALL_SHARE
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
from torch_offload.planning.fake_trace import Recording
from torch_offload.planning.operator_costs import Cost
from torch_offload.planning.plan import Plan

_SWITCHES = ("gradient_checkpointing", "_gradient_checkpointing_func")
ALL_RECOMPUTED = "every layer is recomputed, as asked for"


def layers_to_recompute(module: nn.Module) -> dict[str, nn.Module]:
    """Return every layer that ``activations='recompute'`` would switch, by name.

    Raises:
        ConfigError: If there is none.
    """
    found = dict(layers_of(module))
    if not found:
        raise ConfigError(
            f"activations='recompute': {type(module).__name__} has no layers that transformers can checkpoint; use "
            "activations='page', or checkpoint its parts with torch.utils.checkpoint"
        )
    return found


@contextmanager
def recomputed(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Have layers compute their activations again in backward, for a while."""
    before = [(layer, {name: vars(layer)[name] for name in _SWITCHES if name in vars(layer)}) for layer in layers]
    try:
        for layer, _ in before:
            set_recomputed(layer, on=True)
        yield
    finally:
        for layer, switches in before:
            for name in _SWITCHES:
                vars(layer).pop(name, None)
            vars(layer).update(switches)


def choose(plan: Plan, recording: Recording, costs: Mapping[str, Cost], *, min_paged_bytes: int) -> ActivationChoice:
    """Return what ``activations='auto'`` settles on after its first steps, if these are as they were planned.

    Args:
        plan: Of steps in which every layer's activations are paged.
        recording: With its layers.
        costs: Of the forward of each layer, by name.
        min_paged_bytes: Smaller tensors stay in memory.
    """
    computing = sum(phase.resource_seconds["compute"] for phase in plan.phases)
    stalled = sum(max(0.0, phase.seconds - phase.resource_seconds["compute"]) for phase in plan.phases)
    seconds = plan.predicted_seconds
    activation_bytes, other_bytes = _moved(plan)
    names = sorted(recording.layers)
    if activation_bytes + other_bytes == 0 or stalled < MIN_STALL_SHARE * seconds:
        why = f"a step would wait {stalled / seconds:.0%} of its time: traffic hides behind computing"
        return _choice(names, [], why)
    rate = (activation_bytes + other_bytes) / seconds
    traffic = StepTraffic(
        compute_seconds=computing, other_bytes=other_bytes, activation_bytes=activation_bytes, bytes_per_second=rate
    )
    least_bytes = max(min_paged_bytes, 1)
    layers = [
        LayerCost(name, costs[name].seconds, sum(size for size in layer.saved_bytes.values() if size >= least_bytes))
        for name, layer in recording.layers.items()
    ]
    chosen = worth_recomputing(layers, traffic)
    saved_bytes = sum(layer.saved_bytes for layer in chosen)
    why = (
        f"a step would wait {stalled / seconds:.0%} of its time for {format_size(activation_bytes + other_bytes)} at "
        f"{format_size(int(rate))}/s; computing {format_size(saved_bytes)} again takes "
        f"{sum(layer.seconds for layer in chosen):.3g} s and saves their way out and back"
    )
    return _choice(names, sorted(layer.name for layer in chosen), why)


def _choice(names: list[str], chosen: list[str], why: str) -> ActivationChoice:
    return ActivationChoice(
        recomputed=chosen,
        paged=[name for name in names if name not in chosen],
        explanation=f"{len(chosen)} of {len(names)} layers are recomputed: {why}",
    )


def _moved(plan: Plan) -> tuple[int, int]:
    """Return the bytes of activations and the others over the link that activations take: the SSD's, or a device's."""
    over_ssd, over_link = (plan.ssd_read, plan.ssd_written), (plan.to_device, plan.to_host)
    link = over_link if over_link[0] and not plan.ssd_written.get("activation") else over_ssd
    activation_bytes = sum(way.get("activation", 0) for way in link)
    return activation_bytes, sum(sum(way.values()) for way in link) - activation_bytes
