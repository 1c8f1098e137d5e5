"""What a user may set, checked. Three settings are meant for everybody (the module, ``ram``, ``ssd``)."""

import difflib
import os
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, field_validator

from torch_offload.errors import ConfigError

SECTOR_BYTES = 4096
DEFAULT_PAGE_ELEMENTS = 1 << 20
DEFAULT_MIN_PAGED_BYTES = 64 << 10
DEFAULT_QUEUE_DEPTH = 16

IoEngine = Literal["auto", "uring_fixed", "uring", "threads"]
DeviceKind = Literal["cuda", "emulated"]
Activations = Literal["keep", "ram", "ssd", "recompute", "auto"]
UNPAGED_SHARE = 4
UpdateOn = Literal["auto", "device", "host"]
Trace = Annotated[bool, Strict()] | Path

_ACCEPTED_SIZES = "a whole number of bytes, or a string such as '24GiB', '1.5GiB', '512 MiB', '64kB' or '8GB'"
_SIZE_PATTERN = re.compile(r"\s*(?P<count>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*", re.ASCII)
_UNIT_BYTES = {"": 1, "b": 1}
_UNIT_BYTES |= {f"{letter}ib": 1 << 10 * (power + 1) for power, letter in enumerate("kmgt")}
_UNIT_BYTES |= {f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate("kmgt")}


