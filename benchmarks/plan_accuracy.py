"""How far `torch_offload.plan` is from what a run then takes: seconds, SSD bytes and peak of a step.

    python benchmarks/plan_accuracy.py --json --ssd /mnt/nvme > benchmarks/results/plan_accuracy.json     (30 minutes)
    python benchmarks/plan_accuracy.py --smoke

A random-init Llama of 126 M parameters: full training in fp32 with stock fused AdamW, LoRA of rank 8 over the frozen
base, and over a base in bf16 that bitsandbytes quantizes to NF4 (`qlora`), each with activations kept, paged (`ssd`),
recomputed and chosen by the engine (`auto`), and each within three budgets; generating for one row and for eight, and
evaluating, from a saved bf16 checkpoint that keeps its pages. First the machine's rates are measured anew; then, one
configuration after the other, the plan is made from the configuration of the model, and a process of its own takes the
steps: some to come to rest, `auto` as many as it needs to choose, then those that count. Figures are their medians; a
step in which somebody else took more than a tenth of the machine's CPU is left out while enough are left. An error is
the share by which the prediction is off the measured figure; bytes are those read and written together.
"""

import argparse
import importlib.util
import statistics
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from generate import make_model
from harness.options import driver_parser
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, is_quiet, progress
from harness.worker_process import WorkerProcess, option_words, worker_command
from peft import LoraConfig, get_peft_model
from torch.nn import Parameter
from transformers import LlamaForCausalLM
from workers.adapters import TARGETS, nf4
from workers.step import make_configuration

import torch_offload
from torch_offload import Config, Plan, Probe
from torch_offload.integrations.quantized_models import quantize_on_meta

MAX_MEDIAN_SECONDS = 0.10
MAX_SECONDS = 0.25
MAX_BYTES = 0.05
MAX_PEAK = 0.03
MIN_CONFIGURATIONS = 24
NEGLIGIBLE_BYTES = 1 << 20  # of a step; what both have less of is as predicted
MODES = {"keep": "keep", "ssd": "page", "recompute": "recompute", "auto": "auto"}
NOT_MEASURED = "QLoRA: bitsandbytes is not installed"
IS_QUANTIZER_THERE = importlib.util.find_spec("bitsandbytes") is not None


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    hidden: int = 768
    intermediate: int = 3072
    layers: int = 12
    heads: int = 12
    vocabulary: int = 8192
    page_elements: int = 1 << 20


@dataclass(frozen=True)
class Setting:
    """What is planned and run.

    Attributes:
        kind: ``full``, ``lora``, ``qlora``, ``generate`` or ``evaluate``.
        budget_bytes: Of memory.
        mode: Of activations, a key of `MODES`; empty where there are none.
        batch: Rows.
        sequence: Tokens of a row, of a prompt.
        new_tokens: Of each row.
    """

    kind: str
    budget_bytes: int
    mode: str = ""
    batch: int = 1
    sequence: int = 256
    new_tokens: int = 0

    @property
    def name(self) -> str:
        words = [self.kind, self.mode, f"{self.batch} rows" if self.kind == "generate" else ""]
        return f"{' '.join(filter(None, words))}, {self.budget_bytes >> 20} MiB"


@dataclass(frozen=True)
class Plans:
    """All settings, and how often each takes a step."""

    shape: Shape
    settings: tuple[Setting, ...]
    steps: int = 5
    most_steps: int = 9
    warmup: int = 4
    warmup_auto: int = 8
    judges: bool = True


def settings_of(
    *, full: tuple[int, ...], lora: tuple[int, ...], qlora: tuple[int, ...], forward: tuple[int, ...]
) -> tuple[Setting, ...]:
    """Return the settings of a full run.

    Args:
        full: Budgets in MiB.
        lora: The same.
        qlora: The same.
        forward: The same, of generating and evaluating.
    """
    kinds = [("full", full, 256), ("lora", lora, 256), ("qlora", qlora, 64)]
    trained = [
        Setting(kind, mib << 20, mode, sequence=sequence)
        for kind, budgets, sequence in kinds
        for mode in MODES
        for mib in budgets
    ]
    tokens = [
        Setting("generate", mib << 20, batch=rows, sequence=32, new_tokens=12) for rows in (1, 8) for mib in forward
    ]
    return (*trained, *tokens, *(Setting("evaluate", mib << 20, sequence=1024) for mib in forward))


