"""``torch-offload run --fit``: a ``Trainer`` trains the same rows per step, split as the fastest plan splits them.

Only ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` change, and their product does not.
"""

import functools
import inspect
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_offload.config import Config
from torch_offload.diagnostics.probe import probe
from torch_offload.errors import OffloadError, UnsupportedModelError
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.module_hooks import ModuleHook
from torch_offload.hooks.patches import Patches
from torch_offload.planning import api
from torch_offload.planning.page_uses import OptimizerName
from torch_offload.planning.search import Question, Recordings, answer, meta_copy
from torch_offload.planning.search_result import Candidate, Search
from torch_offload.runtime import preflight
from torch_offload.runtime.process import PROCESS
from torch_offload.system import environment
from torch_offload.system.terminal import echo

logger = logging.getLogger(__name__)

STOCK_TRAINERS = frozenset({"Trainer", "Seq2SeqTrainer", "SFTTrainer"})
"""Trainers whose step is a forward and a backward of the model over rows of the data set."""
MAX_ROWS_READ = 512  # of a data set, to find how long its rows are
TIMING_SECONDS = 15.0
LABELS = frozenset({"label", "label_ids", "labels"})
PARAMETERS = ("model", "args", "data_collator", "train_dataset")  # of a Trainer, in order


@dataclass(frozen=True)
class Given:
    """What a script gave its ``Trainer``."""

    model: Any
    args: Any
    data_collator: Any
    train_dataset: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], options: Mapping[str, Any]) -> "Given":
        """Return it from the arguments of a call."""
        by_name = dict(zip(PARAMETERS, args, strict=False)) | dict(options)
        return cls(*(by_name.get(name) for name in PARAMETERS))


