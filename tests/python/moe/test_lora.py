"""Adapters over coded experts: PEFT's LoRA and DoRA, trained through coded pages, saved in PEFT's format."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import hotswap
from safetensors.torch import load_file
from support.bits import same_bits
from support.coded_models import ROUNDED, coded, logits_of
from support.moe_models import EXPERTS, dequantize, inputs_of, tiny_moe
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import torch_offload
from torch_offload import ConfigError, UnsupportedModelError
from torch_offload.moe.lora import LoraCodedProjection
from torch_offload.moe.modules import CodedExperts

TARGETS = ["coded.up", "coded.down"]


def adapted(
    name: str = "mixtral", *, random: bool = True, seed: int = 1, sizes: dict[str, int] | None = None, **options: object
) -> PeftModel:
    """A coded model with adapters; with random ones they change what it says."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": not random} | options
    base = coded(name, **sizes or {})
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(**settings))
    if random:
        for parameter in trainable(model).values():
            nn.init.normal_(parameter, std=0.1)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def layers_of(model: nn.Module) -> list[LoraCodedProjection]:
    return [module for module in model.modules() if isinstance(module, LoraCodedProjection)]


def loss_of(model: nn.Module) -> Tensor:
    ids = inputs_of(model)["input_ids"]
    return model(input_ids=ids, labels=ids).loss


def dense_twin(model: PeftModel) -> nn.Module:
    """The dequantized model, adapters added to its weights: differentiable in them."""
    twin = tiny_moe("mixtral")
    dequantize(twin, ROUNDED)
    for block, base in zip(twin.model.layers, model.base_model.model.model.layers, strict=True):
        for name, layer in (("gate_up_proj", base.mlp.experts.coded.up), ("down_proj", base.mlp.experts.coded.down)):
            weight = getattr(block.mlp.experts, name).detach()
            a, b = layer._split("default")
            total = weight + layer.scaling["default"] * torch.stack([y @ x for x, y in zip(a, b, strict=True)])
            if layer.use_dora["default"]:
                lengths = total.detach().norm(dim=2)
                total = total * (layer.lora_magnitude_vector["default"].weight / lengths)[:, :, None]
            del block.mlp.experts._parameters[name]
            setattr(block.mlp.experts, name, total)
    return twin


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_values_and_gradients_are_those_of_the_dense_twin(use_dora):
    """Method: a twin whose weights are the codes' values plus B A; losses and every adapter's gradient to float32's
    precision, and the adapters matter."""
    model = adapted(use_dora=use_dora)
    parameters = trainable(model)
    assert len(parameters) == 3 * 2 * (3 if use_dora else 2)
    found = loss_of(model)
    gradients = torch.autograd.grad(found, list(parameters.values()))
    expected = loss_of(dense_twin(model))
    expected_gradients = torch.autograd.grad(expected, list(parameters.values()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for name, gradient, wanted in zip(parameters, gradients, expected_gradients, strict=True):
        assert wanted.abs().max() > 0, name
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-6, msg=name)
    with model.disable_adapter():
        assert (loss_of(model) - found).abs() > 1e-3


def test_one_products_gradients_are_those_of_a_dense_weight():
    """Method: with respect to both factors and the tokens, against W + B A in memory."""
    layer = layers_of(adapted())[0]
    rows, columns = layer.base_layer.shape
    x = torch.randint(-2, 3, (2, columns)).float().requires_grad_()
    a = torch.randint(-2, 3, (4, columns)).float().requires_grad_()
    b = torch.randint(-2, 3, (rows, 4)).float().requires_grad_()

    def adapter(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, a), b) + layer.base_layer.open()(1, x)

    def dense(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return functional.linear(x, layer.base_layer.coded.dense(1, 0) + b @ a)

    found = torch.autograd.grad(adapter(a, b, x).sum(), (a, b, x))
    expected = torch.autograd.grad(dense(a, b, x).sum(), (a, b, x))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_a_new_adapter_changes_nothing(use_dora):
    """Method: B is zero at first, and DoRA's magnitudes are the rows' lengths."""
    plain = logits_of(coded("mixtral"))
    found = logits_of(adapted(random=False, use_dora=use_dora))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5 if use_dora else 0)


