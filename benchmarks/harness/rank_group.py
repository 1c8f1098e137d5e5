"""The worker processes that are the ranks of one group, by themselves or as one."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.memory_group import MemoryGroup
from harness.worker_process import SteppingWorker, WorkerProcess, option_words, worker_command


class Group:
    """The ranks of a group, which take each command together."""

    def __init__(
        self, name: str, folder: str, ranks: int, *, worker: str, limit: MemoryGroup | None, **options: Any
    ) -> None:
        self.workers: list[WorkerProcess] = []
        self._pool = ThreadPoolExecutor(ranks)
        group = Path(folder, f"{name}.group")
        words = option_words({"ranks": ranks, "group": group, "ssd": folder, **options})

        def start(rank: int) -> WorkerProcess:
            command = [*worker_command(worker), *words, "--rank", str(rank)]
            command = command if limit is None else limit.command(command)
            return WorkerProcess(f"{name}-{rank}", command, log_directory=folder)

        self.workers = list(self._pool.map(start, range(ranks)))

    def ask(self, command: str) -> list[dict[str, Any]]:
        return list(self._pool.map(lambda worker: worker.ask(command), self.workers))

    def close(self) -> None:
        list(self._pool.map(WorkerProcess.close, self.workers))
        self._pool.shutdown()


@contextmanager
def group(
    name: str, folder: str, ranks: int, *, worker: str = "rank", limit: MemoryGroup | None = None, **options: Any
) -> Iterator[Group]:
    made = Group(name, folder, ranks, worker=worker, limit=limit, **options)
    try:
        yield made
    finally:
        made.close()


class RanksAsOne(SteppingWorker):
    """Has the ranks of a group step together, and what each measures summed up; speaks as a `WorkerProcess` does.

    Args:
        name: Of the group.
        commands: Of the ranks, in their order.
        log_directory: Gets the log of each.
        environments: Of the ranks, beside this process's own.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        environments: Sequence[dict[str, str]],
        *,
        log_directory: str,
    ) -> None:
        super().__init__(name)
        self._pool = ThreadPoolExecutor(len(commands))

        def start(rank: int) -> WorkerProcess:
            return WorkerProcess(f"{name}-{rank}", commands[rank], log_directory=log_directory, **environments[rank])

        self.workers = list(self._pool.map(start, range(len(commands))))
        self.process = self.workers[0].process
        self.description = self.workers[0].description

    def ask(self, command: str) -> dict[str, Any]:
        return combined(list(self._pool.map(lambda worker: worker.ask(command), self.workers)))

    def close(self) -> None:
        list(self._pool.map(WorkerProcess.close, self.workers))
        self._pool.shutdown()


def combined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up what ranks answered: bytes and processor time are of all together, a peak and seconds of the one with the
    most, what is no number is that of each.
    """
    whole: dict[str, Any] = {}
    for name, first in answers[0].items():
        values = [answer[name] for answer in answers]
        if not isinstance(first, (int, float)):
            whole[name] = values
        elif name.startswith("process_") or (name.endswith("_bytes") and not name.startswith(("peak_", "swap_"))):
            whole[name] = sum(values)
        else:
            whole[name] = max(values)
    if "process_cpu_seconds" in whole:
        spent = answers[0]["other_cpu_seconds"] + answers[0]["process_cpu_seconds"]
        others = max(0.0, spent - whole["process_cpu_seconds"])
        whole["other_cpu_seconds"] = others
        whole["other_share"] = others / (whole["seconds"] * (os.cpu_count() or 1))
    return whole
