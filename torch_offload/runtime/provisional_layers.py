"""Dense layers that transformers lays out only to have a quantizer replace them."""

import weakref
from typing import Any

import torch


class ProvisionalLayers:
    """The quantizers that are about to replace dense experts, so that the budget is not checked against those.

    Threads: the one that loads models.
    """

    def __init__(self) -> None:
        # A quantizer whose load failed is forgotten with the error.
        self._quantizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def expect(self, quantizer: Any) -> None:
        """Treat 3-D tensors without bytes as provisional until `quantizer` has replaced them, or is gone."""
        self._quantizers.add(quantizer)

    def finish(self, quantizer: Any) -> None:
        """The quantizer is about to replace its layers. Safe to call twice."""
        self._quantizers.discard(quantizer)

    def include(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to dense experts that will be replaced."""
        return tensor.device.type == "meta" and tensor.dim() == 3 and len(self._quantizers) > 0
