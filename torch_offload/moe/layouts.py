"""Coded experts in the models of transformers: which modules hold experts, what stands in their place, what runs them.

Modules with fused weights (Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3, GLM4-MoE, GraniteMoE, gpt-oss and
all others that transformers lets choose an ``experts_implementation``) keep their class and hand over to ours by that
choice. SwitchTransformers keeps a small module for each expert; its container is replaced. Any other layout is refused
by name.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.switch_transformers import modeling_switch_transformers as switch

from torch_offload.errors import OffloadError, UnsupportedModelError
from torch_offload.moe.modules import DOWN, UP, CodedExperts, ExpertShapes, coded_experts, mix
from torch_offload.moe.ternary import TernaryMatrix

IMPLEMENTATION = "torch_offload"
"""Value of ``experts_implementation`` of a model whose experts are coded."""

CODED = "coded"
"""The attribute of a module of experts that holds its coded weights."""


class FusedExperts:
    """A module with ``gate_up_proj`` (or ``up_proj``) and ``down_proj`` of all its experts, [experts, ., .]."""

    def __init__(self, name: str, module: Any) -> None:
        """Take a module of a class that transformers decorates with its choice of implementations."""
        self.name = name
        self.module = module
        self.up_name = "gate_up_proj" if module.has_gate else "up_proj"

    @property
    def is_coded(self) -> bool:
        """Whether the weights have been replaced."""
        return isinstance(getattr(self.module, CODED, None), CodedExperts)

    @property
    def shapes(self) -> ExpertShapes:
        """Of the experts. Pre: not coded."""
        up, down = (self._parameter(name) for name in (self.up_name, "down_proj"))
        if up.dim() != 3 or down.dim() != 3 or up.shape[0] != down.shape[0]:
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}): experts of shapes {tuple(up.shape)} and "
                f"{tuple(down.shape)} are not [experts, ., .]"
            )
        return ExpertShapes(up.shape[0], self._linear_shape(up), self._linear_shape(down))

    @property
    def weight_names(self) -> list[str]:
        """Names of the tensors that :meth:`replace` takes away. Pre: not coded."""
        return [f"{self.name}.{self.up_name}", f"{self.name}.down_proj"]

    def weight(self, expert: int, matrix: int) -> Tensor:
        """One matrix of an expert, [rows, columns] as a linear layer has it; a view."""
        weight: Tensor = self._parameter(self.up_name if matrix == UP else "down_proj")[expert]
        return weight.T if self.module.is_transposed else weight

    def replace(self, coded: CodedExperts) -> None:
        """Put coded weights in place of the parameters; biases stay. Pre: `coded` has these shapes."""
        for name in (self.up_name, "down_proj"):
            self.module.register_parameter(name, None)
        self.module.add_module(CODED, coded)
        self.module._is_hf_initialized = True
        choose_implementation(self.module.config)

    def observe(self, observer: nn.Module) -> None:
        """Have products with the weights made by `observer`, called as coded experts are, until :meth:`forget`."""
        self.module.add_module(CODED, observer)
        choose_implementation(self.module.config)

    def forget(self) -> None:
        """Let the observer go."""
        del self.module._modules[CODED]

    def _parameter(self, name: str) -> Tensor:
        parameter: Tensor | None = self.module._parameters.get(name)
        if parameter is None:
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) has no parameter {name}; a quantized or adapted model "
                "has to be made plain first"
            )
        return parameter

    def _linear_shape(self, weight: Tensor) -> tuple[int, int]:
        rows, columns = weight.shape[1:]
        return (columns, rows) if self.module.is_transposed else (rows, columns)


class SwitchExperts:
    """The container of SwitchTransformers: a module for each expert, with ``wi`` and ``wo``."""

    def __init__(self, name: str, module: Any, parent: Any) -> None:
        """Take the container and the module it belongs to."""
        self.name = name
        self.module = module
        self.parent = parent

    @property
    def is_coded(self) -> bool:
        """Whether the container has been replaced."""
        return isinstance(self.module, CodedSwitchExperts)

    @property
    def shapes(self) -> ExpertShapes:
        """Of the experts. Pre: not coded."""
        first = self._expert(0)
        return ExpertShapes(self.module.num_experts, tuple(first.wi.weight.shape), tuple(first.wo.weight.shape))

    @property
    def weight_names(self) -> list[str]:
        """Names of the tensors that :meth:`replace` takes away. Pre: not coded."""
        return [f"{self.name}.{name}" for name, _ in self.module.named_parameters()]

    def weight(self, expert: int, matrix: int) -> Tensor:
        """One matrix of an expert, [rows, columns]."""
        module = self._expert(expert)
        weight: Tensor = (module.wi if matrix == UP else module.wo).weight
        return weight

    def replace(self, coded: CodedExperts) -> None:
        """Put a container of coded experts in place of this one. Pre: `coded` has these shapes."""
        first = self._expert(0)
        self.module = CodedSwitchExperts(coded, act=first.act, dropout=first.dropout)
        self.parent.experts = self.module
        self.parent._is_hf_initialized = True

    def observe(self, observer: nn.Module) -> None:
        """Have products with the weights made by `observer`, called as coded experts are, until :meth:`forget`."""
        first = self._expert(0)
        self.parent.experts = CodedSwitchExperts(observer, act=first.act, dropout=first.dropout)

    def forget(self) -> None:
        """Let the observer go."""
        self.parent.experts = self.module

    def _expert(self, expert: int) -> Any:
        return self.module[f"expert_{expert}"]


ExpertsModule = FusedExperts | SwitchExperts


class CodedSwitchExperts(nn.Module):
    """SwitchTransformers' experts, coded: called as the container is that it stands for."""

    def __init__(self, coded: Any, *, act: nn.Module, dropout: nn.Module) -> None:
        """Take coded experts, or what stands for them, and what the dense ones had beside weights."""
        super().__init__()
        self.num_experts = coded.shapes.count
        self.coded = coded
        self.act = act
        self.dropout = dropout
        self._is_hf_initialized = True

    def forward(self, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
        """Take flattened tokens, their choice as one-hot [tokens, 1, experts] (all zero: none), and its weight."""
        chosen = selected_experts.to(torch.int64)
        index = torch.where(chosen.any(-1), chosen.argmax(-1), self.num_experts)
        up, down = self.coded.open()

        def expert_forward(expert: int, x: Tensor) -> Tensor:
            output: Tensor = down(expert, self.dropout(self.act(up(expert, x))))
            return output

        return mix(self.coded, hidden_states, index, routing_weights, expert_forward, label=self.coded.label)


def experts_of(model: nn.Module) -> list[ExpertsModule]:
    """List a model's modules of experts, coded or not, in the order of the model.

    Raises:
        UnsupportedModelError: If a module holds experts in a layout that is not known; the message names it.
    """
    return list(_find_experts(model))


def _find_experts(model: nn.Module) -> Iterator[ExpertsModule]:
    parents = {id(child): module for module in model.modules() for child in module.children()}
    for name, module in model.named_modules():
        if isinstance(module, switch.SwitchTransformersExperts | CodedSwitchExperts):
            yield SwitchExperts(name, module, parents[id(module)])
        elif hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield FusedExperts(name, module)
        elif _looks_like_experts(module):
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) seems to hold experts in a layout that torch_offload does not "
                "know; nothing was changed"
            )


