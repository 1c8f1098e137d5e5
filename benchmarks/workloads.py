"""What train_step.py runs: models, tokens per step, budgets."""

from dataclasses import dataclass

BYTES_PER_PARAMETER = 16  # fp32: weight, gradient, two moments


@dataclass(frozen=True)
class Workload:
    """A Llama and what a step computes with it."""

    name: str
    batch: int
    sequence: int
    checkpointing: int
    hidden: int = 1024
    intermediate: int = 4096
    layers: int = 12
    heads: int = 16
    vocabulary: int = 8192
    page_elements: int = 1 << 20

    @property
    def parameters(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def state_bytes(self) -> int:
        return self.parameters * BYTES_PER_PARAMETER


@dataclass(frozen=True)
class Plan:
    """Workloads with the budgets of their variants as shares of the state (0: plain torch), and how often."""

    workloads: list[tuple[Workload, dict[str, float]]]
    rounds: int
    most_rounds: int
    warmup: int = 2
    probe_bytes: int = 256 << 20


RESIDENT = 2.0  # more than the state, so that activations fit as well
FULL = Plan(
    [
        (Workload("256 tokens", batch=1, sequence=256, checkpointing=0), {"plain": 0, "resident": RESIDENT}),
        (
            Workload("2048 tokens", batch=8, sequence=256, checkpointing=1),
            {"plain": 0, "resident": RESIDENT, "quarter": 0.25},
        ),
    ],
    rounds=7,
    most_rounds=20,
)

TINY = Workload(
    "smoke",
    batch=8,
    sequence=32,
    checkpointing=1,
    hidden=256,
    intermediate=1024,
    layers=6,
    heads=4,
    vocabulary=512,
    page_elements=1 << 14,
)
SMOKE = Plan(
    [(TINY, {"plain": 0, "resident": RESIDENT, "quarter": 0.25})],
    rounds=2,
    most_rounds=2,
    warmup=1,
    probe_bytes=16 << 20,
)
