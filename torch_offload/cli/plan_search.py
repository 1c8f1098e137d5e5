"""``torch-offload plan --search``: what the command line asks for, and what it prints."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torch_offload.cli.config_options import config_from
from torch_offload.cli.search_options import SearchOptions
from torch_offload.config import parse_size
from torch_offload.diagnostics.probe import probe_with_progress
from torch_offload.errors import ConfigError
from torch_offload.integrations import hf_models
from torch_offload.integrations.trained_parts import TrainedParts
from torch_offload.planning import api
from torch_offload.planning.page_uses import moments_named, optimizer_named
from torch_offload.planning.search import DEFAULT_TIMING_SECONDS, Question, Recordings, answer
from torch_offload.planning.search_page import write_page
from torch_offload.planning.search_result import Search
from torch_offload.planning.setups import precisions_named, rows_of_step
from torch_offload.planning.what_if import Machine, WhatIf, machines_of, rates_of, sizes_of
from torch_offload.runtime import preflight
from torch_offload.system import environment
from torch_offload.system.terminal import echo, error_console, show


def _split_ram(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the settings without a list of budgets, and that list; empty where there is one budget or none."""
    ram = given.get("ram")
    if not isinstance(ram, str) or "," not in ram:
        return dict(given), []
    return {name: value for name, value in given.items() if name != "ram"}, sizes_of(ram)


def run(options: SearchOptions, others: Mapping[str, Any]) -> int:
    """Search, print, and return the exit status: 1 where nothing fits.

    Args:
        options: Of the search.
        others: The other options of ``plan``.

    Raises:
        ConfigError: If an option cannot be used.
    """
    rows = rows_of_step(options.tokens_per_step or 0, others["sequence"])
    own = _own_setup(options.as_is, rows)
    rates = [] if options.ssd_rate is None else rates_of(options.ssd_rate)
    name = others["optimizer"] or api.DEFAULT_OPTIMIZER
    optimizer = None if name == "none" else optimizer_named(name)
    allow = precisions_named(() if options.allow is None else options.allow.split(","))
    settings, budgets = _split_ram(others["given"])
    config = config_from(settings, others["file"])
    model, loaded = model_of(others)
    processes = environment.process_count()
    decided, directories = api.resolved(config, processes)
    probe = probe_with_progress(config.scratch_directory, progress_on=error_console())
    ssd_bytes = others["ssd_bytes"]
    question = Question(
        config=decided,
        probe=probe,
        optimizer=optimizer,
        moments=moments_named(others["moments"] or "fp32", optimizer),
        processes=processes,
        ssd_bytes=(api.room_of(decided, directories) if ssd_bytes is None else parse_size(ssd_bytes)) // processes,
        allow=allow,
    )
    batch = hf_models.batch_of(rows, others["sequence"])
    known = Recordings(
        model,
        batch,
        probe=probe,
        timing_seconds=DEFAULT_TIMING_SECONDS,
        loaded=loaded,
        device=preflight.compute_device(decided),
    )
    machines = machines_of([max(1, size // processes) for size in budgets] or [decided.ram or 0], rates)
    found = WhatIf(searches=[(machine, answer(_on(machine, question), known)) for machine in machines])
    if options.html is not None:
        write_page(options.html, found, probe=probe)
    _print(found, options, own, as_json=others["as_json"])
    return 0 if found.fits else 1


def model_of(others: Mapping[str, Any]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model as it will be trained, and what of it lies in its checkpoint."""
    parts = TrainedParts.of(others["train"] or "full")
    described = hf_models.model_from(
        others["model"],
        dtype=others["dtype"],
        uses_checkpointing=others["checkpointing"],
        load_in_4bit=others["load_in_4bit"],
        trust_remote_code=others["trust_remote_code"],
    )
    return parts.apply(described.module), tuple(described.loaded)


def _on(machine: Machine, question: Question) -> Question:
    config = question.config.replace(ram=machine.ram_bytes)
    return replace(question, config=config, probe=machine.probe(question.probe))


def _print(found: WhatIf, options: SearchOptions, own: tuple[int, int] | None, *, as_json: bool) -> None:
    only = found.searches[0][1] if len(found.searches) == 1 else None
    if as_json:
        echo((only or found).to_json(indent=1))
        return
    show(only or found)
    if only is not None and own is not None:
        echo(_compared(only, own))
    if options.why:
        for line in (only or found).why():
            echo(line)
    if options.html is not None:
        echo(f"{options.html} written")


def _own_setup(as_is: str | None, rows: int) -> tuple[int, int] | None:
    """Return the script's own rows and accumulation.

    Raises:
        ConfigError: If they are not of this step.
    """
    if as_is is None:
        return None
    words = as_is.split("x")
    if len(words) != 2 or not all(word.isdigit() for word in words):
        raise ConfigError(f"--as-is: expected rows and accumulation such as 1x8, got {as_is!r}")
    own, accumulation = int(words[0]), int(words[1])
    if own * accumulation != rows:
        raise ConfigError(f"--as-is {as_is}: {own * accumulation} rows, but a step of these tokens has {rows}")
    return own, accumulation


def _compared(search: Search, own: tuple[int, int]) -> str:
    """Say what the script's own rows and accumulation would take, with all else as it is by default."""
    every = [*search.candidates, *search.refused]
    same = (each for each in every if (each.setup.rows, each.setup.accumulation) == own)
    yours = min(same, key=lambda each: (each.setup.activations != "page", each.setup.checkpointing), default=None)
    if yours is None or search.best is None:
        return "yours: not among the candidates"
    if not yours.fits:
        return f"yours, {yours.setup}: does not fit"
    at_least = "" if yours.plan is not None else "at least "
    return f"yours, {yours.setup}: {at_least}{yours.seconds:.3g} s, {yours.seconds / search.best.seconds:.2f}x"
