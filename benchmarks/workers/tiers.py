"""Trains as workers/step.py does, on an emulated device above memory above a slowed-down SSD.

Answers "turn" (some steps at once) and "predict" (what torch_offload.plan says of a step) besides.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any

import torch
from harness.machine import CpuSeconds
from harness.worker_process import serve
from transformers import LlamaForCausalLM
from workers.step import Worker, make_configuration, make_parser

if TYPE_CHECKING:
    from torch_offload import Config

COUNTED = ("ssd_read_bytes", "ssd_written_bytes", "to_device_bytes", "to_host_bytes")


def parse_options() -> argparse.Namespace:
    parser = make_parser()
    parser.add_argument("--device-bytes", type=int, required=True)
    parser.add_argument("--link", type=int, required=True, help="bytes per second, each way")
    parser.add_argument("--ssd-rate", type=int, required=True, help="bytes per second that both ways share")
    parser.add_argument("--measured-steps", type=int, required=True, help="of a turn")
    parser.add_argument("--plain", action="store_true", help="plain torch; the budgets are for predictions")
    return parser.parse_args()


class TiersWorker(Worker):
    """A model in training on three tiers, or in plain torch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = argparse.Namespace(**vars(options))
        if options.plain:
            options.budget_bytes = 0
        super().__init__(options)

    def config(self, options: argparse.Namespace) -> "Config":
        return (
            super()
            .config(options)
            .replace(
                gpu=options.device_bytes,
                emulation={"gpu": True, "link_rate": options.link, "ssd_rate": options.ssd_rate},
                optimizer_device="cpu",
            )
        )

    def traffic(self) -> dict[str, float]:
        totals = super().traffic()
        if not self.paged:
            return totals
        import torch_offload

        device = torch_offload.report().device
        if device is None:
            raise SystemExit("the engine has no device")
        moved = {"to_device_bytes": device.to_device_bytes, "to_host_bytes": device.to_host_bytes}
        return totals | {name: float(sum(by_kind.values())) for name, by_kind in moved.items()}

    def turn(self) -> dict[str, Any]:
        """Take a step that uses up what idle links did meanwhile, then those that count; seconds and bytes are of one.

        The bytes of a step include what moved just before it.
        """
        losses = [self.step()["loss"]]
        before = CpuSeconds.now()
        steps = [self.step() for _ in range(self.options.measured_steps)]
        measured: dict[str, Any] = CpuSeconds.now().since(before)
        measured["seconds"] /= len(steps)
        if self.paged:
            measured |= {name: sum(step[name] for step in steps) / len(steps) for name in COUNTED}
        return measured | {"losses": losses + [step["loss"] for step in steps]}

    def predict(self) -> dict[str, Any]:
        """Return what is planned for such a step, made anew from timings of this machine."""
        import torch_offload

        with torch.device("meta"):
            model = LlamaForCausalLM(make_configuration(self.options)).train()
        if self.options.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = torch.zeros(self.options.batch, self.options.sequence, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        plan = torch_offload.plan(model, batch, config=self.config(self.options), optimizer="adamw_torch_fused")
        return dict(json.loads(plan.to_json()))


if __name__ == "__main__":
    serve(lambda: TiersWorker(parse_options()))
