"""Which weights of a model train, as ``torch-offload plan --train`` says it: all, LoRA's adapters, some layers."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from torch_offload.activations.recompute import all_layers_of
from torch_offload.errors import ConfigError

FULL = "full"
LORA = "lora"
LAYERS = "layers"
FORMS = "full, lora:r=16, lora:r=16,targets=q_proj+v_proj, or layers:4"


@dataclass(frozen=True)
class TrainedParts:
    """What trains.

    Attributes:
        kind: ``full``, ``lora`` or ``layers``.
        rank: Of LoRA's adapters.
        targets: Names of the modules that get one; empty: those that PEFT has for the model.
        layers: How many of the last layers train.
    """

    kind: str = FULL
    rank: int = 0
    targets: tuple[str, ...] = ()
    layers: int = 0

    @classmethod
    def of(cls, text: str) -> "TrainedParts":
        """Read what an option says.

        Raises:
            ConfigError: If it is not of one of the forms. The message names them.
        """
        kind, _, rest = text.strip().partition(":")
        if kind == FULL and not rest:
            return cls()
        if kind == LAYERS:
            return cls(LAYERS, layers=_count_of("layers", rest, text))
        if kind == LORA:
            return cls._lora(rest, text)
        nearest = difflib.get_close_matches(kind, (FULL, LORA, LAYERS), n=1)
        hint = f"did you mean {nearest[0]}? " if nearest and nearest[0] != kind else ""
        raise ConfigError(f"train: {hint}expected {FORMS}, got {text!r}")

    @classmethod
    def _lora(cls, rest: str, text: str) -> "TrainedParts":
        settings: dict[str, str] = {}
        for setting in filter(None, rest.split(",")):
            name, _, value = setting.partition("=")
            if name not in ("r", "targets") or not value:
                raise ConfigError(f"train: lora takes r and targets, got {setting!r} in {text!r}; such as {FORMS}")
            settings[name] = value
        if "r" not in settings:
            raise ConfigError(f"train: lora needs its rank, such as lora:r=16, got {text!r}")
        targets = tuple(filter(None, settings.get("targets", "").split("+")))
        return cls(LORA, rank=_count_of("the rank r of lora", settings["r"], text), targets=targets)

    def apply(self, model: nn.Module) -> nn.Module:
        """Freeze what does not train; return the model, with LoRA PEFT's around it.

        Args:
            model: A language model of transformers, on the meta device or not.

        Raises:
            ConfigError: If the model has too few layers or no such modules, or PEFT is missing.
        """
        if self.kind == LORA:
            return self._with_adapters(model)
        if self.kind == LAYERS:
            self._freeze_all_but_last(model)
        return model

    def _freeze_all_but_last(self, model: nn.Module) -> None:
        layers = [layer for _, layer in all_layers_of(model)]
        if self.layers > len(layers):
            raise ConfigError(f"train: the model has {len(layers)} layers, got layers:{self.layers}")
        model.requires_grad_(requires_grad=False)
        for layer in layers[-self.layers :]:
            layer.requires_grad_()

    def _with_adapters(self, model: nn.Module) -> nn.Module:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ConfigError(f"train: lora needs PEFT: pip install peft ({error})") from None
        config = LoraConfig(r=self.rank, target_modules=_named(self.targets), task_type="CAUSAL_LM")
        device = next(model.parameters()).device
        try:
            with device:
                made: nn.Module = get_peft_model(model, config)
        except ValueError as error:
            known = sorted(
                {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
            )
            raise ConfigError(
                f"train: PEFT finds nothing to adapt ({_first_line(error)}); name targets among {', '.join(known)}, "
                f"such as lora:r={self.rank},targets={'+'.join(known[:2])}"
            ) from None
        made.train(model.training)
        return made


def _named(targets: Iterable[str]) -> list[str] | str | None:
    """Return the modules as PEFT takes them; ``all-linear`` is a word of its own."""
    names = list(targets)
    return "all-linear" if names == ["all-linear"] else names or None


def _count_of(what: str, value: str, text: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigError(f"train: {what} must be a whole number of at least 1, got {value!r} in {text!r}")
    return int(value)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