def test_autocast_leaves_the_lengths_of_rows_exact():
    """Method: those that DoRA divides by, computed with and without it, bit for bit; products do take bfloat16."""
    layer = layers_of(adapted(use_dora=True))[0]
    factors = layer._factors("default", 1)
    expected = layer._row_squares("default", 1, *factors)
    x = torch.randn(2, layer.base_layer.shape[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(layer._row_squares("default", 1, *factors), expected)
        assert layer.open()(1, x).dtype == torch.bfloat16


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True], ids=["", "from meta"])
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_adapters_are_saved_and_loaded_by_peft(use_dora, low_cpu_mem_usage, tmp_path):
    """With low_cpu_mem_usage PEFT makes adapters on the meta device before it reads them."""
    model = adapted(use_dora=use_dora)
    expected = logits_of(model)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == len(trainable(model))
    assert {tuple(tensor.shape) for name, tensor in saved.items() if "coded.up.lora_A" in name} == {(4 * EXPERTS, 64)}
    options = {"low_cpu_mem_usage": low_cpu_mem_usage}
    loaded = PeftModel.from_pretrained(coded("mixtral"), tmp_path, **options)
    assert same_bits(logits_of(loaded), expected)
    again = PeftModel.from_pretrained(coded("mixtral"), tmp_path, is_trainable=True, **options)
    assert len(trainable(again)) == len(trainable(model))


def test_several_adapters_and_the_router():
    """Method: a second adapter is chosen and left; the router is trained by PEFT's own way."""
    model = adapted(target_parameters=["mlp.gate.weight"])
    assert any("gate" in name for name in trainable(model))
    first = logits_of(model)
    model.add_adapter("second", LoraConfig(r=2, target_modules=TARGETS, target_parameters=["mlp.gate.weight"]))
    model.set_adapter("second")
    assert not same_bits(logits_of(model), first)
    model.set_adapter("default")
    assert same_bits(logits_of(model), first)
    loss_of(model).backward()
    assert all(parameter.grad is not None for parameter in trainable(model).values())


def trained(model: nn.Module, *, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train the adapters by AdamW; return the losses and the weights at the end."""
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in trainable(model).items()}


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_paged_training_is_bitwise_equal(use_dora, config):
    """Method: five steps of AdamW, resident and in a budget of less than the model."""
    sizes = {"intermediate_size": 128, "num_local_experts": 32, "num_hidden_layers": 4}
    results = []
    for paged in (False, True):
        model = adapted(random=False, use_dora=use_dora, sizes=sizes).train()
        if paged:
            torch_offload.wrap(model, config=config.replace(ram="2MiB"))
        results.append(trained(model, steps=5))
    report = torch_offload.report()
    assert report.budget_bytes < sum(tensor.nbytes for tensor in model.state_dict().values())
    assert report.ssd_read_bytes > report.budget_bytes
    (plain_losses, plain), (paged_losses, paged_weights) = results
    assert paged_losses == plain_losses
    assert plain_losses[-1] < plain_losses[0]
    for name, weight in plain.items():
        assert same_bits(paged_weights[name], weight), name


def test_training_does_not_depend_on_what_has_arrived(config, monkeypatch):
    """Method: DoRA with the resident planes, second planes sent away whenever rows' lengths are asked for, as under
    memory pressure, against all in memory: a step uses all planes, for products and for lengths. B is not zero, so that
    lengths depend on the planes."""
    lengths = LoraCodedProjection._row_squares
    stayed_bytes = []

    def lengths_without_second_planes(self: LoraCodedProjection, *args: object) -> Tensor:
        second = self.base_layer.coded.planes[1]
        torch_offload.evict(second)
        stayed_bytes.append(torch_offload.evict(second.blob(0)))  # reading ahead may bring it back from now on
        return lengths(self, *args)

    results = []
    for is_away in (False, True):
        model = adapted(use_dora=True).train()
        for module in model.modules():
            if isinstance(module, CodedExperts):
                module.active_planes = "resident"
        if is_away:
            torch_offload.wrap(model, config=config)
            monkeypatch.setattr(LoraCodedProjection, "_row_squares", lengths_without_second_planes)
        results.append(trained(model, steps=2))
    assert stayed_bytes
    assert not any(stayed_bytes)
    (losses_here, here), (losses_away, away) = results
    assert losses_away == losses_here
    for name, weight in here.items():
        assert same_bits(away[name], weight), name


def test_the_stock_trainer_trains_them(tmp_path):
    model = adapted(random=False, lora_dropout=0.1)
    base = {name: buffer.clone() for name, buffer in model.named_buffers() if "blob_" in name}
    rows = [{"input_ids": ids, "labels": ids} for ids in inputs_of(model, rows=8)["input_ids"]]
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=2e-2,
        logging_steps=1,
        report_to=[],
        gradient_checkpointing=True,
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all(same_bits(buffer, base[name]) for name, buffer in model.named_buffers() if name in base)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_what_coded_weights_cannot_have_is_refused_by_name():
    for settings, message in (
        ({"r": 0}, "rank"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"lora_bias": True}, "lora_bias"),
    ):
        with pytest.raises((ConfigError, UnsupportedModelError, ValueError), match=message):
            get_peft_model(coded("mixtral"), LoraConfig(**{"r": 4, "target_modules": TARGETS} | settings))
    with pytest.raises(UnsupportedModelError, match="read-only"):
        adapted().merge_and_unload()


def test_adapters_are_combined():
    """Method: a part of each, expert by expert; by PEFT's "linear", which combines A and B by themselves."""
    model = adapted()
    model.add_adapter("second", LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False))
    model.add_weighted_adapter(["default", "second"], [0.5, 0.25], "both", combination_type="linear")
    for layer in layers_of(model):
        for expert in range(EXPERTS):
            parts = [layer._factors(name, expert) for name in ("default", "second")]
            shares = [weight * layer.scaling[n] for weight, n in ((0.5, "default"), (0.25, "second"))]
            for found, of_each in zip(layer._factors("both", expert), zip(*parts, strict=True), strict=True):
                expected = sum(share**0.5 * factor for share, factor in zip(shares, of_each, strict=True))
                torch.testing.assert_close(found, expected)
    assert layer.scaling["both"] == 1


