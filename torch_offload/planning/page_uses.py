"""The page uses of steps, made from recordings of their passes: what the engine will pin, in its order."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from torch_offload.errors import ConfigError
from torch_offload.optim.adamw_state import MIN_PACKED_ELEMENTS
from torch_offload.planning.belady import Pages, PageUse, Use
from torch_offload.planning.fake_trace import Moment, ParameterSize, Recording, What

OptimizerName = Literal["adamw_torch_fused", "torch_offload.AdamW"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw_torch_fused", "torch_offload.AdamW")
Moments = Literal["fp32", "8bit"]
UpdateTier = Literal["device", "host"]
MIN_TABLE_PAGES = 4  # of a table, below which it comes as a whole


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The parts of a step beside one pass.

    Attributes:
        page_elements: Elements per page.
        min_paged_bytes: Smaller tensors stay in memory.
        optimizer: Whose states there are; None: gradients are dropped when the step ends.
        moments: How ``torch_offload.AdamW`` keeps its moments.
        micro_batches: Forward and backward passes per step.
        pages_activations: Whether what autograd keeps becomes pages.
        update_tier: Where updates run.
        updates_in_backward: Whether a parameter is updated as soon as its gradient is complete.
        uses_homes: Whether pages of loaded weights lie in the checkpoint until they are first written.
    """

    page_elements: int
    min_paged_bytes: int
    optimizer: OptimizerName | None
    moments: Moments = "fp32"
    micro_batches: int = 1
    pages_activations: bool = False
    update_tier: UpdateTier = "device"
    updates_in_backward: bool = False
    uses_homes: bool = False


def optimizer_named(name: str | None) -> OptimizerName | None:
    """Return the optimizer of this name, if there shall be one.

    Raises:
        ConfigError: If it is not known.
    """
    for known in OPTIMIZERS:
        if name == known:
            return known
    if name is None:
        return None
    raise ConfigError(f"optimizer: {name!r} is not known; there are: {', '.join(OPTIMIZERS)}")


def moments_named(name: str, optimizer: OptimizerName | None) -> Moments:
    """Return the moments of this name, if the optimizer can keep such.

    Raises:
        ConfigError: If they are not known, or the optimizer has no others than torch's.
    """
    if name == "fp32":
        return "fp32"
    if name != "8bit":
        raise ConfigError(f"moments: {name!r} are not known; there are: fp32, 8bit")
    if optimizer != "torch_offload.AdamW":
        raise ConfigError("moments: 8bit are torch_offload.AdamW's; give optimizer='torch_offload.AdamW' as well")
    return "8bit"


def state_bytes_of(parameter: ParameterSize, optimizer: OptimizerName | None, moments: Moments) -> dict[str, int]:
    """Return the bytes per element of each state that an optimizer keeps for a parameter."""
    if optimizer is None or not parameter.is_trained:
        return {}
    dtype = parameter.dtype
    if optimizer != "torch_offload.AdamW":
        return {"exp_avg": dtype.itemsize, "exp_avg_sq": dtype.itemsize}
    is_packed = moments == "8bit" and parameter.elements >= MIN_PACKED_ELEMENTS and dtype is not torch.float64
    moment_bytes = 1 if is_packed else 4 if dtype is torch.bfloat16 else dtype.itemsize
    master = {"master_low": 2} if dtype is torch.bfloat16 else {}
    return {**master, "exp_avg": moment_bytes, "exp_avg_sq": moment_bytes}


@dataclass
class _Paged:
    """The pages of one parameter, by index; states in the order of their names."""

    weight: list[int]
    gradient: list[int] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)


@dataclass
class PassMemory:
    """What one pass over one batch has in memory, as far as it has come.

    Attributes:
        activations: Pages of each temporary that may become some, by number.
        sizes: Of temporaries that are no pages.
        saved: Temporaries that have become pages.
    """

    activations: dict[int, list[int]]
    sizes: dict[int, int] = field(default_factory=dict)
    saved: set[int] = field(default_factory=set)


