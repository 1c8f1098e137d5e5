"""The engine's own optimizer: ``torch.optim.AdamW`` with an fp32 master for bf16 weights, in one pass over memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from torch_offload._compat import is_dtensor, paged_part
from torch_offload.optim import adamw_state

MASTERS = ("split", "fp32")
MOMENTS = ("fp32", "8bit")

_OWN_OPTIONS = {"master": MASTERS, "moments": MOMENTS}


class AdamW(torch.optim.AdamW):
    """AdamW whose update is done in fp32 for bf16 parameters, and page by page where a parameter is paged.

    Takes the place of ``torch.optim.AdamW``: the same groups, schedulers, scalers and ``state_dict`` layout. A bf16
    parameter gets fp32 moments and an fp32 master, whose rounding to bf16 the parameter always is; float32 and float64
    parameters are updated by torch's own fused kernel, with the bits of ``torch.optim.AdamW(fused=True)``. Where
    parameters are not paged this is an ordinary CPU optimizer. Of parameters that are divided among ranks (DTensors)
    each rank updates its part; states are divided alike.

    State of a parameter: ``step``, ``exp_avg``, ``exp_avg_sq`` and, with ``amsgrad``, ``max_exp_avg_sq``, as in torch.
    A bf16 parameter has in addition ``master_low`` (int16, the 16 bits of its master that it lacks itself) or
    ``master`` (float32). 8-bit moments are flat uint8 tensors. See
    docs/reference/adamw.md for representations and the formula.
    """

    grad_norm: Tensor | None = None
    """Norm of all gradients at the last step, before clipping; None without ``max_grad_norm``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # noqa: FBT001, FBT002 (the signature of torch.optim.AdamW)
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str = "split",
        moments: str = "fp32",
        max_grad_norm: float | None = None,
    ) -> None:
        """Take the arguments of ``torch.optim.AdamW`` and three of its own.

        Args:
            params: Tensors on the CPU or a GPU, or groups of them; bfloat16, float32 or float64.
            lr: Learning rate; a tensor must hold one number.
            betas: Decay of the two moments.
            eps: Added to the denominator.
            weight_decay: Decoupled decay.
            amsgrad: Divide by the largest second moment so far.
            maximize: Go up instead of down.
            foreach: None or False: there is one implementation, the fused one.
            capturable: False.
            differentiable: False.
            fused: None or True.
            master: How a bf16 parameter's fp32 master is kept: ``"split"`` as the parameter itself and 16 bits more,
                ``"fp32"`` as a tensor beside it. The numbers are the same; the second form takes 2 bytes more per
                parameter. May differ between groups.
            moments: ``"8bit"`` keeps both moments of bf16 and float32 parameters with at least 4096 elements in 8 bits
                by blocks: 6 bytes less per parameter, at other numbers. May differ between groups.
            max_grad_norm: Scale gradients down to this norm within the step, as ``clip_grad_norm_`` on all parameters
                of this optimizer would just before it, with the same bits. ``p.grad`` of a bf16 parameter stays
                unscaled. None: gradients are taken as they are.

        Raises:
            ValueError: If a number or a choice cannot be used.
            TypeError: If a parameter cannot be trained here.
        """
        refused = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        for name, value in refused.items():
            if value:
                raise ValueError(f"torch_offload.AdamW is fused and takes no {name}=True; leave it out")
        if fused is False:
            raise ValueError("torch_offload.AdamW has no implementation but the fused one; leave fused out")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0 or None, got {max_grad_norm}")
        self._own_defaults = {"master": master, "moments": moments}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True)
        self.defaults.update(self._own_defaults, max_grad_norm=max_grad_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch; its parameters must be ones that can be trained here."""
        for name, value in self._own_defaults.items():
            param_group.setdefault(name, value)
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _check_parameter(parameter, self.param_groups[-1])

    # --- The step --------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step. Where parameters are paged the work is recorded and done when a page is next read.

        Args:
            closure: Evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clip = self._clip_coefficient()
        for group in self.param_groups:
            for (_, is_own), lists in self._lists(group).items():
                if is_own:
                    self._step_own(group, lists, clip)
                else:
                    self._step_plain(group, lists, clip)
        return loss

    def _clip_coefficient(self) -> Tensor | None:
        """Return what ``clip_grad_norm_`` would scale gradients by, computed as there."""
        limit = self.defaults["max_grad_norm"]
        if limit is None:
            return None
        if getattr(self, "grad_scale", None) is not None:
            raise RuntimeError(
                "max_grad_norm needs unscaled gradients; call scaler.unscale_(optimizer) before the step"
            )
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.grad_norm = get_total_norm(gradients)
        return torch.clamp(float(limit) / (self.grad_norm + 1e-6), max=1.0).float()  # in bf16 the norm of bf16 is

    def _lists(self, group: dict[str, Any]) -> dict[tuple[torch.dtype, bool], "_Lists"]:
        """Return what a step works on, by dtype and whether our kernel does it. Makes states that are missing."""
        found = dict[tuple[torch.dtype, bool], _Lists]()
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                _check_parameter(parameter, group)
                state.update(adamw_state.new_state(parameter, group))
            is_own = parameter.dtype is torch.bfloat16 or state["exp_avg"].dtype is torch.uint8
            found.setdefault((parameter.dtype, is_own), _Lists()).add(parameter, state, group)
        return found

    def _step_plain(self, group: dict[str, Any], lists: "_Lists", clip: Tensor | None) -> None:
        if clip is not None:
            torch._foreach_mul_(lists.grads, clip)
        self._run(torch._fused_adamw_, group, lists, group["lr"])

    def _step_own(self, group: dict[str, Any], lists: "_Lists", clip: Tensor | None) -> None:
        coefficient = None if clip is None else _whole(clip)

        def update(*arguments: list[Tensor], **options: Any) -> None:
            *before, steps = ([paged_part(tensor) for tensor in each] for each in arguments)
            masters = [paged_part(master) for master in lists.masters]
            torch.ops.torch_offload.fused_adamw_(*before, masters, steps, **options, clip_coefficient=coefficient)

        self._run(update, group, lists, float(group["lr"]))

    def _run(self, kernel: Callable[..., None], group: dict[str, Any], lists: "_Lists", lr: float | Tensor) -> None:
        """Count the step and call a kernel as torch does, a step that found an overflow counted back."""
        found_inf = cast(Tensor | None, getattr(self, "found_inf", None))
        torch._foreach_add_(lists.steps, 1)
        kernel(
            lists.params,
            lists.grads,
            lists.exp_avgs,
            lists.exp_avg_sqs,
            lists.max_exp_avg_sqs,
            lists.steps,
            lr=lr,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
        )
        if found_inf is not None:
            torch._foreach_sub_(lists.steps, [found_inf] * len(lists.steps))

    # --- States ----------------------------------------------------------------------------------------------------
    def master_of(self, parameter: Tensor) -> Tensor:
        """Return a parameter's value in the precision in which it is updated: a new float32 tensor for bf16."""
        state = self.state.get(parameter, {})
        if parameter.dtype is not torch.bfloat16:
            return parameter.detach().clone()
        if "master" in state:
            return cast(Tensor, state["master"].clone())
        if "master_low" in state:
            return adamw_state.joined_master(parameter, state["master_low"])
        return parameter.detach().float()

    def moments_of(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return both moments of a parameter that was updated, unpacked if they are kept in 8 bits.

        Raises:
            KeyError: If it has none yet.
        """
        state = self.state[parameter]
        first, second = (adamw_state.unpacked_moment(parameter, name, state[name]) for name in adamw_state.MOMENTS[:2])
        return first, second

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class or of ``torch.optim.AdamW``; groups take over the options that were saved.

        States of another dtype are converted to what the group's options say, 8-bit moments too. Those of a paged
        parameter are paged at once. A state without a master begins with the parameter's own value as the master.

        Raises:
            ValueError: If the groups or a state's shape differ from this optimizer's, which then keeps its own.
            TypeError: If a group of the checkpoint asks for what its parameters cannot have; the same.
        """
        handle = self.register_load_state_dict_pre_hook(_with_states_kept)  # after all others
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over groups and states, from a pickle or from ``load_state_dict``."""
        defaults = state.get("defaults", self.__dict__.get("defaults", {}))
        own = {name: defaults[name] for name in _OWN_OPTIONS}
        for group in state["param_groups"]:
            for name, value in own.items():
                group.setdefault(name, value)
            _check_group(group)
            group.update(fused=True, foreach=None, capturable=False, differentiable=False, decoupled_weight_decay=True)
            for parameter in group["params"]:
                values = state["state"].get(parameter)
                if values and all(isinstance(value, _Kept) for value in values.values()):
                    _check_parameter(parameter, group)
                    loaded = {name: value.value for name, value in values.items()}
                    state["state"][parameter] = adamw_state.loaded_state(parameter, loaded, group)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._own_defaults = own
        self._step_supports_amp_scaling = True


@dataclass
class _Lists:
    """The lists that a kernel takes, one element per parameter."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    max_exp_avg_sqs: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)

    def add(self, parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        gradient = cast(Tensor, parameter.grad)
        if gradient.layout is not torch.strided:
            raise RuntimeError(f"AdamW needs dense gradients, got layout {gradient.layout}; use torch.optim.SparseAdam")
        self.params.append(parameter)
        self.grads.append(gradient)
        self.exp_avgs.append(state["exp_avg"])
        self.exp_avg_sqs.append(state["exp_avg_sq"])
        if group["amsgrad"]:
            self.max_exp_avg_sqs.append(state["max_exp_avg_sq"])
        if parameter.dtype is torch.bfloat16:
            self.masters.append(state[adamw_state.master_name(group)])
        self.steps.append(state["step"])


class _Kept:
    """A loaded state on its way past torch's cast to the dtype of the parameter."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _with_states_kept(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {
        key: {name: _Kept(value) for name, value in state.items()} if isinstance(state, dict) else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _check_group(group: dict[str, Any]) -> None:
    for name, known in _OWN_OPTIONS.items():
        if group[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {group[name]!r}")
    if group["moments"] == "8bit" and group.get("amsgrad"):
        raise ValueError("amsgrad keeps a third moment that has no 8-bit form; use moments='fp32' with it")


def _whole(value: Tensor) -> Tensor:
    """Return a number that all ranks have, as an ordinary tensor."""
    return cast(Tensor, value.full_tensor()) if is_dtensor(value) else value  # type: ignore[attr-defined]


def _check_parameter(parameter: Tensor, group: dict[str, Any]) -> None:
    if parameter.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        remedy = "convert the model to bfloat16 or float32 before the optimizer is made"
        raise TypeError(f"torch_offload.AdamW trains bfloat16, float32 and float64, got {parameter.dtype}; {remedy}")
    if parameter.device.type not in ("cpu", "cuda"):
        raise TypeError(f"torch_offload.AdamW trains parameters on the CPU or a GPU, got one on {parameter.device}")
    if group["moments"] == "8bit" and is_dtensor(parameter):
        raise TypeError("8-bit moments have blocks that no rank could divide anew: use moments='fp32' with DTensors")
