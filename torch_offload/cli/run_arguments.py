"""Where the options of ``run`` end and the script's own arguments begin."""

from collections.abc import Sequence

RUN = "run"
FLAGS = frozenset({"--live", "--no-live", "-h", "--help"})
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
