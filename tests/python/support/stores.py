"""A store process, trainings whose pages go to one, and a connection that changes bytes on their way."""

import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_offload
from support.paging import assert_was_paged
from support.small_module import TIGHT, adamw, make_module, snapshot, step
from torch_offload import _C, Config

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from harness import page_store
from harness.page_store import StoreProcess

STEPS = 3
HEADER = struct.Struct("<IHHIi11Q")
"""csrc/net/message.h"""
MAGIC, PROTOCOL = 0x53504F54, 3
BODY_BYTES = 13
"""Which field of a header."""
PAGE, BYTES = 5, 8
"""Kinds of messages with a page behind them: to a client, from one."""


def config_for(address: str, **settings: Any) -> Config:
    return Config(
        **{"ram": TIGHT, "ssd": f"store://{address}", "min_paged_bytes": 0, "page_elements": 4096, **settings}
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": adamw,
    "foreach": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=True, amsgrad=True),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True),
    "own": lambda module: torch_offload.AdamW(module.parameters(), lr=1e-2),
    "own, 8-bit moments": lambda module: torch_offload.AdamW(module.parameters(), lr=1e-2, moments="8bit"),
}


def train(address: str | None, optimizer: str = "fused", *, clips: bool = False, **settings: Any) -> list[Any]:
    """Return losses and a digest of every tensor, in memory or over a store."""
    module = make_module()
    if address is not None:
        torch_offload.wrap(module, config=config_for(address, **settings))
    chosen = OPTIMIZERS[optimizer](module)
    outcome = [[step(module, chosen, clips=clips).item() for _ in range(STEPS)], snapshot(module, chosen)]
    if address is not None:
        assert_was_paged()
    return outcome


def train_whole_pages(address: str) -> None:
    """Train what has no page of less than 16 KiB."""
    train(address, min_paged_bytes=16 << 10)


def train_and_count(address: str, *optimizer: str, clips: bool = False) -> tuple[list[Any], dict[str, int]]:
    """Return that, and what the engine has counted."""
    return train(address, *optimizer, clips=clips), torch_offload.report().counters


def stand_still(store: StoreProcess) -> None:
    """Stop it, and wait until each of its threads has stopped: the others go on until the first is scheduled."""
    store.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, store.process.pid, os.WSTOPPED)


def store_process(directory: Path, *options: str, ram: str, **environment: str) -> AbstractContextManager[StoreProcess]:
    """Start the command, whose kernels have one thread."""
    return page_store.store_process(str(directory), *options, ram=ram, **{"OMP_NUM_THREADS": "1", **environment})


@contextmanager
def store_here(directory: Path, *, ram: int) -> Iterator[_C.PageServer]:
    """The same in this process."""
    server = _C.PageServer(
        listen="127.0.0.1:0",
        budget_bytes=ram,
        directories=[str(directory)],
        io_engine="auto",
        queue_depth=16,
        io_timeout=60,
    )
    yield server
    server.close()


@contextmanager
def relay(address: str, change: Callable[[int, bytearray], None]) -> Iterator[str]:
    """Stand between one client and a store, and give `change` each message: its kind and its body."""
    listening = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source.makefile("rb") as incoming:
            while header := incoming.read(HEADER.size):
                fields = HEADER.unpack(header)
                body = bytearray(incoming.read(fields[BODY_BYTES]))
                change(fields[2], body)
                target.sendall(header + body)
        hang_up()

    def hang_up() -> None:
        for end in (listening, *ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def connect() -> None:
        with suppress(OSError):
            ends.append(listening.accept()[0])
            host, port = address.rsplit(":", 1)
            ends.append(socket.create_connection((host, int(port))))
            back = threading.Thread(target=pass_on, args=(ends[1], ends[0]))
            back.start()
            pass_on(ends[0], ends[1])
            back.join()

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield "{}:{}".format(*listening.getsockname())
    finally:
        hang_up()
        thread.join()
        for end in (listening, *ends):
            end.close()


def answer_to(address: str, said: bytes) -> bytes:
    """Return all that a store answers to bytes that are said to it, until it is silent for a moment."""
    host, port = address.rsplit(":", 1)
    answer = b""
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(said)
        while select.select([connection], [], [], 10 if not answer else 0.2)[0] and (more := connection.recv(4096)):
            answer += more
    return answer
