"""User-facing settings, validated. Most users need only ``ram`` and ``ssd``.

This is the one definition of each setting: the options of the command line, ``OffloadArguments``, the keys of a file
and the reference are generated from it.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from torch_offload.errors import ConfigError
from torch_offload.places import DIRECTORIES, STORE_SCHEME, STORES, PlacesOfPages

SECTOR_BYTES = 4096
DEFAULT_PAGE_ELEMENTS = 1 << 20
DEFAULT_MIN_PAGED_BYTES = 64 << 10
DEFAULT_QUEUE_DEPTH = 16
DEFAULT_IO_TIMEOUT = 120

IoEngine = Literal["auto", "uring_fixed", "uring", "threads"]
Activations = Literal["page", "keep", "ram", "recompute", "auto"]
OptimizerDevice = Literal["auto", "gpu", "cpu"]
Update = Literal["step", "backward"]
CheckpointPages = Literal["in_place", "copy"]
RESERVED_GPU_SHARE = 4
Directories = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
RENAMED = MappingProxyType({"device": "gpu", "offload_dir": "ssd", "offload_folder": "ssd", "max_memory": "gpu"})
"""Names that other libraries use for a setting, for messages."""
Trace = Annotated[bool, Strict()] | Path

_MIN_LIKENESS = 0.6
_NAME_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
_EXPECTED = MappingProxyType(
    {
        "greater_than": "more than {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than_equal": "at most {le}",
        "multiple_of": "a multiple of {multiple_of}",
        "int_type": "a whole number",
        "bool_type": "true or false",
        "literal_error": "{expected}",
        "path_type": "a path",
        "tuple_type": "a directory or a list of directories",
        "model_type": "a mapping of settings",
    }
)
"""Accepted values, by pydantic's name of the error."""

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


class Emulation(BaseModel):
    """Hardware to try that is not there, and slower hardware than is there. For tests and experiments.

    Experimental: may change in a minor release.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    gpu: bool = Field(default=False, strict=True)
    """Compute in host memory that is handed out and filled like a GPU's; tensors stay on ``cpu``. Needs ``gpu``."""
    link_rate: Bytes | None = Field(default=None, gt=0)
    """Bytes per second of the emulated GPU's link, each way. None: as fast as memory."""
    ssd_rate: Bytes | None = Field(default=None, gt=0)
    """Bytes per second that reads and writes of the SSD share. None: as it is."""

    if TYPE_CHECKING:

        def __init__(
            self, *, gpu: bool = False, link_rate: int | str | None = None, ssd_rate: int | str | None = None
        ) -> None: ...

    else:

        def __init__(self, **settings: object) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise _config_error(error, type(self), prefix="emulation.") from None


