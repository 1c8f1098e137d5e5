"""The paged tensors of one wrapped module, and the hooks on them."""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torch_offload import _C
from torch_offload._compat import paged_part
from torch_offload.activations.paging import PagedActivations
from torch_offload.hooks.module_hooks import ModuleHook
from torch_offload.runtime.backward_updates import BackwardUpdates
from torch_offload.runtime.eligibility import check_engine, why_not_pageable
from torch_offload.runtime.sharded_parameters import ShardedParameters, Shards, own_gradient
from torch_offload.runtime.tensor_parts import all_parts_of, parts_beside, parts_of

FIRST_SEARCHES = 8
CALLS_BETWEEN_SEARCHES = 64

MAX_NAMED = 3  # tensors that stay in memory for the same reason

Refusals = list[tuple[str, str]]
"""Tensors that are not paged: the name of each, and what it is."""
_Folder = Mapping[str, torch.Tensor | None]
OnSubmodule = Callable[["WrappedModule", nn.Module, str], None]
OnForward = Callable[["WrappedModule", tuple[Any, ...], dict[str, Any]], None]


@dataclass
class Tracked:
    """One tensor of a wrapped module."""

    label: str
    kind: str
    tensor: weakref.ref[torch.Tensor]
    is_managed: bool
    parameter: weakref.ref[torch.Tensor]  # the same, or the DTensor that it is a part of
    gradient_hook: RemovableHandle | None = None


