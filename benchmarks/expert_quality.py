"""What coding experts costs in held-out loss, against file bytes, on models whose experts have learned something.

    python benchmarks/expert_quality.py --json --models upcycled --work DIR > build/quality.json     (hours, once)
    python benchmarks/expert_quality.py --smoke

Models of trained_experts.py, several seeds each; every one is judged as it is in bf16, with its experts zeroed, and
with them made smaller by: rounding to nearest (RTN), QMoE with tokens counting as published, QMoE with each token
counting the same as this project has it, and this project at six rates. All see the same calibration texts.
`value_retained` is (L zeroed - L) / (L zeroed - L bf16). Beside it, on single matrices of the same models: the bits
that this project takes for the output error that QMoE has, and what sorting columns saves.

Then adapters (PEFT's LoRA on the coded experts and on the router) are trained over experts coded at a rate where that
costs something (`adapted_bits`), and, for comparison, the same over the dense ones. `recovered` is what they win back
of the loss that coding costs. The bar was set for 0.8 bits, and moved to `adapted_bits` of the small models after
numbers were seen; both rates are measured and judged.

What is done stays in DIR (texts, trained models, each number that was found), and the next call goes on with it; a
model of which all numbers are there is not made again. Numbers alone (DIR's JSON files) may be carried to another
machine; where training gives other weights there, that is found and nothing is mixed.

After a change of the code that is measured, begin with a new folder.
"""

import argparse
import copy
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from harness.cached_files import kept
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, progress, spread
from models import baselines
from models.trained_experts import (
    RECIPES,
    Recipe,
    Rows,
    Texts,
    held_out_loss,
    parameters_below,
    smoke,
    texts_for,
    tokenizer_for,
    train,
    trained_model,
)
from peft import LoraConfig, get_peft_model
from torch import nn

from torch_offload.compression import gptq
from torch_offload.compression.input_moments import moments_of
from torch_offload.moe import operators
from torch_offload.moe.layouts import experts_of
from torch_offload.moe.modules import DOWN, UP

OUR_BITS = (0.4, 0.6, 0.8, 1.0, 1.5, 2.0)
SMOKE_BITS = (0.8, 2.0)
NEAREST_ZEROS = (0.87, 0.55)  # some 0.8 and 1.5 bits
MIN_VALUE = 0.5  # nat that zeroing experts must cost
SORTED_BITS = 0.8
MAX_ADAPTED_BITS = 16 / 20  # a twentieth of bf16; what adapters win back was to be judged there
COMPARED_EXPERTS = 3  # of the first and of the last layer
SORTED_CLASSES = (2, 4, 8, 16)
AT_MOST_BITS = "adapters_at_most_bits"
COMPARED_SHARES = (0.35, 0.45, 0.55, 0.65, 0.8)  # of QMoE's bits


class Subject:
    """A model of one seed and its texts, made when something has to be found of them that is not kept."""

    def __init__(self, recipe: Recipe, seed: int, folder: Path) -> None:
        self.recipe = recipe
        self.seed = seed
        self.folder = folder / f"{recipe.name}-{digest_of(recipe)}"
        self._begun = self.folder / str(seed)
        self._begun.mkdir(parents=True, exist_ok=True)

    @cached_property
    def texts(self) -> Texts:
        return texts_for(self.recipe, tokenizer_for(self.recipe, self.folder), self.folder, seed=self.seed)

    @cached_property
    def model(self) -> nn.Module:
        """Made again where only numbers were kept: from the same weights, or they are of no use."""
        model = trained_model(self.recipe, self.texts, self.folder, seed=self.seed)
        weights = digest_of_weights(model)
        if self.once("weights", lambda _: weights) != weights:
            raise SystemExit(f"{self._begun} has numbers of a model that training does not make here; begin anew")
        return model

    @cached_property
    def compared(self) -> "Compared":
        return compared_matrices(self.model, self.texts)

    def once(self, name: str, find: Callable[["Subject"], Any]) -> Any:
        """Find something, or read what was found before."""

        def write(part: Path) -> None:
            part.write_text(json.dumps(find(self), indent=1) + "\n")

        return json.loads(kept(self._begun / f"{name}.json", write).read_text())


