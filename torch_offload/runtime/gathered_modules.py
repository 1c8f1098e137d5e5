"""Room for what `fully_shard` gathers: memory that torch takes and frees by itself, which no page can make up for."""

import logging
from collections.abc import Sequence
from typing import Any

from torch_offload import _compat
from torch_offload.config import Config, format_size
from torch_offload.errors import OutOfTierMemory

logger = logging.getLogger(__name__)

COPIES = 3
"""Of a module's parameters and of its gradients, while it is gathered, computed with and reduced beside the next one.

With gloo, on two and three ranks, a module of 512 KiB trained in six times that and not in five; with products in bf16
and gradients reduced in fp32 in five times, and not in four.
"""


def check_room(config: Config, name: str, parameters: Sequence[Any], *, left: Sequence[Any] = ()) -> None:
    """Refuse a budget that cannot hold what is gathered of a module, and warn of one that it nearly fills.

    Args:
        config: Of the session.
        name: Of the module, in messages.
        parameters: What `fully_shard` keeps of each of its parameters.
        left: The same of parameters of all modules that stay gathered from a forward until its backward.

    Raises:
        OutOfTierMemory: If not even twice the module fits: gathered, and as it arrives; or its gradients, and as they
            are sent; beside others that stay gathered. The message names the module and what would help.
    """
    gathered_bytes = sum(map(_compat.gathered_bytes, parameters))
    trained = [parameter for parameter in parameters if parameter.sharded_param.requires_grad]
    gradient_bytes = sum(map(_compat.gathered_bytes, trained))
    reduced_bytes = sum(map(_compat.reduced_bytes, trained))
    own = set(map(id, parameters))
    left_bytes = sum(_compat.gathered_bytes(parameter) for parameter in left if id(parameter) not in own)
    least = left_bytes + max(2 * gathered_bytes, gradient_bytes + reduced_bytes)
    usual = left_bytes + COPIES * (gathered_bytes + reduced_bytes)
    beside, remedy = "", "call fully_shard on smaller modules"
    if left_bytes:
        beside = (
            f", beside {format_size(left_bytes)} of modules that stay gathered from their forward to their backward"
        )
        remedy = "call fully_shard with reshard_after_forward=True, or on smaller modules"
    available = config.compute_bytes
    if available < least:
        raise OutOfTierMemory(
            f"host tier: fully_shard has all of {name} in memory at once, {gathered_bytes} bytes "
            f"({format_size(gathered_bytes)}), twice{beside}: at least {least} bytes ({format_size(least)}) needed, "
            f"{available} ({format_size(available)}) available; give a ram of some {usual} ({format_size(usual)}), "
            f"or {remedy}"
        )
    if available < usual:
        logger.warning(
            "ram: fully_shard takes up to some %s for %s (%s), its gradients and the module after it%s, of %s: if "
            "training ends in OutOfTierMemory, give a larger ram, or %s",
            format_size(usual),
            name,
            format_size(gathered_bytes),
            beside,
            format_size(available),
            remedy,
        )
