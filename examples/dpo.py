"""Trains on preferences with TRL's DPOTrainer: a policy and a frozen reference share one memory budget.

python examples/dpo.py --model FOLDER --ram 8GiB --ssd /mnt/nvme --dtype bfloat16 --out TUNED

The second call of from_pretrained joins the budget of the first.
"""

import tempfile

from datasets import Dataset
from example_run import paging, parse, texts
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import torch_offload


def pairs(count: int) -> Dataset:
    """Return preferences for prose over the same words in reverse."""
    openings = [text.split()[:10] for text in texts()[:count]]
    answers = [{"chosen": " ".join(words[4:]), "rejected": " ".join(words[:3:-1])} for words in openings]
    prompts = [{"prompt": " ".join(words[:4]) + " "} for words in openings]
    return Dataset.from_list([prompt | answer for prompt, answer in zip(prompts, answers, strict=True)])


def main() -> None:
    options = parse(__doc__)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    policy, reference = (
        torch_offload.from_pretrained(
            AutoModelForCausalLM, options.model, ram=options.ram, ssd=options.ssd, dtype=options.dtype
        )
        for _ in range(2)
    )
    arguments = DPOConfig(
        output_dir=str(options.out or tempfile.mkdtemp()),
        use_cpu=True,
        bf16=False,
        max_length=options.tokens,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = DPOTrainer(policy, reference, arguments, train_dataset=pairs(options.steps), processing_class=tokenizer)
    result = trainer.train()
    if options.out:
        trainer.save_model()
    print(f"DPO: {result.global_step} steps, mean loss {result.training_loss:.4f}")
    print(paging())


if __name__ == "__main__":
    main()
