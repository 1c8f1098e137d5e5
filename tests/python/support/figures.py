"""Figures of an engine that never ran."""

from typing import Any

from torch_offload import Probe, Report
from torch_offload.activations.recompute import ActivationChoice
from torch_offload.diagnostics.compute_rates import GpuRates
from torch_offload.reporting.timeline import Sample, Timeline

MACHINE = Probe(
    key={},
    ssd_read=1e9,
    ssd_write=2e9,
    ssd_mixed=1.5e9,
    copy_rate=10e9,
    gemm={"float32": 100e9, "bfloat16": 200e9},
    update={"adamw_torch_fused": 2e8, "torch_offload.AdamW": 4e8},
    read_cost=0.3e-9,
    write_cost=0.1e-9,
)

GPU_MACHINE = MACHINE.model_copy(
    update={
        "gpu": GpuRates(
            to_device=50e9,
            to_host=50e9,
            copy_rate=3e12,
            gemm={"float32": 50e12, "bfloat16": 500e12},
            update={"adamw_torch_fused": 80e9, "torch_offload.AdamW": 80e9},
        )
    }
)


def device_statistics(*, to_device: int = 0, to_host: int = 0, used: int = 0) -> dict[str, Any]:
    """What the engine would say of a device."""
    return {
        "name": "emulated",
        "memory": statistics(used=used)["memory"],
        "to_device_bytes": {"parameter": to_device, "state": 0},
        "to_host_bytes": {"parameter": to_host, "state": 0},
    }


def statistics(
    *, read: int = 0, written: int = 0, stalls: dict[str, float] | None = None, used: int = 0
) -> dict[str, Any]:
    """What the engine would say; causes of stalls that nobody knows yet included."""
    memory = {"frame_bytes": used, "free_frame_bytes": 0, "range_bytes": 0, "idle_range_bytes": 0, "small_bytes": 0}
    return {
        "memory": memory | {"limit_bytes": 100, "most_limit_bytes": 100, "peak_bytes": used},
        "stored_bytes": written,
        "file_bytes": written,
        "read_bytes": {"parameter": read, "state": 0},
        "written_bytes": {"parameter": written, "state": 0},
        "stall_seconds": stalls or {"read": 0.0, "cosmic rays": 0.0},
        "engine": "threads",
        "read_times": [(0.001, 0.002, 9), (0.5, 0.75, 1)],
        **dict.fromkeys(("pins", "misses", "faults", "evictions", "clean_drops", "prefetches", "odd_counter"), 1),
    }


def sample(number: int) -> Sample:
    """One of a run whose figures all grow."""
    content = statistics(read=3 * number, written=5 * number, stalls={"read": 0.5 * number}, used=number)
    content["device"] = device_statistics(to_device=7 * number, used=number)
    return Sample.from_statistics(content, seconds=2.0 * number, steps=number, tokens=4 * number, is_step_end=True)


def whole_report() -> Report:
    """Everything that a report can have."""
    samples = [sample(number) for number in range(1, 5)]
    content = statistics(used=7) | {"device": device_statistics(to_device=1)}
    timeline = Timeline(recent=samples, step_ends=samples)
    return Report.from_statistics(content, timeline=timeline, activations=ActivationChoice(["a"], ["b"]))
