"""The arguments of ``run``: where its options end and the script's begin, and which file the script is."""

import difflib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_offload.cli.config_options import flags_without_value
from torch_offload.errors import ConfigError

RUN = "run"
FLAGS = frozenset({*flags_without_value(), "--fit", "-h", "--help"})
MODULE_OPTIONS = ("-m", "--module")


def separate_script(argv: Sequence[str]) -> list[str]:
    """Put ``--`` before what belongs to the script, so that no parser looks at it.

    That is everything from the first argument that is neither an option of ``run`` nor its value, and everything after
    ``-m MODULE``.
    """
    arguments = list(argv)
    if not arguments or arguments[0] != RUN:
        return arguments
    position, is_module = 1, False
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--" or not argument.startswith("-") or argument == "-":
            break
        position += 1 if _stands_alone(argument) else 2
        is_module = _names_module(argument)
        if is_module:
            break
    if position >= len(arguments) or (arguments[position] == "--" and not is_module):
        return arguments
    return [*arguments[:position], "--", *arguments[position:]]


def _stands_alone(argument: str) -> bool:
    """Whether the next argument is not this option's value."""
    is_joined = argument.startswith("--") and "=" in argument
    is_short_joined = not argument.startswith("--") and len(argument) > 2
    return argument in FLAGS or is_joined or is_short_joined


def _names_module(argument: str) -> bool:
    is_short_joined = argument.startswith("-m") and not argument.startswith("--")
    return argument in MODULE_OPTIONS or is_short_joined or argument.startswith("--module=")


def script_path(name: str) -> str:
    """Return the file of a script: a path, or else the name of an installed command that is a Python script.

    Raises:
        ConfigError: If there is neither. The message names the nearest one.
    """
    script = Path(name)
    if script.exists():
        if script.is_dir() and not (script / "__main__.py").exists():
            raise ConfigError(f"{name} is a directory without a __main__.py; name a Python file")
        return name
    command = _installed_command(name) if script.name == name else None
    if command is None:
        nearest = _nearest(script)
        hint = f"did you mean {nearest}?" if nearest else "give a Python file, an installed command, or -m MODULE"
        kind = "script or installed command" if script.name == name else "script"
        raise ConfigError(f"there is no {kind} {name}; {hint}")
    if not _is_python_script(command):
        raise ConfigError(f"{command} is no Python script; give one that is, or a module with -m")
    return str(command)


def _installed_command(name: str) -> Path | None:
    """Return the command of this environment, else the one on the search path."""
    beside_python = shutil.which(name, path=str(Path(sys.executable).parent))
    command = beside_python or shutil.which(name)
    return None if command is None else Path(command)


def _is_python_script(path: Path) -> bool:
    with path.open("rb") as file:
        first_line = file.readline(256)
    return first_line.startswith(b"#!") and b"python" in first_line


def _nearest(script: Path) -> str | None:
    """Return the name most like that of a script: a Python file beside it, or an installed command."""
    folder = script.parent
    names = {entry.name: str(folder / entry.name) for entry in folder.glob("*.py")} if folder.is_dir() else {}
    if script.name == str(script):
        names |= {entry.name: entry.name for entry in Path(sys.executable).parent.glob("[a-z]*")}
    nearest = difflib.get_close_matches(script.name, names, n=1)
    return names[nearest[0]] if nearest else None
