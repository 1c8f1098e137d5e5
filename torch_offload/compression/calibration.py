"""Texts and tokens as batches that a model is run on while it is compressed."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_offload.errors import ConfigError

DEFAULT_SEQUENCE = 512

logger = logging.getLogger(__name__)

_MIN_ROW = 2
_FEW_TOKENS = 4096
_PIECE = 1 << 20  # characters

Sample = str | Tensor | Mapping[str, Tensor]
"""A text, token ids [tokens] or [rows, tokens], or all that the model is called with."""


def batches_of(
    samples: Iterable[Sample],
    model: nn.Module,
    *,
    tokenizer: Callable[..., Any] | None,
    sequence: int,
    rows: int | None = None,
) -> list[Mapping[str, Tensor]]:
    """Turn samples into batches. Texts are joined and cut into rows of `sequence` tokens.

    Args:
        samples: Some.
        model: That the batches are for.
        tokenizer: Turns texts into tokens.
        sequence: Tokens of a row.
        rows: The most batches; samples behind those that are needed for them are not looked at. Default: all.

    Raises:
        ConfigError: If there is a text and no tokenizer, nothing at all, or one sample in place of several.
    """
    if isinstance(samples, str | bytes | os.PathLike | Mapping):
        raise ConfigError(
            f"calibration is one {type(samples).__name__}; give a list of texts, of token ids or of what the model is "
            "called with"
        )
    batches: list[Mapping[str, Tensor]] = []
    stream: list[int] = []
    for sample in samples:
        if rows is not None and len(batches) + len(stream) // sequence >= rows:
            break
        if isinstance(sample, str):
            if tokenizer is None:
                raise ConfigError("calibration has texts; give the tokenizer that turns them into tokens")
            stream.extend(tokenizer(sample)["input_ids"])
        elif isinstance(sample, Tensor):
            batches.append(_called_with(sample.reshape(-1, sample.shape[-1]), model))
        else:
            batches.append(dict(sample))
    for begin in range(0, len(stream), sequence):
        row = stream[begin : begin + sequence]
        if len(row) >= _MIN_ROW:
            batches.append(_called_with(torch.tensor([row]), model))
    if not batches:
        raise ConfigError("calibration has no tokens; give some texts of the kind that the model is meant for")
    return batches[:rows]


def warn_of_few_tokens(batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Say it if batches show too little of what experts are given."""
    tokens = sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch)
    if 0 < tokens < _FEW_TOKENS:
        logger.warning("calibration has only %d tokens; some hundred thousand show what experts are given", tokens)


def _called_with(ids: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """An encoder-decoder model gets the same tokens on both sides."""
    is_encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return {"input_ids": ids, "decoder_input_ids": ids} if is_encoder_decoder else {"input_ids": ids}


def texts_in(path: Path) -> list[str]:
    """Read texts: a .jsonl file has one object with ``text`` on each line, any other file is one text.

    A long one comes in several pieces, cut behind a line, so that no more of it is turned into tokens than is needed.

    Raises:
        ConfigError: If the file cannot be read as that; the message names the line.
    """
    if not path.is_file():
        raise ConfigError(f"there is no calibration text at {path}; give a .jsonl or a text file")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8 text: {error}") from None
    if path.suffix != ".jsonl":
        return list(_pieces(content))
    return [_text_of(line, f"{path}:{number}") for number, line in enumerate(content.split("\n"), 1) if line.strip()]


def _pieces(content: str) -> Iterator[str]:
    begin = 0
    while begin < len(content):
        end = content.find("\n", begin + _PIECE) + 1 or len(content)
        yield content[begin:end]
        begin = end


def _text_of(line: str, location: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{location}: invalid JSON: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise ConfigError(f'{location}: expected an object with a string "text"')
    return str(entry["text"])
