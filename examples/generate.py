"""Generates text with a model that is larger than the memory budget.

    python examples/generate.py --model FOLDER --ram 8GiB --ssd /mnt/nvme --dtype bfloat16 --prompt "Once upon"

Every token reads the weights that do not fit in memory.
"""

import time

import torch
from example_run import paging, parse
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_offload

PROMPT = "In Python, a dictionary is"


def main() -> None:
    options = parse(__doc__, prompt=PROMPT)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = torch_offload.from_pretrained(
        AutoModelForCausalLM, options.model, ram=options.ram, ssd=options.ssd, dtype=options.dtype
    )
    prompt = tokenizer(options.prompt, return_tensors="pt")
    begun = time.perf_counter()
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False)[0]
    seconds = time.perf_counter() - begun
    made = len(tokens) - prompt["input_ids"].shape[1]
    print(f"generate: {made} tokens in {seconds:.1f} s: {tokenizer.decode(tokens, skip_special_tokens=True)!r}")
    print(paging())


if __name__ == "__main__":
    main()
