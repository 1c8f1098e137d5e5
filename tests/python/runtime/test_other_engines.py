"""Engines that divide parameters in another way than `fully_shard` are refused, before `wrap` and after it.

Method: two ranks over gloo with torch's older FSDP; of DeepSpeed, which is not installed, the marks on parameters.
"""

import pytest
import torch
from support.collectives import in_each_rank, join_group
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import torch_offload
from torch_offload import UnsupportedModelError


def said_of_flat_parameters(rank: int, folder: str, options: dict[str, bool], wraps_first: bool) -> str:
    """Return the error of `wrap` or of the first forward."""
    join_group(rank, folder)
    model: nn.Module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
    try:
        for divides in (not wraps_first, wraps_first):
            if divides:
                device = torch.device("cpu")
                model = FullyShardedDataParallel(model, device_id=device, **options)
            else:
                torch_offload.wrap(model, ram="16MiB", ssd=folder)
        model(torch.ones(2, 256))
    except UnsupportedModelError as error:
        return str(error)
    finally:
        torch.distributed.destroy_process_group()
    return ""


@pytest.mark.rotating
@pytest.mark.parametrize("wraps_first", [False, True])
@pytest.mark.parametrize("keeps_originals", [False, True])
def test_flat_parameters_are_refused_by_each_rank(scratch, wraps_first, keeps_originals):
    options = {"use_orig_params": keeps_originals}
    for said in in_each_rank(said_of_flat_parameters, str(scratch), options, wraps_first):
        assert said.startswith("FullyShardedDataParallel (FSDP1) has the parameters of this ")
        assert "fully_shard (FSDP2)" in said


@pytest.mark.parametrize("mark", ["ds_id", "_hp_mapping"])
@pytest.mark.parametrize("wraps_first", [False, True])
def test_parameters_of_deepspeed_are_refused(scratch, mark, wraps_first):
    """As its stage 3 marks them, and other stages those that have others in fp32; all give them other memory."""
    model = nn.Linear(256, 256)
    config = torch_offload.Config(ram="16MiB", ssd=scratch)
    if wraps_first:
        torch_offload.wrap(model, config=config)
    setattr(model.weight, mark, None)
    model.weight.data = torch.ones(256, 256)
    with pytest.raises(UnsupportedModelError, match="DeepSpeed has the parameters of this Linear"):
        (model if wraps_first else lambda _: torch_offload.wrap(model, config=config))(torch.ones(2, 256))
    if wraps_first:
        torch_offload.unwrap(model)
    model(torch.ones(2, 256))
