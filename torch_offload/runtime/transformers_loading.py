"""Loading with a `device_map`: transformers would put the whole model into the GPU's memory, or divide it there.

What is loaded while modules are paged as they are built comes to the GPU page by page instead, and needs no map.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches

HOST_PLACES = ("cpu", "disk")


def install(patches: Patches, *, device: torch.device, is_open: Callable[[], bool]) -> None:
    """Replace the function that completes a map, where transformers has it.

    Args:
        patches: Puts it back.
        device: Where the pages are brought.
        is_open: Asked whether what is built is paged.
    """
    if hasattr(sys.modules.get("transformers.modeling_utils"), "_get_device_map"):
        patches.replace(replaced_functions.TRANSFORMERS_DEVICE_MAP, functools.partial(_mapped, device, is_open))


def _mapped(
    device: torch.device,
    is_open: Callable[[], bool],
    original: Callable[..., Any],
    model: Any,
    device_map: Mapping[str, Any] | str,
    max_memory: Any,
    hf_quantizer: Any,
    *args: Any,
) -> Any:
    """Return no map where all of the model would be between the pages' device and the host; a quantizer has its own."""
    if is_open() and hf_quantizer is None and _is_between(device_map, device):
        return None
    return original(model, device_map, max_memory, hf_quantizer, *args)


def _is_between(device_map: Mapping[str, Any] | str, device: torch.device) -> bool:
    if isinstance(device_map, str):  # "auto" and the like: as much as fits, the rest on the host
        return True
    return all(str(place) in HOST_PLACES or _device_of(place) == device for place in device_map.values())


def _device_of(place: Any) -> torch.device:
    named = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return torch.device("cuda", torch.cuda.current_device()) if named == torch.device("cuda") else named
