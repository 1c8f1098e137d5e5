"""The JSON of a report as it is read: every field, of its type and of a bounded size, and no other."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from torch_offload.reporting.prediction import Prediction
from torch_offload.system.environment import Rank

MAX_NAME_CHARACTERS = 1024
MAX_NAMES = 256
"""Of one table of figures: kinds, causes, purposes, counters."""
MAX_BINS = 256
"""Of a histogram of times."""
MAX_LAYERS = 100_000
MAX_SAMPLES = 10_000

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
Count = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Counts = Annotated[dict[Name, Count], Field(max_length=MAX_NAMES)]
Durations = Annotated[dict[Name, Seconds], Field(max_length=MAX_NAMES)]
Layers = Annotated[list[Name], Field(max_length=MAX_LAYERS)]


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SavedSample(_Saved):
    """See ``Sample``."""

    seconds: Seconds
    steps: Count
    tokens: Count
    is_step_end: bool
    read_bytes: Counts
    written_bytes: Counts
    stall_seconds: Durations
    host_bytes: Counts
    stored_bytes: Count
    device_bytes: Counts = Field(default_factory=dict)
    to_device_bytes: Counts = Field(default_factory=dict)
    to_host_bytes: Counts = Field(default_factory=dict)


Samples = Annotated[list[SavedSample], Field(max_length=MAX_SAMPLES)]


class SavedTimeline(_Saved):
    """See ``Timeline``."""

    recent: Samples
    step_ends: Samples


class SavedReadTimes(_Saved):
    """See ``ReadTimes``."""

    bins: Annotated[tuple[tuple[Seconds, Seconds, Annotated[Count, Field(gt=0)]], ...], Field(max_length=MAX_BINS)] = ()


class SavedDevice(_Saved):
    """See ``DeviceReport``."""

    name: Name
    budget_bytes: Count
    used_bytes: Counts
    peak_bytes: Count
    to_device_bytes: Counts
    to_host_bytes: Counts
    updates_on: Name | None = None


class SavedShare(_Saved):
    """See ``ShareReport``."""

    shared_bytes: Count
    equal_bytes: Count
    guaranteed_bytes: Count
    leased_bytes: Count
    most_leased_bytes: Count
    given_back_bytes: Count


class SavedActivations(_Saved):
    """See ``ActivationChoice``."""

    recomputed: Layers
    paged: Layers
    explanation: Name


class SavedReport(_Saved):
    """See ``Figures``; totals of the SSD traffic and quantiles follow from the rest and are not kept."""

    io_engine: Name
    budget_bytes: Count
    host_bytes: Counts
    host_peak_bytes: Count
    ssd_bytes: Count
    ssd_file_bytes: Count
    read_bytes: Counts
    written_bytes: Counts
    pins: Count
    misses: Count
    hit_rate: Annotated[float, Field(ge=0, le=1)]
    faults: Count
    prefetches: Count
    evictions: Count
    clean_drops: Count
    stall_seconds: Durations
    counters: Annotated[dict[Name, Count | Seconds], Field(max_length=MAX_NAMES)]
    read_times: SavedReadTimes = Field(default_factory=SavedReadTimes)
    share: SavedShare | None = None
    device: SavedDevice | None = None
    activations: SavedActivations | None = None
    timeline: SavedTimeline | None = None
    prediction: Prediction | None = None
    rank: Rank | None = None
    comparison: Annotated[Any, Field(exclude=True)] = None
    read_seconds: Annotated[Any, Field(exclude=True)] = None
    ssd_read_bytes: Annotated[Count | None, Field(exclude=True)] = None
    ssd_written_bytes: Annotated[Count | None, Field(exclude=True)] = None


def fields_of(saved: _Saved) -> dict[str, Any]:
    """Return the fields as arguments, what is nested as it is."""
    return {name: getattr(saved, name) for name, field in type(saved).model_fields.items() if not field.exclude}
