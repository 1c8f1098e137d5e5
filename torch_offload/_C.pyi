"""The compiled engine. Private: the public surface is ``torch_offload``."""

from types import TracebackType
from typing import Any, final

import torch

built_against_torch: str
has_liburing: bool
built_with_cuda: bool
cuda_architectures: tuple[str, ...]
"""GPU architectures of the kernels, as TORCH_CUDA_ARCH_LIST names them: "9.0", or "12.0+PTX" for later ones too."""

def set_log_level(level: int) -> None:
    """Route engine log lines at or above ``level`` to ``logging.getLogger("torch_offload")``."""

def is_managed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage is a segment of some engine and the tensor carries the key."""

def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor has bytes of its own, as opposed to standing for another one."""

def in_transform() -> bool:
    """Whether ``torch.func`` transforms what this thread runs: modules may hold tensors that stand for others."""

def in_backward() -> bool:
    """Whether this thread runs a part of a backward."""

def is_applied(gradient: torch.Tensor) -> bool:
    """Whether the backward has used this gradient up: see ``Engine.gradient_applied``."""

def may_hook_saved_tensors() -> bool:
    """Whether torch allows hooks on saved tensors now, and nobody has put any in place in this thread."""

def saved_tensor_hook_count() -> int:
    """The number of hooks on saved tensors that are in place in this thread."""

def engine_of_storage(storage: torch.UntypedStorage) -> tuple[Engine, torch.Tensor] | None:
    """Return the engine that pages a storage and a flat tensor of its bytes; None if it is not paged."""

def address_of(tensor: torch.Tensor) -> int:
    """Return where the storage of a managed tensor begins, which never changes; whether or not bytes are there."""

def engine_of(tensor: torch.Tensor) -> Engine | None:
    """The engine that pages the tensor's storage, if any."""

@final
class Pin:
    """Keeps a tensor's pages mapped; a context manager, released on exit or by ``release()``."""

    def __enter__(self) -> Pin: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def release(self) -> None: ...

@final
class RankWait:
    """A context in which the thread waits for other ranks."""

    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class PagedBuckets:
    """A context in which what torch's ``Reducer`` makes for gradients becomes pages."""

    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

@final
class SavedTensor:
    """Entry of the graph for a tensor that ``Engine.save_for_backward`` saved."""

def restore_for_backward(saved: SavedTensor) -> torch.Tensor:
    """Return the tensor; RuntimeError if it was changed in place since."""

@final
class ActivityRecord:
    """Activities of each resource, on the clock of ``time.monotonic_ns``."""

    @property
    def begin_ns(self) -> int:
        """When recording started."""
    @property
    def end_ns(self) -> int:
        """When the record was made."""
    @property
    def dropped_count(self) -> int:
        """Activities that came when there was no room any more: the record ends before them, on every lane."""
    def activities(self) -> list[tuple[str, int, int, int, int, str]]:
        """Return (lane, thread, begin, end, bytes, end of a label) in the order in which they ended, roughly."""

@final
class BudgetLedger:
    """A budget that the processes of one machine share, in a file of memory that ends with the last of them."""

    @staticmethod
    def make(*, name: str, budget_bytes: int, rank_count: int) -> BudgetLedger:
        """Make one. A link to it, to memfd:`name`, is among the open files of this process in /proc."""
    @staticmethod
    def open(path: str) -> BudgetLedger:
        """Open that of another process, by the path of such a link. OffloadError if it cannot be."""
    @property
    def budget_bytes(self) -> int: ...
    @property
    def equal_bytes(self) -> int:
        """What each has where all want as much as they can get."""

