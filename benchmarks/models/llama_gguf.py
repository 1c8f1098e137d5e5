"""A saved Llama in the file format of llama.cpp, with the same bf16 weights."""

from pathlib import Path

import gguf
import torch
from safetensors import safe_open
from transformers import LlamaConfig


def write_gguf(folder: Path, path: Path) -> None:
    """Write the model that `save_pretrained` wrote to `folder` as one file, without a tokenizer: tokens are numbers."""
    config = LlamaConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with safe_open(folder / "model.safetensors", "pt") as saved:
        for name in saved.keys():  # noqa: SIM118 (it is no dict)
            weight = saved.get_tensor(name)
            named_heads = heads.get(name.split(".")[-2])
            if named_heads is not None:
                weight = _pairs_side_by_side(weight, named_heads)
            known_as = names.get_name(name, try_suffixes=(".weight",))
            if weight.dim() == 1:  # scales of norms, which llama.cpp has in fp32
                writer.add_tensor(known_as, weight.float().numpy())
            else:
                bytes_of_rows = weight.contiguous().view(torch.uint8).numpy()
                writer.add_tensor(known_as, bytes_of_rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def _pairs_side_by_side(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a projection to queries or keys with its rows in llama.cpp's order.

    Of a head's rows transformers rotates the first half against the second, llama.cpp each one against the next.
    """
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