def test_what_would_mix_the_factors_of_experts_is_refused():
    model = adapted()
    others = {"second": {"rank_pattern": {"coded.up": 2}}, "third": {}, "fourth": {"use_rslora": True}}
    for name, options in (others | {"fifth": {"use_dora": True}}).items():
        model.add_adapter(name, LoraConfig(r=4, target_modules=TARGETS, **options))
    before = set(model.peft_config)
    for names, kind, message in (
        (["default", "third"], "cat", "combination_type='cat'"),
        (["default", "third"], "svd", "combination_type='svd'"),
        (["default", "second"], "linear", "rank_pattern"),
        (["second"], "linear", "rank_pattern"),
        (["fourth"], "linear", "use_rslora"),
        (["fifth"], "linear", "use_dora"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            model.add_weighted_adapter(names, [1.0] * len(names), "both", kind)
    assert set(model.peft_config) == before


def test_adapters_are_swapped_for_those_of_their_rank(tmp_path):
    """Method: swapped in, an adapter is what it is loaded; one of another rank is refused."""
    other = adapted(seed=2)
    other.save_pretrained(tmp_path / "4")
    adapted(r=2).save_pretrained(tmp_path / "2")
    model = adapted()
    assert not same_bits(logits_of(model), logits_of(other))
    hotswap.hotswap_adapter(model, str(tmp_path / "4"), "default")
    assert same_bits(logits_of(model), logits_of(other))
    with pytest.raises(UnsupportedModelError, match="only for those of their rank"):
        hotswap.hotswap_adapter(model, str(tmp_path / "2"), "default")


@pytest.mark.parametrize(
    "targets",
    [{"target_modules": ["q_proj", "w1", "w2", "w3"]}, {"target_parameters": ["experts.gate_up_proj"]}],
    ids=["modules", "parameters"],
)
def test_adapters_of_dense_experts_are_refused(targets, tmp_path):
    """In silence all but their experts would be put on: new ones, and trained ones that are loaded."""
    config = {"r": 4, "target_modules": ["q_proj"]} | targets
    get_peft_model(tiny_moe("mixtral"), LoraConfig(**config)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="of coded experts are not there"):
        get_peft_model(coded("mixtral"), LoraConfig(**config))
    with pytest.raises(UnsupportedModelError, match="of coded experts are not there"):
        PeftModel.from_pretrained(coded("mixtral"), tmp_path)


def test_other_adapters_for_each_row_are_refused():
    """In silence all rows would have the one that is active."""
    model = adapted().eval()
    ids = inputs_of(model)["input_ids"]
    with pytest.raises(UnsupportedModelError, match="adapter_names"):
        model(input_ids=ids, adapter_names=["__base__"] * len(ids))
    with pytest.raises(UnsupportedModelError, match="adapter_names"):
        model.generate(input_ids=ids, adapter_names=["__base__"] * len(ids), max_new_tokens=1)


def test_copies_keep_their_own_weights():
    """Method: a deep copy's products use the copy's pages."""
    model = coded("mixtral")
    twin = copy.deepcopy(model)
    assert twin.model.layers[0].mlp.experts.coded.up.coded is twin.model.layers[0].mlp.experts.coded
    assert same_bits(logits_of(twin), logits_of(model))
