"""Generates and evaluates with a large mixture of experts of made-up weights, on request, as workers/step.py trains.

    python -m workers.moe --kind coded --zeros 0.885 [--budget-bytes N --ssd DIR]

Kinds: `coded`, and `bf16`, the same experts dense, one tensor for each. Weights are made up, since only their count,
their sizes and what is chosen matter here: few random ternary matrices used again and again, each in a blob of its own.
Attention, routers and embeddings are random, the same in both. Dense experts are read as soon as the router has chosen
them, but not before by what the layer before has chosen: such guesses would take the memory of what is needed, of which
there is room for four.
"""

import argparse
import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from harness.machine import CpuSeconds
from harness.process_memory import forget_peak, peak_resident_bytes
from harness.worker_process import serve
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import torch_offload
from torch_offload.moe import layouts, modules, operators, ternary
from torch_offload.moe.modules import UP, CodedExperts, ExpertShapes, blob_name

TEMPLATES = 3  # different experts
PROMPT_TOKENS = 8
VOCABULARY = 512
EVALUATED_TOKENS = 64


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("coded", "bf16"), required=True)
    parser.add_argument("--zeros", type=float, default=0.885, help="share of zeros of the ternary matrices")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--choices", type=int, default=8, help="experts per token")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--expert-width", type=int, default=2816)
    parser.add_argument("--new-tokens", type=int, default=8, help="generated per step")
    parser.add_argument("--budget-bytes", type=int, default=0, help="0: nothing is paged")
    parser.add_argument("--ssd")
    parser.add_argument("--page-elements", type=int, default=1 << 20)
    parser.add_argument("--disk-rate", type=int, default=0, help="slow the SSD down to so many bytes per second")
    return parser.parse_args()