USUAL = Plans(
    Shape(), settings_of(full=(640, 960, 1280), lora=(384, 512, 640), qlora=(84, 96, 112), forward=(96, 144, 192))
)
SMOKE = Plans(
    Shape(hidden=256, intermediate=1024, layers=6, heads=4, vocabulary=512, page_elements=1 << 14),
    (
        Setting("full", 32 << 20, "ssd", sequence=64),
        Setting("lora", 24 << 20, "recompute", sequence=64),
        Setting("qlora", 9 << 20, "ssd", sequence=64),
        Setting("generate", 8 << 20, sequence=8, new_tokens=2),
    ),
    steps=2,
    most_steps=2,
    warmup=2,
    judges=False,
)


def plan_of(setting: Setting, shape: Shape, rates: Probe, ssd: str) -> Plan:
    """Plan from the configuration of the model alone."""
    options = argparse.Namespace(**asdict(shape), sequence=setting.sequence)
    dtype = torch.float32 if setting.kind in ("full", "lora") else torch.bfloat16
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(make_configuration(options)).to(dtype).train()
        if setting.kind == "qlora":
            quantize_on_meta(model, nf4())
        loaded = [] if dtype is torch.float32 else [each for each in model.parameters() if type(each) is Parameter]
        if setting.kind in ("lora", "qlora"):
            model = get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS, task_type="CAUSAL_LM"))
    config = Config(ram=setting.budget_bytes, ssd=ssd, page_elements=shape.page_elements)
    ids = torch.ones(setting.batch, setting.sequence, dtype=torch.long)
    return torch_offload.plan(
        model,
        {"input_ids": ids, "labels": ids},
        config=config.replace(activations=MODES[setting.mode]) if setting.mode else config,
        work="train" if setting.mode else setting.kind,
        new_tokens=setting.new_tokens or None,
        loaded=loaded,
        probe=rates,
        timing_seconds=20,
    )


def command_of(setting: Setting, shape: Shape, folder: Path, ssd: str) -> list[str]:
    """Return the command of the process that takes the steps."""
    common = {"budget_bytes": setting.budget_bytes, "ssd": ssd, "page_elements": shape.page_elements}
    if not setting.mode:
        own = {"folder": folder, "variant": "paged", "rows": setting.batch, "prompt": setting.sequence}
        return [*worker_command("generate"), *option_words(common | own | {"new_tokens": setting.new_tokens})]
    own = asdict(shape) | {"batch": setting.batch, "sequence": setting.sequence, "activations": MODES[setting.mode]}
    if setting.kind == "qlora":
        own |= {"folder": folder, "quantized": 1, "dtype": "bf16"}
    worker = "step" if setting.kind == "full" else "adapters"
    return [*worker_command(worker), *option_words(common | own)]


