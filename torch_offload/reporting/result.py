"""Base of every result that a user gets: it becomes values, JSON text or a file."""

import json
import os
from abc import ABC, abstractmethod
from typing import Any

from torch_offload.system.atomic_files import write_whole


class Result(ABC):
    """Base of reports, plans and other results. Print one for its readable form."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the result, with the figures that follow from it, as values that JSON knows."""

    def to_json(self, *, indent: int | None = None) -> str:
        """Return :meth:`to_dict` as one JSON object.

        Args:
            indent: Spaces by which each level is indented. None: all on one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file, whole or not at all.

        Raises:
            OSError: If the file cannot be written; what was there stays.
        """
        write_whole(path, f"{self.to_json()}\n".encode())