def configuration(options: argparse.Namespace, *, expert_width: int) -> Qwen3MoeConfig:
    """Small attention, many experts."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        moe_intermediate_size=expert_width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=options.experts,
        num_experts_per_tok=options.choices,
        decoder_sparse_step=1,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        eos_token_id=None,
    )


def made_up(rows: int, columns: int, *, zeros: float, generator: torch.Generator) -> ternary.TernaryMatrix:
    """A random ternary matrix that keeps the size of what it is multiplied by."""
    values = torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8) * 2 - 1
    values[torch.rand(rows, columns, generator=generator) < zeros] = 0
    scale = (columns * (1 - zeros)) ** -0.5
    return ternary.TernaryMatrix(values, torch.full((rows,), scale), torch.ones(columns))


def shapes_of(options: argparse.Namespace, count: int) -> ExpertShapes:
    """So many experts: gate and up as one, then down."""
    return ExpertShapes(count, (2 * options.expert_width, options.width), (options.width, options.expert_width))


def templates(options: argparse.Namespace) -> list[tuple[ternary.TernaryMatrix, ternary.TernaryMatrix]]:
    """First and last matrices of a few experts."""
    shapes = shapes_of(options, TEMPLATES)
    generator = torch.Generator().manual_seed(7)
    return [
        (
            made_up(*shapes.up, zeros=options.zeros, generator=generator),
            made_up(*shapes.down, zeros=options.zeros, generator=generator),
        )
        for _ in range(TEMPLATES)
    ]


def coded_templates(options: argparse.Namespace) -> CodedExperts:
    terms = [([up], [down]) for up, down in templates(options)]
    return modules.coded_experts(shapes_of(options, TEMPLATES), terms, label="templates")


def dense_templates(options: argparse.Namespace) -> list[Tensor]:
    """Both matrices of each, one behind the other."""
    return [torch.cat([matrix.dense().bfloat16().flatten() for matrix in matrices]) for matrices in templates(options)]


def model_of(options: argparse.Namespace, make: Callable[[ExpertShapes, str], CodedExperts]) -> nn.Module:
    """Lay the model out with experts of width 1 and put those that `make` makes in their place."""
    model = AutoModelForCausalLM.from_config(configuration(options, expert_width=1), dtype=torch.bfloat16)
    shapes = shapes_of(options, options.experts)
    for experts in layouts.experts_of(model):
        experts.replace(make(shapes, experts.name))
    if options.kind == "coded":
        layouts.read_ahead(model)
    return model


def repeated(few: CodedExperts, shapes: ExpertShapes, *, label: str) -> CodedExperts:
    """As many experts as wanted, copies of a few."""
    (template,) = few.planes
    numbers = [expert % TEMPLATES for expert in range(shapes.count)]
    plane = modules.CodedPlane(shapes, [template.blob(number).numel() for number in numbers], dtype=torch.bfloat16)
    for expert, number in enumerate(numbers):
        plane.blob(expert).copy_(template.blob(number))
    for name in ("up_row_scale", "up_column_scale", "down_row_scale", "down_column_scale"):
        getattr(plane, name).copy_(getattr(template, name)[numbers])
    return CountedExperts(shapes, [plane], label=label)


class CountedExperts(CodedExperts):
    """Says how many experts its calls have used."""

    chosen = 0

    def on_routed(self, chosen: Sequence[int]) -> None:
        self.chosen += len(chosen)
        super().on_routed(chosen)


class DensePlane(modules.CodedPlane):
    """Dense bf16 experts where coded ones would be: each a tensor of its own, read by the same code."""

    def __init__(self, shapes: ExpertShapes, few: list[Tensor]) -> None:
        super().__init__(shapes, [0] * shapes.count, dtype=torch.bfloat16)
        self.shapes = shapes
        for expert in range(shapes.count):
            weights = torch.empty(shapes.weights_each, dtype=torch.bfloat16).copy_(few[expert % TEMPLATES])
            self.register_buffer(blob_name(expert), weights)

    def product(self, expert: int, matrix: int, x: Tensor) -> Tensor:
        up, down = self.shapes.up, self.shapes.down
        begin, shape = (0, up) if matrix == UP else (up[0] * up[1], down)
        return functional.linear(x, self.blob(expert)[begin : begin + shape[0] * shape[1]].view(shape))


class MoeWorker:
    """The model, and what it counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.steps = 0
        torch.manual_seed(0)
        emulation = {"ssd_rate": options.disk_rate or None}
        config = torch_offload.Config(page_elements=options.page_elements, emulation=emulation)
        settings = {"ram": options.budget_bytes, "ssd": options.ssd, "config": config}
        few = coded_templates(options) if options.kind == "coded" else dense_templates(options)  # outside the budget
        paged = torch_offload.loading(**settings) if options.budget_bytes else nullcontext()
        with torch.no_grad(), paged:

            def make(shapes: ExpertShapes, label: str) -> CodedExperts:
                if isinstance(few, CodedExperts):
                    return repeated(few, shapes, label=label)
                return CountedExperts(shapes, [DensePlane(shapes, few)], label=label)

            self.model = model_of(options, make).eval()
            if options.budget_bytes:
                torch_offload.wrap(self.model, **settings)

    def step(self) -> dict[str, Any]:
        """Generate from a prompt that no other step has, then evaluate a row."""
        generator = torch.Generator().manual_seed(self.steps)
        self.steps += 1
        prompt = torch.randint(0, VOCABULARY, (1, PROMPT_TOKENS), generator=generator)
        row = torch.randint(0, VOCABULARY, (1, EVALUATED_TOKENS), generator=generator)
        forget_peak()
        tokens, generated = self.timed(lambda: self.generate(prompt))
        loss, evaluated = self.timed(lambda: self.evaluate(row))
        said = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
        return (
            generated
            | {f"evaluation_{name}": value for name, value in evaluated.items()}
            | {"tokens": said, "loss": loss.hex(), "peak_resident_bytes": float(peak_resident_bytes())}
        )

    def timed(self, work: Any) -> tuple[Any, dict[str, Any]]:
        """Run it; returns its result and what it took."""
        read_before, chosen_before, before = self.read_bytes(), self.chosen(), CpuSeconds.now()
        with torch.inference_mode():
            result = work()
        measured: dict[str, Any] = CpuSeconds.now().since(before)
        chosen = self.chosen() - chosen_before
        return result, measured | {"read_bytes": self.read_bytes() - read_before, "chosen": chosen}

    def generate(self, prompt: Tensor) -> Tensor:
        """Continue the prompt greedily."""
        count = self.options.new_tokens
        return self.model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)

    def evaluate(self, row: Tensor) -> float:
        """Return the loss of a row."""
        return float(self.model(input_ids=row, labels=row).loss)

    def chosen(self) -> int:
        """Count the experts that layers have used, once for each call."""
        return sum(module.chosen for module in self.model.modules() if isinstance(module, CountedExperts))

    def read_bytes(self) -> int:
        return torch_offload.report().ssd_read_bytes if self.options.budget_bytes else 0

    def finish(self) -> dict[str, Any]:
        """Describe the run."""
        if not self.options.budget_bytes:
            return {}
        report = torch_offload.report()
        return {
            "peak_bytes": report.host_peak_bytes,
            "budget_bytes": report.budget_bytes,
            "misses": report.misses,
            "prefetches": report.prefetches,
        }

    def describe(self) -> dict[str, Any]:
        options = self.options
        weights = options.layers * options.experts * 3 * options.width * options.expert_width
        pages = [buffer for name, buffer in self.model.named_buffers() if ".blob_" in name]
        stored = [page for page in pages if page.dtype == torch.uint8]
        coded_bytes = sum(extent.coded_bytes for extent in operators.extents(stored[0])) if stored else 0
        return {
            "expert_weights": weights,
            "expert_bytes": sum(page.nbytes for page in stored) or 2 * weights,
            "blob_bytes": stored[0].nbytes if stored else 0,
            "coded_bytes_of_a_blob": coded_bytes,
            "other_bytes": sum(p.nbytes for name, p in self.model.named_parameters() if "experts" not in name),
        }


if __name__ == "__main__":
    serve(lambda: MoeWorker(parse_options()))
