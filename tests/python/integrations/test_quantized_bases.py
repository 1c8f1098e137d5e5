"""Adapters over a quantized base in half of its memory have the bits of those over one in memory.

Method: a tiny Llama quantized as bitsandbytes, torchao and others keep their weights, LoRA over it, a plain run beside
each paged one. Counters say that the base moved, by pins alone: no kernel that is given an address met a page that was
not there.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import QuantState
from peft import LoraConfig, get_peft_model
from support.bits import digest
from support.isolation import in_child
from support.models import VOCABULARY, tiny_config
from support.paging import assert_bitwise_equal
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_, to_nf4
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import torch_offload
from torch_offload import _C, Config
from torch_offload.runtime.tensor_parts import all_parts_of, parts_beside, parts_of

pytestmark = pytest.mark.any_torch

STEPS = 3
HIDDEN, LAYERS = 128, 24
LARGE = 18_688  # rows and columns of a matrix that takes 166 MiB in four bits

METHODS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "nf4 in bf16": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16
    ),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}
Outcome = tuple[list[str], dict[str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model's folder, in fp32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", tied=False, hidden=HIDDEN, layers=LAYERS))
    path = tmp_path_factory.mktemp("folders") / "model"
    model.save_pretrained(path)
    return path


@pytest.fixture
def base_only(config: Config) -> Config:
    """Pages for the base, none for adapters, gradients and moments: what is read or written is of the base."""
    return config.replace(min_paged_bytes=8192)


def load(folder: Path, method: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=METHODS[method])


def bytes_of(model: nn.Module) -> int:
    """Bytes of a base, statistics included, each storage once."""
    parts = all_parts_of([*model.named_parameters(), *model.named_buffers()])
    parts += [part for child in model.modules() for part in parts_beside(child)]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for _, part in parts}.values())


def with_adapters(base: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    adapters = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(base, adapters).train()


def train(model: nn.Module) -> Outcome:
    """Return the losses of some steps and the digests of the adapters after them."""
    adapters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.AdamW(adapters.values(), lr=1e-2, fused=True)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(STEPS):
        ids = torch.randint(0, VOCABULARY, (1, 8), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses, {name: digest(weight) for name, weight in adapters.items()}


def assert_the_base_moved(*, base_bytes: int, budget_bytes: int) -> None:
    """It was read in every step, by pins, within the budget."""
    report = torch_offload.report()
    assert report.read_bytes["parameter"] >= STEPS * (base_bytes - budget_bytes)
    assert report.faults == 0
    assert report.host_peak_bytes <= report.budget_bytes


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_adapters_over_bitsandbytes_are_equal(folder, base_only, method):
    """Wrapped after it was quantized in memory."""
    plain = with_adapters(load(folder, method))
    expected = train(plain)
    del plain
    base = load(folder, method)
    base_bytes = bytes_of(base)
    paged = torch_offload.wrap(with_adapters(base), config=base_only, ram=base_bytes // 2)
    assert_bitwise_equal(train(paged), expected)
    assert_the_base_moved(base_bytes=base_bytes, budget_bytes=base_bytes // 2)


def test_statistics_are_paged_and_come_back(folder, config):
    """What a Params4bit and an Int8Params keep beside their bytes leaves memory with them, and is theirs again."""
    for method, names in (("nf4", {"", ".absmax", ".nested.absmax"}), ("int8", {"", ".CB", ".SCB"})):
        model = load(folder, method)
        weight = model.model.layers[0].mlp.down_proj.weight
        parts = dict(parts_of(weight))
        assert set(parts) == names
        before = {name: digest(part) for name, part in parts.items()}
        torch_offload.wrap(model, config=config)
        assert all(_C.is_managed(part) for part in parts.values())
        torch_offload.evict(model)
        assert not any(torch_offload.is_resident(part) for part in parts.values())
        assert {name: digest(part) for name, part in parts.items()} == before
        torch_offload.unwrap(model)
        assert not any(_C.is_managed(part) for part in parts.values())
        assert {name: digest(part) for name, part in parts.items()} == before


def test_a_model_is_quantized_within_the_budget_as_it_is_loaded(folder, config):
    """`from_pretrained` with a quantization_config, stock: every layer becomes pages as soon as it is quantized."""
    plain = load(folder, "nf4")
    base_bytes = bytes_of(plain)
    expected = train(with_adapters(plain))
    del plain
    with torch_offload.loading(config=config, ram=base_bytes // 2):
        base = load(folder, "nf4")
    assert all(_C.is_managed(layer.mlp.up_proj.weight) for layer in base.model.layers)
    assert all(_C.is_managed(layer.mlp.up_proj.weight.quant_state.absmax) for layer in base.model.layers)
    assert torch_offload.report().host_peak_bytes <= base_bytes // 2
    assert torch_offload.report().written_bytes["parameter"] > base_bytes // 4
    paged = torch_offload.wrap(with_adapters(base))
    assert_bitwise_equal(train(paged), expected)
    assert_the_base_moved(base_bytes=base_bytes, budget_bytes=base_bytes // 2)


def test_a_quantized_checkpoint_stays_in_its_file(folder, base_only, tmp_path):
    """Loaded as it was saved, nothing of the base is written. Method: the counter of written pages, and the bits."""
    plain = load(folder, "nf4")
    plain.save_pretrained(tmp_path / "quantized")
    base_bytes = bytes_of(plain)
    expected = train(with_adapters(plain))
    del plain
    with torch_offload.loading(config=base_only, ram=base_bytes // 2):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    report = torch_offload.report()
    assert report.written_bytes["parameter"] == 0
    assert report.counters["home_bytes"] > base_bytes // 2
    paged = torch_offload.wrap(with_adapters(base))
    assert_bitwise_equal(train(paged), expected)
    assert_the_base_moved(base_bytes=base_bytes, budget_bytes=base_bytes // 2)
    assert torch_offload.report().written_bytes["parameter"] == 0


def test_evaluation_over_bitsandbytes_is_equal(folder, base_only):
    """Where the processor has bf16, a layer packs its weight anew in its first forward without gradients; then the
    pages hold that. Method: logits of some passes, plain and paged.
    """

    def logits(model: nn.Module) -> list[str]:
        ids = torch.arange(16)[None]
        with torch.no_grad():
            return [digest(model.eval()(input_ids=ids + shift).logits) for shift in range(STEPS)]

    expected = logits(load(folder, "nf4"))
    base = load(folder, "nf4")
    base_bytes = bytes_of(base)
    paged = torch_offload.wrap(base, config=base_only, ram=base_bytes // 2)
    assert logits(paged) == expected
    report = torch_offload.report()
    assert report.read_bytes["parameter"] > base_bytes // 2
    assert report.faults == 0
    assert report.host_peak_bytes <= report.budget_bytes


def large_layers() -> nn.Sequential:
    """Two matrices of random bytes: to quantize so many numbers would take minutes."""
    layers = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        packed = torch.randint(0, 256, (LARGE, 1), dtype=torch.uint8, generator=generator).repeat(LARGE // 2, 1)
        layer = bitsandbytes.nn.Linear4bit(LARGE, LARGE, bias=False, device="meta")
        state = QuantState(
            absmax=(torch.rand(LARGE, generator=generator) / LARGE**0.5).repeat(LARGE // 64),
            shape=torch.Size((LARGE, LARGE)),
            code=bitsandbytes.functional.get_4bit_type("nf4", device="cpu"),
            blocksize=64,
            quant_type="nf4",
            dtype=torch.bfloat16,
        )
        layer.weight = bitsandbytes.nn.Params4bit(
            packed, quant_state=state, quant_type="nf4", bnb_quantized=True, module=layer
        )
        layers.append(layer)
    return nn.Sequential(*layers).train()


def large_gradient(scratch: str | None) -> dict[str, Any]:
    """Return digests of result and gradient, and the engine's figures; None: plain torch."""
    layers = large_layers()
    if scratch is not None:
        torch_offload.wrap(layers, ram="900MiB", ssd=scratch)
    x = torch.randn(4, LARGE, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(9)).requires_grad_()
    result = layers(x)
    result.square().mean().backward()
    found: dict[str, Any] = {
        "result": digest(result),
        "gradient": digest(x.grad),
        "numbers": bool(x.grad.isfinite().all()),
    }
    if scratch is not None:
        report = torch_offload.report()
        found |= {"read": report.read_bytes["parameter"], "faults": report.faults, "evictions": report.evictions}
        found["spare"] = report.budget_bytes - report.host_peak_bytes
    return found