class PagedStep:
    """All pages of a model, and what parts of steps use of them.

    Attributes:
        pages: Every page, kinds named as in a report.
        homes: Of these, the ones that lie in a checkpoint at first.
        resident_bytes: What is too small to be paged, gradients and states included.
        updated_elements: How many a step updates.
    """

    def __init__(self, recording: Recording, shape: StepShape, parameters: Iterable[int]) -> None:
        """Lay out the pages of parameters, gradients and states.

        Args:
            recording: Of one pass.
            shape: Of a step.
            parameters: Numbers of those that there are.
        """
        self.pages = Pages()
        self.homes: set[int] = set()
        self.resident_bytes = 0
        self.updated_elements = 0
        self._recording = recording
        self._shape = shape
        self._paged = self._lay_out(parameters)
        self._group = 0
        self._subgroup = 0
        self._other_bytes = self.resident_bytes
        self._pending: set[int] = set()

    def events(self, *, steps: int) -> Iterator[PageUse]:
        """Yield the uses of loading and of so many steps; a mark ends each phase."""
        for paged in self._paged.values():
            self._group += 1
            yield from self._each(Use.create, [page for page in paged.weight if page not in self.homes])
        for step in range(steps):
            if step > 0 and self._shape.optimizer is not None and not self._shape.updates_in_backward:
                self._pending = {index for index, paged in self._paged.items() if paged.gradient}
            yield from self._step()
            if self._shape.optimizer is None:
                for paged in self._paged.values():
                    yield from self._each(Use.drop, paged.gradient)
            yield PageUse(Use.mark)

    def _step(self) -> Iterator[PageUse]:
        """Yield what the passes of a step use; a mark stands between two phases."""
        raise NotImplementedError

    def _lay_out(self, parameters: Iterable[int]) -> dict[int, _Paged]:
        paged = {}
        for index in parameters:
            parameter = self._recording.parameters[index]
            self.updated_elements += parameter.elements if parameter.is_trained else 0
            states = state_bytes_of(parameter, self._shape.optimizer, self._shape.moments)
            if parameter.size_bytes < max(self._shape.min_paged_bytes, 1):
                of_one = parameter.element_bytes * (1 + parameter.is_trained) + sum(states.values())
                self.resident_bytes += parameter.elements * of_one
                continue
            entry = _Paged(self._cut("parameter", parameter.elements, parameter.element_bytes))
            if parameter.is_loaded and self._shape.uses_homes:
                self.homes.update(entry.weight)
            if parameter.is_trained:
                entry.gradient = self._cut("gradient", parameter.elements, parameter.element_bytes)
                entry.states = [self._cut("state", parameter.elements, size) for size in states.values()]
            paged[index] = entry
        return paged

    def _lay_out_activations(self, moments: Sequence[Moment]) -> dict[int, list[int]]:
        """Return the pages of every temporary that autograd keeps in a part of the recording, where they are to be."""
        if not self._shape.pages_activations:
            return {}
        sizes = {m.subject: m.size_bytes for m in self._recording.moments if m.what is What.allocate}
        saved = dict.fromkeys(m.subject for m in moments if m.what is What.save)
        least_bytes = max(self._shape.min_paged_bytes, 1)
        return {
            number: self._cut("activation", -(-sizes[number] // 4), 4)
            for number in saved
            if sizes[number] >= least_bytes
        }

    def _cut(self, kind: str, elements: int, element_bytes: int) -> list[int]:
        whole = self._shape.page_elements
        counts = [min(whole, elements - first) for first in range(0, elements, whole)]
        return [self.pages.add(kind, count * element_bytes) for count in counts]

    def _pass(self, moments: Iterable[Moment], memory: PassMemory, *, is_first: bool) -> Iterator[PageUse]:
        """Yield what a part of a recorded pass uses.

        Args:
            moments: Of the part.
            memory: Of the pass.
            is_first: Whether gradients begin with those of this pass, or are added to those that there are.
        """
        for moment in moments:
            if moment.what is What.backward:
                yield PageUse(Use.mark)
            elif moment.what is What.allocate:
                memory.sizes[moment.subject] = moment.size_bytes
                self._other_bytes += moment.size_bytes
                yield PageUse(Use.temporaries, other_bytes=self._other_bytes)
            elif moment.what is What.free:
                self._other_bytes -= memory.sizes.pop(moment.subject, 0)
                if moment.subject in memory.saved:
                    yield from self._each(Use.drop, memory.activations[moment.subject])
            elif moment.what is What.save:
                yield from self._save(moment.subject, memory)
            elif moment.what is What.operate:
                yield from self._operate(moment, memory)
            elif moment.what is What.finish and is_first:
                self._let_go(moment, memory)
                yield from self._finish(moment.subject, Use.create)
                if self._shape.updates_in_backward and moment.subject in self._paged:
                    yield from self._update(self._paged[moment.subject])
            elif moment.what is What.finish:  # it is added to the one that is there, and dies then
                yield from self._finish(moment.subject, Use.update)
                self._let_go(moment, memory)

    def _end_pass(self, memory: PassMemory) -> None:
        """Let go of the temporaries of a pass that outlive its recording."""
        self._other_bytes -= sum(memory.sizes.values())

    def _save(self, number: int, memory: PassMemory) -> Iterator[PageUse]:
        """It becomes pages where it lies."""
        if number in memory.activations and number not in memory.saved:
            memory.saved.add(number)
            self._other_bytes -= memory.sizes.pop(number, 0)
            self._group += 1
            yield from self._each(Use.create, memory.activations[number])

    def _let_go(self, moment: Moment, memory: PassMemory) -> None:
        """Count temporaries of finished gradients no more: they became pages, or are too small to be paged."""
        for number in moment.temporaries:
            self._other_bytes -= memory.sizes.pop(number, 0)

    def _operate(self, moment: Moment, memory: PassMemory) -> Iterator[PageUse]:
        """An operator pins all that it uses; what is pending on it is done first."""
        paged = [index for index in moment.parameters if index in self._paged]
        activations = [number for number in moment.temporaries if number in memory.saved]
        if not paged and not activations:
            return
        self._group += 1
        for index in paged:
            if index in self._pending:
                self._pending.discard(index)
                yield from self._update(self._paged[index])
            yield from self._each(Use.read, self._paged[index].weight, rows=moment.rows)
        for number in activations:
            yield from self._each(Use.read, memory.activations[number])

    def _finish(self, index: int, use: Use) -> Iterator[PageUse]:
        """A gradient becomes pages, or is added to those of the micro-batch before."""
        if index not in self._paged:
            return
        self._group += 1
        yield from self._each(use, self._paged[index].gradient)

    def _is_updated_below(self) -> bool:
        return self._shape.update_tier == "host" and self._shape.optimizer is not None

    def _update(self, paged: _Paged) -> Iterator[PageUse]:
        """Apply an update page by page: weight, gradient and states of one index at a time."""
        is_below = self._is_updated_below()
        if is_below:
            yield from self._each(Use.sink, paged.weight + paged.gradient)
        for position, weight in enumerate(paged.weight):
            self._subgroup += 1
            yield self._update_use(weight, is_below=is_below, is_weight=True)
            yield self._update_use(paged.gradient[position], is_below=is_below)
            for state in paged.states:
                yield self._update_use(state[position], is_below=is_below)
        yield from self._each(Use.drop, paged.gradient)

    def _update_use(self, page: int, *, is_below: bool, is_weight: bool = False) -> PageUse:
        """Return the use of a page by an update; the weight stays in use for the operator that waits for it."""
        subgroup = 0 if is_weight and not is_below else self._subgroup
        group = -self._subgroup if is_below else self._group
        other_bytes = 0 if is_below else self._other_bytes
        return PageUse(Use.update, page, group, subgroup, other_bytes, is_below=is_below)

    def _each(self, use: Use, pages: list[int], *, rows: int = 0) -> Iterator[PageUse]:
        """Yield one use of each page, or of those in which so many rows of a table lie, one after the other."""
        if rows and len(pages) >= MIN_TABLE_PAGES:
            return self._looked_up(pages, rows)
        return (PageUse(use, page, self._group, 0, self._other_bytes) for page in pages)

    def _looked_up(self, pages: list[int], rows: int) -> Iterator[PageUse]:
        """Yield the reads of as many pages as rows from anywhere lie in, evenly spread."""
        count = max(1, round(len(pages) * (1 - (1 - 1 / len(pages)) ** rows)))
        for number in range(count):
            self._group += 1
            yield PageUse(Use.read, pages[number * len(pages) // count], self._group, 0, self._other_bytes)


class StepUses(PagedStep):
    """The pages of a whole model, and the order in which steps use them."""

    def __init__(self, recording: Recording, shape: StepShape, *, passes: Sequence[Recording] = ()) -> None:
        """Lay out the pages.

        Args:
            recording: Of one pass.
            shape: Of a step.
            passes: Recordings of the same module that a step consists of, each without a backward; empty: forward and
                backward of `recording`, once for each micro-batch.
        """
        super().__init__(recording, shape, range(len(recording.parameters)))
        self._passes = list(passes) or [recording] * shape.micro_batches
        self._activations = self._lay_out_activations(recording.moments)

    def phases(self) -> list[str]:
        """Return the names of what the marks of one step end, in order."""
        return [name for recording in self._passes for name in recording.calls]

    def _step(self) -> Iterator[PageUse]:
        for number, recording in enumerate(self._passes):
            if number > 0:
                yield PageUse(Use.mark)
            memory = PassMemory(self._activations)
            yield from self._pass(recording.moments, memory, is_first=number == 0)
            self._end_pass(memory)
