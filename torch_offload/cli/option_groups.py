"""Options of a command that belong together, as one object: with them it does something else."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

Group = TypeVar("Group")


def option_group(
    group: type[Group], instead: Callable[[Group, Mapping[str, Any]], None]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a group.

    Args:
        group: A dataclass; each field is an option, annotated as typer wants it.
        instead: Called before the command with these and the other options; ends the program where it has done the
            work.
    """

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        own_fields = fields(group)  # type: ignore[arg-type]

        @functools.wraps(command)
        def called(**options: Any) -> None:
            own = group(**{each.name: options.pop(each.name) for each in own_fields})
            instead(own, options)
            command(**options)

        parameters = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in own_fields
        ]
        signature = inspect.signature(command)
        called.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), *parameters]
        )
        return called

    return with_options
