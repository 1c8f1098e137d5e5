"""The page uses of one rank of a pipeline, in the order in which its schedule runs the stages that it holds."""

from collections.abc import Iterator, Mapping, Sequence

from torch_offload.planning.belady import PageUse, Use
from torch_offload.planning.fake_trace import Recording
from torch_offload.planning.page_uses import PagedStep, PassMemory, StepShape
from torch_offload.planning.schedules import StageCall, StageWork
from torch_offload.planning.stages import Stage


class RankUses(PagedStep):
    """The pages of the stages of a rank, and the order in which steps use them.

    Each micro-batch has activations of its own, since several are under way.
    """

    def __init__(
        self, recording: Recording, shape: StepShape, stages: Mapping[int, Stage], calls: Sequence[StageCall]
    ) -> None:
        """Lay out the pages.

        Args:
            recording: Of one pass of the whole model.
            shape: Of a step.
            stages: Of this rank, by number.
            calls: What its schedule calls them for in a step.
        """
        used: set[int] = set().union(*(stage.parameters for stage in stages.values()))
        super().__init__(recording, shape, sorted(used))
        self._stages = stages
        self._calls = calls
        self._activations = {
            (number, micro_batch): self._lay_out_activations(stage.forward)
            for number, stage in stages.items()
            for micro_batch in range(shape.micro_batches)
        }
        self.resident_bytes += sum(self._buffer_bytes(*key) for key in self._activations)
        self._other_bytes = self.resident_bytes

    def _buffer_bytes(self, number: int, micro_batch: int) -> int:
        """Return the bytes that a stage has for what it receives with a micro-batch, and that are no pages."""
        paged = self._activations[number, micro_batch]
        return sum(size for temporary, size in self._stages[number].received.items() if temporary not in paged)

    def _step(self) -> Iterator[PageUse]:
        passes: dict[tuple[int, int], PassMemory] = {}
        begun: set[int] = set()
        for call in self._calls:
            yield from _with_room(list(self._called(call, passes, begun)))

    def _called(self, call: StageCall, passes: dict[tuple[int, int], PassMemory], begun: set[int]) -> Iterator[PageUse]:
        """Yield what one call uses.

        Args:
            call: Of a stage.
            passes: Those under way, by stage and micro-batch.
            begun: Stages that have gradients.
        """
        stage, key = self._stages[call.stage], (call.stage, call.micro_batch)
        if call.work is StageWork.forward:
            passes[key] = PassMemory(self._activations[key])
            yield from self._pass(stage.forward, passes[key], is_first=call.stage not in begun)
        elif call.work is StageWork.backward:
            yield from self._pass(stage.backward, passes[key], is_first=call.stage not in begun)
            self._end_pass(passes.pop(key))
            begun.add(call.stage)
        else:
            yield from self._scale(stage)

    def _scale(self, stage: Stage) -> Iterator[PageUse]:
        """Gradients are divided by the number of micro-batches, one by one."""
        for index in sorted(stage.parameters):
            if index in self._paged:
                self._group += 1
                yield from self._each(Use.update, self._paged[index].gradient)


def _with_room(events: list[PageUse]) -> Iterator[PageUse]:
    """Keep room for the most temporaries of a call throughout it: the engine makes it before they are made."""
    most_bytes = max((event.other_bytes for event in events), default=0)
    return (event._replace(room_bytes=most_bytes - event.other_bytes) for event in events)
