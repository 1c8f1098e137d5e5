"""PEFT's LoRA and DoRA over coded experts.

Targets are ``coded.up`` and ``coded.down``: ``LoraConfig(target_modules=["q_proj", "coded.up", "coded.down"])``. Every
expert has factors of its own; they lie in memory and in files as PEFT lays out those of fused experts (its
``target_parameters``): ``lora_A`` [rank * experts, columns], ``lora_B`` [rows, rank * experts]. Forward and backward
multiply by the coded blob, so training needs no more of the base than inference.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft.tuners.lora.config import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.model import LoraModel
from torch import Tensor, nn
from torch.nn import functional

from torch_offload.errors import ConfigError, UnsupportedModelError
from torch_offload.hooks import replaced_functions
from torch_offload.hooks.patches import Patches
from torch_offload.moe.modules import CodedExperts, CodedProjection, Product
from torch_offload.runtime.process import PROCESS

_COMBINATIONS = ("linear", "ties", "dare_linear", "dare_ties", "magnitude_prune")
"""Of adapters into one, those that keep the rank."""

_DENSE_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of experts that are not coded."""


class Magnitudes(nn.Module):
    """DoRA's trained length of every row of every expert, ``weight`` [experts, rows]."""

    def __init__(self, lengths: Tensor) -> None:
        """Begin with the lengths that rows have."""
        super().__init__()
        self.weight = nn.Parameter(lengths)