class Config(BaseModel):
    """Budgets and settings of an engine. Frozen: :meth:`replace` makes a changed copy.

    Raises:
        ConfigError: If a value cannot be used or a setting does not exist. The message names the nearest one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    gpu: Bytes | None = Field(default=None, gt=0)
    """Hard limit of GPU memory to compute in, such as ``24GiB``. ``ram`` then holds what the GPU has no room for, and
    ``ssd`` what ``ram`` has no room for. None: the module computes in ``ram``."""
    ram: Bytes | None = Field(default=None, gt=0)
    """Hard limit of memory, such as ``24GiB``, for parameters, gradients, optimizer states, activations and temporaries
    together. None: 80 % of what is free under the memory cgroup, shared by the processes that torchrun or accelerate
    start on this machine: each can have an even part, and what the others do not need."""
    ssd: PlacesOfPages = ()
    """Directory on a real disk for an unnamed scratch file, which nothing outlives; several directories on disks of
    their own share the pages evenly. ``{local_rank}`` in a path is the number of the process among those that torchrun
    or accelerate start on this machine, 0 in others. ``store://host:port``: pages go to ``torch-offload store`` there,
    for machines without a disk of their own; several, as in ``store://host:port,host:port``, share the pages evenly.
    Empty: the first usual directory for temporary files that is on a disk."""
    keep_free: Bytes | None = None
    """What pages leave free on the file system of each ``ssd`` directory; beyond it the disk counts as full. None: 5 %
    of the file system, at least 1 GiB."""
    max_spill: Bytes | None = Field(default=None, gt=0)
    """What scratch files may take on the disk together, as much in each ``ssd`` directory; beyond it the disk counts as
    full. None: all but ``keep_free``."""
    checkpoint_pages: CheckpointPages = "in_place"
    """Place of the pages of loaded weights until they are first written. ``in_place``: the checkpoint's own file, which
    they are read from whenever they are needed. Nothing may write into it meanwhile; it may be deleted or replaced.
    Files on a network, and all of them with ``gpu``, are copied. ``copy``: ``ssd``, for files that something writes to,
    or that lie on a slower disk."""
    activations: Activations = "page"
    """Treatment of the tensors that autograd saves for the backward pass. ``page``: they leave memory when it is
    short, down to the SSD. ``ram``: the same, but no further than ``ram``. ``keep``: they stay where the module
    computes. ``recompute``: layers that transformers can checkpoint compute theirs again in backward. ``auto``: as
    ``page``, and after a few steps ``recompute`` for the layers for which that makes a step shorter; the report says
    which and why."""
    optimizer_device: OptimizerDevice = "auto"
    """Where deferred optimizer updates run when the module computes on a GPU. ``gpu``: states come up to it. ``cpu``:
    gradients go down, states stay in ``ram`` and on ``ssd``. ``auto``: on the CPU if weights, gradients and two moments
    of all trained weights do not fit the GPU, unless ``update`` is ``backward``."""
    update: Update = "step"
    """Time of the optimizer's updates. ``step``: they are recorded at ``step()``, and applied to a page before it is
    next read. ``backward``: each parameter is updated as soon as its gradient is complete, so gradients never leave
    memory, from the second step on. For one backward per step and no clipping: a norm above ``max_grad_norm``,
    accumulation and gradients that are read raise an error. They run where the module computes, on a GPU too."""
    gpu_reserved: Bytes | None = Field(default=None, gt=0)
    """Of ``gpu``, the part of torch's own allocator: results, temporaries, small tensors, activations until they are
    saved. Beyond it torch raises its ``OutOfMemoryError``. None: a quarter. Pages have the rest."""
    report: Path | None = None
    """File, or directory for one file per process, that gets a JSON report with timelines when the process ends. None:
    no report, and nothing is recorded for one."""
    plan: Path | None = None
    """JSON file of a plan, as ``torch-offload plan --json`` writes it. Reports then say what was predicted beside what
    was measured, and which input of the plan was wrong. None: no comparison."""
    trace: Trace = False
    """Record what each resource does when, for ``Report.write_trace``. A file, or directory for one file per process,
    also gets it when the process ends; compressed where the name ends in ``.gz``."""
    status_line: bool = Field(default=False, strict=True)
    """Show speed, traffic and stalls in one line at the bottom of the terminal while a script runs. Nothing is written
    where stderr is not a terminal."""
    watchdog: bool = Field(default=False, strict=True)
    """Say on stderr what every thread does and what the engine waits for when nothing moves: after a minute, or after
    the time of 20 optimizer steps if that is longer, then every ten minutes. SIGUSR1 and ``torch-offload dump`` ask for
    the same at any time. Nothing is ended by it. ``torch-offload run`` sets it."""
    min_paged_bytes: Bytes = DEFAULT_MIN_PAGED_BYTES
    """Smaller tensors stay in memory; 0 pages everything. The default of 64 KiB keeps norms and biases resident:
    together they are far below 1 % of a language model, and a read of fewer bytes takes as long. On a GPU the default
    is 1 MiB, since each tensor takes whole frames of 2 MiB there, and so do its gradient and states."""
    page_elements: int = Field(default=DEFAULT_PAGE_ELEMENTS, gt=0, multiple_of=SECTOR_BYTES, strict=True)
    """Elements per page, the unit of transfer, a multiple of 4,096. The default moves 4 MiB of fp32 or 2 MiB of bf16
    at a time. On a GPU it is 2,097,152 to 16,777,216, as much as leaves 192 pages to the GPU and 64 to the host."""
    queue_depth: int = Field(default=DEFAULT_QUEUE_DEPTH, ge=1, le=4096, strict=True)
    """Transfers in flight on the SSD."""
    io_engine: IoEngine = "auto"
    """Interface for reads and writes of pages. ``auto`` takes the first that the system allows, in this order: io_uring
    with registered buffers, plain io_uring, threads with ``preadv`` and ``pwritev``."""
    io_timeout: int = Field(default=DEFAULT_IO_TIMEOUT, ge=1, le=86_400, strict=True)
    """Seconds after which a read or write of the SSD that has not ended is an error for who waits for it. Nothing is
    lost by that if the disk comes back."""
    emulation: Emulation | None = None
    """Hardware to try that is not there: see ``Emulation``."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            gpu: int | str | None = None,
            ram: int | str | None = None,
            ssd: Directories = (),
            keep_free: int | str | None = None,
            max_spill: int | str | None = None,
            checkpoint_pages: CheckpointPages = "in_place",
            activations: Activations = "page",
            optimizer_device: OptimizerDevice = "auto",
            update: Update = "step",
            gpu_reserved: int | str | None = None,
            report: str | os.PathLike[str] | None = None,
            plan: str | os.PathLike[str] | None = None,
            trace: bool | str | os.PathLike[str] = False,
            status_line: bool = False,
            watchdog: bool = False,
            min_paged_bytes: int | str = DEFAULT_MIN_PAGED_BYTES,
            page_elements: int = DEFAULT_PAGE_ELEMENTS,
            queue_depth: int = DEFAULT_QUEUE_DEPTH,
            io_engine: IoEngine = "auto",
            io_timeout: int = DEFAULT_IO_TIMEOUT,
            emulation: Emulation | Mapping[str, object] | None = None,
        ) -> None: ...

    else:

        def __init__(self, **settings: object) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise _config_error(error, type(self)) from None

    @field_validator("keep_free", "max_spill", "emulation")
    @classmethod
    def _check_disk(cls, setting: object, info: ValidationInfo) -> object:
        """Refuse what is of a disk where there is none."""
        of_disk = setting.ssd_rate if isinstance(setting, Emulation) else setting
        if of_disk is not None and isinstance(info.data.get("ssd"), str):
            what = "ssd_rate" if isinstance(setting, Emulation) else "this"
            raise ConfigError(f"{what} is of a disk here, and pages go to {info.data['ssd']}; leave it out")
        return setting

    @field_validator("update")
    @classmethod
    def _check_place(cls, update: Update, info: ValidationInfo) -> Update:
        if update == "backward" and info.data.get("optimizer_device") == "cpu":
            raise ConfigError("'backward' updates where the module computes; leave update or optimizer_device out")
        return update

    @field_validator("report", "plan", "trace", mode="before")
    @classmethod
    def _expand_home(cls, path: object, info: ValidationInfo) -> object:
        """Make ``~`` mean what it means in a shell."""
        if isinstance(path, (str, os.PathLike)):
            return os.path.expanduser(path)
        if info.field_name == "trace" and not isinstance(path, bool):
            raise ConfigError(f"expected true, false or the path of a file, got {path!r}")
        return path

    @field_validator("report", "plan", "trace")
    @classmethod
    def _resolve_file(cls, path: object) -> object:
        """The script may change its directory before the file is written or read."""
        return path.resolve() if isinstance(path, Path) else path

    @field_validator("emulation", mode="before")
    @classmethod
    def _check_keys(cls, emulation: object) -> object:
        return _named(emulation) if isinstance(emulation, Mapping) else emulation

    @property
    def is_gpu_emulated(self) -> bool:
        """Whether the GPU is emulated in host memory."""
        return self.emulation is not None and self.emulation.gpu

    @property
    def uses_cuda(self) -> bool:
        """Whether the module computes on a real GPU."""
        return self.gpu is not None and not self.is_gpu_emulated

    @property
    def compute_bytes(self) -> int:
        """The budget of pages where the module computes; 0 while it is not decided."""
        return (self.gpu or self.ram or 0) - self.reserved_bytes

    @property
    def reserved_bytes(self) -> int:
        """The part of a GPU's memory for torch's own allocator; 0 without a GPU."""
        if self.gpu is None or not self.uses_cuda:
            return 0
        return self.gpu // RESERVED_GPU_SHARE if self.gpu_reserved is None else self.gpu_reserved

    @property
    def link_rate(self) -> int | None:
        """Bytes per second of an emulated GPU's link; None where it is not slowed down."""
        return None if self.emulation is None else self.emulation.link_rate

    @property
    def ssd_rate(self) -> int | None:
        """Bytes per second that the SSD is slowed down to; None where it is not."""
        return None if self.emulation is None else self.emulation.ssd_rate

    @property
    def stores(self) -> tuple[str, ...]:
        """``host:port`` of each store that pages go to; none where they go to directories."""
        return tuple(self.ssd.removeprefix(STORE_SCHEME).split(",")) if isinstance(self.ssd, str) else ()

    @property
    def scratch_directory(self) -> Path | None:
        """The first directory for pages, None while none is chosen; of several processes that of the first one.

        Raises:
            ConfigError: If pages go to a store: nobody here knows its disk.
        """
        if self.stores:
            raise ConfigError(f"ssd: this is about a disk of this machine, got {self.ssd}; give a directory")
        return self.directories_of(0)[0] if self.ssd else None

    def directories_of(self, local_rank: int) -> tuple[Path, ...]:
        """Return the directories for pages of one of the processes on this machine; none where they go to a store."""
        directories = () if isinstance(self.ssd, str) else self.ssd
        return tuple(Path(str(directory).replace("{local_rank}", str(local_rank))) for directory in directories)

    @property
    def pages_activations(self) -> bool:
        """Whether saved tensors become pages."""
        return self.activations in ("page", "auto") or (self.activations == "ram" and self.gpu is not None)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> "Config":
        """Check a mapping of settings; as the constructor, this raises ConfigError."""
        return cls(**_named(obj)) if isinstance(obj, Mapping) else super().model_validate(obj, **options)

    @classmethod
    def combine(cls, config: "Settings | None", **overrides: Any) -> "Config":
        """Return a configuration with some settings replaced by those that are not None.

        Args:
            config: A configuration, a mapping of settings, ``"auto"`` for what the engine decides by measuring, or None
                for the defaults.
            **overrides: Settings that take precedence.

        Raises:
            ConfigError: If a setting does not exist or cannot be used.
        """
        if config == "auto":
            config = {"activations": "auto"}
        if isinstance(config, (str, os.PathLike)):
            raise ConfigError(
                f"config: expected a torch_offload.Config, a dict or 'auto', got {config!r}; read a file by "
                "config=torch_offload.Config.from_file(...)"
            )
        if config is not None and not isinstance(config, (Config, Mapping)):
            raise ConfigError(f"config: expected a torch_offload.Config, a dict or 'auto', got {type(config).__name__}")
        base = config if isinstance(config, Config) else cls(**_named(config or {}))
        return base.replace(**{name: value for name, value in overrides.items() if value is not None})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Config":
        """Read settings from a YAML or JSON file, such as ``ram: 24GiB``.

        Raises:
            ConfigError: If the file cannot be read, or a setting does not exist or cannot be used. The message names
                the file, the line and the nearest setting.
        """
        try:
            text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from None
        return cls.from_text(text, source=str(path))

    @classmethod
    def from_text(cls, text: str, *, source: str) -> "Config":
        """Read settings from the text of a YAML or JSON file.

        Args:
            text: One mapping.
            source: Its name in messages.

        Raises:
            ConfigError: As :meth:`from_file`.
        """
        settings, lines = _mapping_of(text, source)
        try:
            return cls(**settings)
        except ConfigError as error:
            raise ConfigError("; ".join(_with_line(source, lines, *each) for each in error.problems)) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise ConfigError(f"a Config does not change; use config.replace({name}=...) for a changed copy")

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with some settings changed, checked like a new one."""
        return Config(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})


Settings: TypeAlias = Config | Mapping[str, Any] | Literal["auto"]
"""What calls take as ``config``."""


def _mapping_of(text: str, source: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the settings of a YAML or JSON text, and the line of each key, nested ones as ``emulation.gpu``."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = source if mark is None else f"{source}:{mark.line + 1}"
        raise ConfigError(f"{location}: not valid YAML or JSON: {getattr(error, 'problem', error)}") from None
    except (ValueError, RecursionError) as error:  # of a number of too many digits, a date that is none; of a deep nest
        raise ConfigError(f"{source}: expected settings such as 'ram: 24GiB': {error}") from None
    if settings is None:
        return {}, {}
    if not isinstance(settings, dict) or node is None:
        raise ConfigError(f"{source}: expected settings such as 'ram: 24GiB', got {type(settings).__name__}")
    return settings, dict(_key_lines(node, source))


def _key_lines(node: Any, source: str, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield name and line of every key.

    Raises:
        ConfigError: If a key is no string, such as ``1`` or ``yes``. The message names its line.
    """
    for key, value in node.value:
        if key.tag not in _NAME_TAGS:
            raise ConfigError(
                f"{source}:{key.start_mark.line + 1}: expected the name of a setting, such as 'ram', got {key.value}"
            )
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        if value.id == "mapping" and not prefix:  # no setting is nested deeper, and a text may be without end
            yield from _key_lines(value, source, f"{name}.")


