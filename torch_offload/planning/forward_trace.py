"""Recordings of passes without gradients: an evaluation, and a generation's prompt and tokens."""

import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_offload.errors import OffloadError
from torch_offload.planning.fake_trace import HOST, Recorder, Recording, traced

FORWARD = "forward"
PROMPT = "prompt"
TOKEN = "token"


def record_evaluation(
    module: nn.Module, batch: Mapping[str, Any], *, loaded: Collection[Tensor] = (), device: str = HOST
) -> Recording:
    """Run a forward of the module in evaluation mode, as for a loss that is only looked at.

    Args:
        module: As for ``record``; its mode is put back.
        batch: The same.
        loaded: The same.
        device: The same.

    Raises:
        OffloadError: As from ``traced``.
    """
    with _evaluating(module):
        return traced(module, batch, Recorder((FORWARD,), device), _forward, loaded=loaded)


def record_prompt(
    module: nn.Module, batch: Mapping[str, Any], *, loaded: Collection[Tensor] = (), device: str = HOST
) -> Recording:
    """Run the pass that makes a generation's first token.

    Args:
        module: A language model of transformers; its mode is put back.
        batch: With ``input_ids`` [rows, tokens].
        loaded: As for ``record``.
        device: The same.

    Raises:
        OffloadError: As from ``traced``.
    """
    with _evaluating(module):
        return traced(module, _prompt_of(batch), Recorder((PROMPT,), device), _prompt, loaded=loaded)


def record_token(
    module: nn.Module,
    batch: Mapping[str, Any],
    *,
    earlier: int,
    loaded: Collection[Tensor] = (),
    device: str = HOST,
) -> Recording:
    """Run the pass that makes one more token of each row.

    Args:
        module: As for :func:`record_prompt`.
        batch: The same.
        earlier: Tokens of a row that lie in the cache of keys and values.
        loaded: As for ``record``.
        device: The same.

    Raises:
        OffloadError: As from ``traced``, or if the module keeps no such cache.
    """
    program = functools.partial(_token, earlier=earlier)
    with _evaluating(module):
        return traced(module, _prompt_of(batch), Recorder((TOKEN,), device), program, loaded=loaded)


def _prompt_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise OffloadError("a generation begins with tokens: give input_ids of shape [rows, tokens] in the batch")
    return {"input_ids": ids}


def _forward(model: nn.Module, batch: dict[str, Any], recorder: Recorder) -> None:
    with torch.no_grad():
        model(**batch)


def _prompt(model: nn.Module, batch: dict[str, Any], recorder: Recorder) -> None:
    with torch.no_grad():
        model(**batch, use_cache=True, **_last_logits(model))


def _token(model: nn.Module, batch: dict[str, Any], recorder: Recorder, *, earlier: int) -> None:
    rows = batch["input_ids"].shape[0]
    with torch.no_grad():
        output = model(input_ids=torch.ones(rows, earlier, dtype=torch.long), use_cache=True, **_last_logits(model))
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise OffloadError(f"{type(model).__name__} keeps no cache of keys and values, so plan cannot generate")
        del output
        recorder.restart()
        ids = torch.ones(rows, 1, dtype=torch.long)
        model(input_ids=ids, past_key_values=cache, use_cache=True, **_last_logits(model))


def _last_logits(model: nn.Module) -> dict[str, int]:
    """Return what ``generate`` has a model do: logits of the last token alone, where it can."""
    inner = getattr(model, "get_base_model", lambda: model)()
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(inner.forward).parameters else {}


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module in evaluation mode for a while."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, is_training in modes.items():
            part.training = is_training
