"""One training run of a case of the identity table, in memory or paged, and everything about it that must be equal."""

import contextlib
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from support.bits import digest
from support.models import VOCABULARY, state_bytes, tiny_model

STEPS = 8
ROWS = 2
TOKENS = 8
BUDGET_SHARE = 0.30
HOST_SHARE = 0.35
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
    def moments(self) -> int:
        return 1 if self.optimizer in ("sgd", "fusedsgd") else 2


@dataclass
class Outcome:
    """What a run leaves behind. Equal outcomes are equal in every bit."""

    losses: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)


def make_model(case: Case) -> torch.nn.Module:
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    # Frozen weights have no gradient and no moments: a wider model, so that a share of its state is more than what one
    # operation needs at once.
    is_lora = case.tuning == "lora"
    hidden = 256 if is_lora else 128
    model = tiny_model(case.model, tied=case.head == "tied", dtype=dtype, lora=is_lora, hidden=hidden)
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


def make_rows(case: Case) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    count = STEPS * case.micro_batch_count * ROWS
    ids = torch.randint(0, VOCABULARY, (count, TOKENS), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def run_plain_loop(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rows = make_rows(case)
    batches = [
        {name: torch.stack([row[name] for row in rows[start : start + ROWS]]) for name in rows[start]}
        for start in range(0, len(rows), ROWS)
    ]
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.precision == "autocast")
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches[step * case.micro_batch_count :][: case.micro_batch_count]:
            with autocast:
                loss = model(**batch).loss / case.micro_batch_count
            loss.backward()
        if case.clipping == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        optimizer.step()


def run_trainer(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Train with the stock Trainer; for fused AdamW also its own default optimizer. Returns the optimizer used."""
    checkpointed = case.checkpointing != "stored"
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=case.micro_batch_count,
        gradient_checkpointing=checkpointed,
        gradient_checkpointing_kwargs=checkpoint_arguments(case) if checkpointed else None,
        max_grad_norm=case.max_grad_norm,
        learning_rate=1e-3,
        bf16=case.precision == "autocast",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    optimizers = (None, None) if case.optimizer == "fused" else (optimizer, None)
    trainer = Trainer(model=model, args=arguments, train_dataset=make_rows(case), optimizers=optimizers)
    trainer.train()
    return trainer.optimizer.optimizer


def digest_run(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Hash every weight, gradient and optimizer state."""
    digests = {}
    for name, weight in model.named_parameters():
        digests[name] = digest(weight)
        if weight.grad is not None:
            digests[f"{name}.grad"] = digest(weight.grad)
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, torch.Tensor):
                digests[f"{name}.{key}"] = digest(value)
    return digests


def train(case: Case, model: torch.nn.Module) -> Outcome:
    """Train a model of the case and describe the result."""
    outcome = Outcome()
    hook = model.register_forward_hook(lambda _m, _i, output: outcome.losses.append(output.loss.item().hex()))
    torch.manual_seed(2)
    optimizer = make_optimizer(case, model)
    if case.loop == "trainer":
        optimizer = run_trainer(case, model, optimizer)
    else:
        run_plain_loop(case, model, optimizer)
    hook.remove()
    outcome.digests = digest_run(model, optimizer)
    return outcome


def train_plain(case: Case) -> Outcome:
    torch.set_num_threads(1)
    return train(case, make_model(case))


def train_paged(case: Case, scratch: str, on_device: bool = False) -> tuple[Outcome, Any]:
    """Train under a budget of `BUDGET_SHARE` of the state; return also the engine's report.

    On an emulated device that is the budget of its memory, and `HOST_SHARE` that of the memory below it.
    """
    import torch_offload

    model = make_model(case)
    budget = int(BUDGET_SHARE * state_bytes(model, moments=case.moments))
    config = torch_offload.Config(min_paged_bytes=0, page_elements=PAGE_ELEMENTS)
    if on_device:
        ram = int(HOST_SHARE * state_bytes(model, moments=case.moments))
        torch_offload.wrap(model, device=budget, ram=ram, ssd=scratch, config=config.replace(device_kind="emulated"))
    else:
        torch_offload.wrap(model, ram=budget, ssd=scratch, config=config)
    outcome = train(case, model)
    return outcome, torch_offload.report()


def train_both(case: Case, scratch: str, on_device: bool = False) -> tuple[Outcome, Outcome, Any]:
    """Train plain, then paged, in this process."""
    with contextlib.redirect_stdout(None):
        plain = train_plain(case)
        paged, report = train_paged(case, scratch, on_device)
    return plain, paged, report
