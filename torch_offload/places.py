"""Where pages go that leave memory: directories of this machine, or stores elsewhere. Values of ``Config.ssd``."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag

from torch_offload.errors import ConfigError

STORE_SCHEME = "store://"
DIRECTORIES, STORES = "directories", "stores"
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
    """Make a tuple of directories, or one text of stores; there are no more kinds than one."""
    if places is None:
        return ()
    listed = [places] if isinstance(places, (str, Path)) else places
    if not isinstance(listed, (list, tuple)):
        return places
    stores = [place for place in listed if isinstance(place, str) and place.startswith(STORE_SCHEME)]
    if stores and len(stores) < len(listed):
        raise ConfigError(f"{stores[0]} cannot be together with directories; give stores, or directories")
    return ",".join(stores) if stores else tuple(listed)


def _resolve(directories: tuple[Path, ...]) -> tuple[Path, ...]:
    """The script may change its directory before the engine opens."""
    return tuple(Path(os.path.expanduser(directory)).resolve() for directory in directories)


def _check_stores(stores: str) -> str:
    """Return ``store://host:port,host:port``, however they were written down."""
    parts = [part.strip() for part in stores.split(",")]
    if "" in parts:
        example = "store://10.0.0.1:7000,10.0.0.2:7000"
        raise ConfigError(f"expected a comma between two stores only, such as {example}, got {stores!r}")
    addresses = [parse_address(part.removeprefix(STORE_SCHEME).rstrip("/")) for part in parts]
    for number, address in enumerate(addresses):
        if int(address.rpartition(":")[2]) == 0:
            raise ConfigError(f"a store listens at a port from 1 on, got {address}")
        if address in addresses[:number]:
            raise ConfigError(f"{address} is there twice; name each store once")
    return STORE_SCHEME + ",".join(addresses)


PlacesOfPages = Annotated[
    Annotated[tuple[Path, ...], AfterValidator(_resolve), Tag(DIRECTORIES)]
    | Annotated[str, AfterValidator(_check_stores), Tag(STORES)],
    Discriminator(lambda places: STORES if isinstance(places, str) else DIRECTORIES),
    BeforeValidator(_one_or_more),
]
