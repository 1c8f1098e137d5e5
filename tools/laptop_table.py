"""Writes what `torch-offload plan` predicts into the guide for laptops and README: sizes from 0.1 to 8 B parameters.

    python tools/laptop_table.py FOLDER     writes them, for scratch files in FOLDER; nothing else should run meanwhile

The disk is measured anew. Configurations are made in a temporary folder; no weights are.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from generated_parts import replace_parts, write
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import torch_offload
from torch_offload.system.environment import processor_name

ROOT = Path(__file__).resolve().parents[1]
GUIDE, README = ROOT / "docs" / "guides" / "cpu-laptop.md", ROOT / "README.md"
BUDGET, DISK = "8GiB", "200GB"
TOKENS = 512
COMMAND = ("--ram", BUDGET, "--ssd-bytes", DISK, "--dtype", "bfloat16", "--optimizer", "torch_offload.AdamW")
DETAILS = r"; between| \((?:parameter|gradient|state)"
RATED_TERABYTES = 600  # written in the life of a consumer drive of 1 TB, as many are rated
SAMPLE_ROWS = ("step time", "bottleneck", "model", "ram", "ssd", "SSD read", "SSD written", "SSD wear")


@dataclass(frozen=True)
class Size:
    name: str
    shown: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int = 128256
    is_tied: bool = True

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            tie_word_embeddings=self.is_tied,
        )


SIZES = (
    Size("smollm-135m", "0.13 B (SmolLM2-135M)", 576, 1536, 30, 9, 3, vocabulary=49152),
    Size("llama-1b", "1.2 B (Llama 3.2 1B)", 2048, 8192, 16, 32, 8),
    Size("llama-3b", "3.2 B (Llama 3.2 3B)", 3072, 8192, 28, 24, 8),
    Size("llama-8b", "8.0 B (Llama 3.1 8B)", 4096, 14336, 32, 32, 8, is_tied=False),
)


def full(folder: Path, scratch: str, *options: str) -> str:
    """Return what the command prints."""
    command = [sys.executable, "-m", "torch_offload", "plan", str(folder), "--ssd", scratch, *COMMAND]
    return subprocess.run([*command, "--checkpointing", *options], capture_output=True, text=True, check=True).stdout


def lora(folder: Path, scratch: str) -> Any:
    """Return the plan of adapters, as the guide shows it."""
    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = {name: torch.ones(1, TOKENS, dtype=torch.long) for name in ("input_ids", "labels")}
    return torch_offload.plan(model, batch, ram=BUDGET, ssd=scratch, ssd_bytes=DISK)


def gigabytes(size_bytes: float) -> str:
    return "0" if size_bytes == 0 else f"{size_bytes / 1e9:.1f} GB"


def row(first: str, kind: str, plan: dict[str, Any]) -> str:
    seconds = plan["predicted_seconds"]
    read, written = sum(plan["ssd_read"].values()), sum(plan["ssd_written"].values())
    per_day = terabytes_per_day(plan)
    cells = [first, kind, gigabytes(plan["state_bytes"]), gigabytes(plan["peak_bytes"]["ram"])]
    cells += [gigabytes(plan["peak_bytes"]["ssd"]), f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"]
    cells += [gigabytes(read), gigabytes(written), "0" if written == 0 else f"{per_day:.2g} TB", plan["bottleneck"]]
    return f"| {' | '.join(cells)} |"


def rates(scratch: str, break_even: dict[str, int]) -> str:
    """Return a sentence on what was measured before, and what follows from it."""
    measured = torch_offload.probe(scratch, refresh=True)
    gemm = {name: rate / 1e9 for name, rate in measured.gemm.items()}
    tokens = ", ".join(f"{count} for {name}" for name, count in break_even.items())
    return (
        f"Here: {os.cpu_count()} cores, {processor_name()}; the disk read {measured.ssd_read / 1e9:.1f} GB/s and wrote "
        f"{measured.ssd_write / 1e9:.1f} GB/s; bf16 products ran at {gemm['bfloat16']:.0f} GFLOP/s and fp32 ones at "
        f"{gemm['float32']:.0f}. Computing takes longer from so many tokens a step on: {tokens}.\n"
    )


def sample_rows(shown: str) -> list[str]:
    """Return the lines of the command's table that README shows, without what lies where between steps."""
    rows = []
    for line in shown.splitlines():
        name, _, value = (cell.strip() for cell in line.strip("│").partition("│"))
        if name in SAMPLE_ROWS:
            rows.append(f"{name:13} {re.split(DETAILS, value)[0]}")
    return rows


def terabytes_per_day(plan: dict[str, Any]) -> float:
    return float(sum(plan["ssd_written"].values()) / plan["predicted_seconds"] * 86400 / 1e12)


def days(terabytes: float) -> str:
    return f"{RATED_TERABYTES / terabytes:.0f}"


def wear_of_one(plan: dict[str, Any], terabytes: float) -> str:
    written = sum(plan["ssd_written"].values()) / 1e9
    return (
        f"**Full fine-tuning wears an SSD out.** Such a step writes {written:.0f} GB, {terabytes:.0f} TB a day: a "
        f"drive rated for {RATED_TERABYTES} TB lasts {days(terabytes)} days.\n"
    )


def wear_of_all(wear: list[float]) -> str:
    return (
        f"At the {min(wear):.0f} to {max(wear):.0f} TB a day of the table that is {days(max(wear))} to "
        f"{days(min(wear))} days of training, whatever the size of the model: a larger one writes more in a longer "
        "step.\n"
    )


def fenced(lines: Iterable[str]) -> str:
    return "\n".join(["```", *lines, "```", ""])


def main() -> None:
    scratch = sys.argv[1]
    torch_offload.probe(scratch, refresh=True)
    table = [
        "| model | | state | memory | SSD space | seconds a step | read a step | written a step | written a day "
        "| bottleneck |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    break_even, wear = {}, []
    with tempfile.TemporaryDirectory() as made:
        for size in SIZES:
            folder = Path(made, size.name)
            size.config().save_pretrained(folder)
            planned = json.loads(full(folder, scratch, "--json"))
            adapters = lora(folder, scratch)
            table += [row(size.shown, "full", planned), row("", "LoRA", adapters.to_dict())]
            wear += [terabytes_per_day(planned)] if sum(planned["ssd_written"].values()) else []
            break_even[size.shown.partition(" (")[0]] = planned["break_even_tokens"]
        shown = full(folder, scratch)
    command = "$ torch-offload plan llama-8b --ssd . " + " ".join((*COMMAND, "--checkpointing"))
    parts = {
        "laptop table": lambda: "\n".join([*table, ""]),
        "laptop rates": lambda: rates(scratch, break_even),
        "plan sample": lambda: fenced([command, *sample_rows(shown)]),
        "plan wear": lambda: wear_of_one(planned, wear[-1]),
        "laptop wear": lambda: wear_of_all(wear),
    }
    write([(path, replace_parts(path.read_text(), parts)) for path in (GUIDE, README)])


if __name__ == "__main__":
    main()
