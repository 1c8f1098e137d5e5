"""What the examples share: their options, texts, and the line about paging that each prints at its end."""

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tiny_model import save_model

import torch_offload

TINY_RAM = "24MiB"
MIB = 1 << 20


def parse(description: str, *, has_experts: bool = False, **own: Any) -> argparse.Namespace:
    """Read the options. Without --model a tiny model is made in .cache and gets a budget to match.

    Args:
        description: Of the example.
        has_experts: Whether the tiny model is a mixture of experts.
        own: Options that only this example has, with their defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder with a model and its tokenizer; default: a tiny one")
    parser.add_argument("--ram", help="hard limit of memory for tensors, such as 8GiB")
    parser.add_argument("--ssd", help="directory on a real disk; default: one for temporary files")
    parser.add_argument("--dtype", default="float32", help="of the weights, such as bfloat16")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--tokens", type=int, default=64, help="of a row, or to generate")
    parser.add_argument("--out", type=Path, help="folder for what was trained; default: nothing is saved")
    for name, default in own.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    if options.model is None:
        options.model = Path(".cache", "tiny-experts" if has_experts else "tiny-llama")
        save_model(options.model, has_experts=has_experts)
        options.ram = options.ram or TINY_RAM
    return options


def texts() -> list[str]:
    """Return English that every Python has: the help on its language."""
    return [topics[name] for name in sorted(topics)]


def training_rows(tokenizer: Any, *, rows: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Cut the texts into `rows` examples of `tokens` tokens each."""
    ids = torch.tensor(tokenizer("\n\n".join(texts())[: rows * tokens * 8])["input_ids"])
    return [{"input_ids": row, "labels": row} for row in ids[: rows * tokens].view(rows, tokens)]


def paging() -> str:
    """Return what the engine did so far, in one line."""
    report = torch_offload.report()
    return (
        f"paging: peak {report.host_peak_bytes / MIB:.1f} of {report.budget_bytes / MIB:.1f} MiB, "
        f"{report.ssd_read_bytes / MIB:.1f} MiB read, {report.ssd_written_bytes / MIB:.1f} MiB written"
    )
