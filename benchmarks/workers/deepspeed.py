"""The peer of workers/step.py: the same model and step under DeepSpeed ZeRO-3 with everything on NVMe.

Runs in an environment of its own that has DeepSpeed (peers.py makes it). Speaks as workers/step.py does.
"""

import argparse
import json
import logging
import os
import sys
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1")
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29511"}.items():
    os.environ.setdefault(name, value)
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # ninja, for its operators

import deepspeed  # noqa: E402  the settings above come first
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from harness.machine import CpuSeconds  # noqa: E402
from harness.process_memory import forget_peak, peak_resident_bytes, swapped_bytes  # noqa: E402
from workers.step import LEARNING_RATE, make_model  # noqa: E402


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("hidden", "intermediate", "layers", "heads", "vocabulary", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--checkpointing", type=int, default=0)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ssd", required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON, see peers.py")
    return parser.parse_args()


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's configuration: parameters, gradients and optimizer states on NVMe, its own CPU AdamW."""
    chosen = options.settings
    is_pipelined = bool(chosen["pipelined"])
    zero = {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": 10_000_000,
        "sub_group_size": chosen["sub_group_elements"],
        "stage3_max_live_parameters": 30_000_000,
        "stage3_max_reuse_distance": 30_000_000,
        "stage3_prefetch_bucket_size": 12_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "offload_param": {
            "device": "nvme",
            "nvme_path": options.ssd,
            "pin_memory": False,
            "buffer_count": chosen["parameter_buffers"],
            "buffer_size": 10_000_000,
            "max_in_cpu": 0,
        },
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": options.ssd,
            "pin_memory": False,
            "buffer_count": chosen["optimizer_buffers"],
            "pipeline_read": is_pipelined,
            "pipeline_write": is_pipelined,
        },
    }
    transfers = {
        "block_size": chosen["block_bytes"],
        "queue_depth": chosen["queue_depth"],
        "intra_op_parallelism": chosen["io_threads"],
        "single_submit": False,
        "overlap_events": True,
    }
    adam = {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    result = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 30,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": True,
        "optimizer": {"type": "AdamW", "params": adam},
        "aio": transfers,
    }
    return result | ({"bf16": {"enabled": True}} if options.dtype == "bf16" else {})


def keep_dtype() -> None:
    """Make ZeRO-3 keep the model's dtype on processors without fp16 arithmetic.

    There `Init._set_dtype` (deepspeed/runtime/zero/partition_parameters.py, 0.19.8) makes weights bf16 whatever was
    asked for: `dtype or torch.float16 if is_fp16_supported() else torch.bfloat16` takes the `or` first.
    """
    get_accelerator().is_fp16_supported = lambda: True


class Worker:
    """A model in training under DeepSpeed."""

    def __init__(self, options: argparse.Namespace) -> None:
        backend = get_accelerator().communication_backend_name()
        rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        deepspeed.init_distributed(dist_backend=backend, rank=rank, world_size=ranks)
        keep_dtype()
        model = make_model(options)
        self.ids = torch.randint(0, options.vocabulary, (options.batch, options.sequence))
        self.parameters = sum(weight.numel() for weight in model.parameters())
        # It casts the weights itself.
        self.engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=configuration(options)
        )
        self.traffic_so_far = self.traffic()

    def step(self) -> dict[str, Any]:
        forget_peak()
        before = CpuSeconds.now()
        loss = self.engine(input_ids=self.ids, labels=self.ids).loss
        self.engine.backward(loss)
        self.engine.step()
        measured = CpuSeconds.now().since(before)
        earlier, self.traffic_so_far = self.traffic_so_far, self.traffic()
        traffic = {name: count - earlier[name] for name, count in self.traffic_so_far.items()}
        return measured | traffic | {"peak_resident_bytes": float(peak_resident_bytes()), "loss": loss.item().hex()}

    def traffic(self) -> dict[str, float]:
        with open("/proc/self/io") as file:
            counted = dict(line.split(": ") for line in file.read().splitlines())
        return {f"process_{name}": float(counted[name]) for name in ("read_bytes", "write_bytes")} | swapped_bytes()

    def describe(self) -> dict[str, Any]:
        versions = {"torch": torch.__version__, "deepspeed": deepspeed.__version__}
        return {"parameters": self.parameters, "start_peak_resident_bytes": peak_resident_bytes()} | versions


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints must not look like an answer
    logging.disable(logging.WARNING)
    worker = Worker(parse_options())
    answers.write(json.dumps(worker.describe()) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(worker.step() if line.strip() == "step" else {}) + "\n")


if __name__ == "__main__":
    main()
