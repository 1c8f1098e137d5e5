"""Options of the command line, generated from the settings of ``Config`` and ``Emulation``."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_offload.config import Config, Emulation, SettingField, setting_fields
from torch_offload.runtime.settings import overrides
from torch_offload.system import environment
from torch_offload.system.terminal import echo

EMULATE = "emulate_"
_METAVARS = (("size", "SIZE"), ("count", "COUNT"), ("path", "PATH"), ("paths", "DIR"))
_TYPES = (("flag", bool), ("count", int), ("paths", list[str]))


def _settings() -> dict[str, SettingField]:
    """Return every setting by the name of its parameter."""
    return {setting.name: setting for setting in setting_fields()} | {
        f"{EMULATE}{setting.name}": setting for setting in setting_fields(Emulation)
    }


def _flags(parameter: str, setting: SettingField) -> str:
    """Return ``--name``, and ``--name/--no-name`` where a flag can be on by default."""
    name = parameter.replace("_", "-")
    return f"--{name}/--no-{name}" if setting.kind == "flag" and not parameter.startswith(EMULATE) else f"--{name}"


def _option(parameter: str, setting: SettingField) -> inspect.Parameter:
    is_emulation = parameter.startswith(EMULATE)
    metavar = "|".join(setting.choices) or dict(_METAVARS).get(setting.kind)
    summary = setting.summary.replace("``", "")
    option = typer.Option(
        _flags(parameter, setting), metavar=metavar, help=summary, hidden=is_emulation, show_default=False
    )
    kind = dict(_TYPES).get(setting.kind, str)
    return inspect.Parameter(
        parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def config_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some settings, all of them where none is named, and ``--config``.

    The command gets the settings that were given on the command line as its argument ``given``, the file as ``file``.
    """
    settings = _settings()
    chosen = [name for name in settings if not names or name in names or (name.startswith(EMULATE) and "gpu" in names)]

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(*args: Any, config: Path | None = None, **options: Any) -> None:
            given = {name: options.pop(name) for name in chosen}
            is_given = {name: value for name, value in given.items() if value not in (None, [])}
            command(*args, given=is_given, file=config, **options)

        file_option = typer.Option(
            "--config", metavar="FILE", help="YAML or JSON file of settings; options come first."
        )
        file = inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, file_option]
        )
        signature = inspect.signature(command)
        own = [parameter for name, parameter in signature.parameters.items() if name not in ("given", "file")]
        parameters = [*own, *(_option(name, settings[name]) for name in chosen), file]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
        return called

    return with_options


def config_from(given: Mapping[str, Any], file: Path | None, **defaults: Any) -> Config:
    """Return the settings of the command line, before those of a file, before those of the environment variable.

    Options that take precedence over a setting of the file or the variable are named on stderr, in a line for each.

    Args:
        given: Settings of the command line.
        file: Of ``--config``.
        **defaults: Settings of this command where no place has them.

    Raises:
        ConfigError: If a setting cannot be used. The message names the file and the line, or the variable.
    """
    emulation = {name.removeprefix(EMULATE): value for name, value in given.items() if name.startswith(EMULATE)}
    options = {name: value for name, value in given.items() if not name.startswith(EMULATE)}
    flags = {name.replace(EMULATE, "emulation."): f"--{name.replace('_', '-')}" for name in given}
    base = Config(**defaults)
    sources = [(environment.configured(), environment.CONFIG_SOURCE)]
    sources += [] if file is None else [(Config.from_file(file), str(file))]
    for settings, source in sources:
        if settings is None:
            continue
        base = base.replace(**{name: getattr(settings, name) for name in settings.model_fields_set})
        message = overrides(flags, settings, source)
        if message is not None:
            echo(f"torch-offload: {message}", err=True)
    if emulation:
        before = {} if base.emulation is None else base.emulation.model_dump(exclude_unset=True)
        options["emulation"] = {**before, **emulation}
    return base.replace(**options)


def flags_without_value() -> frozenset[str]:
    """Return every option that takes no value."""
    flags = [_flags(name, setting) for name, setting in _settings().items() if setting.kind == "flag"]
    return frozenset(flag for both in flags for flag in both.split("/"))
