"""``torch_offload.search``: the fastest way to train a step of so many tokens within a budget.

Each setup is bounded from below first: by computing alone, and by what memory cannot hold between two sweeps. Setups
that could still win are replayed with large pages, the best of those with the pages of a run.
"""

import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torch_offload.activations.recompute import layers_of
from torch_offload.config import Config, Directories, Settings, parse_size
from torch_offload.diagnostics.probe import Probe
from torch_offload.diagnostics.probe import probe as probe_machine
from torch_offload.planning import api, recomputing
from torch_offload.planning.fake_trace import HOST, Recording, record
from torch_offload.planning.lower_bound import lower_bound
from torch_offload.planning.operator_costs import Cost, OperatorCosts
from torch_offload.planning.page_uses import (
    Moments,
    OptimizerName,
    StepShape,
    UpdateTier,
    moments_named,
    optimizer_named,
)
from torch_offload.planning.plan import Plan
from torch_offload.planning.planner import (
    PlanInputs,
    PlannedMachine,
    PlannedStep,
    build_plan,
    check_updates,
    updates_in_backward,
)
from torch_offload.planning.quantized_weights import without_bytes
from torch_offload.planning.search_result import Candidate, Replay, Search
from torch_offload.planning.setups import Setup, divisors, first_rows, precisions_named, rows_in, setups_of
from torch_offload.planning.step_time import rates_of
from torch_offload.runtime import preflight, settings
from torch_offload.runtime.tensor_parts import is_of_4_bits

DEFAULT_TIMING_SECONDS = 30.0
PAGES_OF_A_COARSE_BUDGET = 64  # a budget holds at least so many of the large pages
EXACT = 3  # the best of the coarse replay are replayed with the pages of a run
EQUAL = 1.01  # times the seconds of the fastest: of such, the one with the fewest bytes is chosen


def search(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    gpu: int | str | None = None,
    ram: int | str | None = None,
    ssd: Directories | None = None,
    config: Settings | None = None,
    optimizer: str | None = api.DEFAULT_OPTIMIZER,
    moments: str = "fp32",
    allow: Iterable[str] = (),
    max_grad_norm: float | None = None,
    loaded: Iterable[Tensor] = (),
    processes: int = 1,
    probe: Probe | None = None,
    ssd_bytes: int | str | None = None,
    timing_seconds: float = DEFAULT_TIMING_SECONDS,
    **unknown: NoReturn,
) -> Search:
    """Find the fastest way to train a step: how its rows are split, what activations do, where updates run.

    The result is a step of the same rows each time. Sums over micro-batches are in another order than over one batch;
    nothing else about the numbers differs, except by what is allowed.

    Experimental: may change in a minor release.

    Args:
        model: As for ``plan``.
        batch: Arguments of its forward by name, of all rows of a step together: tensors of [rows, ...].
        gpu: As in ``plan``.
        ram: As in ``wrap``.
        ssd: As in ``wrap``.
        config: All settings; the other arguments take precedence over it. Settings of ``activations`` and
            ``optimizer_device`` are kept, others are searched. With ``update="backward"`` there is one micro-batch.
        optimizer: As for ``plan``.
        moments: As for ``plan``.
        allow: Other numbers that may be chosen: ``bf16``, weights in bfloat16 with ``torch_offload.AdamW``;
            ``8bit-moments``, its moments in 8 bits.
        max_grad_norm: Gradients are clipped to it; None or 0: they are not.
        loaded: As for ``plan``.
        processes: As for ``plan``; rows are those of one of them.
        probe: As for ``plan``.
        ssd_bytes: As for ``plan``.
        timing_seconds: Time to spend on timing operators, 0 for estimates only.
        **unknown: None; another name is refused with the setting that it may mean.

    Raises:
        ConfigError: If a setting cannot be used, or the batch has no rows.
        UnsupportedModelError: As from ``plan``.
        OffloadError: As from ``plan``.
    """
    settings.check_arguments("search", unknown)
    known_optimizer = optimizer_named(optimizer)
    decided, directories = api.resolved(settings.requested(config, gpu=gpu, ram=ram, ssd=ssd), processes)
    machine = probe or probe_machine(directories[0])
    device = preflight.compute_device(decided)
    known = Recordings(model, batch, probe=machine, timing_seconds=timing_seconds, loaded=tuple(loaded), device=device)
    question = Question(
        config=decided,
        probe=machine,
        optimizer=known_optimizer,
        moments=moments_named(moments, known_optimizer),
        is_clipped=bool(max_grad_norm),
        processes=processes,
        ssd_bytes=(api.room_of(decided, directories) if ssd_bytes is None else parse_size(ssd_bytes)) // processes,
        allow=tuple(allow),
    )
    return answer(question, known)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is searched for, on which machine: of one step's rows, answers to several share recordings.

    Attributes:
        config: With budgets.
        probe: Rates of the machine.
        optimizer: As it is unless a precision asks for another one.
        moments: The same.
        processes: How many share the machine; budgets are of one of them.
        is_clipped: Whether gradients are clipped.
        ssd_bytes: What the SSD may hold.
        allow: Precisions that may be chosen.
    """

    config: Config
    probe: Probe
    optimizer: OptimizerName | None = "adamw_torch_fused"
    moments: Moments = "fp32"
    is_clipped: bool = False
    processes: int = 1
    ssd_bytes: int
    allow: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Of all tiers above the SSD."""
        return (self.config.ram or 0) + (self.config.compute_bytes if self.config.gpu is not None else 0)


