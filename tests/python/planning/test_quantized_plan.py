"""A base of 4 bits is planned as bitsandbytes makes it and multiplies with it.

Method: small models quantized on the meta device beside the same ones quantized in memory; what is planned of a step of
LoRA over one beside the engine's counters of such a step.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.isolation import in_child
from support.models import tiny_config, tiny_model
from support.planned_steps import batch_of, counted_per_step, least_per_step, plan_of, settings, training_step
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import torch_offload
from torch_offload import UnsupportedModelError
from torch_offload.integrations.quantized_models import quantize_on_meta
from torch_offload.planning.fake_trace import record
from torch_offload.planning.search import meta_copy
from torch_offload.runtime.tensor_parts import all_parts_of

pytestmark = pytest.mark.any_torch

HIDDEN = 256
LAYERS = 8


def nf4(*, nested: bool = True) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)


def planned_base(quantization: BitsAndBytesConfig) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama", tied=False, hidden=HIDDEN, layers=LAYERS))
    quantize_on_meta(model, quantization)
    return model.train()


def adapted(base: nn.Module) -> nn.Module:
    with next(base.parameters()).device:
        adapters = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        return get_peft_model(base, adapters).train()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    tiny_model("llama", tied=False, hidden=HIDDEN, layers=LAYERS).save_pretrained(folder)
    return folder


def loaded(folder: str | Path, quantization: BitsAndBytesConfig) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=quantization)


@pytest.mark.parametrize("nested", [True, False])
def test_sizes_are_those_that_loading_makes(saved, nested):
    real, planned = loaded(saved, nf4(nested=nested)), planned_base(nf4(nested=nested))

    def parts(model: nn.Module) -> list[Any]:
        named = all_parts_of([*model.named_parameters(), *model.named_buffers()])
        return [(name, part.shape, part.dtype, part.requires_grad) for name, part in named]

    assert parts(planned) == parts(real)
    assert {part.device.type for part in planned.parameters()} == {"meta"}
    assert parts(meta_copy(real)) == parts(real)
    assert {part.device.type for part in meta_copy(real).parameters()} == {"meta"}


def test_a_copy_of_a_weight_is_there_for_one_product(saved):
    """Recorded alike of a model in memory, on the meta device, and of a copy of its shapes."""
    recordings = [record(adapted(base), batch_of()) for base in (planned_base(nf4()), loaded(saved, nf4()))]
    recordings.append(record(meta_copy(adapted(loaded(saved, nf4()))), batch_of()))
    for recording in recordings:
        counts = {str(call.operator): 0 for calls in recording.calls.values() for call in calls}
        for calls in recording.calls.values():
            for call, count in calls.items():
                counts[str(call.operator)] += count
        forward, backward = 7 * LAYERS, 7 * LAYERS - 3  # the input of the first q, k and v has no gradient
        assert counts["bitsandbytes.dequantize_4bit.default"] == forward + backward
        assert "bitsandbytes.gemm_4bit.default" not in counts
        assert recording.calls == recordings[0].calls
    weights = [size for size in recordings[0].parameters if size.dtype is torch.uint8 and size.model_elements]
    assert all(size.model_elements == 2 * size.elements for size in weights)


def trained_over_4_bits(folder: str, scratch: str, mode: str, ram: int) -> tuple[dict[str, int], ...]:
    """Return what was planned, what was counted, and the least for the engine's own list of uses."""
    torch.set_num_threads(1)
    config = settings(ram, scratch, activations=mode).replace(min_paged_bytes=4096)
    plan = plan_of(adapted(planned_base(nf4())), batch_of(), config)
    planned = {"ssd_read": sum(plan.ssd_read.values()), "ssd_written": sum(plan.ssd_written.values())}
    with torch_offload.loading(config=config) as block:
        model = block.wrap(adapted(loaded(folder, nf4())))
    step = training_step(model)
    return planned | {"peak": plan.peak_bytes["ram"]}, counted_per_step(step), least_per_step(step, ram)


@pytest.mark.parametrize(("mode", "ram"), [("page", 5 << 20), ("recompute", 6 << 20)])
def test_a_step_over_4_bits_moves_what_was_planned(mode, ram, saved, scratch):
    """A plan lies between what the best eviction moves for the engine's own uses and what the engine moves."""
    planned, counted, least = in_child(trained_over_4_bits, str(saved), str(scratch), mode, ram)
    assert least["ssd_read"] > 2 << 20
    for name in ("ssd_read", "ssd_written"):
        assert 0.98 * least[name] < planned[name] < 1.02 * counted[name], (name, planned, counted, least)
    assert planned["peak"] == pytest.approx(counted["peak"], rel=0.02)


def test_what_is_quantized_otherwise_is_refused(saved):
    """And passes without gradients over 4 bits, which pack the weights anew on some processors."""
    eight = loaded(saved, BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight is a Int8Params, which cannot be planned"):
        plan_of(eight, batch_of(), settings("16MiB"))
    with pytest.raises(UnsupportedModelError, match="only training can be planned"):
        plan_of(planned_base(nf4()), batch_of(), settings("16MiB"), work="evaluate")
