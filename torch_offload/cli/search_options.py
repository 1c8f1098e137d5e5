"""Options of ``plan`` that are of a search."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_offload.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What the command line says of a search; None or False: nothing.

    Attributes:
        search: Whether there shall be one.
        tokens_per_step: Of all micro-batches together.
        allow: Precisions, names after commas.
        as_is: Rows and accumulation as the script has them, such as ``1x8``.
        ssd_rate: Rates after commas.
        html: File of a page.
        why: Whether each candidate is explained.
    """

    search: Annotated[
        bool, typer.Option("--search", help="Choose rows, accumulation, activations and recomputing.")
    ] = False
    tokens_per_step: Annotated[
        int | None, typer.Option(metavar="COUNT", help="With --search: tokens of a step, all micro-batches together.")
    ] = None
    allow: Annotated[
        str | None, typer.Option(metavar="bf16,8bit-moments", help="With --search: other numbers that may be chosen.")
    ] = None
    as_is: Annotated[
        str | None, typer.Option(metavar="ROWSxCOUNT", help="With --search: what the script has now, such as 1x8.")
    ] = None
    ssd_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE,RATE", help="With --search: what if the disk had these rates, such as 3GB/s,7GB/s."),
    ] = None
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="With --search: write a page with charts.")] = None
    why: Annotated[bool, typer.Option("--why", help="With --search: say of each candidate what decides.")] = False

    def check(self, others: Mapping[str, Any]) -> None:
        """Refuse what does not go together.

        Args:
            others: The other options of the command.

        Raises:
            ConfigError: The message names the options.
        """
        given = [f"--{each.name.replace('_', '-')}" for each in fields(self) if getattr(self, each.name)]
        if not self.search:
            if given:
                raise ConfigError(f"{', '.join(given)}: of a search; give --search as well")
            return
        if others["evaluate"] or others["generate"] is not None:
            raise ConfigError("--search chooses how to train; leave --evaluate and --generate out")
        if others["schedule"] is not None:
            raise ConfigError("--search chooses how one process trains; leave --schedule out")
        if self.tokens_per_step is None:
            raise ConfigError("--search needs --tokens-per-step: rows times their tokens, all micro-batches together")
        if others["batch"] != 1 or others["micro_batches"] not in (1, None):
            raise ConfigError("--batch and --micro-batches are what --search chooses; leave them out, or --as-is 1x8")
