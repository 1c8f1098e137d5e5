"""Fine-tunes a language model with the stock Trainer under a memory budget.

    python examples/trainer.py --model FOLDER --ram 8GiB --ssd /mnt/nvme --dtype bfloat16 --out FINE_TUNED

torch_offload.AdamW keeps fp32 masters of bf16 weights in 2 bytes each; leave optimizer_cls_and_kwargs out for torch's.
"""

import tempfile

from example_run import paging, parse, training_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import torch_offload


def main() -> None:
    options = parse(__doc__)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = torch_offload.from_pretrained(
        AutoModelForCausalLM, options.model, ram=options.ram, ssd=options.ssd, dtype=options.dtype
    )
    arguments = TrainingArguments(
        output_dir=str(options.out or tempfile.mkdtemp()),
        use_cpu=True,  # on a machine with a GPU a Trainer would move the model there; torch_offload refuses that
        max_steps=options.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=training_rows(tokenizer, rows=options.steps, tokens=options.tokens),
        optimizer_cls_and_kwargs=(torch_offload.AdamW, {"lr": arguments.learning_rate}),
    )
    result = trainer.train()
    if options.out:
        trainer.save_model()
    print(f"Trainer: {result.global_step} steps, mean loss {result.training_loss:.4f}")
    print(paging())


if __name__ == "__main__":
    main()
