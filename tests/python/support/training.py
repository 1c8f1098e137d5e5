"""One training run of a case of the identity table, in memory or paged, and everything about it that must be equal."""

import contextlib
import hashlib
import math
import random
import sys
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from support.bits import digest, fingerprint
from support.models import VOCABULARY, state_bytes, tiny_model
from support.vector_math import settle_vector_math

STEPS = 8
ROWS = 2
TOKENS = 8
LONG_ROWS = 4
LONG_TOKENS = 64  # with the rows enough that a layer's activations are several pages
BUDGET_SHARE = 0.30
HOST_SHARE = 0.35
STAYING_SHARE = 0.75  # of what a forward saves: more than leaves the device
ACTIVATION_SHARE = 0.35  # of what a forward saves: what one layer and the loss need at once
PAGE_ELEMENTS = 4096

COLUMNS = {
    "model": ("llama", "qwen3", "gpt2", "gemma", "mixtral", "bert"),
    "optimizer": ("fused", "foreach", "single", "sgd", "fusedsgd"),
    "precision": ("fp32", "bf16", "autocast"),
    "checkpointing": ("stored", "reentrant", "nonreentrant"),
    "clipping": ("clip", "noclip"),
    "micro_batches": ("accumulate", "one"),
    "head": ("tied", "untied"),
    "tuning": ("full", "lora"),
    "loop": ("plain", "trainer"),
}


@dataclass(frozen=True)
class Case:
    """One row of the table: a word per column."""

    model: str
    optimizer: str
    precision: str
    checkpointing: str
    clipping: str
    micro_batches: str
    head: str
    tuning: str
    loop: str

    @classmethod
    def parse(cls, row: str) -> "Case":
        words = row.split()
        for word, (column, allowed) in zip(words, COLUMNS.items(), strict=True):
            assert word in allowed, f"{word!r} is no {column}: {row}"
        return cls(*words)

    @property
    def name(self) -> str:
        return "-".join(getattr(self, column) for column in COLUMNS)

    @property
    def micro_batch_count(self) -> int:
        return 2 if self.micro_batches == "accumulate" else 1

    @property
    def max_grad_norm(self) -> float:
        return 0.5 if self.clipping == "clip" else 0.0

    @property
    def has_lists(self) -> bool:
        """Whether the optimizer's operators take lists of tensors: those are what can be put off."""
        return self.optimizer in ("fused", "foreach", "fusedsgd")

    @property
    def moments(self) -> int:
        return 1 if self.optimizer in ("sgd", "fusedsgd") else 2


@dataclass(frozen=True)
class Placement:
    """Where a paged run keeps what."""

    device: bool = False
    activations: str = "keep"
    optimizer_device: str = "auto"
    update: str = "step"
    trace: bool = False
    kind: str = "emulated"  # of the device
    threads: int = 1
    hidden: int | None = None  # None: small, so that an operator runs on one thread anyway
    layers: int | None = None
    page_elements: int = PAGE_ELEMENTS
    steps: int = STEPS

    @property
    def name(self) -> str:
        return f"activations-{self.activations}-update-{self.optimizer_device}"

    @property
    def place(self) -> str:
        """Where tensors are."""
        return self.kind if self.device and self.kind == "cuda" else "cpu"

    @property
    def is_long(self) -> bool:
        """Whether batches are long: as long as activations matter, or threads have something to share."""
        return self.activations != "keep" or self.threads > 1

    @property
    def rows(self) -> int:
        return LONG_ROWS if self.is_long else ROWS

    @property
    def tokens(self) -> int:
        return LONG_TOKENS if self.is_long else TOKENS


@dataclass
class Outcome:
    """What a run leaves behind. Equal outcomes are equal in every bit."""

    losses: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def assert_trained(self, micro_batches: int) -> None:
        """As many losses as there were batches, all of them numbers, and not one and the same."""
        assert len(self.losses) == micro_batches
        assert all(math.isfinite(float.fromhex(loss)) for loss in self.losses), self.losses
        assert len(set(self.losses)) > 1, self.losses