def _named(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Return settings as arguments.

    Raises:
        ConfigError: If a name is no string.
    """
    for name in settings:
        if not isinstance(name, str):
            raise ConfigError(f"expected the names of settings, such as 'ram', as keys, got {name!r}")
    return dict(settings)


def _config_error(error: ValidationError, model: type[BaseModel], *, prefix: str = "") -> ConfigError:
    problems: list[tuple[str, str]] = []
    for part in error.errors():
        nested = part.get("ctx", {}).get("error")
        if isinstance(nested, ConfigError) and nested.problems:
            problems += nested.problems
        else:
            name = prefix + ".".join(str(step) for step in part["loc"] if step not in (DIRECTORIES, STORES))
            problems.append((name, _explain(name, part, model)))
    found = ConfigError("; ".join(text for _, text in problems))
    found.problems = problems
    return found


def _with_line(source: str, lines: Mapping[str, int], name: str, text: str) -> str:
    line = lines.get(name) or lines.get(name.split(".")[0])
    return f"{source}: {text}" if line is None else f"{source}:{line}: {text}"


def _explain(name: str, part: Any, model: type[BaseModel]) -> str:
    if part["type"] == "extra_forbidden":
        parent, dot, last = name.rpartition(".")
        nearest = _nearest(last, model)
        hint = f"did you mean {parent + dot + nearest!r}?" if nearest else f"there are: {', '.join(model.model_fields)}"
        return f"unknown setting {name!r}; {hint}"
    if part["type"] == "value_error":
        return f"{name}: {part['ctx']['error']}"
    expected = _EXPECTED.get(part["type"])
    reason = str(part["msg"]) if expected is None else f"expected {expected.format(**part.get('ctx', {}))}"
    return f"{name}: {reason}, got {part['input']!r}"


def _nearest(name: str, model: type[BaseModel]) -> str | None:
    """Return the setting that an unknown name may mean: one that shares its words, or else its letters."""
    if name in RENAMED:
        return RENAMED[name]
    words = set(name.split("_"))
    for known in model.model_fields:
        if words <= set(known.split("_")) or set(known.split("_")) <= words:
            return known
    return next(iter(difflib.get_close_matches(name, model.model_fields, n=1, cutoff=_MIN_LIKENESS)), None)


@dataclass(frozen=True)
class SettingField:
    """One setting as another surface than Python shows it: an option, an argument, a row of the reference.

    Attributes:
        name: Of the setting, such as ``optimizer_device``.
        kind: ``size``, ``count``, ``flag``, ``choice``, ``path`` or ``paths``.
        choices: Of a ``choice``.
        default: As the reference writes it.
        description: All that there is to know.
    """

    name: str
    kind: str
    choices: tuple[str, ...]
    default: str
    description: str

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return re.split(r"(?<=\.)\s", self.description, maxsplit=1)[0]


def setting_fields(model: type[BaseModel] = Config) -> tuple[SettingField, ...]:
    """Return the settings of :class:`Config` or :class:`Emulation` in order, nested models left out."""
    return tuple(
        SettingField(
            name=name,
            kind=_kind(name, field),
            choices=get_args(field.annotation) if get_origin(field.annotation) is Literal else (),
            default=_default_text(field.default),
            description=" ".join((field.description or "").split()),
        )
        for name, field in model.model_fields.items()
        if name != "emulation"
    )


def _default_text(default: object) -> str:
    if default is None or default == ():
        return ""
    return format_size(default) if default == DEFAULT_MIN_PAGED_BYTES else str(default).lower()


def _kind(name: str, field: FieldInfo) -> str:
    """Return how the value of a setting is written, by its type."""
    types = get_args(field.annotation)
    if name == "ssd":
        return "paths"
    if field.annotation is bool:
        return "flag"
    if get_origin(field.annotation) is Literal:
        return "choice"
    if Path in types:
        return "path"
    if Bytes in types or BeforeValidator(parse_size) in field.metadata:
        return "size"
    if field.annotation is int:
        return "count"
    raise TypeError(f"setting {name} has type {field.annotation}, which no option is made for; add a kind")
