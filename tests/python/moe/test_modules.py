"""Coded experts in the models of transformers: every layout, saved, loaded, paged, trained through."""

import copy
import json
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bits import same_bits
from support.coded_models import ROUNDED, coded, logits_of
from support.moe_models import CONFIGS, EXPERTS, dequantize, inputs_of, tiny_moe
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    SwitchTransformersForConditionalGeneration,
)

import torch_offload
from torch_offload import CheckpointError, OffloadError, PageCorruptError, UnsupportedModelError, moe
from torch_offload.moe import checkpoint, operators
from torch_offload.moe.expert_predictor import NextExpertPredictor
from torch_offload.moe.modules import UP, CodedExperts


def coded_modules(model: nn.Module) -> list[CodedExperts]:
    return [module for module in model.modules() if isinstance(module, CodedExperts)]


def blobs_of(model: nn.Module) -> list[Tensor]:
    return [
        plane.blob(expert)
        for module in coded_modules(model)
        for plane in module.planes
        for expert in range(module.shapes.count)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_coded_models_compute_what_their_dequantized_twins_do(name):
    """Method: logits of the same model with the values of its codes as ordinary weights, to float32's precision; and
    those of the model as it was are far from them, so the comparison can tell."""
    plain = tiny_moe(name)
    model = coded(name)
    twin = copy.deepcopy(plain)
    dequantize(twin, ROUNDED)
    assert len(coded_modules(model)) >= 2
    assert sum(parameter.numel() for parameter in model.parameters()) < sum(p.numel() for p in plain.parameters())
    expected, found = logits_of(twin), logits_of(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (logits_of(plain) - expected).abs().max() > 100 * (found - expected).abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_models_are_loaded_with_the_same_logits(name, tmp_path):
    """Method: saved, opened by from_pretrained, evaluated bit for bit; each page begins on a multiple of 4 KiB. What
    save_pretrained writes is opened too, of a model that was loaded and of one that was coded in place."""
    model = coded(name)
    expected = logits_of(model)
    checkpoint.save(model, tmp_path)
    auto = SwitchTransformersForConditionalGeneration if name == "switch" else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path)
    assert len(coded_modules(loaded)) == len(coded_modules(model))
    assert same_bits(logits_of(loaded), expected)
    for path in tmp_path.glob("experts-*.safetensors"):
        assert_blobs_are_aligned(path)
    for number, one in enumerate((loaded, coded(name))):
        again = tmp_path / str(number)
        one.save_pretrained(again)
        assert same_bits(logits_of(auto.from_pretrained(again)), expected)


def test_what_was_loaded_is_saved_again(tmp_path):
    """Method: a folder that names its active planes; blobs are written once, the choice is kept."""
    checkpoint.save(coded("mixtral"), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"]["planes"] = "base"
    (tmp_path / "config.json").write_text(json.dumps(said))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    checkpoint.save(loaded, tmp_path / "ours")
    loaded.save_pretrained(tmp_path / "theirs")
    assert not [name for path in (tmp_path / "ours").glob("model-*") for name in load_file(path) if "blob_" in name]
    for folder in ("ours", "theirs"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert {module.active_planes for module in coded_modules(again)} == {"base"}


@pytest.mark.parametrize("sizes", [("5GB", "60KB"), ("60KB", "5GB"), ("60KB", "90KB")], ids="-".join)
def test_what_an_older_model_left_in_the_folder_is_not_taken_for_the_new_one(sizes, tmp_path):
    """Method: a plain model, a coded one, then another coded one in as few or as many files as differ from those; the
    folder is the last, and no file is left that its index does not name."""
    tiny_moe("mixtral", seed=3).save_pretrained(tmp_path)
    for seed, size in enumerate(sizes):
        model = coded("mixtral", seed=seed)
        checkpoint.save(model, tmp_path, max_shard_size=size)
        assert same_bits(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(model))
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert {path.name for path in tmp_path.glob("*.safetensors")} == set(index["weight_map"].values())


def test_older_files_stay_until_new_ones_are_there(tmp_path, monkeypatch):
    """Method: saved in many files, and again, which ends before its own experts are written."""
    checkpoint.save(coded("mixtral"), tmp_path, max_shard_size="60KB")
    before = set(tmp_path.glob("experts-*"))

    def fail(*args: object, **options: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(checkpoint, "stream_file", fail)
    with pytest.raises(OSError, match="no room"):
        checkpoint.save(coded("mixtral"), tmp_path)
    assert len(before) > 1
    assert set(tmp_path.glob("experts-*")) == before


def assert_blobs_are_aligned(path: Path) -> None:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    assert (8 + header_bytes) % 4096 == 0
    pages = {name: said for name, said in header.items() if name != "__metadata__"}
    assert len(pages) >= EXPERTS
    assert all(begin % 4096 == 0 for said in pages.values() for begin in said["data_offsets"])
    with safe_open(str(path), framework="pt") as file:
        assert operators.extents(file.get_tensor(next(iter(pages))))


def test_one_token_is_worth_the_same_alone_and_in_a_batch():
    """Method: a layer of experts, 30 tokens together and one by one, bit for bit."""
    experts = coded("qwen3_moe").model.layers[1].mlp.experts
    hidden = torch.randn(30, 64)
    index = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(30)])
    weights = torch.rand(30, 2)
    together = experts(hidden, index, weights)
    alone = [experts(hidden[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(30)]
    assert same_bits(together, torch.cat(alone))


def test_experts_without_tokens_and_choices_of_none():
    experts = coded("mixtral").model.layers[0].mlp.experts
    hidden = torch.randn(3, 64)
    one = torch.zeros(3, 2, dtype=torch.int64)
    assert experts(hidden, one, torch.rand(3, 2)).shape == hidden.shape
    none = torch.full((3, 2), EXPERTS)
    assert same_bits(experts(hidden, none, torch.rand(3, 2)), torch.zeros(3, 64))
    empty = experts(hidden[:0], one[:0], torch.rand(0, 2))
    assert empty.shape == (0, 64)


def test_gradients_reach_what_is_before_and_the_router():
    """Method: those of the dequantized twin to float32's precision, for every parameter that is left."""
    model = coded("mixtral")
    twin = tiny_moe("mixtral")
    dequantize(twin, ROUNDED)
    for each in (model, twin):
        ids = inputs_of(each)["input_ids"]
        each(input_ids=ids, labels=ids).loss.backward()
    expected = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-5)


def test_autocast_casts_what_coded_experts_are_given():
    """Method: as it does for linear layers: tokens in float32 give the bits and the dtype of the same in bfloat16, of
    one plane and of two, with a gradient in their own dtype; and a whole model's logits have the dtype of its twin's.
    """
    model = coded("mixtral")
    experts = coded_modules(model)[0]
    x = torch.randn(3, experts.shapes.up[1], generator=torch.Generator().manual_seed(0), requires_grad=True)
    for planes in ("base", "all"):
        experts.active_planes = planes
        expected = experts.product(1, UP, x.detach().bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            found = experts.product(1, UP, x)
        assert found.dtype == expected.dtype == torch.bfloat16
        assert same_bits(found, expected)
        (gradient,) = torch.autograd.grad(found.float().sum(), x)
        assert gradient.dtype == torch.float32
        assert gradient.abs().max() > 0
        assert experts.product(1, UP, x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert logits_of(model).dtype == logits_of(tiny_moe("mixtral")).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixtral", {"intermediate_size": 512, "num_hidden_layers": 8}),
        ("switch", {"d_ff": 1024, "num_experts": 24}),
    ],
)
def test_models_that_do_not_fit_generate_the_same(name, sizes, config):
    """Method: more experts than fit, generation and evaluation bit-equal to the resident coded model; bytes were read,
    and no page was written twice."""
    model = coded(name, **sizes)
    ids = inputs_of(model, rows=1, tokens=5)["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    expected_logits = logits_of(model)
    coded_bytes = sum(page.nbytes for page in blobs_of(model))
    buffer_bytes = sum(-(-buffer.nbytes // 4096) * 4096 for buffer in model.buffers())
    torch_offload.wrap(model, config=config.replace(ram="1MiB"))
    assert same_bits(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert same_bits(logits_of(model), expected_logits)
    report = torch_offload.report()
    assert report.host_peak_bytes <= report.budget_bytes < coded_bytes
    assert report.read_bytes["other"] > report.budget_bytes
    assert 0 < report.written_bytes["other"] <= buffer_bytes
    assert report.clean_drops > 0
    assert report.prefetches > 0


def test_a_predictor_names_what_usually_follows():
    """Method: expert i is followed by i + 1 and, half of the time or less, by others; nothing is known at first."""
    predictor = NextExpertPredictor(4, 5)
    assert predictor.likely([0, 1]) == []
    for case in range(40):
        for expert in range(4):
            predictor.learn([expert], [expert + 1, case % 4])
    assert [predictor.likely([expert]) for expert in range(4)] == [[1], [2], [3], [4]]
    for _ in range(200):
        predictor.learn([0], [3])
    assert predictor.likely([0]) == [3]


def test_the_next_layer_is_read_ahead(config):
    """Method: a model that chooses the same experts every time, its pages sent away; when a layer has been routed to
    pages of the next one arrive without being asked for."""
    model = coded("mixtral", intermediate_size=512)
    logits_of(model)
    logits_of(model)
    torch_offload.wrap(model, config=config)
    first, second = coded_modules(model)[:2]
    torch_offload.evict(second)
    assert not any(torch_offload.is_resident(page) for page in second.planes[0].buffers() if page.dtype == torch.uint8)
    first.on_routed(first._chosen)
    torch_offload.flush()
    deadline = time.monotonic() + 30
    wanted = [second.planes[0].blob(expert) for expert in second._chosen]
    while not all(torch_offload.is_resident(page) for page in wanted):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_planes_that_have_not_arrived_can_be_left_out(config):
    """Method: with the second planes sent away, `arrived` gives what `base` gives; with them back, what `all` gives."""
    model = coded("mixtral")
    modules = coded_modules(model)
    results = {}
    for planes in ("base", "all"):
        for module in modules:
            module.active_planes = planes
        results[planes] = logits_of(model)
    assert not same_bits(results["base"], results["all"])
    torch_offload.wrap(model, config=config)
    for module in modules:
        module.active_planes = "resident"
        torch_offload.evict(module.planes[1])
        module.planes[1].requires_grad_(False)
    for module in modules:
        module.on_routed = lambda _: None
    assert same_bits(logits_of(model), results["base"])
    for module in modules:
        for buffer in module.planes[1].buffers():
            buffer.sum()  # brings it
    assert same_bits(logits_of(model), results["all"])


def test_layouts_that_are_not_known_are_refused_by_name():
    config = JetMoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_key_value_heads=2,
        kv_channels=16,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = JetMoeForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0.*JetMoeParallelExperts"):
        moe.code_experts(model, ROUNDED)
    container = NllbMoeForConditionalGeneration(
        NllbMoeConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_experts=4,
            encoder_sparse_step=1,
            decoder_sparse_step=1,
        )
    )
    with pytest.raises(UnsupportedModelError, match=r"encoder\.layers\.0\.ffn\.experts \(NllbMoeExperts\)"):
        moe.code_experts(container, ROUNDED)
    with pytest.raises(UnsupportedModelError, match="Linear has no experts"):
        moe.code_experts(nn.Linear(2, 2), ROUNDED)


def test_weights_that_are_no_numbers_are_refused_by_name():
    model = tiny_moe("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 3, 4] = float("nan")
    with pytest.raises(
        UnsupportedModelError, match=r"expert 2 of model\.layers\.1\.mlp\.experts: 1 of .* not finite.*\(3, 4\)"
    ):
        moe.code_experts(model, ROUNDED)


def test_a_folder_of_before_the_first_release_is_refused_by_name(tmp_path):
    """Method: the name of its quantization method, as it was."""
    checkpoint.save(coded("mixtral"), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"coded_ternary"', '"torch_offload"'))
    with pytest.raises(CheckpointError, match=r"were written by a pre-release.*compress the model again"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_damaged_blob_names_its_expert():
    model = coded("mixtral")
    with torch.no_grad():
        coded_modules(model)[1].planes[0].blob(3)[100] ^= 1
    with pytest.raises(PageCorruptError, match=r"expert 3 of model\.layers\.1\.mlp\.experts"):
        logits_of(model, rows=4, tokens=16)


def test_folders_that_do_not_fit_are_refused_by_name(tmp_path):
    """Method: a format of the future, another count of experts, an expert that is not in the files."""
    checkpoint.save(coded("mixtral"), tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())

    def changed(change) -> None:
        said = copy.deepcopy(good)
        change(said)
        path.write_text(json.dumps(said))

    changed(lambda said: said["quantization_config"].update(coded_format=2))
    with pytest.raises(CheckpointError, match="expected coded experts of format 1, got format 2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    changed(lambda said: said.update(num_local_experts=5))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts: the files have 4 experts, the model 5"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    changed(lambda said: None)
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    lost = "model.layers.1.mlp.experts.coded.planes.0.blob_2"
    experts_file = next(tmp_path.glob("experts-*.safetensors"))
    with safe_open(str(experts_file), framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in list(file.keys()) if name != lost}
    save_file(kept, experts_file, metadata={"format": "pt"})
    del said["weight_map"][lost]
    index.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="not in the files"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_expert_parallel_runs_are_refused():
    experts = coded("mixtral").model.layers[0].mlp.experts
    experts._is_expert_parallel = True
    with pytest.raises(OffloadError, match=r"model\.layers\.0\.mlp\.experts"):
        experts(torch.randn(1, 64), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))
