"""Examines a machine: what the system says, what the disk does, and whether a small paged training run is exact."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from torch_offload import _C
from torch_offload.config import SECTOR_BYTES, Config, format_size
from torch_offload.diagnostics import checks
from torch_offload.diagnostics.check_result import CheckResult, DoctorReport, State
from torch_offload.errors import ConfigError, OffloadError
from torch_offload.runtime.api import report, unwrap, wrap
from torch_offload.runtime.process import PROCESS
from torch_offload.system import resources

TRIAL_RAM_BYTES = 4 << 20
TRIAL_WIDTH = 256
TRIAL_LAYERS = 12
TRIAL_STEPS = 3
PROBE_BLOCK_BYTES = 256 << 10
PROBE_FILE_BYTES = 4 << 20
PROBE_SECONDS = 0.05


class Limits(NamedTuple):
    """What a run may take of its disk, as in ``Config``."""

    keep_free: int | None = None
    max_spill: int | None = None


def run_checks(
    *, ram: int | None = None, ssd: Path | None = None, keep_free: int | None = None, max_spill: int | None = None
) -> DoctorReport:
    """Look at everything that paging needs.

    Args:
        ram: The budget that a run will have; None: the one that would be chosen.
        ssd: The directory that a run will use; None: the one that would be chosen.
        keep_free: As in ``Config``.
        max_spill: The same.
    """
    limits = Limits(keep_free, max_spill)
    planned_ram = _planned_ram(ram)
    results = [
        checks.torch_result(),
        checks.cuda_result(),
        checks.kernel_result(),
        checks.processor_result(),
        checks.memory_result(ram=ram),
        checks.io_engine_result(),
        checks.memlock_result(needed_bytes=planned_ram),
        checks.address_result(),
        checks.mappings_result(ram=planned_ram),
        checks.huge_page_result(),
    ]
    directory, directory_results = _directory_results(ssd, ram=planned_ram, limits=limits)
    results += directory_results
    if directory is not None:
        results.append(training_result(directory, limits))
    return DoctorReport([*results, *checks.package_results()])


def _planned_ram(ram: int | None) -> int:
    if ram is not None:
        return ram
    try:
        return resources.default_ram_bytes()
    except ConfigError:
        return 0  # memory_result says so


def _directory_results(ssd: Path | None, *, ram: int, limits: Limits) -> tuple[Path | None, list[CheckResult]]:
    """Return the directory that can be used, None where none can, and what there is to say about it."""
    name = "directory"
    try:
        directory = _default_directory(ram=ram, limits=limits) if ssd is None else ssd
    except ConfigError as error:
        return None, [
            CheckResult(name=name, state=State.problem, what=str(error), remedy="give a directory on a disk with --ssd")
        ]
    refusal = resources.scratch_refusal(directory)
    if refusal is not None:
        what, _, remedy = refusal.partition("; ")
        remedy = f"{remedy or 'name a directory on a disk'} (--ssd){_example(ram, limits)}"
        return None, [CheckResult(name=name, state=State.problem, what=what, remedy=remedy)]
    found = [_space_result(directory, ram=ram, limits=limits), transfer_result(directory)]
    usable = all(result.state is not State.problem for result in found)
    return (directory if usable else None), found


def _default_directory(*, ram: int, limits: Limits) -> Path:
    return resources.default_scratch_directory(needed_bytes=ram, keep_free=limits.keep_free)


def _example(ram: int, limits: Limits) -> str:
    try:
        return f", such as {_default_directory(ram=ram, limits=limits)}"
    except ConfigError:
        return ""


def _space_result(directory: Path, *, ram: int, limits: Limits) -> CheckResult:
    free_bytes = resources.room_for_pages((directory,), keep_free=limits.keep_free, max_spill=limits.max_spill)
    what = (
        f"{directory} ({resources.filesystem_of(directory) or 'unknown file system'}), {format_size(free_bytes)} free"
        f"{_kept(directory, limits)}"
    )
    if free_bytes < SECTOR_BYTES:
        remedy = "free space there, lower --keep-free, or give a directory on a larger disk (--ssd)"
        return CheckResult(name="directory", state=State.problem, what=what, remedy=remedy)
    warning = next(resources.scratch_warnings(directory), None)
    if warning is not None:
        concern, _, remedy = warning.partition("; ")
        return CheckResult(name="directory", state=State.warning, what=f"{what}; {concern}", remedy=remedy)
    if free_bytes >= ram:
        return CheckResult(name="directory", state=State.ok, what=what)
    return CheckResult(
        name="directory",
        state=State.warning,
        what=f"{what}: less than the budget of memory ({format_size(ram)}), so that little more than it can be held",
        remedy=f"a model may take about {format_size(ram + free_bytes)} with gradients and optimizer states; "
        "free space there, or give a directory on a larger disk (--ssd)",
    )


def _kept(directory: Path, limits: Limits) -> str:
    kept_bytes = resources.kept_bytes(directory, keep_free=limits.keep_free)
    return f" beside {format_size(kept_bytes)} that stay so (--keep-free)" if kept_bytes else ""


def transfer_result(directory: Path) -> CheckResult:
    """Whether bytes written to the directory come back the same, and whether they pass by the page cache."""
    name = "direct I/O"
    try:
        probe = _C.SsdProbe(
            directory=str(directory),
            io_engine="auto",
            file_bytes=PROBE_FILE_BYTES,
            block_bytes=PROBE_BLOCK_BYTES,
            max_depth=4,
        )
        probe.measure(pattern="mix", depth=4, seconds=PROBE_SECONDS)
    except (OffloadError, OSError) as error:
        what, _, remedy = str(error).partition("; ")
        return CheckResult(
            name=name, state=State.problem, what=what, remedy=remedy or "give a directory on another disk (--ssd)"
        )
    if probe.is_direct:
        return CheckResult(name=name, state=State.ok, what=f"works in {directory}; test transfers came back the same")
    return CheckResult(
        name=name,
        state=State.warning,
        what=f"{directory} has none: pages pass through the page cache, which takes memory beside the budget",
        remedy="give a directory on a local disk with ext4 or xfs (--ssd)",
    )


def training_result(directory: Path, limits: Limits | None = None) -> CheckResult:
    """Train a small model in memory and paged and compare every bit."""
    name = "trial run"
    if PROCESS.session is not None:
        return CheckResult(name=name, state=State.ok, what="left out: a model of this process is paged already")
    try:
        config = Config(
            ram=TRIAL_RAM_BYTES, ssd=directory, page_elements=SECTOR_BYTES, **(limits or Limits())._asdict()
        )
        plain, paged = _train(None), _train(config)
        moved_bytes = report().ssd_read_bytes
    except (OffloadError, OSError, RuntimeError) as error:
        PROCESS.close_session()
        what, _, remedy = str(error).partition("; ")
        return CheckResult(name=name, state=State.problem, what=what, remedy=remedy or "see the message")
    if all(torch.equal(one, other) for one, other in zip(plain, paged, strict=True)):
        what = f"{TRIAL_STEPS} paged steps, {format_size(moved_bytes)} read back, equal to those in memory bit for bit"
        return CheckResult(name=name, state=State.ok, what=what)
    return CheckResult(
        name=name,
        state=State.problem,
        what="a paged run gave other numbers than one in memory",
        remedy="do not train here; report it with the output of torch-offload doctor --json",
    )


def _train(config: Config | None) -> list[torch.Tensor]:
    """Return the weights after a few steps of a model whose state is three times the trial's budget."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(TRIAL_WIDTH, TRIAL_WIDTH) for _ in range(TRIAL_LAYERS)))
        batch = torch.randn(8, TRIAL_WIDTH)
    if config is not None:
        wrap(model, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for _ in range(TRIAL_STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    if config is not None:
        unwrap(model)
    return weights
