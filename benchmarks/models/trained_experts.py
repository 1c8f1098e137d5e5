"""Models with experts that have learned something, made here: no hub has to be reached.

    upcycled    SmolLM2-135M, the real one: the MLPs of its last five layers become eight experts each, copies with
                noise, of which a token takes two (sparse upcycling, Komatsuzaki et al., arXiv 2212.05055), and these
                layers are trained briefly. The 25 layers below stay as they are, so they are run once on every text
    mixtral     a small Mixtral, eight experts, two per token, from scratch
    qwen3       a small Qwen3-MoE, sixteen experts, four per token, from scratch

All are trained and judged on docstrings of packages (package_text.py); what is held out is of other packages.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from harness.cached_files import kept
from harness.reporting import progress
from models.corpus import HELD_OUT, TRAINING, write_texts
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from demo_model import convert_model

SMALL_VOCABULARY = 4096
PIECE = 20_000  # characters
FIRST_UPCYCLED = 25
AT_ONCE = 4  # rows
ADAPTER_LEARNING_RATE = 2e-3
LOSSES_AT_ONCE = 128  # tokens: their logits stay in the cache
COPY_NOISE = 0.2  # of a weight's standard deviation
WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class Recipe:
    """How a model is made, and how much text is used for what; tokens."""

    name: str
    learning_rate: float
    training_tokens: int
    held_out_tokens: int = 102_400
    calibration_tokens: int = 65_536
    adapter_tokens: int = 65_536
    adapter_tokens_seen: int = 0  # of them: the first of those for training
    sequence: int = 512
    batch: int = 4
    width: int = 256
    adapter_rank: int = 8
    adapted_bits: float = 0.8
    training_packages: tuple[str, ...] = TRAINING
    held_out_packages: tuple[str, ...] = HELD_OUT

    def for_adapters(self) -> "Recipe":
        """As adapters are trained: more steps, of one row each."""
        return replace(self, learning_rate=ADAPTER_LEARNING_RATE, batch=1)

    @property
    def is_upcycled(self) -> bool:
        return self.name == "upcycled"


RECIPES = {
    "upcycled": Recipe(
        "upcycled",
        learning_rate=1e-4,
        training_tokens=65_536,
        calibration_tokens=32_768,
        adapter_tokens=131_072,
        adapter_tokens_seen=65_536,
        width=576,
    ),
    # At 0.8 bits coding costs these some thousandth of a nat, less than what adapters reach varies by.
    "mixtral": Recipe(
        "mixtral", learning_rate=3e-3, training_tokens=409_600, sequence=256, adapter_rank=2, adapted_bits=0.4
    ),
    "qwen3": Recipe(
        "qwen3", learning_rate=3e-3, training_tokens=409_600, sequence=256, adapter_rank=1, adapted_bits=0.4
    ),
}


def smoke(recipe: Recipe) -> Recipe:
    """The same for half a minute."""
    return replace(
        recipe,
        training_tokens=4096,
        held_out_tokens=2048,
        calibration_tokens=2048,
        adapter_tokens=4096,
        sequence=64,
        width=192,
        adapter_rank=1,
        adapted_bits=0.8,
        training_packages=("mpmath",),
        held_out_packages=("accelerate",),
    )


@dataclass(frozen=True)
class Rows:
    """Rows of text, and of what the layers below say of them where a model begins above these.

    Attributes:
        ids: Tokens [rows, sequence].
        states: bfloat16 [rows, sequence, hidden], or None.
    """

    ids: Tensor
    states: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, rows: int) -> "Rows":
        return self.take(slice(rows))

    def split(self, rows: int) -> Iterator["Rows"]:
        """In parts of so many rows."""
        for begin in range(0, len(self), rows):
            yield self.take(slice(begin, begin + rows))

    def take(self, rows: slice | list[int]) -> "Rows":
        return Rows(self.ids[rows], None if self.states is None else self.states[rows])

    def inputs(self, model: nn.Module) -> dict[str, Tensor]:
        """What the model is called with."""
        if self.states is None:
            return {"input_ids": self.ids}
        return {"inputs_embeds": self.states.to(next(model.parameters()).dtype)}


@dataclass(frozen=True)
class Texts:
    """Rows for each use; no text is in two of them, but adapters may be trained on what the model was trained on."""

    training: Rows
    adapting: Rows
    calibration: Rows
    held_out: Rows


def texts_for(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, folder: Path, *, seed: int) -> Texts:
    """Cut the texts into rows. The seed chooses what is trained on and calibrated with, of what is held out nothing."""
    wanted = 3 * (recipe.training_tokens + recipe.calibration_tokens)  # of which each seed takes others
    training = _rows(tokenizer, _text(folder, recipe.training_packages), recipe, tokens=wanted)
    held_out = _rows(tokenizer, _text(folder, recipe.held_out_packages), recipe, tokens=recipe.held_out_tokens)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    trained_rows = recipe.training_tokens // recipe.sequence
    calibration_rows = recipe.calibration_tokens // recipe.sequence
    seen_rows = recipe.adapter_tokens_seen // recipe.sequence
    used = trained_rows + calibration_rows
    needed = used + recipe.adapter_tokens // recipe.sequence - seen_rows
    chosen = training[order[:needed]]
    if len(chosen) < needed:
        raise SystemExit(f"{len(training)} rows of text are too few for {recipe}")
    complete = _with_states(_smollm2(folder)) if recipe.is_upcycled else Rows
    rows = complete(chosen)
    return Texts(
        training=rows.first(trained_rows),
        adapting=rows.take([*range(seen_rows), *range(used, needed)]),
        calibration=rows.take(slice(trained_rows, used)),
        held_out=complete(held_out),
    )


def parameters_below(recipe: Recipe, folder: Path) -> int:
    """Parameters of the layers that the model stands on, its embedding left out, which is its head too."""
    layers = _layers_below(_smollm2(folder)).layers if recipe.is_upcycled else nn.ModuleList()
    return sum(parameter.numel() for parameter in layers.parameters())


def _layers_below(path: Path) -> nn.Module:
    below = AutoModel.from_pretrained(path, dtype=torch.bfloat16).eval()
    below.layers = below.layers[:FIRST_UPCYCLED]
    below.norm = nn.Identity()
    return below


def _with_states(path: Path) -> Callable[[Tensor], Rows]:
    """Adds what the layers below the upcycled ones say."""
    below = _layers_below(path)

    def complete(ids: Tensor) -> Rows:
        with torch.no_grad():
            states = [below(input_ids=part, use_cache=False).last_hidden_state for part in ids.split(AT_ONCE)]
        return Rows(ids, torch.cat(states))

    return complete


def _text(folder: Path, packages: Sequence[str]) -> str:
    path = folder / f"{'-'.join(packages)}.txt"
    write_texts(path, packages)
    return path.read_text(encoding="utf-8")


def _rows(tokenizer: PreTrainedTokenizerFast, text: str, recipe: Recipe, *, tokens: int) -> Tensor:
    """Rows of pieces of the text, in an order of chance that is always the same; at most so many tokens."""
    pieces = [text[begin : begin + PIECE] for begin in range(0, len(text), PIECE)]
    random.Random(0).shuffle(pieces)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer(piece)["input_ids"]
        if len(ids) >= tokens:
            break
    rows = min(len(ids), tokens) // recipe.sequence
    return torch.tensor(ids[: rows * recipe.sequence]).view(rows, recipe.sequence)


def tokenizer_for(recipe: Recipe, folder: Path) -> PreTrainedTokenizerFast:
    """The real model's, or a small vocabulary made from the training text."""
    if recipe.is_upcycled:
        return AutoTokenizer.from_pretrained(_smollm2(folder))

    def write(path: Path) -> None:
        trained = ByteLevelBPETokenizer()
        trained.train_from_iterator(
            _text(folder, recipe.training_packages).split("\n\n"), SMALL_VOCABULARY, show_progress=False
        )
        trained.save(str(path))

    return PreTrainedTokenizerFast(tokenizer_file=str(kept(folder / "tokenizer.json", write)))


