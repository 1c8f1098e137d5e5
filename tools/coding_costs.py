"""The tables of docs/concepts/coded-experts.md: what coding experts costs, and what wins it back."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from markdown_parts import table, times

CODED = ("expert_quality_upcycled", "expert_quality_small")
NAMES = {
    "upcycled": "SmolLM2-135M, eight experts in five of its 30 layers",
    "mixtral": "small Mixtral",
    "qwen3": "small Qwen3-MoE",
}
METHODS = {
    "zeroed": "zeroed",
    "nearest": "rounded to nearest",
    "qmoe": "QMoE, re-implemented here, with its own coder",
    "qmoe_of_equal_tokens": "the same, each token counting the same",
    "ours": "this project",
}

Json = dict[str, Any]


def of_models(contents: Iterable[Json]) -> dict[str, list[Json]]:
    """Return the results of each model, one for each seed."""
    found: dict[str, list[Json]] = {}
    for content in contents:
        for result in content["results"]:
            found.setdefault(result["model"], []).append(result)
    return {name: found[name] for name in NAMES if name in found}


def losses(results: list[Json], place: int) -> str:
    """Return by how much a variant's loss is above that of bf16: the median, the range, and the part preserved."""
    above = [result["variants"][place]["loss"] - result["variants"][0]["loss"] for result in results]
    kept = median(result["variants"][place]["value_retained"] for result in results)
    bits = median(result["variants"][place]["bits"] for result in results)
    bit_text = f"{bits:.2f} b: " if bits else ""
    return f"{bit_text}{nats(median(above))} ({nats(min(above))} to {nats(max(above))}; {kept:.4g})"


def nats(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"


def losses_table(contents: Iterable[Json]) -> str:
    models = of_models(contents)
    variants = next(iter(models.values()))[0]["variants"]
    rows = [
        [METHODS[variant["method"]], *(losses(results, place) for results in models.values())]
        for place, variant in enumerate(variants)
        if variant["method"] != "bf16"
    ]
    return table(["experts", *(NAMES[name] for name in models)], rows)


def shares_table(contents: Iterable[Json]) -> str:
    summaries: Mapping[str, Json] = {name: one for content in contents for name, one in content["summary"].items()}
    bits = {name: results[0]["adapters"]["bits"] for name, results in of_models(contents).items()}
    questions = {
        "of QMoE's bits, for its output error on the calibration texts": "rate_at_qmoes_error",
        "of the loss at 0.8 bits, won back by adapters": "recovered_at_most_bits",
        "the same against the dense model with adapters": "recovered_at_most_bits_of_dense_with_adapters",
        "of the loss at the bits in the last row, won back by adapters": "recovered",
        "the same as that against the dense model with adapters": "recovered_of_dense_with_adapters",
    }
    rows = [[question, *(times(summaries[name][key]) for name in bits)] for question, key in questions.items()]
    rows.append(["bits below adapters", *(f"{value:g}" for value in bits.values())])
    return table(["part", *(NAMES[name] for name in bits)], rows)
