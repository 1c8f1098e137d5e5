"""The least SSD traffic that training can have: a replay of its page accesses under furthest-next-use replacement.

    python benchmarks/optimum.py

prints the bytes per parameter and step for several budgets. What is replayed: weights, gradients and optimizer states,
the update of a layer deferred to just before its next forward, write-back of what is dirty, gradients that live from
their backward to that update. All memory is theirs: activations are not counted.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch_offload.planning.belady import Memory, Pages, PageUse, Use

BYTES_OF_KIND = {
    "fp32": {"weight": 4, "gradient": 4, "moment1": 4, "moment2": 4},
    "bf16": {"weight": 2, "gradient": 2, "master_low": 2, "moment1": 4, "moment2": 4},  # masters in halves
}
CHUNKS_PER_LAYER = 4


def training_events(owners: int, *, kinds: Iterable[str], steps: int, micro_batches: int = 1) -> Iterator[PageUse]:
    """Yield the uses of `steps` training steps over parts of a model in the order of their forward."""
    number = {kind: index * owners for index, kind in enumerate(kinds)}

    def event(use: Use, owner: int, kind: str) -> PageUse:
        return PageUse(use, number[kind] + owner, group=owner + 1)

    for step in range(steps):
        for owner in range(owners):
            if step > 0:
                yield from (event(Use.update, owner, kind) for kind in number)
                yield event(Use.drop, owner, "gradient")
            yield event(Use.read, owner, "weight")
        for micro_batch in range(micro_batches):
            if micro_batch > 0:
                yield from (event(Use.read, owner, "weight") for owner in range(owners))
            for owner in reversed(range(owners)):
                yield event(Use.read, owner, "weight")
                yield event(Use.create if micro_batch == 0 else Use.update, owner, "gradient")
        yield PageUse(Use.mark)


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

    Raises:
        ValueError: If the memory cannot hold one part of the model and its state.
    """
    chunks = [elements // CHUNKS_PER_LAYER for elements in part_elements for _ in range(CHUNKS_PER_LAYER)]
    kinds = BYTES_OF_KIND[dtype]
    pages = Pages()
    for kind, size_bytes in kinds.items():
        for count in chunks:
            pages.add(kind, count * size_bytes)
    stored = [page for page, kind in enumerate(pages.kinds) if kind != "gradient"]
    memory = Memory(pages, int(capacity_bytes), stored=stored)
    events = list(training_events(len(chunks), kinds=kinds, steps=steps, micro_batches=micro_batches))
    counted = list(memory.replay(events))[-2]
    if memory.needed_bytes > capacity_bytes:
        raise ValueError(f"{capacity_bytes} bytes cannot hold one part of the model and its state")
    return counted.read_bytes, counted.written_bytes


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
