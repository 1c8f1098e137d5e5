"""``torch-offload plan --schedule``: what the command line asks for."""

from collections.abc import Mapping
from typing import Any

from torch_offload.cli.config_options import config_from
from torch_offload.cli.pipeline_options import PipelineOptions
from torch_offload.cli.plan_search import model_of
from torch_offload.integrations import hf_models
from torch_offload.planning.api import DEFAULT_OPTIMIZER, pipeline_plan
from torch_offload.planning.pipeline_plan import PipelinePlan
from torch_offload.system import environment


def plan_from(schedule: str, options: PipelineOptions, others: Mapping[str, Any]) -> PipelinePlan:
    """Plan a pipeline.

    Args:
        schedule: Its name.
        options: Of the pipeline.
        others: The other options of ``plan``.

    Raises:
        ConfigError: If an option cannot be used.
    """
    config = config_from(others["given"], others["file"])
    model, loaded = model_of(others)
    optimizer = others["optimizer"] or DEFAULT_OPTIMIZER
    return pipeline_plan(
        model,
        hf_models.batch_of(others["batch"], others["sequence"]),
        config=config,
        optimizer=None if optimizer == "none" else optimizer,
        moments=others["moments"] or "fp32",
        micro_batches=others["micro_batches"] or 1,
        loaded=loaded,
        processes=environment.process_count(),
        ssd_bytes=others["ssd_bytes"],
        schedule=schedule,
        ranks=options.ranks,
        stages=options.stages,
    )
