"""What expert_quality makes of what it finds. That it finds something is shown by its smoke run, in test_benchmarks."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_offload.compression import gptq

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import expert_quality
from models import baselines, trained_experts
from models.trained_experts import RECIPES

pytestmark = pytest.mark.any_torch


@pytest.fixture
def matrix() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and the second moments of their inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 256, generator=generator)
    return torch.randn(256, 256, generator=generator), inputs.T @ inputs / len(inputs)


def test_the_rate_at_equal_error_is_found(matrix, monkeypatch):
    """Of a baseline that is this project's own rounding with twice its bytes, half of the bytes are enough."""
    weight, moment = matrix
    terms = gptq.quantize(weight, moment, bits=0.9)
    dense, size_bytes = terms[0].dense(), baselines.coded_bytes(terms)
    monkeypatch.setattr(baselines, "qmoe_rounded", lambda *_: (dense, 2 * size_bytes))
    assert expert_quality.rate_at_equal_error(weight, moment) == pytest.approx(0.5, abs=0.03)


def test_an_error_that_is_out_of_reach_takes_more_than_all_bits(matrix, monkeypatch):
    """What a baseline loses is less than this project loses at any rate that is tried."""
    weight, moment = matrix
    monkeypatch.setattr(baselines, "qmoe_rounded", lambda *_: (weight * 1.0001, 4000))
    assert expert_quality.rate_at_equal_error(weight, moment) == math.inf


def result(*, rates: list[float], loss_adapted: float = 2.7) -> dict[str, Any]:
    """One seed: coding costs 0.4 nat."""
    losses = {"bf16": (16.0, 2.5), "zeroed": (0.0, 7.0), "ours": (0.8, 2.9)}
    adapters = {"bits": 0.8, "parameters_share": 0.009, "loss_adapted": loss_adapted, "loss_dense_adapted": 2.45}
    return {
        "model": "made up",
        "held_out_tokens": 100_000,
        "variants": [
            {"method": method, "bits": bits, "loss": loss, "value_retained": (7.0 - loss) / 4.5}
            for method, (bits, loss) in losses.items()
        ],
        "rate_at_qmoes_error": rates,
        "bytes_by_classes": [{"2": 0.98, "4": 0.97, "8": 0.97, "16": 0.97}],
        "adapters": adapters,
        "adapters_at_most_bits": adapters,
    }


def broken_bars(results: list[dict[str, Any]]) -> list[str]:
    bars = expert_quality.bars_of(results, judges_values=True)
    return [bar["name"] for bar in bars if not bar["holds"]]


def test_bars_hold_what_was_found():
    """Each is broken by what it is about, and by nothing else."""
    good = result(rates=[0.5, 0.6], loss_adapted=2.6)
    assert broken_bars([good] * 3) == []
    assert broken_bars([good] * 2) == ["made up: seeds"]
    out_of_reach = result(rates=[math.inf, math.inf, 0.5], loss_adapted=2.6)
    assert broken_bars([out_of_reach] * 3) == ["made up: bits over QMoE's at its output error"]
    weak = result(rates=[0.5], loss_adapted=2.68)
    won_back = "made up: part of the loss that adapters win back"
    assert broken_bars([weak] * 3) == [f"{won_back} at 0.8 bits", won_back]
    weak_there = good | {"adapters_at_most_bits": weak["adapters"]}
    assert broken_bars([weak_there] * 3) == [f"{won_back} at 0.8 bits"]
    assert broken_bars([good | {"held_out_tokens": 99_999}, good, good]) == ["made up: held-out tokens"]


def test_what_is_known_of_a_model_needs_no_model(tmp_path, monkeypatch):
    """All numbers are read; without one of them the model is made, with the weights that the others are of."""
    recipe = RECIPES["mixtral"]
    known: dict[str, Any] = {"rate_at_qmoes_error": [0.5], "bytes_by_classes": []}
    known |= {"adapters": {}, "adapters_at_most_bits": {}, "dense_adapters": {}}
    known["sizes"] = {"held_out_tokens": 100_000}
    losses = {"bf16": 2.0, "zeroed": 6.0, "qmoe": 4.0, "qmoe_of_equal_tokens": 3.0, "ours-0.8": 3.0}
    variants = losses | {f"nearest-{zeros}": 5.0 for zeros in expert_quality.NEAREST_ZEROS}
    folder = expert_quality.Subject(recipe, 0, tmp_path).folder / "0"
    for name, loss in variants.items():
        known[name] = {"method": name.partition("-")[0], "bits": 1.0, "loss": loss}
    for name, found in known.items():
        (folder / f"{name}.json").write_text(json.dumps(found))

    def train(*_: Any, **__: Any) -> torch.nn.Module:
        return torch.nn.Linear(2, 2).bfloat16()

    monkeypatch.setattr(expert_quality, "texts_for", lambda *_, **__: None)
    monkeypatch.setattr(expert_quality, "tokenizer_for", lambda *_: None)
    monkeypatch.setattr(expert_quality, "trained_model", None)
    found = expert_quality.measure(expert_quality.Subject(recipe, 0, tmp_path), [0.8])
    assert [row["value_retained"] for row in found["variants"]] == [1.0, 0.0, 0.5, 0.75, 0.25, 0.25, 0.75]
    monkeypatch.setattr(expert_quality, "trained_model", train)
    (folder / "bytes_by_classes.json").unlink()
    (folder / "weights.json").write_text('"of another training"')
    with pytest.raises(SystemExit, match="numbers of a model that training does not make here"):
        expert_quality.measure(expert_quality.Subject(recipe, 0, tmp_path), [0.8])


@pytest.mark.parametrize("seen_rows", [0, 2, 4])
def test_texts_share_no_row_but_those_that_adapters_may_see_again(tmp_path, monkeypatch, seen_rows):
    """Method: every row is one number. Of six rows for adapters so many are of those that the model was trained on."""
    one_each = {"sequence": 1, "training_tokens": 4, "calibration_tokens": 3, "held_out_tokens": 5}
    recipe = dataclasses.replace(RECIPES["mixtral"], **one_each, adapter_tokens=6, adapter_tokens_seen=seen_rows)
    packages = [recipe.training_packages, recipe.held_out_packages]

    def rows_of(_: Any, text: int, *__: Any, tokens: int) -> torch.Tensor:
        return 100 * text + torch.arange(tokens)[:, None]

    monkeypatch.setattr(trained_experts, "_text", lambda _, chosen: packages.index(chosen))
    monkeypatch.setattr(trained_experts, "_rows", rows_of)
    texts = trained_experts.texts_for(recipe, None, tmp_path, seed=1)
    training, adapting, calibration, held_out = (
        {int(row) for row in rows.ids} for rows in (texts.training, texts.adapting, texts.calibration, texts.held_out)
    )
    assert [len(rows) for rows in (training, adapting, calibration, held_out)] == [4, 6, 3, 5]
    assert len(training & adapting) == seen_rows
    assert not calibration & (training | adapting)
    assert not held_out & (training | adapting | calibration)
