"""The stages of a pipeline, cut out of the recording of one pass of the whole model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from torch_offload.activations.recompute import all_layers_of
from torch_offload.errors import UnsupportedModelError
from torch_offload.planning.fake_trace import Moment, Recording, What


@dataclass
class Stage:
    """What one stage does with one micro-batch.

    A temporary has the number that it has in the recording. What another stage has made comes into memory that is the
    stage's own for good, so nothing frees it.

    Attributes:
        parameters: Numbers of those that it uses.
        forward: In the order in which they happen.
        backward: The same.
        received: Bytes of what other stages made, by number: inputs, and gradients of outputs.
    """

    parameters: set[int] = field(default_factory=set)
    forward: list[Moment] = field(default_factory=list)
    backward: list[Moment] = field(default_factory=list)
    received: dict[int, int] = field(default_factory=dict)


def layers_to_divide(model: nn.Module) -> list[nn.Module]:
    """Return what stages are made of: layers that transformers knows as such, else the longest list of modules.

    Raises:
        UnsupportedModelError: If there are none.
    """
    layers = [layer for _, layer in all_layers_of(model)]
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    found = layers or max(lists, key=len, default=[])
    if len(found) < 2:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layers that stages could be made of: none that transformers can "
            "checkpoint, and no torch.nn.ModuleList or torch.nn.Sequential of two modules"
        )
    return found


def divided(recording: Recording, layers: int, stages: int) -> list[Stage]:
    """Cut a recording into stages of equally many layers.

    What comes before the first layer belongs to the first stage, what comes after the last layer to the last one.

    Args:
        recording: With a mark for each layer.
        layers: How many; a multiple of `stages`.
        stages: How many.

    Raises:
        UnsupportedModelError: If layers do not follow one another, or stages share a parameter that trains.
    """
    _check_order(recording, layers)
    cut = _Cutting([Stage() for _ in range(stages)], layers // stages)
    for moment in recording.moments:
        cut.take(moment)
    cut.free_sent()
    _check_parameters(recording, cut.stages)
    return cut.stages


class _Cutting:
    """Gives each moment to its stage."""

    def __init__(self, stages: list[Stage], layers: int) -> None:
        """Begin with the forward of the first stage.

        Args:
            stages: Without moments.
            layers: Of each stage.
        """
        self.stages = stages
        self._layers = layers
        self._current = 0
        self._is_backward = False
        self._makers: dict[int, int] = {}  # of temporaries that are alive: their stages
        self._sizes: dict[int, int] = {}
        self._sent: list[tuple[int, Moment]] = []

    def take(self, moment: Moment) -> None:
        """Take what happened next."""
        if moment.what is What.layer:
            self._current = self._stage_at(moment.subject)
        elif moment.what is What.backward:
            self._is_backward = True
        elif moment.what is What.free and self._makers.get(moment.subject, self._current) != self._current:
            self._sent.append((self._makers[moment.subject], moment))
        else:
            self._keep(moment)

    def free_sent(self) -> None:
        """Free what others were the last to use where its own stage has done its backward: it has held it so long."""
        for stage, moment in self._sent:
            self.stages[stage].backward.append(moment)

    def _stage_at(self, layer: int) -> int:
        """Return the stage that goes on at a mark: that of the layer, or the one before where its backward ended."""
        stage, place = divmod(layer, self._layers)
        return max(stage - 1, 0) if self._is_backward and place == 0 else stage

    def _keep(self, moment: Moment) -> None:
        stage = self.stages[self._current]
        if moment.what is What.allocate:
            self._makers[moment.subject] = self._current
            self._sizes[moment.subject] = moment.size_bytes
        used = moment.temporaries if moment.what is not What.save else (moment.subject,)
        for number in used:
            if self._makers.get(number, self._current) != self._current:
                stage.received[number] = self._sizes[number]
        stage.parameters.update(moment.parameters)
        if moment.what is What.finish:
            stage.parameters.add(moment.subject)
        (stage.backward if self._is_backward else stage.forward).append(moment)


def _check_order(recording: Recording, layers: int) -> None:
    backward = next((i for i, m in enumerate(recording.moments) if m.what is What.backward), len(recording.moments))
    begun = [moment.subject for moment in recording.moments[:backward] if moment.what is What.layer]
    if begun != list(range(layers)):
        raise UnsupportedModelError(
            f"the {layers} layers of the model do not run once each in their order, so they are no stages of a pipeline"
        )


def _check_parameters(recording: Recording, stages: Sequence[Stage]) -> None:
    """Refuse what two stages would have to train together; what does not train each has for itself."""
    users: Mapping[int, list[int]] = {
        index: [number for number, stage in enumerate(stages) if index in stage.parameters]
        for index, parameter in enumerate(recording.parameters)
        if parameter.is_trained
    }
    for index, numbers in users.items():
        if len(numbers) > 1:
            name = recording.parameters[index].name
            raise UnsupportedModelError(
                f"{name} is used by stages {numbers[0]} and {numbers[-1]}: a pipeline does not train weights that are "
                "tied across stages; plan a model that does not tie them (tie_word_embeddings=False)"
            )


def stage_counts(layers: int, ranks: int) -> list[int]:
    """Return every number of equal stages that layers can be cut into, the same number of them for each rank."""
    return [count for count in range(ranks, layers + 1, ranks) if layers % count == 0]
