"""Full state dicts of a divided model: what is gathered of all ranks becomes pages, one tensor after the other.

`get_state_dict` with `full_state_dict=True` gathers the whole model and all states of its optimizer in one rank, or in
each. They would be ordinary memory, many times what that rank has of the model.
"""

from typing import Any

import torch

from torch_offload import _C, _compat
from torch_offload._compat import paged_part
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.import_watcher import ImportWatcher
from torch_offload.hooks.patches import Patches
from torch_offload.runtime.eligibility import why_not_pageable


class FullStates:
    """Pages what is gathered for full state dicts while a session is open.

    Threads: any that gathers.
    """

    def __init__(self, engine: _C.Engine, patches: Patches) -> None:
        """Replace nothing before :meth:`install`."""
        self._engine = engine
        self._patches = patches
        self._watcher = ImportWatcher(_compat.STATE_DICT_MODULE, self._replace)

    def install(self) -> None:
        """Page what is gathered, once torch's own part has been imported."""
        self._watcher.install()

    def remove(self) -> None:
        """Wait for torch's own part no more. Safe to call twice."""
        self._watcher.remove()

    def _replace(self) -> None:
        self._patches.replace(replaced_functions.GATHERED_STATE, self._page_gathered)

    def _page_gathered(self, original: Any, value: Any, *args: Any, **options: Any) -> Any:
        """Page what was made of a DTensor, as whole as all ranks have it together."""
        result = original(value, *args, **options)
        if not _compat.is_dtensor(value) or not isinstance(result, torch.Tensor) or _compat.is_dtensor(result):
            return result
        is_new = result.untyped_storage()._cdata != paged_part(value).untyped_storage()._cdata
        if is_new and why_not_pageable(result, self._engine.torch_device) is None:
            self._engine.manage(result, kind="other", label="tensor of a full state dict")
        return result
