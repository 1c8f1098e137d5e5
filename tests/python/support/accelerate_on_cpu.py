"""Lets accelerate shard on CPUs: it leaves several CPUs out of what it shards on, and takes DDP without a word.

For tests only: `fully_shard` itself works over gloo.
"""

from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState


def shard_on_cpus() -> None:
    """Have the `AcceleratorState` of this process take FSDP where a plugin asks for it."""
    original = AcceleratorState.__init__

    def with_shards(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_shards