def make_model(case: Case, placement: Placement = Placement()) -> torch.nn.Module:
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    # Frozen weights have no gradient and no moments: a wider model, so that a share of its state is more than what one
    # operation needs at once.
    is_lora = case.tuning == "lora"
    hidden = placement.hidden or (384 if is_lora else 128)
    tied = case.head == "tied"
    model = tiny_model(case.model, tied=tied, dtype=dtype, lora=is_lora, hidden=hidden, layers=placement.layers)
    if placement.place != "cpu":
        model.config._attn_implementation = "eager"  # the fake GPU has none of the fused kernels
    if case.checkpointing != "stored":
        if case.tuning == "lora":
            model.enable_input_require_grads()
        if case.loop == "plain":
            model.gradient_checkpointing_enable(checkpoint_arguments(case))
    return model


def checkpoint_arguments(case: Case) -> dict[str, bool]:
    return {"use_reentrant": case.checkpointing == "reentrant"}


def make_optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if case.optimizer in ("sgd", "fusedsgd"):
        return torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=0.01, fused=case.optimizer == "fusedsgd")
    choice = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}[case.optimizer]
    return torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01, **choice)


def make_rows(case: Case, placement: Placement) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    count = placement.steps * case.micro_batch_count * placement.rows
    ids = torch.randint(0, VOCABULARY, (count, placement.tokens), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def make_batches(case: Case, placement: Placement) -> list[dict[str, torch.Tensor]]:
    rows = make_rows(case, placement)
    starts = range(0, len(rows), placement.rows)
    parts = [rows[start : start + placement.rows] for start in starts]
    return [{name: torch.stack([row[name] for row in part]).to(placement.place) for name in part[0]} for part in parts]


def run_plain_loop(case: Case, placement: Placement, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batches = make_batches(case, placement)
    autocast = torch.autocast(placement.place, dtype=torch.bfloat16, enabled=case.precision == "autocast")
    for step in range(placement.steps):
        optimizer.zero_grad()
        for batch in batches[step * case.micro_batch_count :][: case.micro_batch_count]:
            with autocast:
                loss = model(**batch).loss / case.micro_batch_count
            loss.backward()
        if case.clipping == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        optimizer.step()


def run_trainer(
    case: Case, placement: Placement, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    """Train with the stock Trainer; for fused AdamW also its own default optimizer. Returns the optimizer used."""
    checkpointed = case.checkpointing != "stored"
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=placement.steps,
        per_device_train_batch_size=placement.rows,
        gradient_accumulation_steps=case.micro_batch_count,
        gradient_checkpointing=checkpointed,
        gradient_checkpointing_kwargs=checkpoint_arguments(case) if checkpointed else None,
        max_grad_norm=case.max_grad_norm,
        learning_rate=1e-3,
        bf16=case.precision == "autocast",
        use_cpu=placement.place == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    optimizers = (None, None) if case.optimizer == "fused" else (optimizer, None)
    trainer = Trainer(model=model, args=arguments, train_dataset=make_rows(case, placement), optimizers=optimizers)
    trainer.train()
    return trainer.optimizer.optimizer


def seed_all(seed: int) -> None:
    """Set the state of every generator that a training run may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, str]:
    """Hash the states of the same generators."""
    return {
        "random state of Python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "random state of NumPy": digest(torch.from_numpy(np.random.get_state(legacy=False)["state"]["key"])),
        "random state of torch": digest(torch.get_rng_state()),
    }


def digest_run(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Hash every weight, buffer, gradient and optimizer state."""
    digests = {name: digest(buffer) for name, buffer in model.named_buffers()}
    for name, weight in model.named_parameters():
        digests[name] = digest(weight)
        if weight.grad is not None:
            digests[f"{name}.grad"] = (
                digest(weight.grad) if weight.grad.layout is torch.strided else repr(fingerprint(weight.grad))
            )
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, torch.Tensor):
                digests[f"{name}.{key}"] = digest(value)
    return digests


def train(case: Case, placement: Placement, model: torch.nn.Module) -> Outcome:
    """Train a model of the case and describe the result. Nothing is seeded here: what came before shows."""
    outcome = Outcome()
    hook = model.register_forward_hook(lambda _m, _i, output: outcome.losses.append(output.loss.item().hex()))
    optimizer = make_optimizer(case, model)
    if case.loop == "trainer":
        optimizer = run_trainer(case, placement, model, optimizer)
    else:
        run_plain_loop(case, placement, model, optimizer)
    hook.remove()
    if placement.update == "backward":
        optimizer.zero_grad()  # they cannot be read
    outcome.digests = random_states() | digest_run(model, optimizer)
    return outcome


def train_plain(case: Case, placement: Placement) -> Outcome:
    """Train in memory; nothing of the package has been imported by then."""
    assert "torch_offload" not in sys.modules
    settle_vector_math()
    torch.set_num_threads(placement.threads)
    model = make_model(case, placement).to(placement.place)
    seed_all(2)
    return train(case, placement, model)


def activation_bytes(case: Case, placement: Placement) -> int:
    """Bytes of what a forward pass saves, weights included."""
    model = make_model(case).to(placement.place)
    saved: dict[int, int] = {}
    kept = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(**make_batches(case, placement)[0])
    return sum(saved.values())


def budgets(case: Case, placement: Placement, model: torch.nn.Module) -> dict[str, int]:
    """`BUDGET_SHARE` of the state for compute memory; on a device, `HOST_SHARE` of it for the memory below.

    Activations that are paged have longer rows: a share of them is added, or all where they stay in the memory below.
    """
    state = state_bytes(model, moments=case.moments)
    is_paged = placement.activations != "keep"
    layers = activation_bytes(replace(case, checkpointing="stored"), placement) if is_paged else 0
    compute = int(BUDGET_SHARE * state + ACTIVATION_SHARE * layers)
    if not placement.device:
        return {"ram": compute}
    stays = STAYING_SHARE * activation_bytes(case, placement) if placement.activations == "ram" else 0
    if placement.kind == "cuda":
        return {"gpu": 2 * compute, "gpu_reserved": compute, "ram": int(HOST_SHARE * state + stays)}
    return {"gpu": compute, "ram": int(HOST_SHARE * state + stays)}


def train_paged(case: Case, placement: Placement, scratch: str) -> tuple[Outcome, Any]:
    """Train within the budgets; return also the engine's report."""
    import torch_offload

    torch.set_num_threads(placement.threads)
    model = make_model(case, placement)
    config = torch_offload.Config(
        min_paged_bytes=0,
        page_elements=placement.page_elements,
        activations=placement.activations,
        optimizer_device=placement.optimizer_device,
        update=placement.update,
        trace=placement.trace,
        emulation={"gpu": True} if placement.device and placement.kind == "emulated" else None,
        ssd=scratch,
        **budgets(case, placement, model),
    )
    seed_all(2)  # before wrapping, so that a number drawn there shows
    torch_offload.wrap(model, config=config)
    outcome = train(case, placement, model)
    return outcome, torch_offload.report()


def train_both(case: Case, scratch: str, placement: Placement = Placement()) -> tuple[Outcome, Outcome, Any]:
    """Train plain, then paged, in this process, which has not imported the package before.

    On the fake GPU it has: that is a library of the package's own tests.
    """
    if placement.kind != "cuda" and "torch_offload" in sys.modules:
        raise RuntimeError("torch_offload was imported before the plain run, which then is none")
    with contextlib.redirect_stdout(None):
        plain = train_plain(case, placement)
        paged, report = train_paged(case, placement, scratch)
    return plain, paged, report