class Fit:
    """Has every stock ``Trainer`` split the rows of its steps as the fastest plan does.

    Attributes:
        is_used: Whether a ``Trainer`` was made.
    """

    def __init__(self, config: Config, *, optimizer: str | None = None) -> None:
        """Replace nothing before :meth:`install`.

        Args:
            config: Of the launch.
            optimizer: Of ``--optimizer``.
        """
        self.is_used = False
        self._config = config
        self._optimizer = optimizer
        self._patches = Patches()
        self._watches: list[_LongestRow] = []

    def install(self) -> None:
        """Replace what makes a ``Trainer``. Pre: ``transformers.trainer`` is imported."""
        self._patches.replace(replaced_functions.TRAINER_INIT, functools.partial(_before_making, self))

    def uninstall(self) -> None:
        """Put it back."""
        self._patches.undo()

    def apply(self, trainer: Any, given: Given) -> str:
        """Choose, change the arguments, and return what was done.

        Raises:
            OffloadError: If nothing can be chosen; the arguments are as they were.
        """
        _check(trainer, given)
        arguments = given.args
        batch = _batch_of(given)
        rows = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        found = self._search(given, batch)
        if found.best is None:
            raise OffloadError(found.advice)
        self._watch(given.model, batch)
        setup = found.best.setup
        before = (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
        arguments.per_device_train_batch_size = setup.rows
        arguments.gradient_accumulation_steps = setup.accumulation
        return _said(found, before, rows)

    def _search(self, given: Given, batch: Mapping[str, Any]) -> Search:
        session = PROCESS.session
        config = self._config if session is None else session.config
        processes = 1 if session is not None else environment.process_count()  # a session has its own share
        decided, directories = api.resolved(config.replace(activations=config.activations), processes)
        machine = probe(directories[0])
        question = Question(
            config=decided,
            probe=machine,
            optimizer=self._optimizer_of(given.args),
            moments="8bit" if self._optimizer == "adamw-8bit" else "fp32",
            processes=environment.process_count(),
            is_clipped=bool(given.args.max_grad_norm),
            ssd_bytes=api.room_of(decided, directories) // environment.process_count(),
        )
        device = preflight.compute_device(decided)
        known = Recordings(_as_trained(given), batch, probe=machine, timing_seconds=TIMING_SECONDS, device=device)
        return answer(question, known)

    def _optimizer_of(self, arguments: Any) -> OptimizerName:
        name = str(getattr(arguments.optim, "value", arguments.optim))
        if self._optimizer is not None:
            return "torch_offload.AdamW"
        if not name.startswith("adamw_torch"):
            raise UnsupportedModelError(f"plans know AdamW, and the script asks for optim={name!r}")
        return "adamw_torch_fused"

    def _watch(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        """Warn once of a batch whose rows are longer than those that were planned."""
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.ndim > 1:
            watch = _LongestRow(ids.shape[1])
            self._watches.append(watch)
            model.register_forward_pre_hook(_LengthHook(watch), with_kwargs=True)


class _LongestRow:
    """The longest row that a plan knows, or that came."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.is_said = False

    def see(self, length: int) -> None:
        if length > self.planned and not self.is_said:
            self.is_said = True
            logger.warning(
                "--fit planned rows of %d tokens, the longest of those it read; a batch with %d came. It is trained on "
                "as it is; where memory runs out give smaller rows, or leave --fit out",
                self.planned,
                length,
            )


class _LengthHook(ModuleHook[_LongestRow]):
    def run(self, owner: _LongestRow, module: nn.Module, arguments: tuple[Any, ...], more: Any) -> None:
        ids = more.get("input_ids") if isinstance(more, Mapping) else None
        if isinstance(ids, Tensor) and ids.ndim > 1:
            owner.see(ids.shape[1])


def _before_making(fit: Fit, original: Callable[..., Any], trainer: Any, *args: Any, **options: Any) -> Any:
    """Choose before a ``Trainer`` looks at its arguments."""
    fit.is_used = True
    try:
        said = fit.apply(trainer, Given.of(args, options))
    except (OffloadError, OSError) as error:
        said = f"nothing is changed: {error}"
    if environment.is_first_process():
        echo(f"torch-offload: --fit: {said}", err=True)
    return original(trainer, *args, **options)


def _check(trainer: Any, given: Given) -> None:
    """Refuse what is no stock step.

    Raises:
        UnsupportedModelError: The message says why.
    """
    kind = type(trainer).__name__
    if kind not in STOCK_TRAINERS:
        raise UnsupportedModelError(f"a step of {kind} is its own; plans know those of Trainer")
    if given.args is None or not isinstance(given.model, nn.Module):
        raise UnsupportedModelError("the Trainer was given no TrainingArguments, or no model but what makes one")
    if given.train_dataset is None:
        raise UnsupportedModelError("the Trainer has no train_dataset")
    if given.args.auto_find_batch_size:
        raise UnsupportedModelError("auto_find_batch_size changes the rows by itself; leave it or --fit out")
    if not hasattr(given.train_dataset, "__len__") or len(given.train_dataset) == 0:
        raise UnsupportedModelError("the data set has no length, so nobody knows how long its rows are")
    rows = given.args.per_device_train_batch_size * given.args.gradient_accumulation_steps
    if given.args.dataloader_drop_last and len(given.train_dataset) % rows:
        raise UnsupportedModelError(
            f"dataloader_drop_last would drop other rows: {len(given.train_dataset)} are no multiple of {rows}"
        )


def _batch_of(given: Given) -> dict[str, Any]:
    """Return a batch of all rows of a step, the longest of the data set among them.

    Raises:
        UnsupportedModelError: If the rows make no batch.
    """
    count = given.args.per_device_train_batch_size * given.args.gradient_accumulation_steps
    with _random_states_kept():
        numbers = _spread(len(given.train_dataset))
        try:
            read = {number: _columns_of(given.model, given.train_dataset[number]) for number in numbers}
            longest = max(numbers, key=lambda number: _length_of(read[number]))
            others = [number for number in numbers if number != longest] or [longest]
            chosen = [read[longest], *(dict(read[others[place % len(others)]]) for place in range(count - 1))]
            batch = _collator_of(given)(chosen)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            raise UnsupportedModelError(f"the rows of the data set make no batch for a plan ({error})") from error
    if isinstance(batch, Mapping) and not batch:
        raise UnsupportedModelError("the model's forward takes no column of the data set; tokenize it before")
    if not isinstance(batch, Mapping):
        raise UnsupportedModelError(f"the collator makes a {type(batch).__name__} of rows, plans need names")
    return dict(batch)


def _spread(length: int) -> list[int]:
    """Return the numbers of rows to read, evenly spread."""
    count = min(length, MAX_ROWS_READ)
    return [place * length // count for place in range(count)]


def _length_of(row: Mapping[str, Any]) -> int:
    lengths = [len(value) for value in row.values() if isinstance(value, Sequence) and not isinstance(value, str)]
    lengths += [value.numel() for value in row.values() if isinstance(value, Tensor)]
    return max(lengths, default=0)


def _columns_of(model: nn.Module, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model's forward takes of a row, as a Trainer does."""
    base: Any = getattr(model, "get_base_model", None)  # of PEFT's
    inner = base() if callable(base) else model
    taken = {*inspect.signature(type(inner).forward).parameters, *LABELS}
    return {name: value for name, value in row.items() if name in taken}


def _collator_of(given: Given) -> Callable[[list[Any]], Any]:
    from transformers import default_data_collator

    collator: Callable[[list[Any]], Any] = given.data_collator or default_data_collator
    return collator


def _as_trained(given: Given) -> nn.Module:
    """Return the model without memory, as the Trainer will train it."""
    model = meta_copy(given.model).train()
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if given.args.gradient_checkpointing and callable(enable):
        enable({"use_reentrant": False})
    if given.args.bf16 or given.args.fp16:
        dtype = torch.bfloat16 if given.args.bf16 else torch.float16
        model.forward = torch.autocast("cpu", dtype)(model.forward)
    return model


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Leave random numbers as they are: data sets and collators may draw some."""
    import numpy as np

    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


def _said(found: Search, before: tuple[int, int], rows: int) -> str:
    best = found.best
    if best is None:
        return found.advice
    rest = f"{rows} rows a step as before; plan: {best.seconds:.3g} s a step"
    if (best.setup.rows, best.setup.accumulation) == before:
        return f"{before[0]} x {before[1]} stays, {rest}"
    yours = _candidate_of(found, before)
    instead = "" if yours is None else f" instead of {_seconds_of(yours)}"
    return (
        f"per_device_train_batch_size {before[0]} -> {best.setup.rows}, gradient_accumulation_steps {before[1]} -> "
        f"{best.setup.accumulation}; {rest}{instead}; sums are in another order"
    )


def _candidate_of(found: Search, split: tuple[int, int]) -> Candidate | None:
    every = [*found.candidates, *found.refused]
    return next((each for each in every if (each.setup.rows, each.setup.accumulation) == split), None)


def _seconds_of(candidate: Candidate) -> str:
    if not candidate.fits:
        return "a step that does not fit"
    return f"{candidate.seconds:.3g} s" if candidate.plan is not None else f"at least {candidate.seconds:.3g} s"
