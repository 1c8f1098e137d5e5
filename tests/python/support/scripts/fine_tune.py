"""A stock Trainer script.

    python fine_tune.py KIND MODEL_FOLDER OUTPUT_FOLDER [CHECKPOINT] [--max_grad_norm 0]

KIND is causal, classification or seq2seq. With a checkpoint the run is resumed there. Without clipping gradients are
not accumulated either.
"""

import sys

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

words = sys.argv[1:]
is_clipped = words[-2:] != ["--max_grad_norm", "0"]
kind, folder, output, *checkpoint = words if is_clipped else words[:-2]
tokenizer = AutoTokenizer.from_pretrained(folder)
texts = [f"the {'small ' * (number % 3)}fox {number} jumps" for number in range(32)]
if kind == "causal":
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [tokenizer(text) for text in texts]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
elif kind == "classification":
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, dtype=torch.float32)
    rows = [{**tokenizer(text), "label": number % 3} for number, text in enumerate(texts)]
    collator = DataCollatorWithPadding(tokenizer)
else:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    rows = [{**tokenizer(text), "labels": tokenizer(text[::-1])["input_ids"]} for text in texts]
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
data = Dataset.from_list([dict(row) for row in rows])

arguments = TrainingArguments(
    output_dir=output,
    max_steps=4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2 if is_clipped else 1,
    max_grad_norm=1.0 if is_clipped else 0,
    learning_rate=1e-3,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
)
trainer = Trainer(
    model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(4)), data_collator=collator
)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
trainer.save_model(output)