def parse_size(size: object) -> int:
    """Return the bytes that `size` means.

    KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB are powers of 1000. Case does not matter; a part of
    a byte is dropped.

    Raises:
        ConfigError: If `size` is neither a whole number nor such a string. The message names the accepted forms.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(f"a size cannot be negative, got {size}")
        return size
    match = _SIZE_PATTERN.fullmatch(size) if isinstance(size, str) else None
    unit_bytes = None if match is None else _UNIT_BYTES.get(match["unit"].lower())
    if match is None or unit_bytes is None:
        raise ConfigError(f"cannot read {size!r} as a size; accepted: {_ACCEPTED_SIZES}")
    return int(Decimal(match["count"]) * unit_bytes)


def format_size(size_bytes: int) -> str:
    """Return bytes in the largest binary unit that keeps the number at or above 1, such as ``1.5 GiB``."""
    count = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


Bytes = Annotated[int, BeforeValidator(parse_size)]


class Config(BaseModel):
    """Budgets and places of an engine. Frozen: :meth:`replace` makes a changed copy.

    Attributes:
        ram: Bytes of memory for parameters, gradients, optimizer states, activations and temporaries together.
            A hard limit. None: 80 % of what is free under the memory cgroup, measured by ``wrap``.
        ssd: Directory on a real disk for an unnamed scratch file; nothing stays there after the process. None: the
            first usual directory for temporary files that is on a disk.
        stripe_over: Further directories, on disks of their own; pages are spread evenly over them and ``ssd``.
        min_paged_bytes: Tensors smaller than this stay in memory; 0 pages everything. The default of 64 KiB keeps
            norms and biases resident: together they are far below 1 % of a language model, and a read of fewer
            bytes takes as long.
        page_elements: Elements per page, the unit of transfer, a multiple of 4,096. The default moves 4 MiB of fp32
            or 2 MiB of bf16 at a time.
        queue_depth: Transfers in flight on the SSD.
        io_engine: How pages are read and written. ``auto`` takes the first that the system allows, in this order:
            io_uring with registered buffers, plain io_uring, threads with ``preadv`` and ``pwritev``.
        report: File, or directory for one file per process, that gets a JSON report with timelines when the process
            ends. None: no report, and nothing is recorded for one.
        live: Whether one line at the foot of the terminal shows speed, traffic and stalls while a script runs. Nothing
            is written where stderr is not a terminal.
        device: Bytes of a device's memory to compute in; ``ram`` then holds what the device has no room for, and
            ``ssd`` what ``ram`` has no room for. A hard limit. None: the module computes in ``ram``.
        trace: Whether to record what each resource does when, for :meth:`Report.write_trace`. A file, or directory for
            one file per process, also gets it when the process ends; compressed where the name ends in ``.gz``.
        activations: Where what the backward pass needs waits for it. ``keep``: in the memory that the module computes
            in. ``ram``: as pages, which leave a device when its memory is short and come back before they are used;
            without a device the same as ``keep``. ``ssd``: as pages that leave ``ram`` as well. ``recompute``: layers
            that transformers can checkpoint compute theirs again in backward. ``auto``: as ``ssd``, and after a few
            steps ``recompute`` for the layers for which that makes a step shorter; the report says which and why.
        update_on: Where the optimizer's deferred updates run when the module computes on a device. ``device``: states
            come up to it. ``host``: gradients go down, states stay in ``ram`` and on ``ssd``. ``auto``: on the host if
            weights, gradients and two moments of all trained weights do not fit the device.
        device_unpaged: Of ``device``, what torch's own allocator may take on a GPU: results, temporaries, small
            tensors, activations until they are saved. A wall: beyond it torch raises its ``OutOfMemoryError``. None:
            a quarter. Pages have the rest. An emulated device has no such part.
        device_kind: Which device. ``cuda``: the current GPU; wrapping brings the module to it. ``emulated``: host
            memory that is handed out and filled like a device's, to try a machine that is not there; tensors stay on
            ``cpu``. None: ``cuda`` where torch sees a GPU.
        emulated_link: Bytes per second that an emulated device's link carries, each way. None: as fast as memory.
        emulated_ssd: Bytes per second that reads and writes of the SSD share, to try a slower one. None: as it is.

    Raises:
        ConfigError: If a value cannot be used or a setting does not exist. The message names the nearest one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ram: Bytes | None = Field(default=None, gt=0)
    ssd: Path | None = None
    stripe_over: tuple[Path, ...] = ()
    min_paged_bytes: Bytes = DEFAULT_MIN_PAGED_BYTES
    page_elements: int = Field(default=DEFAULT_PAGE_ELEMENTS, gt=0, multiple_of=SECTOR_BYTES, strict=True)
    queue_depth: int = Field(default=DEFAULT_QUEUE_DEPTH, ge=1, le=4096, strict=True)
    io_engine: IoEngine = "auto"
    report: Path | None = None
    live: bool = Field(default=False, strict=True)
    device: Bytes | None = Field(default=None, gt=0)
    device_kind: DeviceKind | None = None
    device_unpaged: Bytes | None = Field(default=None, gt=0)
    activations: Activations = "keep"
    update_on: UpdateOn = "auto"
    emulated_link: Bytes | None = Field(default=None, gt=0)
    emulated_ssd: Bytes | None = Field(default=None, gt=0)
    trace: Trace = False

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            ram: int | str | None = None,
            ssd: str | os.PathLike[str] | None = None,
            stripe_over: Sequence[str | os.PathLike[str]] = (),
            min_paged_bytes: int | str = DEFAULT_MIN_PAGED_BYTES,
            page_elements: int = DEFAULT_PAGE_ELEMENTS,
            queue_depth: int = DEFAULT_QUEUE_DEPTH,
            io_engine: IoEngine = "auto",
            report: str | os.PathLike[str] | None = None,
            live: bool = False,
            device: int | str | None = None,
            device_kind: DeviceKind | None = None,
            device_unpaged: int | str | None = None,
            activations: Activations = "keep",
            update_on: UpdateOn = "auto",
            emulated_link: int | str | None = None,
            emulated_ssd: int | str | None = None,
            trace: bool | str | os.PathLike[str] = False,
        ) -> None: ...

    else:

        def __init__(self, **settings: object) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                _raise_config_error(error)

    @field_validator("ssd", "report", "trace", mode="before")
    @classmethod
    def _expand_home(cls, directory: object) -> object:
        """Make ``~`` mean what it means in a shell."""
        return os.path.expanduser(directory) if isinstance(directory, (str, Path)) else directory

    @field_validator("stripe_over")
    @classmethod
    def _resolve_all(cls, directories: tuple[Path, ...]) -> tuple[Path, ...]:
        """The script may change its directory before the engine opens."""
        return tuple(Path(os.path.expanduser(directory)).resolve() for directory in directories)

    @property
    def compute_bytes(self) -> int:
        """The budget of pages where the module computes; 0 while it is not decided."""
        return (self.device or self.ram or 0) - self.unpaged_bytes

    @property
    def unpaged_bytes(self) -> int:
        """What of a GPU's memory is torch's own allocator's; 0 without a GPU."""
        if self.device is None or self.device_kind != "cuda":
            return 0
        return self.device // UNPAGED_SHARE if self.device_unpaged is None else self.device_unpaged

    @property
    def pages_activations(self) -> bool:
        """Whether what the backward pass needs becomes pages."""
        return self.activations in ("ssd", "auto") or (self.activations == "ram" and self.device is not None)

    @field_validator("report", "trace")
    @classmethod
    def _stay_where_it_is(cls, path: object) -> object:
        """The script may change its directory before the file is written."""
        return path.resolve() if isinstance(path, Path) else path

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> "Config":
        """Check a mapping of settings; as the constructor, this raises ConfigError."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            _raise_config_error(error)

    def __setattr__(self, name: str, value: object) -> None:
        raise ConfigError(f"a Config does not change; use config.replace({name}=...) for a changed copy")

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with some settings changed, checked like a new one."""
        return Config(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})


def _raise_config_error(error: ValidationError) -> NoReturn:
    """Say all that is wrong with a Config in one line per setting."""
    raise ConfigError("; ".join(_explain(part["type"], part) for part in error.errors())) from None


def _explain(kind: str, part: Any) -> str:
    name = ".".join(str(step) for step in part["loc"])
    if kind == "extra_forbidden":
        nearest = difflib.get_close_matches(name, Config.model_fields, n=1, cutoff=0.35)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are: {', '.join(Config.model_fields)}"
        return f"unknown setting {name!r}; {hint}"
    reason = str(part["msg"]).removeprefix("Value error, ")
    return f"{name}: {reason}" if kind == "value_error" else f"{name}: {reason}, got {part['input']!r}"