def _smollm2(folder: Path) -> Path:
    path = folder / "smollm2-135m"
    convert_model(path)
    return path


def trained_model(recipe: Recipe, texts: Texts, folder: Path, *, seed: int) -> nn.Module:
    """Train a model in float32, with products in bfloat16; returns it in bfloat16. A finished one is read again."""
    torch.manual_seed(seed)
    model = _upcycled(_smollm2(folder)) if recipe.is_upcycled else _small(recipe)

    def write(path: Path) -> None:
        train(model, texts.training, recipe, autocast=True)
        torch.save(model.state_dict(), path)

    model.load_state_dict(torch.load(kept(folder / f"{seed}.pt", write)))
    return model.bfloat16().eval()


def _small(recipe: Recipe) -> nn.Module:
    shared = {
        "vocab_size": SMALL_VOCABULARY,
        "hidden_size": recipe.width,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": recipe.width // 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": recipe.sequence,
    }
    if recipe.name == "mixtral":
        mixtral = MixtralConfig(**shared, intermediate_size=3 * recipe.width, num_local_experts=8)
        return MixtralForCausalLM(mixtral)
    qwen3 = Qwen3MoeConfig(
        **shared,
        moe_intermediate_size=3 * recipe.width // 2,
        num_experts=16,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(qwen3)


def _upcycled(path: Path) -> nn.Module:
    """The layers above `FIRST_UPCYCLED` and the head.

    Experts start as noisy copies of the MLP they replace; two of them, with weights of sum 1, say what it did. The head
    is the embedding too, which the layers below were run with: it is not trained.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = MixtralConfig(
        hidden_size=model.config.hidden_size,
        intermediate_size=model.config.intermediate_size,
        num_local_experts=8,
        num_experts_per_tok=2,
        hidden_act=model.config.hidden_act,
    )
    model.get_output_embeddings().requires_grad_(requires_grad=False)
    model.model.layers = model.model.layers[FIRST_UPCYCLED:]
    for layer in model.model.layers:
        dense = layer.mlp
        block = MixtralSparseMoeBlock(config)
        with torch.no_grad():
            block.experts.gate_up_proj.copy_(_noisy(torch.cat([dense.gate_proj.weight, dense.up_proj.weight])))
            block.experts.down_proj.copy_(_noisy(dense.down_proj.weight))
            block.gate.weight.normal_(std=config.initializer_range)
        layer.mlp = block
    return model


def _noisy(weight: Tensor) -> Tensor:
    return weight + COPY_NOISE * weight.std() * torch.randn(8, *weight.shape)


def train(model: nn.Module, rows: Rows, recipe: Recipe, *, autocast: bool) -> None:
    """Go once over the rows, in order: AdamW, a warm-up and a cosine to a tenth."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    steps = len(rows) // recipe.batch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_rate(step, steps))
    for step, batch in enumerate(rows.first(steps * recipe.batch).split(recipe.batch)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(**batch.inputs(model), use_cache=False).logits
        loss = _losses(logits[:, :-1], batch.ids[:, 1:]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            progress(f"{recipe.name}: step {step} of {steps}, loss {loss:.3f}")
    model.eval()


def _share_of_rate(step: int, steps: int) -> float:
    warmup = max(1, round(WARMUP_SHARE * steps))
    done = max(0.0, (step - warmup) / max(1, steps - warmup))
    return min((step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each of [rows, tokens], in nats."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(), reduction="none")


def held_out_loss(model: nn.Module, rows: Rows) -> float:
    """Mean over all predicted tokens, in nats."""
    total = torch.zeros((), dtype=torch.float64)
    with torch.inference_mode():
        for batch in rows.split(AT_ONCE):
            logits = model(**batch.inputs(model), use_cache=False).logits[:, :-1]
            parts = zip(logits.split(LOSSES_AT_ONCE, 1), batch.ids[:, 1:].split(LOSSES_AT_ONCE, 1), strict=True)
            total += sum(_losses(said, right).double().sum() for said, right in parts)
    return float(total / (rows.ids.shape[0] * (rows.ids.shape[1] - 1)))
