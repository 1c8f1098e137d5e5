"""Fine-tunes a language model in a plain PyTorch loop under a memory budget.

    python examples/plain_loop.py --model FOLDER --ram 8GiB --ssd /mnt/nvme

Only the loading differs from a loop without torch_offload: optimizer, clipping and saving are torch's own.
"""

import torch
from example_run import paging, parse, training_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_offload


def main() -> None:
    options = parse(__doc__)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = torch_offload.from_pretrained(
        AutoModelForCausalLM, options.model, ram=options.ram, ssd=options.ssd, dtype=options.dtype
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    losses = []
    for row in training_rows(tokenizer, rows=options.steps, tokens=options.tokens):
        batch = {name: values.unsqueeze(0) for name, values in row.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if options.out:
        model.save_pretrained(options.out)
    print(f"plain loop: {options.steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(paging())


if __name__ == "__main__":
    main()
