"""The options of ``torch-offload plan`` that are no settings."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torch_offload.errors import ConfigError

if TYPE_CHECKING:
    from torch_offload.planning.plan import Work

Batch = Annotated[int, typer.Option(metavar="COUNT", help="Rows of a micro-batch, or of a prompt.")]
Sequence = Annotated[int, typer.Option(metavar="COUNT", help="Tokens of a row.")]
Evaluate = Annotated[bool, typer.Option("--evaluate", help="Plan forwards without gradients instead of training.")]
Generate = Annotated[
    int | None, typer.Option(metavar="COUNT", help="Plan so many new tokens after each row instead of training.")
]
Train = Annotated[
    str | None,
    typer.Option(
        metavar="full|lora:r=16|layers:4",
        help="Weights that train: all; PEFT's adapters of a rank, at its own modules or at those of "
        "lora:r=16,targets=q_proj+v_proj; the last layers.",
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option("--micro-batches", "--accumulate", metavar="COUNT", help="Micro-batches of a step; default 1."),
]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16 or float16.")]
LoadIn4bit = Annotated[
    bool, typer.Option("--load-in-4bit", help="bitsandbytes quantizes it to NF4 as it is loaded (QLoRA).")
]
Optimizer = Annotated[
    str | None, typer.Option(metavar="NAME", help="adamw_torch_fused, torch_offload.AdamW or none; default the first.")
]
Moments = Annotated[str | None, typer.Option(metavar="fp32|8bit", help="How torch_offload.AdamW keeps its moments.")]
Checkpointing = Annotated[bool, typer.Option("--checkpointing", help="Layers run again in the backward pass.")]
Endurance = Annotated[str, typer.Option(metavar="SIZE", help="Endurance rating of the drive (TBW).")]
SsdBytes = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Capacity for pages on the SSD (default: the free space).")
]


def work_of(training: Mapping[str, Any], *, evaluate: bool, new_tokens: int | None) -> "Work":
    """Return what is planned.

    Args:
        training: Options that are of training only, None where not given.
        evaluate: Of ``--evaluate``.
        new_tokens: Of ``--generate``.

    Raises:
        ConfigError: If the options contradict each other.
    """
    if evaluate and new_tokens is not None:
        raise ConfigError("--evaluate and --generate are two plans; give one of them")
    if not evaluate and new_tokens is None:
        return "train"
    name = "--evaluate" if evaluate else "--generate"
    refused = [option for option, value in training.items() if value is not None]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: of training, which {name} has none of; leave {name} or them out")
    if new_tokens is not None and new_tokens < 1:
        raise ConfigError(f"--generate: must be at least 1, got {new_tokens}")
    return "evaluate" if evaluate else "generate"
