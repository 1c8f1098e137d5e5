"""Measures a directory's disk with the engine that pages use, and recommends a queue depth."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from torch_offload import _C
from torch_offload.config import DEFAULT_QUEUE_DEPTH, SECTOR_BYTES, IoEngine, format_size
from torch_offload.errors import ConfigError, OutOfTierMemory
from torch_offload.reporting.progress import Show, progress
from torch_offload.reporting.result import Result
from torch_offload.system import resources

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEPTHS = (1, 2, 4, 8, 16, 32)
PATTERNS = ("read", "write", "mix")
ROUNDS = 3  # of which the median counts: disks vary from second to second
GOOD_ENOUGH = 0.95
MAX_SHARE_OF_DISK = 0.5
BLOCKS_PER_DEPTH = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """Parameters of a measurement.

    Attributes:
        directory: On a real disk.
        file_bytes: Size of the scratch file; at most half of the free disk is taken.
        block_bytes: Of one transfer.
        seconds: Per figure, in several rounds.
        io_engine: As in ``Config``.
    """

    directory: Path
    file_bytes: int
    block_bytes: int
    seconds: float
    io_engine: IoEngine = "auto"


@dataclass(frozen=True, kw_only=True)
class DepthFigures:
    """Bytes per second at one depth; of the mix, reads and writes together."""

    queue_depth: int
    read: float
    write: float
    mix: float


@dataclass(frozen=True, kw_only=True)
class SsdBenchmark(Result):
    """Result of a measurement.

    Attributes:
        recommended_queue_depth: The smallest depth at which reads, writes and the mix reach 95 % of the best each.
        notes: What a reader should know about the figures.
    """

    directory: str
    filesystem: str | None
    io_engine: str
    is_direct: bool
    file_bytes: int
    block_bytes: int
    figures: list[DepthFigures]
    recommended_queue_depth: int
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        return asdict(self)

    def __rich__(self) -> "Table":
        """Return it as a table for rich."""
        from torch_offload.system.tables import PlainTable

        table = PlainTable(
            title=f"{self.directory} ({self.filesystem or 'unknown file system'}), {self.io_engine}, "
            f"{format_size(self.block_bytes)} transfers in a file of {format_size(self.file_bytes)}",
            caption="\n".join([*self.notes, self.recommendation()]),
        )
        for name in ("queue depth", "read GB/s", "write GB/s", "1:1 mix GB/s"):
            table.add_column(name, justify="right")
        for row in self.figures:
            is_it = row.queue_depth == self.recommended_queue_depth
            rates = [f"{rate / 1e9:.2f}" for rate in (row.read, row.write, row.mix)]
            table.add_row(str(row.queue_depth), *rates, style="bold" if is_it else None)
        return table

    def recommendation(self) -> str:
        """Say which depth to set."""
        depth = self.recommended_queue_depth
        return f"Recommended: --queue-depth {depth} (default {DEFAULT_QUEUE_DEPTH})"


def directory_for(ssd: Path | None, *, file_bytes: int) -> Path:
    """Return the directory to measure: the one given, or the one that pages would go to.

    Raises:
        ConfigError: If it cannot hold pages. The message says why.
    """
    directory = resources.default_scratch_directory(needed_bytes=file_bytes) if ssd is None else ssd
    reason = resources.scratch_refusal(directory)
    if reason is not None:
        raise ConfigError(f"ssd: {reason}")
    return directory.resolve()


def measure_with_progress(request: Request, *, progress_on: "Console") -> SsdBenchmark:
    """Measure; a bar on the console where that is a terminal, nothing otherwise."""
    with progress(progress_on, "measuring the disk", uses_lines=False) as show:
        return measure(request, show=show)


def measure(request: Request, *, show: Show | None = None) -> SsdBenchmark:
    """Measure every depth that the free space allows.

    Args:
        request: What to measure.
        show: Told what is measured next, how many figures are done and how many there are.

    Raises:
        ConfigError: If the sizes do not fit together.
        OutOfTierMemory: If the disk has no room for the smallest file.
        TierIOError: If a transfer fails or brings wrong bytes.
    """
    file_bytes, depths, notes = _fitted(request)
    probe = _C.SsdProbe(
        directory=str(request.directory),
        io_engine=request.io_engine,
        file_bytes=file_bytes,
        block_bytes=request.block_bytes,
        max_depth=depths[-1],
    )
    if not probe.is_direct:
        notes.append("No direct I/O on this file system: the figures include the page cache, that is memory.")
    total = ROUNDS * len(depths) * len(PATTERNS)
    rates: dict[tuple[int, str], list[float]] = {(depth, pattern): [] for depth in depths for pattern in PATTERNS}
    for done, (depth, pattern) in enumerate([*rates] * ROUNDS):
        if show is not None:
            show(f"{pattern} at depth {depth}", done, total)
        moved = probe.measure(pattern=pattern, depth=depth, seconds=request.seconds / ROUNDS)
        rates[depth, pattern].append((moved["read_bytes"] + moved["written_bytes"]) / moved["seconds"])
    figures = [
        DepthFigures(queue_depth=depth, **{pattern: median(rates[depth, pattern]) for pattern in PATTERNS})
        for depth in depths
    ]
    return SsdBenchmark(
        directory=str(request.directory),
        filesystem=resources.filesystem_of(request.directory),
        io_engine=probe.engine_name,
        is_direct=probe.is_direct,
        file_bytes=probe.file_bytes,
        block_bytes=request.block_bytes,
        figures=figures,
        recommended_queue_depth=recommended_depth(figures),
        notes=notes,
    )


def recommended_depth(figures: list[DepthFigures]) -> int:
    """Return the smallest depth at which every pattern reaches 95 % of its best, else the one with the best mix."""
    best = {pattern: max(getattr(row, pattern) for row in figures) for pattern in PATTERNS}
    for row in figures:
        if all(getattr(row, pattern) >= GOOD_ENOUGH * best[pattern] for pattern in PATTERNS):
            return row.queue_depth
    return max(figures, key=lambda row: row.mix).queue_depth


def _fitted(request: Request) -> tuple[int, list[int], list[str]]:
    """Return the size of the file and the depths that the free disk allows, and what was cut for it."""
    block_bytes = request.block_bytes
    if block_bytes <= 0 or block_bytes % SECTOR_BYTES != 0:
        raise ConfigError(f"block: must be a positive multiple of {SECTOR_BYTES} bytes, got {block_bytes}")
    free_bytes = resources.free_disk_bytes(request.directory)
    file_bytes = min(request.file_bytes, int(free_bytes * MAX_SHARE_OF_DISK)) // block_bytes * block_bytes
    needed_bytes = BLOCKS_PER_DEPTH * DEPTHS[0] * block_bytes
    if request.file_bytes < needed_bytes:
        raise ConfigError(f"size: must be at least {needed_bytes} bytes for transfers of {block_bytes}")
    if file_bytes < needed_bytes:
        raise OutOfTierMemory(
            f"ssd tier: measuring needs {2 * needed_bytes} free bytes in {request.directory}, {free_bytes} are free; "
            "free space there, or give a directory on a larger disk"
        )
    depths = [depth for depth in DEPTHS if BLOCKS_PER_DEPTH * depth * block_bytes <= file_bytes]
    return file_bytes, depths, list(_notes(request, file_bytes, depths))


def _notes(request: Request, file_bytes: int, depths: list[int]) -> Iterator[str]:
    if file_bytes < request.file_bytes // request.block_bytes * request.block_bytes:
        yield (
            f"The disk has little free space: measured in {format_size(file_bytes)} instead of "
            f"{format_size(request.file_bytes)}."
        )
    if depths[-1] < DEPTHS[-1]:
        yield f"Depths above {depths[-1]} need a larger file than {format_size(file_bytes)}."
