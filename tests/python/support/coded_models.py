"""Tiny mixtures of experts whose experts are coded."""

import functools

import torch
from torch import Tensor, nn

from support.moe_models import inputs_of, tiny_moe
from torch_offload import moe
from torch_offload.moe import ternary

ROUNDED = functools.partial(ternary.in_planes, zeros=(0.6, 0.6))


def coded(name: str, **options: object) -> nn.Module:
    model = tiny_moe(name, **options)
    moe.code_experts(model, ROUNDED)
    return model


def logits_of(model: nn.Module, **options: int) -> Tensor:
    with torch.no_grad():
        return model(**inputs_of(model, **options)).logits
