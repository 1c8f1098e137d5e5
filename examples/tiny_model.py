"""A small model with random weights and its tokenizer, to try the examples and guides without a network.

python examples/tiny_model.py FOLDER            a Llama of 5.3 M parameters
python examples/tiny_model.py FOLDER --experts  a Qwen3-MoE of 6.3 M, of which 3 layers of 4 experts are 1.8 M

The weights are the same in every run.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
SIZES = {
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "tie_word_embeddings": False,
}


def llama() -> LlamaConfig:
    return LlamaConfig(**SIZES, hidden_size=256, intermediate_size=1024, num_hidden_layers=5)


def mixture_of_experts() -> Qwen3MoeConfig:
    """Return one whose other layers, dense ones, do not fit in the budget either."""
    widths = {"hidden_size": 192, "intermediate_size": 2048, "moe_intermediate_size": 256, "head_dim": 48}
    layers = {"num_hidden_layers": 6, "mlp_only_layers": [3, 4, 5]}
    return Qwen3MoeConfig(**SIZES, **widths, **layers, num_experts=4, num_experts_per_tok=2)


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per character."""
    numbers = {word: number for number, word in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    pad, unknown, begin, end = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown, bos_token=begin, eos_token=end
    ).save_pretrained(folder)


def save_model(folder: Path, *, has_experts: bool = False) -> None:
    """Write the model and its tokenizer to `folder`; a folder that is there is reused."""
    if (folder / "model.safetensors").exists():
        return
    torch.manual_seed(0)
    config = mixture_of_experts() if has_experts else llama()
    save_tokenizer(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", action="store_true", help="a mixture of experts")
    options = parser.parse_args()
    save_model(options.folder, has_experts=options.experts)
