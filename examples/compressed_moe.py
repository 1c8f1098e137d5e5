"""Compresses the experts of a mixture-of-experts model, checks the folder, and uses it: generation and an adapter.

python examples/compressed_moe.py --model FOLDER --out CODED --ram 8GiB --ssd /mnt/nvme --bits 0.8

The calibration texts are Python's help; for a model in earnest give texts of the kind that it is meant for.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from example_run import paging, parse, texts, training_rows
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_offload

ADAPTED = ["q_proj", "v_proj", "coded.up", "coded.down"]  # of the experts: gate and up together, down


def command(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "torch_offload", *map(str, arguments)], check=True)


def main() -> None:
    options = parse(__doc__, has_experts=True, bits=0.8, rows=64)
    coded = options.out or Path(tempfile.mkdtemp(), "coded")
    budget = [*(["--ram", options.ram] if options.ram else []), *(["--ssd", options.ssd] if options.ssd else [])]
    calibration = Path(tempfile.mkdtemp(), "calibration.txt")
    calibration.write_text("\n\n".join(texts()))
    amount = ["--bits", options.bits, "--rows", options.rows, "--sequence", options.tokens]
    command("compress", options.model, "--calibration", calibration, "--out", coded, *amount, *budget)
    command("verify", coded)

    tokenizer = AutoTokenizer.from_pretrained(coded)
    model = torch_offload.from_pretrained(AutoModelForCausalLM, coded, ram=options.ram, ssd=options.ssd)
    prompt = tokenizer("In Python, a dictionary is", return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False)[0]
    print(f"generate: {tokenizer.decode(tokens, skip_special_tokens=True)!r}")

    model = get_peft_model(model.train(), LoraConfig(r=4, target_modules=ADAPTED))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses = []
    for row in training_rows(tokenizer, rows=options.steps, tokens=options.tokens):
        loss = model(**{name: values.unsqueeze(0) for name, values in row.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"adapter: {options.steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(paging())


if __name__ == "__main__":
    main()
