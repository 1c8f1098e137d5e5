"""Generates with llama.cpp over a mapped file, step by step on request: a process of generate.py.

Reads one command per line from stdin ("step" or "finish") and answers each with a JSON line on stdout. It does without
torch, whose memory is left to the file's pages.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
from typing import Any

import llama_cpp
from harness.machine import CpuSeconds, read_bytes_of_process
from harness.process_memory import forget_peak, peak_resident_bytes
from harness.worker_process import serve


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", required=True, help="the model")
    parser.add_argument("--prompt", type=int, required=True, help="tokens of the one row")
    parser.add_argument("--new-tokens", type=int, required=True)
    return parser


class LlamaCppWorker:
    """A model that only runs forward."""

    def __init__(self, options: argparse.Namespace) -> None:
        threads = os.cpu_count() or 1
        self.options = options
        self.model = llama_cpp.Llama(
            options.file,
            n_ctx=options.prompt + options.new_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            use_mmap=True,
            use_mlock=False,
            verbose=False,
        )
        self.ids = random.Random(1).choices(range(self.model.n_vocab()), k=options.prompt)

    def run(self) -> list[int]:
        self.model.reset()
        return list(itertools.islice(self.model.generate(self.ids, temp=0.0), self.options.new_tokens))

    def step(self) -> dict[str, Any]:
        forget_peak()
        from_disk = read_bytes_of_process()
        started = CpuSeconds.now()
        tokens = self.run()
        measured = CpuSeconds.now().since(started)
        return measured | {
            "result_sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
            "read_bytes": read_bytes_of_process() - from_disk,
            "peak_resident_bytes": peak_resident_bytes(),
        }

    def finish(self) -> dict[str, Any]:
        return {"system": llama_cpp.llama_print_system_info().decode()}

    def describe(self) -> dict[str, Any]:
        size_bytes = os.path.getsize(self.options.file)
        return {
            "file_bytes": size_bytes,
            "peak_resident_bytes": peak_resident_bytes(),
            "llama_cpp": llama_cpp.__version__,
        }


if __name__ == "__main__":
    serve(lambda: LlamaCppWorker(make_parser().parse_args()))
