"""Folders as a user has them: a tiny model with a tokenizer, data sets in JSON lines."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
)

from support.models import VOCABULARY, tiny_config

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
HIDDEN = 384
LAYERS = 6
LABELS = {"classification": 3, "reward": 1}  # a reward is one number


def save_tokenizer(folder: Path) -> None:
    """One token per character."""
    characters = [chr(code) for code in range(32, 127)]
    words = {word: number for number, word in enumerate(SPECIAL + characters)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.model_input_names = ["input_ids", "attention_mask"]
    wrapped.save_pretrained(folder)


def save_model(kind: str, folder: Path, *, layers: int = LAYERS) -> Path:
    """A model of the kind (causal, classification, seq2seq, reward) and its tokenizer."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    if kind == "seq2seq":
        model = AutoModelForSeq2SeqLM.from_config(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=HIDDEN,
                d_kv=32,
                d_ff=2 * HIDDEN,
                num_layers=layers,
                num_heads=4,
                decoder_start_token_id=0,
                **special,
            )
        )
    else:
        is_causal = kind == "causal"
        config = tiny_config("llama" if is_causal else "bert", tied=not is_causal, hidden=HIDDEN, layers=layers)
        config.update(special | ({} if is_causal else {"num_labels": LABELS[kind]}))
        auto = AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification
        model = auto.from_config(config)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_rows(folder: Path, *, preference: bool) -> Path:
    """A data set of texts, or of answers of which one is preferred."""
    folder.mkdir()
    rows = []
    for number in range(32):
        prompt = f"how many foxes jump, fox {number}? "
        answers = {"chosen": f"{number} foxes", "rejected": "no dog"}
        rows.append({"prompt": prompt, **answers} if preference else {"text": prompt + answers["chosen"]})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