def measure(subject: Subject, rates: Sequence[float]) -> dict[str, Any]:
    """Judge a model in every way, or read what was found before."""
    return {
        "model": subject.recipe.name,
        "seed": subject.seed,
        "variants": variants(subject, rates),
        **subject.once("sizes", sizes_of),
        "rate_at_qmoes_error": subject.once("rate_at_qmoes_error", rates_at_equal_error),
        "bytes_by_classes": subject.once("bytes_by_classes", bytes_by_classes),
        "adapters": subject.once("adapters", adapters) | subject.once("dense_adapters", dense_adapters),
        "adapters_at_most_bits": at_most_bits(subject),
    }


def at_most_bits(subject: Subject) -> dict[str, Any]:
    """The same at the rate that was asked for, where adapters are also trained at a lower one."""
    if subject.recipe.adapted_bits == MAX_ADAPTED_BITS:
        return subject.once("adapters", adapters) | subject.once("dense_adapters", dense_adapters)
    there = partial(adapters, bits=MAX_ADAPTED_BITS)
    return subject.once("adapters_at_most_bits", there) | subject.once("dense_adapters", dense_adapters)


def digest_of(recipe: Recipe) -> str:
    """What is found with another recipe is kept elsewhere."""
    return hashlib.sha256(json.dumps(asdict(recipe)).encode()).hexdigest()[:8]


def digest_of_weights(model: nn.Module) -> str:
    """Of all bits."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def sizes_of(subject: Subject) -> dict[str, int]:
    """What it was judged on, and how much was coded."""
    shapes = [experts.shapes for experts in experts_of(subject.model)]
    return {
        "held_out_tokens": subject.texts.held_out.ids.numel(),
        "expert_weights": sum(shape.count * shape.weights_each for shape in shapes),
    }


Way = Callable[[nn.Module, Rows], float]
"""Makes a model's experts smaller in place, given texts for calibration; returns their bits per weight."""