class LoraCodedProjection(nn.Module, LoraLayer):
    """A low-rank term beside the coded matrices of all experts.

    ``y = W x + scaling * B (A x)``; with DoRA (arXiv 2402.09353) each row of that times its magnitude over the length
    that the row of ``W + scaling * B A`` has, which gets no gradient. That length is found without the sum:
    ``|w|^2 + 2 scaling b . (A w) + scaling^2 b . (A A^T) b`` for a row w of W and b of B.
    """

    base_layer: CodedProjection
    base_squares: Tensor
    r: dict[str, int]
    lora_alpha: dict[str, int]
    scaling: dict[str, float]
    use_rslora: dict[str, bool]
    use_dora: dict[str, bool]
    lora_bias: dict[str, bool]
    lora_A: Any  # noqa: N815 (PEFT's name)
    lora_B: Any  # noqa: N815
    lora_dropout: Any
    lora_magnitude_vector: Any

    def __init__(
        self, base_layer: CodedProjection, adapter_name: str, config: LoraConfig, *, r: int, lora_alpha: int, **_: Any
    ) -> None:
        """Take what PEFT gives every layer."""
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], None]:
        """LoRA as it is, and DoRA; PEFT refuses the others by name."""
        return {(): None, ("use_dora",): None}

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **_: Any) -> None:
        """Add an adapter.

        Raises:
            ConfigError: If the rank is not positive.
            UnsupportedModelError: If the configuration asks for what coded weights cannot have.
        """
        self._check(r, config)
        self.resolve_lora_variant(config=config)
        rows, columns = self.base_layer.shape
        count = self.base_layer.coded.shapes.count
        self.r[adapter_name] = r
        self.lora_alpha[adapter_name] = lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name] = config.use_rslora
        self.use_dora[adapter_name] = config.use_dora
        self.lora_bias[adapter_name] = False
        dropout = nn.Dropout(config.lora_dropout) if config.lora_dropout > 0 else nn.Identity()
        self.lora_dropout.update({adapter_name: dropout})
        self.lora_A[adapter_name] = nn.Linear(columns, r * count, bias=False)
        self.lora_B[adapter_name] = nn.Linear(r * count, rows, bias=False)
        if config.init_lora_weights:
            self.reset_lora_parameters(adapter_name, config.init_lora_weights)  # type: ignore[no-untyped-call]
        if config.use_dora:
            self.register_buffer("base_squares", self._base_squares(), persistent=False)
            self.lora_magnitude_vector[adapter_name] = Magnitudes(self._lengths(adapter_name))
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def open(self) -> Product:
        """Return the product with all active adapters, for the experts of one call.

        Factors are taken apart once for all experts, so that their gradients are put together once.
        """
        base = self.base_layer.open()
        if self.disable_adapters:
            return base
        terms = [self._open_adapter(name) for name in self.active_adapters if name in self.lora_A]

        def product(expert: int, x: Tensor) -> Tensor:
            result = base(expert, x)
            for term in terms:
                result = term(expert, x, result)
            return result

        return product

    def merge(self, *_: Any, **__: Any) -> None:
        """Not possible.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError(
            "adapters cannot be merged into coded experts, which are read-only; keep them beside"
        )

    def unmerge(self) -> None:
        """Nothing is ever merged."""

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """PEFT would give adapters the dtype of the scales too, which is too coarse for DoRA's magnitudes.

        With low_cpu_mem_usage it makes them on the meta device, and calls this once they are loaded.
        """
        for group in (self.lora_A, self.lora_B, self.lora_dropout, self.lora_magnitude_vector):
            if adapter_name in group and not any(weight.is_meta for weight in group[adapter_name].parameters()):
                group[adapter_name].to(device or self.base_layer.weight.device)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        rows, columns = self.base_layer.shape
        return columns, rows

    @staticmethod
    def _check(r: int, config: LoraConfig) -> None:
        if r <= 0:
            raise ConfigError(f"the rank r of an adapter is at least 1, got {r}")
        if config.lora_bias or config.fan_in_fan_out:
            raise UnsupportedModelError("adapters over coded experts have no lora_bias and no fan_in_fan_out")
        if config.init_lora_weights not in (True, False, "gaussian"):
            raise UnsupportedModelError(
                f"init_lora_weights={config.init_lora_weights!r} needs dense weights; coded experts take True, False "
                "or 'gaussian'"
            )

    def _factors(self, adapter_name: str, expert: int) -> tuple[Tensor, Tensor]:
        a, b = self._split(adapter_name)
        return a[expert], b[expert]

    def _split(self, adapter_name: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Factors of each expert, [rank, columns] and [rows, rank]."""
        r = self.r[adapter_name]
        a, b = self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight
        return a.view(-1, r, a.shape[1]).unbind(0), b.view(b.shape[0], r, -1).unbind(2)

    def _open_adapter(self, adapter_name: str) -> Callable[[int, Tensor, Tensor], Tensor]:
        a, b = self._split(adapter_name)
        scaling = self.scaling[adapter_name]
        dropout = self.lora_dropout[adapter_name]
        magnitudes = self.lora_magnitude_vector[adapter_name].weight.unbind(0) if self.use_dora[adapter_name] else None

        def add(expert: int, x: Tensor, result: Tensor) -> Tensor:
            low = functional.linear(dropout(self._cast_input_dtype(x, a[expert].dtype)), a[expert])
            total = result + scaling * functional.linear(low, b[expert])
            if magnitudes is not None:
                squares = self._row_squares(adapter_name, expert, a[expert], b[expert])
                total = total * (magnitudes[expert] / squares.sqrt())
            return total.to(result.dtype)

        return add

    def _lengths(self, adapter_name: str) -> Tensor:
        """Of the rows of W + scaling B A, [experts, rows]; without values where the factors have none."""
        count, (rows, _) = self.base_layer.coded.shapes.count, self.base_layer.shape
        if self.lora_A[adapter_name].weight.is_meta:
            return torch.empty(count, rows, device="meta")
        factors = [self._factors(adapter_name, expert) for expert in range(count)]
        squares = [self._row_squares(adapter_name, expert, *factors[expert]) for expert in range(count)]
        return torch.stack(squares).sqrt()

    def _row_squares(self, adapter_name: str, expert: int, a: Tensor, b: Tensor) -> Tensor:
        """|row|^2 of W + scaling B A, [rows], without a gradient and never below the smallest number.

        Factors are detached, gradients stay enabled or not: that decides which planes W has with the resident planes,
        and they have to be those that the tokens are multiplied by. Autocast is off: lengths are divided by.
        """
        scaling = self.scaling[adapter_name]
        a, b = a.detach().float(), b.detach().float()
        with torch.autocast(a.device.type, enabled=False):
            along = self.base_layer.open()(expert, a).T  # [rows, rank]: A w of each row
            squares = self.base_squares[expert].float() + 2 * scaling * (b * along).sum(1)
            squares = squares + scaling**2 * ((b @ (a @ a.T)) * b).sum(1)
        return squares.clamp(min=torch.finfo(torch.float32).tiny)

    @torch.no_grad()
    def _base_squares(self) -> Tensor:
        """|row|^2 of every expert's matrix, [experts, rows]. One matrix at a time is in memory."""
        coded = self.base_layer.coded
        rows = [coded.dense(expert, self.base_layer.matrix).square().sum(1) for expert in range(coded.shapes.count)]
        return torch.stack(rows)