def measure(setting: Setting, plans: Plans, rates: Probe, folder: Path, ssd: str) -> dict[str, Any]:
    """Plan a setting, run it, and put both side by side."""
    planned = plan_of(setting, plans.shape, rates, ssd)
    with WorkerProcess(setting.kind, command_of(setting, plans.shape, folder, ssd), log_directory=ssd) as worker:
        worker.warm_up(plans.warmup_auto if setting.mode == "auto" else plans.warmup)
        steps: list[dict[str, Any]] = []
        while len(steps) < plans.steps or (quiet_count(steps) < plans.steps and len(steps) < plans.most_steps):
            steps.append(worker.step())
        report = worker.ask("finish")["report"]
    quiet = [step for step in steps if is_quiet(step)]
    counted = quiet if len(quiet) >= min(3, plans.steps) else steps
    measured = {
        "seconds": statistics.median(step["seconds"] for step in counted),
        "ssd_bytes": statistics.median(step["ssd_read_bytes"] + step.get("ssd_written_bytes", 0) for step in counted),
        "peak_bytes": report["host_peak_bytes"],
    }
    prediction = planned.prediction
    predicted = {
        "seconds": prediction.seconds,
        "ssd_bytes": prediction.ssd_read_bytes + prediction.ssd_written_bytes,
        "peak_bytes": prediction.peak_bytes,
    }
    errors = {name: error_of(name, predicted[name], measured[name]) for name in measured}
    progress(f"{setting.name}: { ({name: round(error, 3) for name, error in errors.items()}) }")
    return {
        "setting": asdict(setting),
        "name": setting.name,
        "disturbed": counted is steps and len(quiet) < len(steps),
        "predicted": predicted,
        "measured": measured,
        "errors": errors,
        "plan": planned.to_dict(),
        "activations": report["activations"],
        "steps": steps,
    }


def quiet_count(steps: list[dict[str, Any]]) -> int:
    return sum(is_quiet(step) for step in steps)


def error_of(name: str, predicted: float, measured: float) -> float:
    """Return the signed error as a share of what was measured."""
    if name == "ssd_bytes" and max(predicted, measured) < NEGLIGIBLE_BYTES:
        return 0.0
    return predicted / measured - 1 if measured else float("inf")


def bars_of(rows: list[dict[str, Any]], *, judges: bool) -> list[dict[str, Any]]:
    """Return what must hold, over all settings."""
    over_budget = max(row["measured"]["peak_bytes"] / row["setting"]["budget_bytes"] for row in rows)
    bars = [at_most("peak over budget", over_budget, 1)]
    if not judges:
        return bars
    errors = {name: [abs(row["errors"][name]) for row in rows] for name in rows[0]["errors"]}
    return [
        at_least("configurations", len(rows), MIN_CONFIGURATIONS),
        at_most("error of seconds, median", statistics.median(errors["seconds"]), MAX_MEDIAN_SECONDS),
        at_most("error of seconds, worst", max(errors["seconds"]), MAX_SECONDS),
        at_most("error of SSD bytes, worst", max(errors["ssd_bytes"]), MAX_BYTES),
        at_most("error of SSD bytes, median", statistics.median(errors["ssd_bytes"]), MAX_BYTES),
        at_most("error of peak, worst", max(errors["peak_bytes"]), MAX_PEAK),
        *bars,
    ]


def main() -> None:
    parser = driver_parser(__doc__)
    parser.add_argument("--only", default="", help="settings whose name contains this, such as 'lora ssd'")
    parser.add_argument("--steps", type=int, help="quiet steps to measure; default: 5")
    options = parser.parse_args()
    plans = SMOKE if options.smoke else USUAL
    plans = replace(plans, steps=options.steps or plans.steps)
    chosen = [setting for setting in plans.settings if options.only in setting.name]
    if not IS_QUANTIZER_THERE:
        chosen = [setting for setting in chosen if setting.kind != "qlora"]
    if not chosen:
        parser.error(f"no setting is called {options.only!r}; there are: {[each.name for each in plans.settings]}")
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        rates = torch_offload.probe(scratch, refresh=True)
        shape = plans.shape
        folder = make_model(Path(scratch).resolve() / "model", shape.hidden, shape.layers, shape.vocabulary)
        rows = [measure(setting, plans, rates, folder, scratch) for setting in chosen]
    told = {
        "benchmark": "plan_accuracy",
        "machine": machine(options.ssd),
        "probe": rates.to_dict(),
        "not_measured": [] if IS_QUANTIZER_THERE else [NOT_MEASURED],
        "settings": rows,
    }
    emit(told | {"bars": bars_of(rows, judges=plans.judges)}, as_json=options.json)


if __name__ == "__main__":
    main()
