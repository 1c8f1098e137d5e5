"""Trains a Llama of a given size, in memory or paged: the process whose memory test_memory_limit.py limits.

    python -m support.memory_worker --hidden 512 --layers 8 --scratch DIRECTORY [--budget-bytes 90000000]

Prints the losses, hashes of the weights and what the engine counted as a JSON line. In memory it does not import the
package.
"""

import argparse
import hashlib
import json
import sys
from typing import Any

import torch

from support.models import VOCABULARY, tiny_model
from support.vector_math import settle_vector_math

STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--budget-bytes", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(2)
    settle_vector_math()
    model: Any = tiny_model("llama", tied=True, hidden=options.hidden, layers=options.layers)
    if options.budget_bytes:
        import torch_offload

        config = torch_offload.Config(min_paged_bytes=0, page_elements=1 << 16)
        torch_offload.wrap(model, ram=options.budget_bytes, ssd=options.scratch, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    weights = {name: hashlib.sha256(weight.detach().numpy()).hexdigest() for name, weight in model.named_parameters()}
    result: dict[str, Any] = {"losses": losses, "weights": weights}
    if options.budget_bytes:
        report = torch_offload.report()
        result |= {"peak_bytes": report.host_peak_bytes, "ssd_read_bytes": report.ssd_read_bytes}
    else:
        assert "torch_offload" not in sys.modules
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
