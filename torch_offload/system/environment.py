"""Environment variables by which this process tells other programs something, child processes of the launcher included.

Settings of the engine come through `Config` alone; a child of the launcher gets its parent's.
"""

import json
import os
import platform
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from torch_offload.config import Config
from torch_offload.errors import ConfigError
from torch_offload.system.kernel_files import field_of

LOADING_IN_SEQUENCE = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""Read by transformers at each load: no thread converts tensors ahead of those that are paged, since what waits to be
registered cannot leave memory."""

MAX_LAUNCH_CHARACTERS = 256

LAUNCH = "TORCH_OFFLOAD_LAUNCH"
"""Settings of a launcher for its child processes, as JSON. `_site/sitecustomize.py` looks for it."""

SITE_DIRECTORY = Path(__file__).resolve().parents[1] / "launch" / "_site"


CONFIG = "TORCH_OFFLOAD_CONFIG"
"""The public variable: settings as the path of a YAML or JSON file, or as JSON itself."""

CONFIG_SOURCE = f"environment variable {CONFIG}"
"""Its name in messages."""


def configured() -> Config | None:
    """Return the settings of the public environment variable, None where it is not set.

    Raises:
        ConfigError: If it holds no settings. The message names the variable.
    """
    value = os.environ.get(CONFIG, "")
    if not value.strip():
        return None
    if value.lstrip().startswith("{"):
        return Config.from_text(value, source=CONFIG_SOURCE)
    if not os.path.isfile(os.path.expanduser(value)):
        raise ConfigError(
            f"{CONFIG_SOURCE}: expected the path of a YAML or JSON file, or a JSON object such as "
            f'\'{{"ram": "8GiB"}}\', got {reprlib.repr(value)}, which is no file'
        )
    try:
        return Config.from_file(value)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_SOURCE}: {error}") from None


@dataclass(frozen=True)
class Launch:
    """One run of the launcher.

    Attributes:
        name: What its processes share.
        config: The settings of its engines.
        optimizer: What a ``Trainer`` creates, a name of ``trainer_optimizer.OPTIMIZERS``; None: what the script says.
        fit: Whether a ``Trainer`` splits the rows of a step as the fastest plan does.
    """

    name: str
    config: Config
    optimizer: str | None = None
    fit: bool = False


class _Handed(BaseModel):
    """The JSON of a launch."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    config: dict[str, Any]
    optimizer: str | None
    fit: bool = False


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, for this process and the ones it starts, and put them back as they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def hand_to_children(launch: Launch) -> None:
    """Have every Python process that this one starts page like this one."""
    settings = launch.config.model_dump(mode="json", exclude_unset=True)
    handed = {"name": launch.name, "config": settings, "optimizer": launch.optimizer, "fit": launch.fit}
    os.environ[LAUNCH] = json.dumps(handed)
    paths = [str(SITE_DIRECTORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in dict.fromkeys(paths) if path)
    os.environ.update(LOADING_IN_SEQUENCE)


def launch_of_parent() -> Launch | None:
    """Return what a launcher handed to this process, if it was started by one.

    Raises:
        ConfigError: If it holds no launch, or a setting that this version does not know. The message names the
            variable.
    """
    handed = os.environ.get(LAUNCH)
    if handed is None:
        return None
    try:
        content = _Handed.model_validate_json(handed)
        config = Config.model_validate(content.config)
        return Launch(name=content.name, config=config, optimizer=content.optimizer, fit=content.fit)
    except (ValidationError, ConfigError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(
            f"environment variable {LAUNCH}: not what this version of torch-offload run hands to its child processes "
            f"({problem}); unset it, or start both with one version"
        ) from None


def process_count() -> int:
    """Return how many processes of this machine train together, as torchrun and accelerate say it."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdigit() else 1


class Rank(BaseModel):
    """A process among those that train together.

    Attributes:
        number: From 0.
        count: Of the processes, on all machines.
        launch: The same in all that one launcher started on this machine, and another in another run.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    number: int = Field(ge=0)
    count: int = Field(ge=1)
    launch: str = Field(max_length=MAX_LAUNCH_CHARACTERS)


def rank() -> Rank | None:
    """Return which process this is, as torchrun and accelerate say it; None for one that trains alone."""
    number, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (number.isdigit() and count.isdigit() and int(count) > 1):
        return None
    launch = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')} {os.getppid()}"
    return Rank(number=int(number), count=int(count), launch=launch[-MAX_LAUNCH_CHARACTERS:])


def local_rank() -> int:
    """Return the number of this process among those of this machine that train together; 0 for one that is alone."""
    number = os.environ.get("LOCAL_RANK", "")
    return int(number) if number.isdigit() else 0


def visible_gpus() -> str | None:
    """Return which GPUs this process may see, as the NVIDIA driver is told; None where it may see all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def is_first_process() -> bool:
    """Whether this process is the first of those of this machine that train together, or the only one."""
    return local_rank() == 0


def cache_directory() -> Path:
    """Return where this user's caches of ours go, after the XDG base directory specification."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    parent = Path(configured) if os.path.isabs(configured) else Path("~/.cache").expanduser()
    return parent / "torch_offload"


def runtime_directory() -> Path | None:
    """Return where this user's sockets go, after the XDG base directory specification; None where nobody says it."""
    configured = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(configured) if os.path.isabs(configured) else None


def processor_name(*, root: Path = Path("/")) -> str:
    """Return the name of the processor, or of its architecture where the system does not say it."""
    return field_of(root / "proc/cpuinfo", "model name") or platform.machine()
