"""Looks rows of a large table up on request and says which tokens come of them: a process of embedding.py.

Reads one command per line from stdin ("step" or "finish") and answers each with a JSON line on stdout.
"""

import argparse
import hashlib
import json
import tempfile
from typing import Any

import torch
from harness.machine import CpuSeconds
from harness.process_memory import peak_resident_bytes
from harness.worker_process import serve
from safetensors.torch import load_file
from torch import nn


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", required=True, help="the weights")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--asked", type=int, required=True, help="rows of a step")
    parser.add_argument("--budget-bytes", type=int, default=0, help="0: plain torch")
    parser.add_argument("--page-elements", type=int, default=1 << 20)
    parser.add_argument("--ssd", required=True)
    return parser


class Model(nn.Module):
    """A table of rows and what makes tokens of them."""

    def __init__(self, rows: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.mixed = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        found = self.table(indices)
        return self.head(found + self.mixed(found).relu()).argmax(-1)


class EmbeddingWorker:
    """The model, and what it counts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.scratch = tempfile.TemporaryDirectory(dir=options.ssd)
        with torch.device("meta"):
            self.model = Model(options.rows, options.width, options.vocabulary).requires_grad_(requires_grad=False)
        if options.budget_bytes:
            import torch_offload

            config = torch_offload.Config(
                ram=options.budget_bytes, ssd=self.scratch.name, page_elements=options.page_elements
            )
            with torch_offload.loading(config=config):
                self.model.load_state_dict(load_file(options.file), assign=True)
            torch_offload.wrap(self.model)
        else:
            self.model.load_state_dict(load_file(options.file), assign=True)
        self.generator = torch.Generator().manual_seed(1)

    def pages_read(self) -> int:
        if not self.options.budget_bytes:
            return 0
        import torch_offload

        return torch_offload.report().ssd_read_bytes

    @torch.no_grad()
    def step(self) -> dict[str, Any]:
        indices = torch.randint(0, self.options.rows, (self.options.asked,), generator=self.generator)
        before = self.pages_read()
        started = CpuSeconds.now()
        tokens = self.model(indices)
        measured = CpuSeconds.now().since(started)
        return measured | {
            "tokens_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
            "distinct_rows": len(indices.unique()),
            "ssd_read_bytes": self.pages_read() - before,
            "peak_resident_bytes": peak_resident_bytes(),
        }

    def finish(self) -> dict[str, Any]:
        if not self.options.budget_bytes:
            return {}
        import torch_offload

        return {"report": json.loads(torch_offload.report().to_json())}

    def describe(self) -> dict[str, Any]:
        return {"table_bytes": self.model.table.weight.nbytes, "torch": torch.__version__}


if __name__ == "__main__":
    serve(lambda: EmbeddingWorker(make_parser().parse_args()))
