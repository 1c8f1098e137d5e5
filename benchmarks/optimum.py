"""The least SSD traffic that training can have: a replay of its page accesses under furthest-next-use replacement.

    python benchmarks/optimum.py

prints the bytes per parameter and step for several budgets. What is replayed: weights, gradients and optimizer states,
the update of a layer deferred to just before its next forward, write-back of what is dirty, gradients that live from
their backward to that update. All memory is theirs: activations are not counted.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

BYTES_OF_KIND = {
    "fp32": {"weight": 4, "gradient": 4, "moment1": 4, "moment2": 4},
    "bf16": {"weight": 2, "gradient": 2, "master_low": 2, "moment1": 4, "moment2": 4},  # masters in halves
}
CHUNKS_PER_LAYER = 4
NEVER = 1 << 60


class Use(Enum):
    read = "read"
    update = "update"  # read and written
    create = "create"  # written without being read
    drop = "drop"  # its bytes are worthless from here on


@dataclass(frozen=True)
class Access:
    """One use of one object; objects of the same owner are never evicted for each other."""

    step: int
    owner: int
    kind: str
    use: Use


def training_accesses(owners: int, *, kinds: Iterable[str], steps: int, micro_batches: int = 1) -> Iterator[Access]:
    """Yield the accesses of `steps` training steps over parts of a model in the order of their forward."""
    for step in range(steps):
        for owner in range(owners):
            if step > 0:
                yield from (Access(step, owner, kind, Use.update) for kind in kinds)
                yield Access(step, owner, "gradient", Use.drop)
            yield Access(step, owner, "weight", Use.read)
        for micro_batch in range(micro_batches):
            if micro_batch > 0:
                yield from (Access(step, owner, "weight", Use.read) for owner in range(owners))
            for owner in reversed(range(owners)):
                yield Access(step, owner, "weight", Use.read)
                yield Access(step, owner, "gradient", Use.create if micro_batch == 0 else Use.update)


class Replay:
    """Memory of `capacity_bytes` over an SSD; evicts what is used furthest in the future."""

    def __init__(
        self,
        accesses: Sequence[Access],
        elements: Sequence[int],
        bytes_of_kind: Mapping[str, int],
        capacity_bytes: float,
    ) -> None:
        self.size_bytes = {
            (owner, kind): count * size for owner, count in enumerate(elements) for kind, size in bytes_of_kind.items()
        }
        self.capacity_bytes = capacity_bytes
        self.uses: dict[tuple[int, str], list[int]] = defaultdict(list)
        for time, access in enumerate(accesses):
            self.uses[access.owner, access.kind].append(time)
        self.used_bytes = 0
        self.resident: set[tuple[int, str]] = set()
        self.dirty: set[tuple[int, str]] = set()
        self.stored = {key for key in self.uses if key[1] != "gradient"}
        self.read_bytes = 0
        self.written_bytes = 0

    def next_use(self, key: tuple[int, str], time: int) -> int:
        uses = self.uses[key]
        index = bisect.bisect_right(uses, time)
        return uses[index] if index < len(uses) else NEVER

    def apply(self, time: int, access: Access) -> None:
        key = (access.owner, access.kind)
        if access.use is Use.drop:
            self.forget(key)
            self.stored.discard(key)
            return
        if key not in self.resident:
            self.make_room(self.size_bytes[key], time, keep_owner=access.owner)
            if access.use is not Use.create and key in self.stored:
                self.read_bytes += self.size_bytes[key]
            self.resident.add(key)
            self.used_bytes += self.size_bytes[key]
        if access.use is not Use.read:
            self.dirty.add(key)

    def forget(self, key: tuple[int, str]) -> None:
        if key in self.resident:
            self.resident.remove(key)
            self.used_bytes -= self.size_bytes[key]
        self.dirty.discard(key)

    def make_room(self, wanted_bytes: int, time: int, *, keep_owner: int) -> None:
        while self.used_bytes + wanted_bytes > self.capacity_bytes:
            others = [key for key in self.resident if key[0] != keep_owner]
            if not others:
                raise ValueError(f"{self.capacity_bytes} bytes cannot hold one part of the model and its state")
            victim = max(others, key=lambda key: self.next_use(key, time))
            if victim in self.dirty:
                self.written_bytes += self.size_bytes[victim]
                self.stored.add(victim)
            self.forget(victim)


def optimum(
    part_elements: Sequence[int], capacity_bytes: float, *, dtype: str = "fp32", steps: int = 6, micro_batches: int = 1
) -> tuple[int, int]:
    """Return the bytes that a step reads and writes at least.

    Args:
        part_elements: Parameters of each part of the model (embedding, layers, head), in the order of the forward.
        capacity_bytes: Memory for weights, gradients and states.
        dtype: Of the weights: ``fp32`` with stock AdamW, or ``bf16`` with fp32 masters in halves.
        steps: Steps to replay. The last but one is counted: the first start cold, after the last comes nothing.
        micro_batches: Forward and backward passes per step.
    """
    chunks = [elements // CHUNKS_PER_LAYER for elements in part_elements for _ in range(CHUNKS_PER_LAYER)]
    kinds = BYTES_OF_KIND[dtype]
    accesses = list(training_accesses(len(chunks), kinds=kinds, steps=steps, micro_batches=micro_batches))
    replay = Replay(accesses, chunks, kinds, capacity_bytes)
    totals = {}
    for time, access in enumerate(accesses):
        replay.apply(time, access)
        totals[access.step] = (replay.read_bytes, replay.written_bytes)
    before, after = totals[steps - 3], totals[steps - 2]
    return after[0] - before[0], after[1] - before[1]


def main() -> None:
    layers = [1 << 20] * 12
    for dtype, kinds in BYTES_OF_KIND.items():
        state_bytes = sum(layers) * sum(kinds.values())
        for share in (0.2, 0.25, 0.35, 0.4, 0.5, 0.7, 0.86, 1.0):
            least = optimum(layers, share * state_bytes, dtype=dtype)
            read, written = (count / sum(layers) for count in least)
            total = f"{read:5.1f} + written {written:5.1f} = {read + written:5.1f} B/param"
            print(f"{dtype}, {share:5.0%} in memory: read {total}")


if __name__ == "__main__":
    main()
