"""torch's own schedules of pipelines: which there are, and what each has the stages of a rank do, in its order."""

from enum import Enum
from typing import Any, NamedTuple

from torch_offload import _compat
from torch_offload.errors import ConfigError

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
AUTO = "auto"


class StageWork(Enum):
    """What a stage is called for."""

    forward = "forward"
    backward = "backward"
    scale = "scale"  # the gradients of all micro-batches together


class StageCall(NamedTuple):
    """One call of one stage.

    Attributes:
        work: What for.
        stage: Its number.
        micro_batch: Which; -1 where it is about all of them.
    """

    work: StageWork
    stage: int
    micro_batch: int


def schedules_named(name: str) -> tuple[str, ...]:
    """Return the schedule of this name, in any case of letters, or all of them.

    Raises:
        ConfigError: If it is not known.
    """
    if name.lower() == AUTO:
        return SCHEDULES
    for known in SCHEDULES:
        if name.lower() == known.lower():
            return (known,)
    raise ConfigError(f"schedule: {name!r} is not known; there are: {AUTO}, {', '.join(SCHEDULES)}")


def has_one_stage(name: str) -> bool:
    """Whether each rank has one stage only."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return issubclass(_class_named(name), PipelineScheduleSingle)


def calls_of(name: str, *, ranks: int, stages: int, micro_batches: int) -> list[list[StageCall]]:
    """Return what a step calls the stages of each rank for.

    The schedule runs: with stages that compute nothing.

    Raises:
        ConfigError: If it does not work for these numbers; in torch's words.
    """
    try:
        return [_calls_of_rank(name, rank, ranks, stages, micro_batches) for rank in range(ranks)]
    except ValueError as error:
        raise ConfigError(f"schedule: {name}: {' '.join(str(error).split())}") from None


def _calls_of_rank(name: str, rank: int, ranks: int, stages: int, micro_batches: int) -> list[StageCall]:
    calls = _compat.calls_of_stages(
        _class_named(name),
        rank=rank,
        ranks=ranks,
        stages=stages,
        micro_batches=micro_batches,
        has_one_stage=has_one_stage(name),
    )
    return [StageCall(StageWork(work), stage, micro_batch) for work, stage, micro_batch in calls]


def _class_named(name: str) -> Any:
    from torch.distributed import pipelining

    return getattr(pipelining, f"Schedule{name}")
