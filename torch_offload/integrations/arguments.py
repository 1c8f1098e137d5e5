"""Settings among the arguments of a script that uses ``transformers.HfArgumentParser``."""

import dataclasses
import logging
from typing import Any

from torch_offload.config import Config, SettingField, setting_fields
from torch_offload.runtime.settings import overrides, requested
from torch_offload.system import environment

logger = logging.getLogger(__name__)

PREFIX = "offload_"
_TYPES = (("flag", bool), ("count", int), ("paths", list[str]))


class _Arguments:
    """Methods of :class:`OffloadArguments`."""

    def to_config(self) -> Config:
        """Return the settings that were given, before those of ``--offload_config`` and the environment variable.

        One warning names the arguments that take precedence over a setting of the file or the variable.

        Raises:
            ConfigError: If a setting cannot be used.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        file = given.pop(f"{PREFIX}config")
        base = environment.configured() if file is None else Config.from_file(file)
        if base is not None:
            flags = {name.removeprefix(PREFIX): f"--{name}" for name, value in given.items() if value is not None}
            message = overrides(flags, base, environment.CONFIG_SOURCE if file is None else file)
            if message is not None:
                logger.warning(message)
        return requested(base, **{name.removeprefix(PREFIX): value for name, value in given.items()})


def _argument(setting: SettingField) -> tuple[str, Any, Any]:
    """Return name, type and field; None stands for a setting that was not given."""
    kind = dict(_TYPES).get(setting.kind, str)
    metadata: dict[str, Any] = {"help": setting.description.replace("``", "").replace("%", "%%")}  # argparse formats it
    if setting.choices:
        metadata["choices"] = list(setting.choices)
    return f"{PREFIX}{setting.name}", kind | None, dataclasses.field(default=None, metadata=metadata)


OffloadArguments = dataclasses.make_dataclass(
    "OffloadArguments",
    [
        *(_argument(setting) for setting in setting_fields()),
        (
            f"{PREFIX}config",
            str | None,
            dataclasses.field(default=None, metadata={"help": "YAML or JSON file of settings; the others come first."}),
        ),
    ],
    bases=(_Arguments,),
    namespace={
        "__doc__": "The settings of :class:`torch_offload.Config`, each as ``--offload_NAME``.",
        "__module__": __name__,
    },
)
"""A dataclass: ``HfArgumentParser((OffloadArguments, TrainingArguments))``, then ``arguments.to_config()``."""
