"""What a plan predicts of a step, beside what a run measured, and which input of the plan was wrong."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from torch_offload.config import format_size
from torch_offload.errors import ConfigError
from torch_offload.reporting.timeline import Interval

CLOSE = 0.10
"""Of the measured seconds; closer ones are as predicted."""

CLOSE_BYTES = 0.05
MAX_PLAN_BYTES = 16 << 20
"""Of a file that is read. A plan's has some kilobytes."""

_Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class Prediction(BaseModel):
    """The figures of a plan that a run can be held against. Frozen.

    Attributes:
        seconds: Of a step.
        computing_seconds: Of these, the ones in which the program does not wait for pages.
        ssd_read_bytes: Of a step.
        ssd_written_bytes: Of a step.
        peak_bytes: The most memory where the module computes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    seconds: _Seconds
    computing_seconds: _Seconds
    ssd_read_bytes: _Bytes
    ssd_written_bytes: _Bytes
    peak_bytes: _Bytes

    @classmethod
    def of_plan(cls, path: str | os.PathLike[str]) -> "Prediction":
        """Read the prediction of a plan that ``Plan.write_json`` or ``torch-offload plan --json`` wrote.

        Raises:
            ConfigError: If the file is not such a plan, or cannot be read.
        """
        try:
            with Path(path).expanduser().open("rb") as file:
                text = file.read(MAX_PLAN_BYTES + 1)
            content = json.loads(text) if len(text) <= MAX_PLAN_BYTES else None
        except OSError as error:
            raise ConfigError(f"plan: cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            content = None
        try:
            return cls.model_validate(content["prediction"] if isinstance(content, dict) else None)
        except (KeyError, ValidationError):
            raise ConfigError(
                f"plan: {path} is not a plan that this version wrote; write one with: torch-offload plan ... --json"
            ) from None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure of a step, twice.

    Attributes:
        name: Such as ``seconds``.
        predicted: By the plan, in seconds or bytes.
        measured: In steady steps of the run.
        is_time: Whether it is in seconds.
    """

    name: str
    predicted: float
    measured: float
    is_time: bool = False

    @property
    def excess(self) -> float:
        """What the run has more than the plan, as a share of the plan's; below 0 where it has less."""
        if self.predicted == 0:
            return 0.0 if self.measured == 0 else float("inf")
        return self.measured / self.predicted - 1.0

    def __str__(self) -> str:
        """Return both for a reader."""
        values = (self.predicted, self.measured)
        predicted, measured = (f"{v:.3g} s" if self.is_time else format_size(int(v)) for v in values)
        more = "none planned" if self.excess == float("inf") else f"{self.excess:+.0%}"
        return f"{predicted} predicted, {measured} measured ({more})"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predicted beside measured.

    Attributes:
        figures: Of a step: ``seconds``, ``SSD read``, ``SSD written``, ``peak``.
        wrong_input: The input of the plan that differs most, in a sentence; None where the seconds are as predicted.
    """

    figures: list[Compared]
    wrong_input: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        rows = [{"name": f.name, "predicted": f.predicted, "measured": f.measured} for f in self.figures]
        return {"figures": rows, "wrong_input": self.wrong_input}


def compare(prediction: Prediction, steady: Interval, *, peak_bytes: int) -> Comparison:
    """Put a prediction beside steps of a run that did what was planned.

    Args:
        prediction: Of one step.
        steady: The steps.
        peak_bytes: The most memory that was in use where the module computes.
    """
    read, written = steady.ssd_read_bytes / steady.steps, steady.ssd_written_bytes / steady.steps
    figures = [
        Compared(name="seconds", predicted=prediction.seconds, measured=steady.seconds / steady.steps, is_time=True),
        Compared(name="SSD read", predicted=prediction.ssd_read_bytes, measured=read),
        Compared(name="SSD written", predicted=prediction.ssd_written_bytes, measured=written),
        Compared(name="peak", predicted=prediction.peak_bytes, measured=peak_bytes),
    ]
    return Comparison(figures=figures, wrong_input=_wrong_input(prediction, figures, steady))


def _wrong_input(prediction: Prediction, figures: list[Compared], steady: Interval) -> str | None:
    """Say which input of the plan explains most of the difference in seconds."""
    seconds, read, written, _ = figures
    if abs(seconds.predicted - seconds.measured) <= CLOSE * seconds.measured:
        return None
    computing = Compared(
        name="computing",
        predicted=prediction.computing_seconds,
        measured=steady.compute_seconds / steady.steps,
        is_time=True,
    )
    waiting = Compared(
        name="waiting",
        predicted=seconds.predicted - computing.predicted,
        measured=seconds.measured - computing.measured,
        is_time=True,
    )
    if abs(computing.measured - computing.predicted) >= abs(waiting.measured - waiting.predicted):
        return (
            f"computing: {computing}; operators take another time here than when they were timed alone, or something "
            "else has the processor"
        )
    moved = Compared(
        name="SSD", predicted=read.predicted + written.predicted, measured=read.measured + written.measured
    )
    if abs(moved.excess) > CLOSE_BYTES:
        return f"bytes over the SSD: {moved}; the batch, the budget or what trains is another than planned"
    return (
        f"rate of the disk: the bytes are as planned, and waiting for them: {waiting}; measure it again "
        "(torch-offload probe --refresh) while nothing else uses it"
    )
