"""Options of ``plan`` that are of a pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from torch_offload.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What the command line says of a pipeline; None: nothing.

    Attributes:
        schedule: Name of torch's schedule, or ``auto``.
        ranks: How many.
        stages: How many.
    """

    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|auto",
            help="Plan the ranks of a pipeline by 1F1B, GPipe, Interleaved1F1B or LoopedBFS; auto: what moves least.",
        ),
    ] = None
    ranks: Annotated[int | None, typer.Option(metavar="COUNT", help="With --schedule: ranks of the pipeline.")] = None
    stages: Annotated[
        int | None, typer.Option(metavar="COUNT", help="With --schedule: its stages; default those that move least.")
    ] = None

    def check(self, others: Mapping[str, Any]) -> None:
        """Refuse what does not go together.

        Args:
            others: The other options of the command.

        Raises:
            ConfigError: The message names the options.
        """
        if self.schedule is None:
            given = [f"--{name}" for name in ("ranks", "stages") if getattr(self, name) is not None]
            if given:
                raise ConfigError(f"{', '.join(given)}: of a pipeline; give its --schedule as well, or --schedule auto")
        elif others["evaluate"] or others["generate"] is not None:
            raise ConfigError("--schedule plans how to train; leave --evaluate and --generate out")