def _create_new_module(
    original: Callable[..., Any], lora_config: Any, adapter_name: str, target: Any, **options: Any
) -> Any:
    """PEFT's choice of a layer for a target, which knows coded experts too."""
    if isinstance(target, CodedProjection):
        return LoraCodedProjection(target, adapter_name, lora_config, **options)
    return original(lora_config, adapter_name, target, **options)


def _enable_peft_forward_hooks(original: Callable[..., Any], model: LoraModel, *args: Any, **options: Any) -> Any:
    """Refuse adapters by row: PEFT's hooks that choose them would not run, since nobody calls experts as layers."""
    if options.get("adapter_names") is not None and _has_coded(model):
        raise UnsupportedModelError(
            "adapter_names: coded experts cannot use other adapters for each row; choose one for the batch with "
            "set_adapter"
        )
    return original(model, *args, **options)


def _add_weighted_adapter(
    original: Callable[..., Any],
    model: LoraModel,
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
    combination_type: str = "svd",
    *args: Any,
    **options: Any,
) -> Any:
    """PEFT's combination of adapters. Factors of all experts lie in one matrix: what changes ranks would mix them.

    It forgets DoRA's lengths and scales RS-LoRA's factors twice, on layers of any kind.
    """
    if _has_coded(model):
        if len(adapters) > 1 and combination_type not in _COMBINATIONS:
            raise UnsupportedModelError(
                f"combination_type={combination_type!r}: adapters over coded experts are combined by "
                f"{', '.join(_COMBINATIONS)}"
            )
        for option in ("rank_pattern", "use_dora", "use_rslora"):
            if any(getattr(model.peft_config.get(name), option, None) for name in adapters):
                raise UnsupportedModelError(f"adapters over coded experts are combined only without {option}")
    return original(model, adapters, weights, adapter_name, combination_type, *args, **options)


def _prepare_model(original: Callable[..., Any], tuner: LoraModel, config: LoraConfig, model: nn.Module) -> Any:
    """Refuse an adapter for dense experts, of which PEFT would put on only what finds its weights."""
    dense = sorted(name for name in config.target_parameters or () if name.rpartition(".")[2] in _DENSE_WEIGHTS)
    if dense and any(isinstance(module, CodedExperts) for module in model.modules()):
        raise UnsupportedModelError(
            f"target_parameters: {', '.join(dense)} of coded experts are not there; adapters over them have the "
            "target_modules coded.up and coded.down, and adapters of dense experts cannot be put on them"
        )
    return original(tuner, config, model)


def _hotswap_adapter_from_state_dict(
    original: Callable[..., Any],
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    adapter_name: str,
    config: LoraConfig,
    *args: Any,
    **options: Any,
) -> Any:
    """Refuse a swap for another rank, which would mix the factors of experts."""
    layers = [module for module in model.modules() if isinstance(module, LoraCodedProjection)]
    ranks = {layer.r[adapter_name] for layer in layers if adapter_name in layer.r}
    if ranks and (ranks != {config.r} or config.rank_pattern):
        raise UnsupportedModelError(
            f"adapters over coded experts are swapped only for those of their rank: {sorted(ranks)}"
        )
    return original(model, state_dict, adapter_name, config, *args, **options)


def _has_coded(model: nn.Module) -> bool:
    return any(isinstance(module, LoraCodedProjection) for module in model.modules())


def _install(patches: Patches) -> None:
    patches.replace(replaced_functions.LORA_CREATE, _create_new_module)
    patches.replace(replaced_functions.LORA_FORWARD_HOOKS, _enable_peft_forward_hooks)
    patches.replace(replaced_functions.LORA_PREPARE, _prepare_model)
    patches.replace(replaced_functions.LORA_COMBINE, _add_weighted_adapter)
    patches.replace(replaced_functions.LORA_HOTSWAP, _hotswap_adapter_from_state_dict)


PROCESS.coded_experts.provide(_install)