@final
class Engine:
    """A pager with its recorder of deferred work. Methods release the GIL while they wait."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        directories: list[str],
        io_engine: str,
        queue_depth: int,
        page_elements: int,
        min_paged_bytes: int,
        device_bytes: int = 0,
        updates_on_host: bool = False,
        activations_stay_on_host: bool = False,
        link_bytes_per_second: float = 0,
        ssd_bytes_per_second: float = 0,
        device_kind: str = "emulated",
        device_ordinal: int = 0,
        io_timeout: int = 120,
        retry_delays_ms: list[int] = ...,
        remedy: str = "",
        keep_free_bytes: list[int] = ...,
        max_file_bytes: int | None = None,
        copies_checkpoints: bool = False,
        ledger: BudgetLedger | None = None,
        guaranteed_bytes: int = 0,
        stores: list[str] = ...,
    ) -> None:
        """Start one; `remedy` ends messages about a full budget, after "raise `ram`".

        After `io_timeout` seconds a transfer is an error for who waits for it; one that fails for a reason that may
        pass is tried again after each of `retry_delays_ms`.
        `keep_free_bytes` are left on the disk of each directory; no list, no limits. `max_file_bytes`: of each file.
        Pages of weights that are loaded from files lie there until they are written, unless `copies_checkpoints`.
        With a `ledger`, memory is leased from there: `budget_bytes` is what this process can have whatever others do,
        `guaranteed_bytes` what it always has. Waits for these some seconds; OutOfTierMemory if they do not come.
        `stores`, each as host:port, have the pages instead of `directories`: TierIOError unless all answer and agree,
        ConfigError for one that is there twice.
        """
    @property
    def torch_device(self) -> str:
        """Where the module computes and its tensors are: "cpu", or a GPU such as "cuda:0"."""
    def install_allocator(self) -> None:
        """Make large CPU allocations count against this engine's budget from now on."""
    def remove_allocator(self) -> None: ...
    def manage(
        self,
        tensor: torch.Tensor,
        *,
        kind: str,
        label: str,
        anchor: torch.Tensor | None = None,
        of_module: bool = False,
    ) -> bool:
        """Make the tensor's storage a segment (kind: parameter, gradient, state, other).

        A module's tensor goes to ``place`` first, and takes its gradient along.

        Returns:
            False if it is too small, or not at ``place``.
        """
    def unmanage(self, tensor: torch.Tensor) -> None:
        """Make the tensor ordinary memory of the host again; applies what is pending on it first."""
    def gradient_complete(self, parameter: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Adopt ``gradient`` (default: ``parameter.grad``) as pages, cache its norm, let it leave.

        For the post-accumulate hook.
        """
    def hold_for_update(self, parameter: torch.Tensor, states: list[torch.Tensor]) -> Pin | None:
        """Take a gradient as complete, and keep it in memory while its optimizer's update runs, which uses ``states``.

        Returns None for a gradient that gets no pages.
        """
    def gradient_applied(self, parameter: torch.Tensor, states: list[torch.Tensor]) -> None:
        """Make ``parameter.grad`` a gradient without bytes, which only knows its norm.

        Raises OffloadError at any other use from then on, until all of it is overwritten.
        """
    def keep_out(self, tensor: torch.Tensor) -> None:
        """Leave the tensor's storage ordinary memory when something of it is saved for the backward pass."""
    def save_for_backward(self, tensor: torch.Tensor) -> SavedTensor:
        """Take a tensor that a graph is about to keep, as pages where it lies in the engine's memory."""
    def end_saving(self) -> None:
        """Let go of what was saved last, which an operator may have been using."""
    def begin_optimizer_step(self) -> None: ...
    def abandon_optimizer_step(self) -> None:
        """The step that this thread is in raised before its end."""
    def end_optimizer_step(self) -> None:
        """End of a step: also the end of a recorded pass."""
    def expect_pass(self, program: int, tensors: list[torch.Tensor]) -> None:
        """What the first pass of the program is thought to use, in this order; what is not managed is left out."""
    def begin_pass(self, program: int) -> None:
        """Begin a pass of the program: its uses are predicted by those of its last one. 0 is training; any thread."""
    def finish_loading(self) -> None:
        """Give back the memory that reads a file ahead between two tensors."""
    def evict(self, tensor: torch.Tensor) -> int:
        """Send the tensor's pages to SSD and wait; returns the bytes that stayed because they are pinned."""
    def prefetch(self, tensor: torch.Tensor) -> None: ...
    def pages_buckets(self, *, holds_gradients: bool) -> PagedBuckets:
        """A context in which the floating-point tensors that this thread makes by ``empty`` are buckets, paged from
        ``min_paged_bytes`` on. ``holds_gradients``: the gradients are views of them.
        """
    def forget_buckets(self) -> None:
        """Let buckets whose gradients were copied out of them be zeros without bytes."""
    def release_buckets(self) -> None:
        """Make all buckets ordinary memory again."""
    def waits_for_ranks(self) -> RankWait:
        """A context in which this thread waits for other processes: timed, its cores are offered to deferred work."""
    def pin(self, tensor: torch.Tensor, *, read_only: bool = False) -> Pin:
        """Page the tensor in, apply what is pending, and keep it mapped for raw access and system calls.

        On a GPU it counts as written unless it is `read_only`: nobody notices writes there.
        """
    def lease(self, view: torch.Tensor) -> None:
        """Pin like ``pin`` for as long as this very tensor object (its TensorImpl) is alive."""
    def is_resident(self, tensor: torch.Tensor) -> bool: ...
    def has_pending_work(self, tensor: torch.Tensor) -> bool: ...
    def flush(self) -> None:
        """Apply all deferred work and wait for all writes; raises what failed."""
    def statistics(self) -> dict[str, object]:
        """Return the counters, and hand the engine's log lines to Python.

        ``read_times`` has for each bin of a histogram that is not empty (from seconds, to seconds, reads).
        """
    def dump(self) -> dict[str, object]:
        """Say what the engine does now, for a person: ``host``, and ``device`` where there is one.

        Each has pages by state, who waits for what and since when, and the oldest transfers; some seconds at most.
        """
    def start_use_log(self) -> None:
        """List every use of a page from now on."""
    def take_use_log(self) -> list[tuple[str, int, int, int, int, int, int, int]]:
        """End the list: (kind, segment, first page, pages, page bytes, segment bytes, bytes not in pages, and
        the most of them since the use before).
        """
    def start_activity_log(self, capacity: int) -> None:
        """Record up to so many activities from now on; RuntimeError the second time."""
    def activity_log(self) -> ActivityRecord | None:
        """The record so far; None where recording was never started. Recording goes on."""
    def managed_count(self) -> int:
        """Number of live segments."""

def io_engine_refusal(io_engine: str) -> str | None:
    """Say why this way of reading and writing does not work here, or return None where a test transfer did."""

@final
class SsdProbe:
    """Random whole blocks of a fully written scratch file in a directory, through the engine that pages use.

    Every read is checked. For one thread.
    """

    def __init__(
        self, *, directory: str, io_engine: str, file_bytes: int, block_bytes: int, max_depth: int
    ) -> None: ...
    def measure(self, *, pattern: str, depth: int, seconds: float) -> dict[str, float]:
        """Keep `depth` transfers (pattern: read, write, mix) in flight.

        Returns:
            ``read_bytes``, ``written_bytes`` and ``seconds``.
        """
    @property
    def engine_name(self) -> str: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def is_direct(self) -> bool:
        """Whether transfers pass by the page cache. Where not, the figures are those of memory."""

@final
class PageServer:
    """A store of pages for engines in other processes: it listens from the beginning until `close()`."""

    def __init__(
        self,
        *,
        listen: str,
        budget_bytes: int,
        directories: list[str],
        io_engine: str,
        queue_depth: int,
        io_timeout: int,
        retry_delays_ms: list[int] = ...,
        keep_free_bytes: list[int] = ...,
        max_file_bytes: int | None = None,
        runs_updates: bool = True,
    ) -> None:
        """Listen at `listen`, as host:port; port 0 is one that is free. The others are those of `Engine`.

        With `runs_updates`, optimizers' updates run here for clients whose kernels give the same bits.
        """
    @property
    def address(self) -> str:
        """Where it listens, as host:port with the port that it has."""
    def statistics(self) -> dict[str, Any]:
        """Return what it has counted; bytes are those of pages, but for `update_bytes`, which say what to run."""
    def close(self) -> None:
        """End all connections, and with them all pages."""
