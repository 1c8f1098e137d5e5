"""What the demo notes about a run: step times, hashes of weights, generated text, the process's peak."""

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from demo_progress import Progress
from transformers import TrainerCallback

PROMPT = "In Python, a dictionary is"


class StepClock(TrainerCallback):
    """Notes how long each optimizer step takes, its micro-batches included, and shows how far the run is."""

    def __init__(self, steps: int, progress: Progress) -> None:
        self.steps = steps
        self.progress = progress
        self.started = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.progress.show(f"step {len(self.seconds) + 1} of {self.steps}")
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def weight_hashes(model: torch.nn.Module) -> dict[str, str]:
    """Hash the bytes of each weight, one weight in memory at a time."""
    bytes_by_name = ((name, weight.detach().numpy().data) for name, weight in model.named_parameters())
    return {name: hashlib.sha256(content).hexdigest() for name, content in bytes_by_name}


def generate(model: Any, tokenizer: Any) -> str:
    """Continue the prompt by greedy choice."""
    prompt = tokenizer(PROMPT, return_tensors="pt")
    model.eval()
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def rss_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
