"""Trains a LoRA adapter over a paged base model with PEFT and the stock Trainer.

    python examples/lora.py --model FOLDER --ram 8GiB --ssd /mnt/nvme --dtype bfloat16 --out ADAPTER

The base is frozen: each step only reads it, and evicting it writes nothing.
"""

import tempfile

from example_run import paging, parse, training_rows
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import torch_offload


def main() -> None:
    options = parse(__doc__)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    base = torch_offload.from_pretrained(
        AutoModelForCausalLM, options.model, ram=options.ram, ssd=options.ssd, dtype=options.dtype
    )
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    arguments = TrainingArguments(
        output_dir=str(options.out or tempfile.mkdtemp()),
        use_cpu=True,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    rows = training_rows(tokenizer, rows=options.steps, tokens=options.tokens)
    result = Trainer(model=model, args=arguments, train_dataset=rows).train()
    if options.out:
        model.save_pretrained(options.out)
    trained, total = model.get_nb_trainable_parameters()
    print(f"LoRA: {result.global_step} steps, {trained:,} of {total:,} parameters, loss {result.training_loss:.4f}")
    print(paging())


if __name__ == "__main__":
    main()
