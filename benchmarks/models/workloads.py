"""What train_step.py runs: models, tokens per step, budgets."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from harness.worker_process import option_words
from optimum import BYTES_OF_KIND


@dataclass(frozen=True)
class Workload:
    """A Llama and what a step computes with it."""

    name: str
    batch: int
    sequence: int
    checkpointing: int
    dtype: str = "fp32"  # bf16 has fp32 masters in torch_offload.AdamW, plain and paged
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
        return self.parameters * sum(BYTES_OF_KIND[self.dtype].values())

    @property
    def optimizer(self) -> str:
        return "offload" if self.dtype == "bf16" else "stock"

    def step_options(self, **more: object) -> list[str]:
        """Return what workers.step is called with, `more` included."""
        values = {key: value for key, value in asdict(self).items() if key != "name"}
        values |= {"optimizer": self.optimizer, **more}
        return option_words(values)


@dataclass(frozen=True)
class Case:
    """A workload in memory for a part of its state, by which its threads are looked at."""

    name: str
    workload: Workload
    budget_share: float


@dataclass(frozen=True)
class VariantPlan:
    """How a workload is trained."""

    budget_share: float = 0  # of the state; 0: plain torch
    max_grad_norm: float = 0  # 0: gradients are not clipped
    activations: str = ""  # "": the package's default
    update: str = ""  # the same
    in_huge_pages: bool = False  # plain torch with malloc and allocator asking for them


RESIDENT = 2.0  # more than the state, so that activations fit as well
PLAIN = {"plain": VariantPlan()}
HUGE = {"plain_huge": VariantPlan(in_huge_pages=True)}
IN_MEMORY = PLAIN | {"resident": VariantPlan(RESIDENT)}
QUARTER = {"quarter": VariantPlan(0.25)}
IN_BACKWARD = {"quarter_in_backward": VariantPlan(0.25, update="backward")}
CLIPPED = {"quarter_clipped": VariantPlan(0.25, max_grad_norm=1.0)}


def with_each_activations(variants: dict[str, VariantPlan], modes: Sequence[str]) -> dict[str, VariantPlan]:
    """Return the variants with every paged one once for each mode of `Config.activations`, such as `resident_keep`."""
    paged = {name: variant for name, variant in variants.items() if variant.budget_share and not variant.max_grad_norm}
    return PLAIN | {
        f"{name}_{mode}": replace(variant, activations=mode) for name, variant in paged.items() for mode in modes
    }


@dataclass(frozen=True)
class Plan:
    """Workloads with their variants, and how often."""

    workloads: list[tuple[Workload, dict[str, VariantPlan]]] = field(default_factory=list)
    rounds: int = 5
    most_rounds: int = 15
    warmup: int = 3
    probe_bytes: int = 256 << 20


def workloads_of(**shape: int) -> list[tuple[Workload, dict[str, VariantPlan]]]:
    """Return the questions, for a model of this shape: both dtypes, bound by the disk and bound by computing."""
    fewest = {"batch": 1, "sequence": 32, "checkpointing": 0, **shape}
    few = {"batch": 1, "sequence": 128, "checkpointing": 0, **shape}
    more = {"batch": 1, "sequence": 512, "checkpointing": 0, **shape}
    some = {"batch": 1, "sequence": 256, "checkpointing": 0, **shape}
    many = {"batch": 8, "sequence": 256, "checkpointing": 1, **shape}
    return [
        (Workload("fp32, 32 tokens", **fewest), PLAIN | QUARTER | IN_BACKWARD),
        (Workload("fp32, 128 tokens", **few), PLAIN | QUARTER | IN_BACKWARD),
        (Workload("fp32, 256 tokens", **some), IN_MEMORY),
        (Workload("fp32, 512 tokens", **more), PLAIN | QUARTER | IN_BACKWARD),
        (Workload("fp32, 2048 tokens", **many), IN_MEMORY | QUARTER | CLIPPED),
        (Workload("bf16, 128 tokens", dtype="bf16", **few), PLAIN | QUARTER),
        (Workload("bf16, 2048 tokens", dtype="bf16", **many), IN_MEMORY | QUARTER),
    ]


USUAL = Plan([(workload, PLAIN | HUGE | variants) for workload, variants in workloads_of()])
LARGE = Plan(workloads_of(hidden=2048, intermediate=8192, layers=14))

FEW = Workload("fp32, 128 tokens", batch=1, sequence=128, checkpointing=0)
TINY = Workload(
    "smoke fp32",
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
    [
        (TINY, HUGE | IN_MEMORY | QUARTER | IN_BACKWARD | CLIPPED),
        (replace(TINY, name="smoke bf16", dtype="bf16"), PLAIN | QUARTER),
    ],
    rounds=2,
    most_rounds=2,
    warmup=1,
    probe_bytes=16 << 20,
)