def _looks_like_experts(module: nn.Module) -> bool:
    """Whether a class that is named so has fused weights, or a module for each expert."""
    has_fused = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    is_container = isinstance(module, nn.ModuleDict | nn.ModuleList) and len(module) > 0
    return "expert" in type(module).__name__.lower() and (has_fused or is_container)


def code_experts(model: nn.Module, rounded: Callable[[Tensor], Sequence[TernaryMatrix]]) -> None:
    """Code all experts of a model in place, one module at a time.

    Args:
        model: Experts that are coded already stay as they are.
        rounded: A matrix [rows, columns] to its terms; as many for every matrix of a module.

    Raises:
        UnsupportedModelError: If the layout of a module is not known, the model has no experts, or a weight is not
            finite; the message names the module and the expert. Modules before it are coded.
    """
    found = experts_of(model)
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} has no experts")
    for experts in found:
        if not experts.is_coded:
            shapes = experts.shapes
            terms = [_terms(experts, expert, rounded) for expert in range(shapes.count)]
            experts.replace(coded_experts(shapes, terms, label=experts.name))
    read_ahead(model)


def read_ahead(model: nn.Module) -> None:
    """Have each module of coded experts read ahead by what the one before it chooses, in the order of the model."""
    found = [module for module in model.modules() if isinstance(module, CodedExperts)]
    for before, after in itertools.pairwise(found):
        after.follow(before)


def _terms(
    experts: ExpertsModule, expert: int, rounded: Callable[[Tensor], Sequence[TernaryMatrix]]
) -> tuple[Sequence[TernaryMatrix], Sequence[TernaryMatrix]]:
    try:
        return rounded(experts.weight(expert, UP)), rounded(experts.weight(expert, DOWN))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"expert {expert} of {experts.name}: {error}") from error


def choose_implementation(config: Any) -> None:
    """Have transformers run the experts of models with this configuration by ours. Others run as before."""
    config._experts_implementation_internal = IMPLEMENTATION


@dataclass(frozen=True)
class _Biases:
    """Rows of an expert's biases; None where it has none."""

    up: Tensor | None
    down: Tensor | None


def _biases_of(module: Any, expert: int) -> _Biases:
    if not module.has_bias:
        return _Biases(None, None)
    up = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
    return _Biases(up[expert], module.down_proj_bias[expert])


def coded_experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a module of experts; what transformers calls for ``experts_implementation="torch_offload"``.

    A module of the model whose weights are not coded runs by the code of its own class.

    Args:
        module: The module.
        hidden_states: [tokens, width].
        top_k_index: int64 [tokens, choices].
        top_k_weights: [tokens, choices].
    """
    coded = module._modules.get(CODED)
    if coded is None:
        dense: Tensor = type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
        return dense
    if module._is_expert_parallel:
        raise OffloadError(f"{coded.label}: coded experts do not run expert-parallel; load the model without it")

    up, down = coded.open()

    def expert_forward(expert: int, x: Tensor) -> Tensor:
        biases = _biases_of(module, expert)
        hidden = _with_bias(up(expert, x), biases.up)
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        output = _with_bias(down(expert, hidden), biases.down)
        return module.post_expert_norm(output) if module.has_post_expert_norm else output

    return mix(coded, hidden_states, top_k_index, top_k_weights, expert_forward, label=coded.label)


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, coded_experts_forward)