def variants(subject: Subject, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Loss and bits per weight of each."""
    ways: dict[str, Way] = {
        "bf16": baselines.keep,
        "zeroed": baselines.zero,
        "qmoe": partial(baselines.qmoe, is_by_length=True),
        "qmoe_of_equal_tokens": partial(baselines.qmoe, is_by_length=False),
        **{f"nearest-{zeros}": partial(baselines.nearest, zeros=zeros) for zeros in NEAREST_ZEROS},
        **{f"ours-{bits}": partial(baselines.ours, bits=bits) for bits in rates},
    }
    rows = [subject.once(name, partial(judge, name, way)) for name, way in ways.items()]
    whole, none = rows[0]["loss"], rows[1]["loss"]
    return [row | {"value_retained": (none - row["loss"]) / (none - whole)} for row in rows]


def judge(name: str, way: Way, subject: Subject) -> dict[str, Any]:
    """Make a copy of the model smaller and find its loss."""
    one = copy.deepcopy(subject.model)
    bits = way(one, subject.texts.calibration)
    progress(f"{name}: {bits:.3f} bits")
    row = {"method": name.partition("-")[0], "bits": bits, "loss": held_out_loss(one, subject.texts.held_out)}
    progress(f"{name}: loss {row['loss']:.4f}")
    return row


Compared = list[tuple[torch.Tensor, torch.Tensor]]
"""Matrices and the second moments of their inputs."""


def compared_matrices(model: nn.Module, texts: Texts) -> Compared:
    """Return some of the first and of the last layer."""
    model = copy.deepcopy(model)
    modules = experts_of(model)
    chosen = {experts.name: experts for experts in (modules[0], modules[-1])}

    def run() -> None:
        held_out_loss(model, texts.calibration)

    moments = moments_of(list(chosen.values()), run)
    return [
        (experts.weight(expert, matrix).detach().float(), moments[name].means(matrix, [expert])[0])
        for name, experts in chosen.items()
        for matrix in (UP, DOWN)
        for expert in range(COMPARED_EXPERTS)
    ]


def rates_at_equal_error(subject: Subject) -> list[float]:
    """For single matrices: bits of ours over bits of QMoE's where both lose the same of the output's energy."""
    return [rate_at_equal_error(weight, moment) for weight, moment in subject.compared]


def bytes_by_classes(subject: Subject) -> list[dict[str, float]]:
    """For single matrices at `SORTED_BITS`: what columns sorted into some classes take of what they take in one."""
    shares: list[dict[str, float]] = []
    for weight, moment in subject.compared:
        (term,) = gptq.quantize(weight, moment, bits=SORTED_BITS)
        alone, *sorted_ = (
            operators.extents(operators.encode(term.values, most_classes=classes))[0].coded_bytes
            for classes in (1, *SORTED_CLASSES)
        )
        shares.append({str(count): size / alone for count, size in zip(SORTED_CLASSES, sorted_, strict=True)})
    return shares


def rate_at_equal_error(weight: torch.Tensor, moment: torch.Tensor) -> float:
    """Interpolated between rates, the logarithm of the error on a line; infinite if QMoE's is beyond them."""
    dense, qmoe_bytes = baselines.qmoe_rounded(weight, moment)
    target = math.log(lost(weight, dense, moment))
    points: list[tuple[float, float]] = []
    for share in COMPARED_SHARES:
        terms = gptq.quantize(weight, moment, bits=share * qmoe_bytes * 8 / weight.numel())
        total = torch.stack([term.dense() for term in terms]).sum(0)
        points.append((baselines.coded_bytes(terms) / qmoe_bytes, math.log(lost(weight, total, moment))))
        if len(points) > 1 and points[-1][1] <= target <= points[-2][1]:
            (low, first), (high, second) = points[-2:]
            return low + (first - target) / (first - second) * (high - low)
    return points[0][0] if points[0][1] <= target else math.inf


def lost(weight: torch.Tensor, other: torch.Tensor, moment: torch.Tensor) -> float:
    """Part of the output's energy."""
    error = (weight - other).double()
    exact = weight.double()
    return float((error @ moment.double() * error).sum() / (exact @ moment.double() * exact).sum())


def adapters(subject: Subject, *, bits: float | None = None) -> dict[str, float]:
    """Loss with adapters over coded experts, and how many parameters they are; `bits` are the recipe's unless given."""
    bits = bits or subject.recipe.adapted_bits
    coded, recipe = copy.deepcopy(subject.model), subject.recipe
    parameters = sum(parameter.numel() for parameter in coded.parameters()) + parameters_below(recipe, subject.folder)
    baselines.ours(coded, subject.texts.calibration, bits=bits)
    loss, count = adapt(coded, ["coded.up", "coded.down"], [], subject.texts, recipe)
    return {"bits": bits, "parameters_share": count / parameters, "loss_adapted": loss}


def dense_adapters(subject: Subject) -> dict[str, float]:
    """Loss with the same adapters over dense experts, trained alike."""
    weights = ["experts.gate_up_proj", "experts.down_proj"]
    loss, _ = adapt(copy.deepcopy(subject.model), [], weights, subject.texts, subject.recipe)
    return {"loss_dense_adapted": loss}


def adapt(
    model: nn.Module, modules: list[str], parameters: list[str], texts: Texts, recipe: Recipe
) -> tuple[float, int]:
    """Train LoRA factors on experts and router; returns the held-out loss and how many parameters were trained."""
    torch.manual_seed(0)
    rank = recipe.adapter_rank
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=modules, target_parameters=["gate.weight", *parameters]
    )
    adapted = get_peft_model(model, config)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    train(adapted, texts.adapting, recipe.for_adapters(), autocast=False)
    return held_out_loss(adapted, texts.held_out), sum(parameter.numel() for parameter in trained)


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the seeds of each model."""
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(result["model"] for result in results):
        of_model = [result for result in results if result["model"] == name]
        per_variant = zip(*(result["variants"] for result in of_model), strict=True)
        summary[name] = {
            "value_of_experts": spread([value_of_experts(result) for result in of_model]),
            "variants": [
                {"method": rows[0]["method"]}
                | {key: spread([row[key] for row in rows]) for key in ("bits", "loss", "value_retained")}
                for rows in per_variant
            ],
            "rate_at_qmoes_error": spread([ratio for result in of_model for ratio in result["rate_at_qmoes_error"]]),
            "bytes_by_classes": {
                str(count): spread([row[str(count)] for result in of_model for row in result["bytes_by_classes"]])
                for count in SORTED_CLASSES
            },
            "recovered": spread([recovered(result) for result in of_model]),
            "recovered_of_dense_with_adapters": spread([recovered_of_adapted(result) for result in of_model]),
            "recovered_at_most_bits": spread([recovered(result, AT_MOST_BITS) for result in of_model]),
            "recovered_at_most_bits_of_dense_with_adapters": spread(
                [recovered_of_adapted(result, AT_MOST_BITS) for result in of_model]
            ),
        }
    return summary


def loss_of(result: dict[str, Any], method: str) -> float:
    return next(float(row["loss"]) for row in result["variants"] if row["method"] == method)


def below_adapters(result: dict[str, Any], where: str = "adapters") -> dict[str, Any]:
    """The variant that adapters were trained over."""
    ours = [row for row in result["variants"] if row["method"] == "ours"]
    return min(ours, key=lambda row: abs(float(row["bits"] - result[where]["bits"])))


def value_of_experts(result: dict[str, Any]) -> float:
    """Nats that zeroing them costs."""
    return loss_of(result, "zeroed") - loss_of(result, "bf16")


def recovered(result: dict[str, Any], where: str = "adapters") -> float:
    """Part of the loss that coding costs, won back by adapters."""
    coded = below_adapters(result, where)["loss"]
    return float((coded - result[where]["loss_adapted"]) / (coded - loss_of(result, "bf16")))


def recovered_of_adapted(result: dict[str, Any], where: str = "adapters") -> float:
    """The same against the dense model with adapters of its own."""
    coded, losses = below_adapters(result, where)["loss"], result[where]
    return float((coded - losses["loss_adapted"]) / (coded - losses["loss_dense_adapted"]))


def bars_of(results: list[dict[str, Any]], *, judges_values: bool) -> list[dict[str, Any]]:
    """Return what must hold for each model. Losses are reported, not judged."""
    bars = []
    for name, summary in summarise(results).items():
        of_model = [result for result in results if result["model"] == name]
        share = max(result["adapters"]["parameters_share"] for result in of_model)
        bits = max(below_adapters(result)["bits"] for result in of_model)
        bars += [
            at_most(f"{name}: adapters' part of the parameters", share, 0.01),
            at_most(f"{name}: bits per weight below adapters", bits, MAX_ADAPTED_BITS),
        ]
        if judges_values:
            bars += [
                at_least(f"{name}: seeds", len(of_model), 3),
                at_least(f"{name}: held-out tokens", min(result["held_out_tokens"] for result in of_model), 100_000),
                at_least(f"{name}: nats that zeroing experts costs", summary["value_of_experts"]["min"], MIN_VALUE),
                at_most(
                    f"{name}: bits over QMoE's at its output error",
                    summary["rate_at_qmoes_error"]["median"],
                    0.75,
                ),
                at_least(
                    f"{name}: part of the loss that adapters win back at {MAX_ADAPTED_BITS} bits",
                    min(
                        summary["recovered_at_most_bits"]["median"],
                        summary["recovered_at_most_bits_of_dense_with_adapters"]["median"],
                    ),
                    0.5,
                ),
                at_least(
                    f"{name}: part of the loss that adapters win back",
                    min(summary["recovered"]["median"], summary["recovered_of_dense_with_adapters"]["median"]),
                    0.5,
                ),
            ]
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the bars")
    parser.add_argument("--smoke", action="store_true", help="one small model for a minute: shows that it runs")
    parser.add_argument("--models", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", help="directory for what is kept; default: nothing is")
    options = parser.parse_args()
    recipes = [smoke(RECIPES["mixtral"])] if options.smoke else [RECIPES[name] for name in options.models]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.work or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rates = SMOKE_BITS if options.smoke else OUR_BITS
        seeds = range(1 if options.smoke else options.seeds)
        results = [measure(Subject(recipe, seed, folder), rates) for seed in seeds for recipe in recipes]
    benchmark = {"benchmark": "expert_quality", "machine": machine(), "recipes": [asdict(one) for one in recipes]}
    bars = bars_of(results, judges_values=not options.smoke)
    emit(benchmark | {"results": results, "summary": summarise(results), "bars": bars}, as_json=options.json)


if __name__ == "__main__":
    main()
