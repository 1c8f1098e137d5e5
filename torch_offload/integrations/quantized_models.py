"""Models that bitsandbytes quantizes to 4 bits while they are loaded, as loading makes them, on the meta device."""

from typing import Any

import torch
from torch import nn

from torch_offload.errors import ConfigError, UnsupportedModelError
from torch_offload.runtime.tensor_parts import is_of_4_bits

NESTED_BLOCK = 256
"""Elements whose statistics have one of their own where statistics are quantized as well: bitsandbytes' constant."""


def quantization_of(configuration: Any, *, load_in_4bit: bool, dtype: torch.dtype, source: object) -> Any:
    """Return how a model is quantized, as transformers keeps it; None if it is not.

    Args:
        configuration: Of the model. What it says itself counts.
        load_in_4bit: Otherwise, quantize as TRL's ``--load_in_4bit`` does: NF4, statistics as they are.
        dtype: Of the products, where the configuration does not say.
        source: Where the configuration comes from, for the message.

    Raises:
        UnsupportedModelError: If it is quantized in a way that cannot be planned.
        ConfigError: If bitsandbytes is missing.
    """
    from transformers import BitsAndBytesConfig

    for part in (configuration, configuration.get_text_config(decoder=True)):
        given = getattr(part, "quantization_config", None)
        if given is None:
            continue
        words = given if isinstance(given, dict) else given.to_dict()
        if not words.get("load_in_4bit"):
            method = words.get("quant_method", "an unknown method")
            raise UnsupportedModelError(
                f"{source} is of a model quantized by {getattr(method, 'value', method)}, which cannot be planned: of "
                "quantized models only bitsandbytes' of 4 bits can; give a plain one"
            )
        _check_installed()
        return BitsAndBytesConfig.from_dict(words)  # type: ignore[no-untyped-call]
    if not load_in_4bit:
        return None
    _check_installed()
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)  # type: ignore[no-untyped-call]


def quantize_on_meta(model: nn.Module, quantization: Any) -> None:
    """Give the linear layers that transformers would quantize weights of 4 bits, of the sizes that loading makes.

    Args:
        model: Of transformers, on the meta device.
        quantization: From :func:`quantization_of`.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    with torch.device("meta"):
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
        quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if is_of_4_bits(weight):
            layer.weight = _packed(weight, layer, model.dtype)
    quantizer.postprocess_model(model)  # PEFT asks the model whether its layers have 4 bits


def _packed(weight: Any, layer: Any, dtype: Any) -> Any:
    from bitsandbytes import functional
    from bitsandbytes.nn.modules import Params4bit

    make_state: Any = functional.QuantState

    def empty(count: int, of: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=of, device="meta")

    blocks = -(-weight.numel() // weight.blocksize)
    nested: dict[str, Any] = {}
    if weight.compress_statistics:
        statistics = make_state(
            absmax=empty(-(-blocks // NESTED_BLOCK), torch.float32),
            code=empty(256, torch.float32),
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        nested = {"offset": torch.empty((), dtype=torch.float32, device="meta"), "state2": statistics}
    state = make_state(
        absmax=empty(blocks, torch.uint8 if nested else torch.float32),
        shape=weight.shape,
        code=empty(16, torch.float32),
        blocksize=weight.blocksize,
        quant_type=weight.quant_type,
        dtype=dtype,
        **nested,
    )
    packed_bytes = (weight.numel() + 1) // 2
    return Params4bit(
        empty(packed_bytes // weight.quant_storage.itemsize, weight.quant_storage).view(-1, 1),
        requires_grad=False,
        quant_state=state,
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
        module=layer,
        bnb_quantized=True,
    )


def _check_installed() -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"planning a model of 4 bits needs bitsandbytes: pip install bitsandbytes ({error})"
        ) from None