@pytest.mark.alone
def test_the_backward_of_large_layers_reads_weights_that_left_memory(scratch):
    """Layers of 166 MiB. MatMul4Bit keeps its weight outside of what autograd saves: whoever brings weights in and out
    by copies has others in their place by then. Method: the bits of plain torch, and reads of all layers in backward.
    """
    expected = in_child(large_gradient, None)
    found = in_child(large_gradient, str(scratch))
    assert expected["numbers"]
    assert {name: found[name] for name in ("result", "gradient")} == {
        name: expected[name] for name in ("result", "gradient")
    }
    assert found["read"] >= LARGE * LARGE // 2
    assert found["faults"] == 0
    assert found["spare"] >= 0


# --- torchao ----------------------------------------------------------------------------------------------------------


def to_torchao(base: nn.Module, kind: str) -> nn.Module:
    if kind == "NF4Tensor":
        for layer in base.model.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    module.weight = nn.Parameter(
                        to_nf4(module.weight.detach(), scaler_block_size=64), requires_grad=False
                    )
        return base
    chosen = {"Int8Tensor": Int8WeightOnlyConfig(), "IntxUnpackedToInt8Tensor": IntxWeightOnlyConfig(torch.int4)}
    quantize_(base.model.layers, chosen[kind])
    return base


