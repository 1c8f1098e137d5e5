"""Makes a plan of pipelines: one recording, cut into stages and replayed as each schedule runs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_offload.config import Config
from torch_offload.errors import ConfigError
from torch_offload.planning.fake_trace import Recording
from torch_offload.planning.page_uses import StepShape
from torch_offload.planning.pipeline_plan import PipelinePlan, PlannedRank, PlannedSchedule
from torch_offload.planning.planner import PlannedStep, least_of_operator
from torch_offload.planning.rank_uses import RankUses
from torch_offload.planning.schedules import StageCall, calls_of, has_one_stage, schedules_named
from torch_offload.planning.stages import Stage, divided, stage_counts
from torch_offload.planning.step_time import total_by_kind
from torch_offload.planning.tier_traffic import Budgets, traffic_of
from torch_offload.runtime import settings

MIN_RANKS = 2
ONLY_OF_A_STEP = ("gpu", "work", "new_tokens", "probe", "endurance_bytes", "steps_per_day", "timing_seconds")


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """What was asked for.

    Attributes:
        schedules: Names of those to replay.
        ranks: How many there are.
        stages: How many; None: each number that is possible.
    """

    schedules: tuple[str, ...]
    ranks: int
    stages: int | None

    @classmethod
    def of(cls, schedule: str, ranks: int | None, stages: int | None) -> "PipelineRequest":
        """Take what was asked for.

        Raises:
            ConfigError: If a schedule is not known, or the numbers are not those of one.
        """
        schedules = schedules_named(schedule)
        if ranks is None or ranks < MIN_RANKS:
            raise ConfigError(f"ranks: a pipeline has at least {MIN_RANKS}, got {ranks}")
        if stages is not None and len(schedules) == 1 and has_one_stage(schedules[0]) and stages != ranks:
            raise ConfigError(
                f"stages: {schedules[0]} has one stage on each rank, so {ranks} ranks have {ranks}, got {stages}"
            )
        return cls(schedules=schedules, ranks=ranks, stages=stages)

    def counts_of(self, schedule: str, layers: int) -> list[int]:
        """Return the numbers of stages with which a schedule is replayed.

        Raises:
            ConfigError: If the layers cannot be divided so.
        """
        possible = stage_counts(layers, self.ranks)
        wanted = possible if self.stages is None else [self.stages]
        if not possible or wanted[0] not in possible:
            raise ConfigError(
                f"stages: {layers} layers cannot be divided into {self.stages or self.ranks} stages of equally many, "
                f"equally many on each of {self.ranks} ranks; possible: {', '.join(map(str, possible)) or 'none'}"
            )
        return [count for count in wanted if count == self.ranks] if has_one_stage(schedule) else wanted


def check_others(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of plans that those of pipelines do not have.

    Raises:
        ConfigError: The message names the first.
    """
    for name, value in arguments.items():
        if name in ONLY_OF_A_STEP and value not in (None, "train"):
            raise ConfigError(
                f"{name}: pipelines are planned for training on the CPU, bytes and memory without times; "
                f"leave {name} or schedule out"
            )
    settings.check_arguments("plan", {name: arguments[name] for name in arguments if name not in ONLY_OF_A_STEP})


def check_can_be_replayed(config: Config) -> None:
    """Refuse settings that plans of pipelines do not know.

    Raises:
        ConfigError: The message says what to change.
    """
    if config.gpu is not None:
        raise ConfigError("gpu: pipelines are planned in memory over the SSD only; leave gpu or schedule out")
    if config.activations == "auto":
        raise ConfigError(
            "activations: 'auto' chooses by seconds, which a plan of pipelines has none of; "
            "give activations='page', 'keep' or 'recompute'"
        )
    if config.update == "backward":
        raise ConfigError("update: 'backward' works in a single process only; leave update or schedule out")


@dataclass(frozen=True, kw_only=True)
class PipelinePlanner:
    """Replays schedules.

    Attributes:
        config: Every setting decided, budgets of one rank.
        step: What it does.
        recording: Of one pass of the whole model, with a mark for each layer.
        layers: How many marks.
        ssd_bytes: What the SSD may hold of one rank.
    """

    config: Config
    step: PlannedStep
    recording: Recording
    layers: int
    ssd_bytes: int

    def plan(self, request: PipelineRequest) -> PipelinePlan:
        """Replay all that was asked for.

        Raises:
            ConfigError: If nothing of it can run.
        """
        found: list[PlannedSchedule] = []
        refused: dict[str, str] = {}
        for name in request.schedules:
            for stages in request.counts_of(name, self.layers):
                try:
                    calls = calls_of(name, ranks=request.ranks, stages=stages, micro_batches=self.step.micro_batches)
                except ConfigError as error:
                    refused[name] = str(error)
                else:
                    found.append(self._replayed(name, stages, calls))
        if not found:
            raise ConfigError("; ".join(refused.values()))
        found.sort(key=lambda candidate: (not candidate.fits, candidate.moved_bytes))
        return PipelinePlan(micro_batches=self.step.micro_batches, candidates=found, refused=refused)

    def _replayed(self, name: str, stages: int, calls: Sequence[list[StageCall]]) -> PlannedSchedule:
        cut = divided(self.recording, self.layers, stages)
        ranks = len(calls)
        held = [{number: cut[number] for number in range(rank, stages, ranks)} for rank in range(ranks)]
        planned = [self._rank(rank, held[rank], calls[rank]) for rank in range(ranks)]
        return PlannedSchedule(name=name, stages=stages, layers=self.layers // stages, ranks=planned)

    def _rank(self, rank: int, stages: dict[int, Stage], calls: list[StageCall]) -> PlannedRank:
        used = sorted(set().union(*(stage.parameters for stage in stages.values())))
        parameters = [self.recording.parameters[index] for index in used]
        uses = RankUses(self.recording, self._shape(), stages, calls)
        traffic = traffic_of(uses, Budgets(ram=self.config.ram or 0))
        least_bytes = least_of_operator(self.config, parameters)
        return PlannedRank(
            rank=rank,
            stages=list(stages),
            weights_bytes=sum(parameter.size_bytes for parameter in parameters),
            ssd_read=total_by_kind(moved.read for moved in traffic.ssd),
            ssd_written=total_by_kind(moved.written for moved in traffic.ssd),
            budget_bytes={"ram": self.config.ram or 0, "ssd": self.ssd_bytes},
            needed_bytes={"ram": max(least_bytes, traffic.needed_bytes["ram"]), "ssd": traffic.peak_bytes["ssd"]},
            peak_bytes=traffic.peak_bytes,
        )

    def _shape(self) -> StepShape:
        return StepShape(
            page_elements=self.config.page_elements,
            min_paged_bytes=self.config.min_paged_bytes,
            optimizer=self.step.optimizer,
            moments=self.step.moments,
            micro_batches=self.step.micro_batches,
            pages_activations=self.config.pages_activations,
            uses_homes=self.config.checkpoint_pages == "in_place",
        )