class WrappedModule:
    """Keeps what is paged in step with what the module holds, which may change after it was wrapped.

    Threads: the one that trains.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: _C.Engine,
        *,
        on_submodule: OnSubmodule,
        on_forward: OnForward,
        activations: PagedActivations | None,
        updates: BackwardUpdates | None,
        sharded: ShardedParameters,
    ) -> None:
        """Take note of the module. Nothing is paged before :meth:`scan`.

        Args:
            module: Held weakly.
            engine: Pages the module.
            on_submodule: Told of every submodule that a scan finds: this, the submodule, its qualified name. Must not
                keep the module alive.
            on_forward: Called before each forward of the module: this, and the arguments of the call.
            activations: Pages what the module's forward saves; None: it stays in memory.
            updates: Told of each gradient that is complete; None: gradients wait for the step.
            sharded: Knows what `fully_shard` did.
        """
        self._module = weakref.ref(module)
        self._engine = engine
        self._on_submodule = on_submodule
        self._on_forward = on_forward
        self._updates = updates
        self._tracked: dict[int, Tracked] = {}
        self._parts: list[weakref.ref[nn.Module]] = []
        self._sharded = sharded
        self._shards: Shards = {}
        self._has_named_shards = False
        self._is_stale = True
        self._refreshes = 0
        # Some callers (PEFT) run `forward` of the module itself, which calls no hook; its first child is called.
        callable_children = [child for child in module.children() if not isinstance(child, nn.ModuleList)]
        hooked = [module, *callable_children[:1]]
        self._forward_hooks = [part.register_forward_pre_hook(RefreshHook(self), with_kwargs=True) for part in hooked]
        if activations is not None:
            self._forward_hooks += [hook for part in hooked for hook in activations.hook(part)]

    @property
    def module(self) -> nn.Module | None:
        """The module, None once it is gone."""
        return self._module()

    def mark_stale(self) -> None:
        """The module has changed: look at all of it before the next forward."""
        self._is_stale = True

    def begin_forward(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """The module is called. While `torch.func` transforms the call, what it holds is not its own.

        Raises:
            OffloadError: As from :meth:`scan`.
            UnsupportedModelError: If another engine has put its parameters into memory of its own since.
        """
        self._on_forward(self, arguments, options)
        if not _C.in_transform():
            module = self._module()
            if module is not None and self._is_search_due():
                check_engine(module, [*module.parameters(), *self._tracked_parameters()])
            self.refresh()

    def _tracked_parameters(self) -> Iterator[torch.Tensor]:
        """Yield those that are still alive; an engine may have put others in their place."""
        held = (known.parameter() for known in self._tracked.values())
        return (parameter for parameter in held if parameter is not None)

    def _is_search_due(self) -> bool:
        return self._refreshes < FIRST_SEARCHES or (self._refreshes + 1) % CALLS_BETWEEN_SEARCHES == 0

    def refresh(self) -> None:
        """Scan again if the module is known to have changed.

        Hooks tell of parameters that are registered, of submodules and of conversions. What reaches a parameter by no
        hook is looked for in the first calls and now and then, since a search visits every parameter.
        """
        is_due = self._is_search_due()
        self._refreshes += 1
        if self._is_stale or (is_due and self._has_changed()):
            self.scan()

    def scan(self) -> None:
        """Page what is not paged yet and hook what trains. One warning names what cannot be paged.

        Raises:
            OffloadError: As from ``Engine.manage``; what was paged before the failure stays paged.
        """
        module = self._module()
        if module is None:
            return
        self._drop_dead()
        self._parts = []
        refusals: Refusals = []
        self._shards = self._sharded.in_module(module)
        why_shards_stay = self._sharded.why_not_paged
        if self._shards and why_shards_stay is not None and not self._has_named_shards:
            refusals.append((f"{sum(map(len, self._shards.values()))} parameters", why_shards_stay))
            self._has_named_shards = True
        for path, submodule in module.named_modules():
            self._on_submodule(self, submodule, path)
            self._parts.append(weakref.ref(submodule))
            for kind, folder in (("parameter", self._parameters_of(submodule)), ("other", submodule._buffers)):
                for name, tensor in folder.items():
                    if tensor is not None and not _is_on_loan(tensor):
                        self._adopt_parts(f"{path}.{name}" if path else name, tensor, kind, refusals)
            for suffix, part in parts_beside(submodule):
                self._adopt(f"{path}{suffix}".removeprefix("."), part, "parameter", refusals)
        if why_shards_stay is None:
            self._sharded.page_padded(self._shards)
        self._is_stale = False
        warn_unmanaged(refusals)

    def _drop_dead(self) -> None:
        """Forget tensors that are gone. A DTensor that has another local part by now gets another hook."""
        for key, known in list(self._tracked.items()):
            if known.tensor() is None:
                del self._tracked[key]
                if known.gradient_hook is not None:
                    known.gradient_hook.remove()

    def _parameters_of(self, module: nn.Module) -> _Folder:
        """Return what a module itself holds; where shards are, these if they are paged, not what is gathered now."""
        shards = self._shards.get(module)
        if not shards:
            return module._parameters
        held: dict[str, torch.Tensor | None] = dict.fromkeys(shards)
        if self._sharded.why_not_paged is None:
            held |= {name: known.sharded_param for name, shard in shards.items() if (known := shard()) is not None}
        return {**module._parameters, **held}

    def adopt_parameter(self, label: str, parameter: torch.Tensor) -> None:
        """Page a parameter that is about to be registered. One that cannot be paged waits for the next scan."""
        for suffix, part in parts_of(parameter):
            if why_not_pageable(part, self._engine.torch_device) is None:
                self._adopt(f"{label}{suffix}", part, "parameter", [], parameter)

    def _adopt_parts(self, label: str, tensor: torch.Tensor, kind: str, refusals: Refusals) -> None:
        for suffix, part in parts_of(tensor):
            self._adopt(f"{label}{suffix}", part, kind, refusals, tensor)

    def _adopt(
        self, label: str, tensor: torch.Tensor, kind: str, refusals: Refusals, whole: torch.Tensor | None = None
    ) -> None:
        """Page a tensor: a parameter or buffer of a module, or part of one, `whole`."""
        parameter = whole if whole is not None and paged_part(whole) is tensor else tensor
        known = self._tracked.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            reason = why_not_pageable(tensor, self._engine.torch_device)
            if reason is not None and not tensor.is_meta:  # that has no memory; a later look finds what it gets
                refusals.append((label, reason))
            known = Tracked(label, kind, weakref.ref(tensor), is_managed=False, parameter=weakref.ref(parameter))
        if not known.is_managed or not _C.is_managed(tensor):
            can_be = why_not_pageable(tensor, self._engine.torch_device) is None
            known.is_managed = can_be and self._engine.manage(tensor, kind=kind, label=label, of_module=True)
        self._tracked[id(tensor)] = known
        may_train = kind == "parameter" and (parameter.requires_grad or isinstance(parameter, nn.Parameter))
        is_hooked = known.is_managed or parameter is not tensor  # a small gradient can keep those of a whole module
        if may_train and is_hooked and known.gradient_hook is None:
            known.gradient_hook = _hook_gradient(parameter, self._gradient_hook_of(parameter))

    def _gradient_hook_of(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        if paged_part(parameter) is not parameter:
            return _shard_gradient_hook(self._engine)
        return _gradient_hook(self._engine, self._updates)

    def _has_changed(self) -> bool:
        return any(
            self._is_news(part)
            for module in (part() for part in self._parts)
            if module is not None
            for tensor in self._parameters_of(module).values()
            if tensor is not None and not _is_on_loan(tensor)
            for _, part in parts_of(tensor)
        )

    def _is_news(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the module is not known, or not as it is now."""
        known = self._tracked.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            return True
        if not known.is_managed:
            return False
        return (tensor.requires_grad and known.gradient_hook is None) or not _C.is_managed(tensor)

    def let_go(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """Forget a tensor and return its label and kind; None if it was not known, nor is this rank's part of it."""
        part = paged_part(tensor)
        known = self._tracked.get(id(part))
        if known is None or known.tensor() is not part:
            return None
        del self._tracked[id(part)]
        if known.gradient_hook is not None:
            known.gradient_hook.remove()
        return known.label, known.kind

    def take_up(self, label: str, tensor: torch.Tensor, kind: str) -> None:
        """Page a tensor that was let go of, whatever it is now.

        Raises:
            OffloadError: As from ``Engine.manage``.
        """
        self._adopt(label, paged_part(tensor), kind, [], tensor)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield label and tensor of everything tracked that is still alive."""
        for known in list(self._tracked.values()):
            tensor = known.tensor()
            if tensor is not None:
                yield known.label, tensor

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what has the gradient and the states of a tracked tensor: it, or the DTensor that it is a part of."""
        known = self._tracked.get(id(tensor))
        parameter = None if known is None else known.parameter()
        return tensor if parameter is None else parameter

    def expected_uses(self) -> Iterator[torch.Tensor]:
        """Yield the parameters in the order in which the modules are, which most forwards go by.

        Tables of embeddings are left out: of these a forward looks up rows.
        """
        module = self._module()
        for part in () if module is None else module.modules():
            if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
                yield from (held for _, held in all_parts_of(part.named_parameters(recurse=False)))

    def label_of(self, tensor: torch.Tensor) -> str | None:
        """Return the qualified name of a tracked tensor."""
        known = self._tracked.get(id(tensor))
        return known.label if known is not None and known.tensor() is tensor else None

    def release_shards(self) -> None:
        """Leave nothing paged of what `fully_shard` keeps beside the tracked tensors, which are ordinary again."""
        self._sharded.release_padded(self._shards)

    def remove_hooks(self) -> None:
        """Take every hook off again. Safe to call twice."""
        for hook in self._forward_hooks:
            hook.remove()
        for known in self._tracked.values():
            if known.gradient_hook is not None:
                known.gradient_hook.remove()
                known.gradient_hook = None


class RefreshHook(ModuleHook[WrappedModule]):
    """Forward pre-hook that is given the keyword arguments too."""

    def run(self, owner: WrappedModule, module: nn.Module, arguments: tuple[Any, ...], options: Any) -> None:
        """Tell the wrapped module; nothing while a graph is captured."""
        if not torch.compiler.is_compiling():
            owner.begin_forward(arguments, options or {})


def warn_unmanaged(refusals: Refusals) -> None:
    """Name, in one warning, the tensors that stay ordinary memory, each reason once."""
    labels: dict[str, list[str]] = {}
    for label, reason in refusals:
        labels.setdefault(reason, []).append(label)
    said = [
        f"{', '.join(named[:MAX_NAMED])}{_and_others(len(named) - MAX_NAMED)} {reason}"
        for reason, named in labels.items()
    ]
    if said:
        warnings.warn(f"torch_offload leaves these tensors in memory: {'; '.join(said)}", UserWarning, stacklevel=5)


def _and_others(count: int) -> str:
    return f" and {count} more, each of which" if count > 0 else ""


def _is_on_loan(tensor: torch.Tensor) -> bool:
    """Whether a module has the tensor for one call only: `functional_call` puts in what was computed."""
    return not tensor.is_leaf


def _hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle | None:
    """Hook a parameter, also one that is frozen now: nothing tells when it begins to train."""
    is_frozen = not parameter.requires_grad
    if is_frozen and (parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex())):
        return None
    if is_frozen:
        parameter.requires_grad_(True)  # noqa: FBT003 (torch takes hooks of what trains only)
    try:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    finally:
        if is_frozen:
            parameter.requires_grad_(False)  # noqa: FBT003
    return handle


def _gradient_hook(engine: _C.Engine, updates: BackwardUpdates | None) -> Callable[[torch.Tensor], None]:
    def complete(parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            if updates is None:
                engine.gradient_complete(parameter)
            else:
                updates.complete(parameter)

    return complete


def _shard_gradient_hook(engine: _C.Engine) -> Callable[[torch.Tensor], None]:
    def complete(parameter: torch.Tensor) -> None:
        gradient = own_gradient(parameter)
        if gradient is not None and gradient.layout is torch.strided:
            engine.gradient_complete(paged_part(parameter), gradient)

    return complete