@pytest.mark.parametrize("kind", ["Int8Tensor", "IntxUnpackedToInt8Tensor", "NF4Tensor"])
def test_adapters_over_torchao_are_equal(folder, base_only, kind):
    """Its tensors are made of others, which become pages."""

    def made() -> nn.Module:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        return to_torchao(base, kind)

    plain = made()
    assert type(plain.model.layers[0].mlp.down_proj.weight).__name__ == kind
    expected = train(with_adapters(plain))
    del plain
    base = made()
    base_bytes = bytes_of(base)
    paged = torch_offload.wrap(with_adapters(base), config=base_only, ram=base_bytes // 2)
    assert_bitwise_equal(train(paged), expected)
    assert_the_base_moved(base_bytes=base_bytes, budget_bytes=base_bytes // 2)


# --- integers in ordinary tensors -------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """Four bits in int32, with scales and zeros per group and row, as GPTQ, AWQ and compressed-tensors keep them."""

    GROUP = 64

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-(2**31), 2**31 - 1, (columns // 8, rows), dtype=torch.int32))
        self.register_buffer("scales", torch.rand(columns // self.GROUP, rows) / columns)
        self.register_buffer("qzeros", torch.randint(0, 16, (columns // self.GROUP, rows), dtype=torch.int32))
        self.register_buffer("g_idx", torch.arange(columns, dtype=torch.int32) // self.GROUP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)[None, :, None]
        levels = ((self.qweight[:, None] >> shifts) & 15).flatten(0, 1)
        group = self.g_idx.long()
        return x @ ((levels - self.qzeros[group]) * self.scales[group])


class PackedExperts(nn.Module):
    """MXFP4 as transformers has it in parameters of bytes: blocks of 32 values and their scales."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        blocks = torch.randint(0, 256, (2, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 121, (2, rows, columns // 32), dtype=torch.uint8)
        self.gate_up_proj_blocks = nn.Parameter(blocks, requires_grad=False)
        self.gate_up_proj_scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = convert_moe_packed_tensors(self.gate_up_proj_blocks, self.gate_up_proj_scales, dtype=x.dtype)
        return x @ weights.sum(0)


class HQQLinear(nn.Module):
    """As hqq has it: bytes in a parameter, scales and zeros in a dictionary beside it."""

    __module__ = "hqq.core.quantize"

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.W_q = nn.Parameter(torch.randint(0, 256, (rows // 2, columns), dtype=torch.uint8), requires_grad=False)
        self.meta = {"scale": torch.rand(rows, columns // 64), "zero": torch.rand(rows, columns // 64), "nbits": 4}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = torch.cat([self.W_q & 15, self.W_q >> 4])
        scale, zero = (self.meta[name].repeat_interleave(64, dim=1) for name in ("scale", "zero"))
        return x @ ((levels - zero) * scale / levels.numel()).T


@pytest.mark.parametrize("kind", [PackedLinear, PackedExperts, HQQLinear])
def test_integers_in_ordinary_tensors_are_paged(config, kind):
    """Stand-ins for packages that need a GPU. Method: a chain of layers around trained ones, plain and paged."""

    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), kind(256, 256))))

    def outcome(module: nn.Module) -> Iterator[str]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        for seed in range(STEPS):
            loss = module(torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield digest(loss)
        yield from (digest(weight) for weight in module.parameters())

    expected = list(outcome(chain()))
    paged = chain()
    torch_offload.wrap(paged, config=config, ram="2MiB")
    assert all(_C.is_managed(part) for child in paged.modules() for _, part in parts_beside(child))
    assert list(outcome(paged)) == expected
    report = torch_offload.report()
    assert report.ssd_read_bytes > 0
    assert report.faults == 0
    assert report.host_peak_bytes <= report.budget_bytes


# --- what is not known ------------------------------------------------------------------------------------------------


def test_subclasses_that_are_not_known_are_named_once_with_the_reason(config):
    """Many tensors of one type are one entry of one warning."""

    class Mystery(nn.Parameter):
        pass

    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(9)))
    for layer in module:
        layer.weight = Mystery(layer.weight.detach())
    with pytest.warns(UserWarning, match="a subclass of Tensor whose memory is not known") as caught:
        torch_offload.wrap(module, config=config)
    [message] = [str(warning.message) for warning in caught]
    assert message.count("Mystery") == 1
    assert "0.weight, 1.weight, 2.weight and 6 more" in message
