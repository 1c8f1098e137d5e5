"""A stock Trainer script for several ranks, with FSDP2.

torchrun --nproc-per-node 2 fine_tune_sharded.py MODEL_FOLDER OUTPUT_FOLDER STATE_DICT_TYPE [CHECKPOINT]
"""

import sys

import torch
from datasets import Dataset
from support.accelerate_on_cpu import shard_on_cpus
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

folder, output, state_dict_type, *checkpoint = sys.argv[1:]
shard_on_cpus()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
data = Dataset.from_list([dict(tokenizer(f"the {'small ' * (number % 3)}fox {number} jumps")) for number in range(32)])
arguments = TrainingArguments(
    output_dir=output,
    max_steps=4,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="steps",
    save_steps=2,
    use_cpu=True,
    report_to=[],
    fsdp="full_shard auto_wrap",
    fsdp_config={
        "fsdp_version": 2,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": state_dict_type,
    },
)
trainer = Trainer(
    model=model, args=arguments, train_dataset=data, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)
)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
trainer.save_model(output)
