"""Takes samples of the running engine: at the end of each optimizer step and, between them, on a light thread.

Nothing is recorded unless a report (``Config.report``) or the status line needs it.
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torch_offload.reporting.timeline import Sample, Timeline
from torch_offload.system.threads import BackgroundThread

logger = logging.getLogger(__name__)

RECENT_SAMPLES = 2048
STEP_SAMPLES = 2048
MIN_PERIOD_SECONDS = 0.1
SAMPLES_PER_STEP = 40


class Recorded(Protocol):
    """A recorder's sample."""

    def statistics(self) -> Mapping[str, Any]:
        """Return the figures of the engine, as ``Engine.statistics``."""

    def modules(self) -> Iterable[nn.Module]:
        """Return the modules whose tokens are counted."""


class Recorder:
    """Samples of one engine, of bounded number however long the run.

    Threads: samples are taken by its own thread and by the one that trains; everything else is for one thread.
    """

    def __init__(self, recorded: Recorded, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the first sample. :meth:`start` begins to record.

        Args:
            recorded: An engine and its modules. Tokens are counted from the end of the first step on.
            clock: Seconds.
        """
        self._recorded = recorded
        self._clock = clock
        self._start_seconds = clock()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._recent: deque[Sample] = deque(maxlen=RECENT_SAMPLES)
        self._step_ends: list[Sample] = []
        self._steps_per_entry = 1
        self._steps = 0
        self._tokens = 0
        self._hooks: list[RemovableHandle] = []
        self._counted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._ended = threading.Event()
        self._thread: BackgroundThread | None = None
        self.sample()

    def start(self) -> None:
        """Record from now on."""
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        self._thread = BackgroundThread(self._run)
        if not self._thread.start():
            logger.warning("there is no room for another thread: samples are taken at the end of each step only")

    def stop(self) -> None:
        """Record no more; what was recorded stays. Safe to call twice."""
        self._ended.set()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._thread is not None and self._process == os.getpid():
            self._thread.join()
        self._thread = None

    def sample(self, *, is_step_end: bool = False) -> Sample:
        """Take a sample now."""
        statistics = self._recorded.statistics()
        with self._lock:
            self._steps += is_step_end
            taken = Sample.from_statistics(
                statistics,
                seconds=self._clock() - self._start_seconds,
                steps=self._steps,
                tokens=self._tokens,
                is_step_end=is_step_end,
            )
            self._recent.append(taken)
            if is_step_end and (self._steps - 1) % self._steps_per_entry == 0:
                self._keep_step_end(taken)
        return taken

    def _keep_step_end(self, taken: Sample) -> None:
        self._step_ends.append(taken)
        if len(self._step_ends) > STEP_SAMPLES:
            self._step_ends = self._step_ends[::2]
            self._steps_per_entry *= 2

    def timeline(self) -> Timeline:
        """Return what was recorded so far."""
        with self._lock:
            recent = list(self._recent)
            ends = list(self._step_ends)
        last = next((sample for sample in reversed(recent) if sample.is_step_end), None)
        if last is not None and last.steps != ends[-1].steps:
            ends.append(last)  # of a long run the last step may be one of those that are passed over
        return Timeline(recent=recent, step_ends=ends)

    def add_tokens(self, count: int) -> None:
        """Note tokens that a model has seen."""
        with self._lock:
            self._tokens += count

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if self._process != os.getpid():
            return
        self.sample(is_step_end=True)
        for module in self._recorded.modules():
            self._count_tokens_of(module)

    def _count_tokens_of(self, module: nn.Module) -> None:
        """Count, from now on, what a module's input embedding sees. Nothing for one without, or one that is counted."""
        embedding = _input_embedding(module)
        if embedding is None or embedding in self._counted:
            return
        self._counted.add(embedding)
        self._hooks.append(embedding.register_forward_pre_hook(TokenHook(self)))

    def _run(self) -> None:
        while not self._ended.wait(self._period_seconds()):
            self.sample()

    def _period_seconds(self) -> float:
        """Close enough to show a step, far enough apart that the last steps fit."""
        with self._lock:
            ends = self._step_ends[-2:]
        if len(ends) < 2:
            return MIN_PERIOD_SECONDS
        step_seconds = (ends[1].seconds - ends[0].seconds) / max(1, ends[1].steps - ends[0].steps)
        return max(MIN_PERIOD_SECONDS, step_seconds / SAMPLES_PER_STEP)


class TokenHook:
    """Forward pre-hook of an embedding. What is in its place in a copy or a pickle does nothing."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count the tokens of a training forward pass."""
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if args and isinstance(args[0], torch.Tensor):
            self._recorder.add_tokens(args[0].numel())

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return {}.get

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, ({}, "get"))  # as tracking.RefreshHook: a hook that does nothing wherever it is loaded


def _input_embedding(module: nn.Module) -> nn.Module | None:
    get_embedding = getattr(module, "get_input_embeddings", None)
    if get_embedding is None or getattr(module, "_compiled_call_impl", None) is not None:
        return None
    try:
        embedding = get_embedding()
    except (NotImplementedError, AttributeError):
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None
