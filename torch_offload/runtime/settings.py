"""The settings of a call: its arguments, before ``config``, before the environment variable, before the defaults."""

from collections.abc import Mapping
from typing import Any

from torch_offload.config import Config, Settings
from torch_offload.errors import ConfigError
from torch_offload.system import environment


def requested(config: Settings | None, **arguments: Any) -> Config:
    """Return the settings that a call asks for.

    Args:
        config: Of the call; None: those of the environment variable ``TORCH_OFFLOAD_CONFIG``.
        **arguments: Of the call, those that are None left out.

    Raises:
        ConfigError: If a setting does not exist or cannot be used. The message names where it comes from.
    """
    if config is None:
        config = environment.configured()
    return Config.combine(config, **arguments)


def overrides(flags: Mapping[str, str], config: Config, source: str) -> str | None:
    """Return the message that options take precedence over other settings, None where none does.

    Args:
        flags: Options of a command line, by the setting that each gives; a nested one as ``emulation.gpu``.
        config: The other settings.
        source: Their name in the message.
    """
    nested = set() if config.emulation is None else config.emulation.model_fields_set
    names = config.model_fields_set | {f"emulation.{name}" for name in nested}
    both = [flag for name, flag in sorted(flags.items()) if name in names]
    return f"{', '.join(both)} on the command line override{'s' * (len(both) == 1)} {source}" if both else None


def check_arguments(function: str, unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that a public function does not have.

    Raises:
        ConfigError: If there is one; the message names the setting to use instead.
    """
    if "device" in unknown:
        raise ConfigError(
            f"{function}() has no argument 'device'; give gpu= the size of the GPU memory to use, such as gpu='24GiB'"
        )
    for name in unknown:
        try:
            Config(**{name: unknown[name]})
        except ConfigError as error:
            raise ConfigError(f"{function}(): {error}") from None
        raise ConfigError(f"{function}() has no argument {name!r}; give it as config={{{name!r}: {unknown[name]!r}}}")
