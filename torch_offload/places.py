"""Where pages go that leave memory: directories of this machine, or a store elsewhere. Values of ``Config.ssd``."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag

from torch_offload.errors import ConfigError

STORE_SCHEME = "store://"
DIRECTORIES, STORE = "directories", "store"
"""The two kinds."""

_ADDRESS_PATTERN = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)
_MAX_PORT = 65_535


def parse_address(address: str) -> str:
    """Return ``host:port``; a number of IPv6 is in brackets.

    Raises:
        ConfigError: If `address` is none.
    """
    match = _ADDRESS_PATTERN.fullmatch(address)
    if match is None or int(match["port"]) > _MAX_PORT:
        raise ConfigError(f"expected host:port, such as 10.0.0.1:7000 or [::1]:7000, got {address!r}")
    return address


def _one_or_more(places: object) -> object:
    """Make a tuple of one directory, and leave a store what it is; it stands alone."""
    if places is None:
        return ()
    listed = [places] if isinstance(places, (str, Path)) else places
    if not isinstance(listed, (list, tuple)):
        return places
    stores = [place for place in listed if isinstance(place, str) and place.startswith(STORE_SCHEME)]
    if stores and len(listed) > 1:
        raise ConfigError(f"{stores[0]} is all there can be; give one store, or directories")
    return stores[0] if stores else tuple(listed)


def _resolve(directories: tuple[Path, ...]) -> tuple[Path, ...]:
    """The script may change its directory before the engine opens."""
    return tuple(Path(os.path.expanduser(directory)).resolve() for directory in directories)


def _check_store(store: str) -> str:
    address = parse_address(store.removeprefix(STORE_SCHEME).rstrip("/"))
    if int(address.rpartition(":")[2]) == 0:
        raise ConfigError(f"a store listens at a port from 1 on, got {address}")
    return STORE_SCHEME + address


PlacesOfPages = Annotated[
    Annotated[tuple[Path, ...], AfterValidator(_resolve), Tag(DIRECTORIES)]
    | Annotated[str, AfterValidator(_check_store), Tag(STORE)],
    Discriminator(lambda places: STORE if isinstance(places, str) else DIRECTORIES),
    BeforeValidator(_one_or_more),
]