@dataclass(frozen=True)
class Recorded:
    """One pass over a micro-batch: what it does to memory, and what its phases cost."""

    recording: Recording
    costs: dict[str, Cost]

    @property
    def operations(self) -> int:
        """Floating-point operations of the pass."""
        return sum(call.flops * count for calls in self.recording.calls.values() for call, count in calls.items())


@dataclass
class Recordings:
    """Recordings of micro-batches of one step, each made once, when it is first asked for.

    Attributes:
        model: What trains.
        batch: Of the whole step.
        probe: What estimates of costs are made from.
        timing_seconds: For all of them together.
        loaded: Tensors of the model whose bytes lie in a checkpoint.
        device: Where the model computes.
    """

    model: nn.Module
    batch: Mapping[str, Any]
    probe: Probe
    timing_seconds: float
    loaded: tuple[Tensor, ...] = ()
    device: str = HOST
    _known: dict[tuple[int, bool, bool], Recorded] = field(default_factory=dict)
    _models: dict[bool, nn.Module] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Of a step."""
        return rows_in(self.batch)

    def of(self, setup: Setup) -> Recorded:
        """Return the pass over a micro-batch of a setup."""
        key = (setup.rows, setup.recomputes, "bf16" in setup.precisions)
        if key not in self._known:
            self._known[key] = self._record(*key)
        return self._known[key]

    def _record(self, rows: int, recomputes: bool, is_bf16: bool) -> Recorded:  # noqa: FBT001
        if is_bf16 not in self._models:
            self._models[is_bf16] = meta_copy(self.model, dtype=torch.bfloat16 if is_bf16 else None).train()
        model = self._models[is_bf16]
        with recomputing.recomputed([layer for _, layer in layers_of(model)] if recomputes else []):
            loaded = self._loaded_of(model, is_bf16=is_bf16)
            recording = record(model, first_rows(self.batch, rows), loaded=loaded, device=self.device)
        share = rows / sum(divisors(self.rows))  # of the time: operators take as long as there are rows
        costs = OperatorCosts(self.probe, limit_seconds=self.timing_seconds * share)
        return Recorded(recording, costs.of(recording.calls))

    def _loaded_of(self, model: nn.Module, *, is_bf16: bool) -> list[Tensor]:
        """Return what lies in a checkpoint of a copy of the model; nothing where the copy has another type."""
        if is_bf16:
            return []
        stored = {id(tensor) for tensor in self.loaded}
        pairs = zip(_tensors_of(self.model), _tensors_of(model), strict=True)
        return [copied for tensor, copied in pairs if id(tensor) in stored]


def answer(question: Question, known: Recordings) -> Search:
    """Return what is best; deterministic for the same recordings and costs.

    Raises:
        ConfigError: If the step cannot be updated in its backward, and is to be.
    """
    check_updates(question.config, PlannedStep(optimizer=question.optimizer, is_clipped=question.is_clipped))
    started = time.perf_counter()
    rows = known.rows
    setups = list(
        setups_of(
            rows,
            config=question.config,
            has_layers=any(True for _ in layers_of(known.model)),
            is_checkpointed=_is_checkpointed(known.model),
            allow=precisions_named(question.allow),
        )
    )
    planner = Planner(question, known)
    candidates = planner.replayed(setups)
    fitting = [each for each in candidates if each.fits]
    exact = [each for each in fitting if each.replay == "exact"]
    best = _chosen(exact)
    return Search(
        best=best,
        candidates=sorted(fitting, key=lambda each: (each is not best, each.plan is None, each.seconds)),
        refused=sorted((each for each in candidates if not each.fits), key=lambda each: each.missing_bytes),
        tokens_per_step=api.tokens_of(known.batch),
        budget_bytes=_budgets(question),
        search_seconds=time.perf_counter() - started,
    )


def _chosen(exact: list[Candidate]) -> Candidate | None:
    """Return the one with the fewest bytes on the SSD among those that are as good as the fastest."""
    if not exact:
        return None
    fastest = min(each.seconds for each in exact)
    return min((each for each in exact if each.seconds <= EQUAL * fastest), key=lambda each: each.ssd_bytes)


def _budgets(question: Question) -> dict[str, int]:
    config = question.config
    device = {} if config.gpu is None else {"device": config.compute_bytes}
    return device | {"ram": config.ram or 0, "ssd": question.ssd_bytes}


class Planner:
    """Plans setups for one question."""

    def __init__(self, question: Question, known: Recordings) -> None:
        self._question = question
        self._known = known
        self._tokens = api.tokens_of(known.batch)

    def replayed(self, setups: list[Setup]) -> list[Candidate]:
        """Return a candidate for each setup, in the same order; one that fits and is the best has an exact replay."""
        bounded = [self._bounded(setup) for setup in setups]
        found: dict[Setup, Candidate] = {}
        best = float("inf")
        for each in sorted(bounded, key=lambda each: each.lower_bound_seconds):
            if each.lower_bound_seconds > best * EQUAL:
                found[each.setup] = each
                continue
            found[each.setup] = replayed = self._replayed(each, "coarse")
            if replayed.fits:
                best = min(best, replayed.seconds)
        for setup in self._worth_exactness(found):
            found[setup] = self._replayed(found[setup], "exact")
        return [found[setup] for setup in setups]

    def _worth_exactness(self, found: Mapping[Setup, Candidate]) -> list[Setup]:
        """Return the best of the coarse replay, and what did not fit by little: its pages were too large."""
        coarse = [each for each in found.values() if each.replay == "coarse"]
        fitting = sorted((each for each in coarse if each.fits), key=lambda each: each.seconds)
        slack = 4 * self._page_elements("coarse") * 4
        near = sorted((each for each in coarse if not each.fits), key=lambda each: each.missing_bytes)
        close = [each for each in near if each.missing_bytes <= slack]
        return [each.setup for each in [*fitting[:EXACT], *close[:EXACT], *near[:1]]]

    def _bounded(self, setup: Setup) -> Candidate:
        recorded = self._known.of(setup)
        bound = lower_bound(
            recorded.recording,
            self._shape(setup),
            recorded.costs,
            memory_bytes=self._question.memory_bytes,
            rates=rates_of(self._question.config, self._question.probe, processes=self._question.processes),
        )
        return Candidate(setup=setup, lower_bound_seconds=bound, operations=recorded.operations * setup.accumulation)

    def _replayed(self, candidate: Candidate, replay: Replay) -> Candidate:
        if self._page_elements(replay) == self._question.config.page_elements:
            replay = "exact"
        if candidate.replay == replay:
            return candidate
        return Candidate(
            setup=candidate.setup,
            lower_bound_seconds=candidate.lower_bound_seconds,
            replay=replay,
            plan=self.plan(candidate.setup, self._page_elements(replay)),
            operations=candidate.operations,
        )

    def plan(self, setup: Setup, page_elements: int) -> Plan:
        """Return the plan of a setup with pages of a size."""
        question, recorded = self._question, self._known.of(setup)
        config = question.config.replace(
            activations=setup.activations, optimizer_device=setup.optimizer_device, page_elements=page_elements
        )
        inputs = PlanInputs(
            config=config,
            recording=recorded.recording,
            step=PlannedStep(
                micro_batches=setup.accumulation, is_clipped=question.is_clipped, **self._optimizer(setup)
            ),
            machine=PlannedMachine(question.probe, question.processes, question.ssd_bytes, api.DEFAULT_ENDURANCE_BYTES),
            tokens=self._tokens,
            costs=recorded.costs,
            steps_per_day=None,
        )
        return build_plan(inputs, _update_tier(config, self._known.model))

    def _optimizer(self, setup: Setup) -> dict[str, Any]:
        name = "torch_offload.AdamW" if setup.precisions else self._question.optimizer
        return {"optimizer": name, "moments": "8bit" if "8bit-moments" in setup.precisions else self._question.moments}

    def _shape(self, setup: Setup) -> StepShape:
        config = self._question.config.replace(activations=setup.activations)
        optimizer = self._optimizer(setup)
        return StepShape(
            page_elements=config.page_elements,
            min_paged_bytes=config.min_paged_bytes,
            micro_batches=setup.accumulation,
            pages_activations=config.pages_activations,
            updates_in_backward=updates_in_backward(config, optimizer["optimizer"]),
            uses_homes=config.checkpoint_pages == "in_place" and config.gpu is None,
            **optimizer,
        )

    def _page_elements(self, replay: Replay) -> int:
        """Return the pages of a replay: those of a run, or as large as a budget still holds some dozens of."""
        usual = self._question.config.page_elements
        if replay == "exact":
            return usual
        budget = self._question.config.compute_bytes
        return usual * max(1, budget // (PAGES_OF_A_COARSE_BUDGET * 4 * usual))


def _update_tier(config: Config, model: nn.Module) -> UpdateTier:
    return "host" if preflight.optimizer_device(config, model.parameters()) == "cpu" else "device"


def _is_checkpointed(model: nn.Module) -> bool:
    """Whether layers compute their forward again as the model is."""
    return any(bool(getattr(part, "gradient_checkpointing", False)) for part in model.modules())


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def meta_copy(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model whose tensors own no memory.

    Args:
        model: It is not changed, and no bytes of it are read.
        dtype: Of the fractions among its parameters and buffers, but those of 4 bits; None: their own.
    """
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        if is_of_4_bits(tensor):
            memo[id(tensor)] = without_bytes(tensor)
            continue
        kind = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)
