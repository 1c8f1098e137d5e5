"""One fine-tuning run of the demo: a stock Trainer with its default optimizer, in memory or paged.

    python examples/demo_train.py --model FOLDER --output run.json [--budget-share 0.35]

Without --budget-share torch_offload is not even imported. With it, one line differs: `torch_offload.wrap(...)`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from demo_measure import StepClock, generate, rss_peak_bytes, weight_hashes
from demo_model import training_rows
from demo_progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

KINDS_OF_STATE = 4  # parameters, gradients, two moments


def train(model: Any, rows: list[dict[str, list[int]]], steps: int, progress: Progress) -> dict[str, Any]:
    """Fine-tune `model`; return every loss with all its digits and the seconds of every step."""
    losses: list[str] = []
    hook = model.register_forward_hook(lambda _m, _i, output: losses.append(output.loss.item().hex()))
    clock = StepClock(steps, progress)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=1e-4,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock]).train()
    hook.remove()
    return {"losses": losses, "step_seconds": clock.seconds}


def run(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Generate, train and generate again; return what the other run is compared with."""
    progress.show("loading the model")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    state_bytes = KINDS_OF_STATE * sum(weight.nbytes for weight in model.parameters())
    result: dict[str, Any] = {"state_bytes": state_bytes, "parameters": model.num_parameters()}
    if options.budget_share is not None:
        import torch_offload

        torch_offload.wrap(model, ram=int(options.budget_share * state_bytes))
    progress.show("generating 24 tokens")
    result["generated_before"] = generate(model, tokenizer)
    rows = training_rows(tokenizer, rows=2 * options.steps, tokens=options.tokens)
    result |= train(model, rows, options.steps, progress)
    progress.show("generating 24 tokens")
    result["generated_after"] = generate(model, tokenizer)
    progress.show("hashing the weights")
    result["weights"] = weight_hashes(model)
    if options.budget_share is not None:
        report = torch_offload.report()
        result |= {"budget_bytes": report.budget_bytes, "peak_bytes": report.host_peak_bytes}
        result |= {"ssd_read_bytes": report.ssd_read_bytes, "ssd_written_bytes": report.ssd_written_bytes}
    return result | {"process_rss_peak_bytes": rss_peak_bytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--budget-share", type=float, help="of parameters + gradients + moments; not given: in memory")
    options = parser.parse_args()

    for function in (torch.cos, torch.sin):  # of positions; torch_offload's settle_vector_math says why
        function(torch.ones(1))
    with Progress("in memory" if options.budget_share is None else "paged") as progress:
        result = run(options, progress)
    options.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
