"""Compressing models: to the bytes that were asked for, with less error than baselines, again where it was ended."""

import functools
import io
import json
import logging
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support.bits import same_bits
from support.moe_models import EXPERTS, VOCABULARY, tiny_moe
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, SwitchTransformersForConditionalGeneration

import torch_offload
from torch_offload import Config, ConfigError, OutOfTierMemory, UnsupportedModelError, moe
from torch_offload.compression import calibration, gptq, resume
from torch_offload.compression.compress import RateBudget, compress_folder
from torch_offload.compression.input_moments import ExpertMoments
from torch_offload.compression.rate_allocation import RateCurve, min_sectors, share_sectors
from torch_offload.moe import inspection, ternary
from torch_offload.moe.activate import experts_of
from torch_offload.moe.modules import DOWN, UP, CodedExperts, ExpertShapes
from torch_offload.reporting.progress import progress

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.any_torch]

SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES_OF = {
    "switch": {"d_model": 192, "d_ff": 512},
    "deepseek_v3": {**SIZES, "moe_intermediate_size": 256},
    "gpt_oss": {"hidden_size": 192, "intermediate_size": 256},
}
LAYERS = "model.layers.{}.mlp.experts"


def tokens(*, seed: int = 3, batches: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (4, 48), generator=generator) for _ in range(batches)]


def model_of(name: str = "mixtral", **changes: int) -> nn.Module:
    return tiny_moe(name, **SIZES_OF.get(name, SIZES) | changes)


def logits_of(model: nn.Module) -> Tensor:
    ids = tokens(seed=9, batches=1)[0]
    given = {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}
    with torch.no_grad():
        return model(**given).logits


def experts_bytes(folder: Path) -> int:
    """What coded experts take on the disk: their files, and the scales in the others."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name for name in index["weight_map"].values() if name.startswith("experts-")}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    scales = sum(buffer.numel() for name, buffer in loaded.named_buffers() if name.endswith("_scale"))
    return sum((folder / name).stat().st_size for name in files) + scales * ternary.SCALE_DTYPE.itemsize


@pytest.mark.parametrize("bits", [0.9, 1.2, 2.2])
def test_all_bytes_together_are_what_was_asked_for(bits, tmp_path):
    """Method: files with headers, and scales; at most the target, and not more than 3 % below it."""
    model = model_of(num_local_experts=8)
    weights = sum(experts.shapes.count * experts.shapes.weights_each for experts in experts_of(model))
    done = torch_offload.compress(model, bits=bits, calibration=tokens(), out=tmp_path)
    assert done.target_bytes == int(bits * weights / 8)
    assert 0.97 * done.target_bytes < experts_bytes(tmp_path) <= done.coded_bytes <= done.target_bytes
    assert {module.planes for module in done.modules} == {gptq.planes_for(bits)}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "switch"])
def test_the_folder_is_the_model(name, tmp_path):
    """Method: from_pretrained, logits bit for bit; all but experts is as it was, and the folder holds nothing else."""
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items() if ".experts." not in key}
    done = torch_offload.compress(model, bits=1.4, calibration=tokens(), out=tmp_path)
    assert [module.name for module in done.modules] == [experts.name for experts in experts_of(model)]
    auto = SwitchTransformersForConditionalGeneration if name == "switch" else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path)
    assert any(isinstance(module, CodedExperts) for module in loaded.modules())
    assert same_bits(logits_of(loaded), logits_of(model))
    after = model.state_dict()
    assert all(same_bits(after[key], value) for key, value in before.items())
    assert not (tmp_path / resume.FOLDER).exists()


def correlated() -> nn.Module:
    """A model whose hidden states lie near a few directions, as those of trained models do."""
    model = model_of()
    width = SIZES["hidden_size"]
    with torch.no_grad():
        directions = torch.randn(width, width) * torch.arange(1, width + 1)[:, None] ** -1.0
        model.model.embed_tokens.weight.copy_(torch.randn(VOCABULARY, width) @ directions)
    return model


def test_it_loses_less_than_the_baselines():
    """Method: mean square of what the logits change. QMoE's matrices are put into the model, those rounded to nearest
    take as many bits; ours have six tenths of them."""
    exact = logits_of(correlated())

    def lost(model: nn.Module) -> float:
        return float((logits_of(model) - exact).square().mean())

    qmoe = correlated()
    moments = observed(qmoe)
    coded_bytes = weights = 0
    for experts in experts_of(qmoe):
        for matrix in (UP, DOWN):
            for expert in range(experts.shapes.count):
                weight = experts.weight(expert, matrix).detach()
                rounded = gptq.qmoe_quantize(weight, moments[experts.name].means(matrix, [expert])[0])
                coded_bytes += rounded.coded_bytes
                weights += weight.numel()
                weight.copy_(rounded.dense())
    bits = coded_bytes * 8 / weights
    ours, nearest = correlated(), correlated()
    torch_offload.compress(ours, bits=0.6 * bits, calibration=tokens())
    moe.code_experts(nearest, lambda weight: [ternary.nearest(weight, zeros=0.55)])  # 1.5 bits
    figures = {"bits": bits, "ours": lost(ours), "QMoE": lost(qmoe), "nearest": lost(nearest)}
    assert bits > 1.3, figures
    assert figures["ours"] < 0.8 * figures["QMoE"], figures
    assert figures["ours"] < 0.8 * figures["nearest"], figures


def observed(model: nn.Module) -> dict[str, ExpertMoments]:
    found = experts_of(model)
    moments = {experts.name: ExpertMoments(experts) for experts in found}
    for experts in found:
        experts.observe(moments[experts.name])
    with torch.no_grad():
        for ids in tokens():
            model(input_ids=ids)
    for experts in found:
        experts.forget()
    return moments


def test_moments_are_those_of_the_tokens_routed_there():
    """Method: observing changes no logit; the sum over experts is that over all choices of all tokens."""
    model = model_of()
    before = logits_of(model)
    seen: list[Tensor] = []
    first = model.model.layers[0].mlp.experts
    handle = first.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    moments = observed(model)[LAYERS.format(0)]
    handle.remove()
    assert same_bits(logits_of(model), before)
    inputs = torch.cat(seen)
    choices = model.config.num_experts_per_tok
    assert moments.tokens.sum() == choices * len(inputs)
    units = nn.functional.normalize(inputs, dim=1)
    torch.testing.assert_close(moments._sums[UP].sum(0), choices * units.T @ units, rtol=1e-4, atol=1e-3)


def test_every_token_counts_the_same():
    """Method: the same tokens, some of them a thousand times longer, which decide alone where length counts."""
    (experts, *_) = experts_of(model_of())
    x = torch.randn(50, SIZES["hidden_size"])
    longer = x * torch.where(torch.arange(50) % 10 == 0, 1000.0, 1.0)[:, None]
    equal, stretched, by_length = (
        ExpertMoments(experts, is_by_length=is_by_length) for is_by_length in (False, False, True)
    )
    for moments, tokens_given in ((equal, x), (stretched, longer), (by_length, longer)):
        first, _ = moments.open()
        with torch.no_grad():
            first(0, tokens_given)
    torch.testing.assert_close(stretched.means(UP, [0]), equal.means(UP, [0]), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(by_length._sums[UP][0], longer.T @ longer, rtol=1e-4, atol=1.0)


def test_later_layers_see_what_coded_ones_say(monkeypatch):
    """Method: the second layer's moments are those of a model whose first layer is coded already."""
    seen = {}
    inner = ExpertMoments.means

    def means(self, matrix, experts):
        if len(experts) == EXPERTS:
            seen[self.label, matrix] = inner(self, matrix, experts)
        return inner(self, matrix, experts)

    monkeypatch.setattr(ExpertMoments, "means", means)
    model, half = model_of(), model_of()
    torch_offload.compress(model, bits=0.9, calibration=tokens())
    experts_of(half)[0].replace(model.model.layers[0].mlp.experts.coded)
    found = experts_of(half)[1]
    expected = ExpertMoments(found)
    found.observe(expected)
    with torch.no_grad():
        for ids in tokens():
            half(input_ids=ids)
    torch.testing.assert_close(seen[LAYERS.format(1), UP], inner(expected, UP, range(EXPERTS)), rtol=1e-3, atol=1e-5)


def test_experts_without_tokens_and_without_weights():
    """Method: a router that never chooses expert 2, and expert 1 all zero: the first is coded as the layer's inputs
    say, with fewer bytes; the second stays zero."""
    model = model_of()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[2] = 0
            layer.mlp.gate.weight[0] = layer.mlp.gate.weight[1] * 1.01
            layer.mlp.experts.gate_up_proj[1] = 0
            layer.mlp.experts.down_proj[1] = 0
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(_never_two)
    moments = observed(model)[LAYERS.format(0)]
    of_the_layer = moments._sums[UP].sum(0) / moments.tokens.sum()
    torch.testing.assert_close(moments.means(UP, [2])[0], of_the_layer, rtol=1e-5, atol=1e-6)
    done = torch_offload.compress(model, bits=1.2, calibration=tokens())
    assert all(module.tokens[2] == 0 for module in done.modules)
    coded = model.model.layers[0].mlp.experts.coded
    x = torch.randn(3, SIZES["hidden_size"])
    assert coded.product(2, UP, x).abs().sum() > 0
    assert not coded.product(1, UP, x).any()
    assert coded.planes[0].blob(2).numel() <= coded.planes[0].blob(0).numel()
    assert logits_of(model).isfinite().all()


def _never_two(module: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, index = output
    return logits, weights, torch.where(index == 2, 3, index)


ENDED = """
import sys
sys.path[:0] = {tests!r}
import test_compress
from torch_offload.compression import resume

keep = resume.ResumeState.keep

def keep_and_die(self, *args):
    keep(self, *args)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

resume.ResumeState.keep = keep_and_die
import torch_offload, torch
torch.set_num_threads({threads})
torch_offload.compress(test_compress.model_of(), bits=0.9, calibration=test_compress.tokens(), out={out!r})
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class TwoMixtures(nn.Module):
    """Two modules of experts in one block, as of models with experts of their own for images."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, hidden: Tensor) -> Tensor:
        return self.first(hidden) + self.second(hidden)


def model_of_two_mixtures() -> nn.Module:
    model, other = (tiny_moe("mixtral", seed=seed, num_local_experts=2, **SIZES) for seed in (0, 1))
    for layer, beside in zip(model.model.layers, other.model.layers, strict=True):
        layer.mlp = TwoMixtures(layer.mlp, beside.mlp)
    return model


def test_blocks_with_two_modules_of_experts_keep_to_the_target(tmp_path, monkeypatch):
    """Method: pages and scales of the model; the same where the first block was kept from a run that ended."""
    keep = resume.ResumeState.keep
    whole, ended = model_of_two_mixtures(), model_of_two_mixtures()
    done = torch_offload.compress(whole, bits=0.9, calibration=tokens(), out=tmp_path / "whole")
    coded = [module for module in whole.modules() if isinstance(module, CodedExperts)]
    assert len(coded) == 4
    assert sum(buffer.nbytes for module in coded for buffer in module.buffers()) < done.coded_bytes
    assert 0.97 * done.target_bytes < done.coded_bytes <= done.target_bytes
    with monkeypatch.context() as patch:
        patch.setattr(resume.ResumeState, "keep", lambda *args: (keep(*args), interrupt()))
        with pytest.raises(KeyboardInterrupt):
            torch_offload.compress(ended, bits=0.9, calibration=tokens(), out=tmp_path / "ended")
    again = torch_offload.compress(model_of_two_mixtures(), bits=0.9, calibration=tokens(), out=tmp_path / "ended")
    assert [module.coded_bytes for module in again.modules] == [module.coded_bytes for module in done.modules]
    assert contents(tmp_path / "ended") == contents(tmp_path / "whole")


def interrupt() -> None:
    raise KeyboardInterrupt


def test_the_least_bits_that_are_named_are_enough():
    """Method: what the message says is asked for."""
    with pytest.raises(ConfigError, match="out of reach") as refused:
        torch_offload.compress(model_of(num_local_experts=2), bits=0.1, calibration=tokens())
    least = float(re.search(r"([\d.]+) is the least", str(refused.value))[1])
    done = torch_offload.compress(model_of(num_local_experts=2), bits=least, calibration=tokens())
    assert done.coded_bytes <= done.target_bytes


@pytest.mark.parametrize("rows", range(256, 288, 4))
def test_no_module_is_left_with_less_than_its_least(rows):
    """Method: two modules of unlike sizes, the larger one at the rate that its bytes need exactly, up to numbers'
    rounding, and a byte around it: either that is refused or both have the pages that they need."""
    shapes = {"small": ExpertShapes(3, (192, 192), (192, 192)), "large": ExpertShapes(4, (rows, 192), (192, rows))}
    modules = [SimpleNamespace(name=name, shapes=shape) for name, shape in shapes.items()]
    least = {
        name: min_sectors([math.prod(pair) for pair in (shape.up, shape.down) for _ in range(shape.count)], 1)
        for name, shape in shapes.items()
    }
    asked = RateBudget(modules, bits=1.3)
    done = 0
    for name, shape in shapes.items():
        needed = 4096 * least[name] + asked.overhead_bytes(name, shape)
        for more in (-1, 0, 1, 3):
            try:
                budget = RateBudget(modules, bits=(needed + more) * 8 / (shape.count * shape.weights_each))
            except ConfigError:
                continue
            done += 1
            for each in modules:
                pages = budget.sectors(each.name, each.shapes)
                assert pages >= least[each.name]
                budget.spend(4096 * pages + budget.overhead_bytes(each.name, each.shapes))
    assert done > 0


def test_an_ended_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    """Method: killed behind its first layer, run again: the first layer is not coded again, and every file is that of a
    run that was not ended."""
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    torch_offload.compress(model_of(), bits=0.9, calibration=tokens(), out=whole)
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    script = ENDED.format(tests=folders, out=str(ended), threads=torch.get_num_threads())
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    assert len(list((ended / resume.FOLDER).glob("block-*"))) == 1
    coded = []
    keep = resume.ResumeState.keep
    monkeypatch.setattr(
        resume.ResumeState,
        "keep",
        lambda self, block, *rest: (coded.append(block), keep(self, block, *rest)),
    )
    torch_offload.compress(model_of(), bits=0.9, calibration=tokens(), out=ended)
    assert coded == ["model.layers.1"]
    assert contents(ended) == contents(whole)


@pytest.fixture
def begun(tmp_path, monkeypatch) -> Path:
    """A folder with the first of two layers."""
    keep = resume.ResumeState.keep

    def keep_and_stop(self, *args):
        keep(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resume.ResumeState, "keep", keep_and_stop)
        with pytest.raises(KeyboardInterrupt):
            torch_offload.compress(model_of(), bits=0.9, calibration=tokens(), out=tmp_path)
    return tmp_path


def test_beginnings_of_something_else_are_refused(begun):
    """Method: another rate, another text, one weight changed, one number of the configuration changed."""
    other, choosing = model_of(), model_of(num_experts_per_tok=1)
    assert all(same_bits(value, choosing.state_dict()[name]) for name, value in model_of().state_dict().items())
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    for model, bits, texts in (
        (model_of(), 1.0, tokens()),
        (model_of(), 0.9, tokens(seed=4)),
        (other, 0.9, tokens()),
        (choosing, 0.9, tokens()),
    ):
        with pytest.raises(ConfigError, match="another model, or with other settings or texts"):
            torch_offload.compress(model, bits=bits, calibration=texts, out=begun)


def test_models_that_are_coded_in_part_are_refused(begun):
    """Method: the model of a call that was ended, given again in the same process, with the folder and without."""
    model = model_of()
    (first, _) = experts_of(model)
    moe.code_experts(model.model.layers[0], functools.partial(ternary.in_planes, zeros=(0.6,)))
    for out in (None, begun):
        with pytest.raises(
            ConfigError, match=rf"compressed already \(first: {re.escape(first.name)}\).*reload the model"
        ):
            torch_offload.compress(model, bits=0.9, calibration=tokens(), out=out)


def test_the_folder_that_a_model_is_of_is_refused(tmp_path):
    model_of().save_pretrained(tmp_path)
    before = contents(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is the folder of the model itself, which would be lost"):
        torch_offload.compress(model, bits=0.9, calibration=tokens(), out=f"{tmp_path}/../{tmp_path.name}")
    assert contents(tmp_path) == before


def test_where_a_model_lay_is_no_part_of_what_it_is():
    """Method: the checksum of two models that differ in where they were loaded from and in what wrote them."""
    one, other = model_of(), model_of()
    other.config._name_or_path = "elsewhere"
    other.config.transformers_version = "1.0"
    assert resume.fingerprint_of(other, [], {}) == resume.fingerprint_of(one, [], {})


def test_damaged_beginnings_are_coded_again(begun, caplog):
    whole = begun / "whole"
    torch_offload.compress(model_of(), bits=0.9, calibration=tokens(), out=whole)
    expected = contents(whole)
    shutil.rmtree(whole)
    (block,) = (begun / resume.FOLDER).glob("block-*")
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 1
    block.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        torch_offload.compress(model_of(), bits=0.9, calibration=tokens(), out=begun)
    assert "is damaged; model.layers.0" in caplog.text
    assert contents(begun) == expected


def test_what_cannot_be_done_is_named():
    model = model_of()
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[3, 5, 6] = float("inf")
    with pytest.raises(
        UnsupportedModelError, match=r"expert 3 of model\.layers\.1\.mlp\.experts: .*not finite.*\(5, 6\)"
    ):
        torch_offload.compress(model, bits=0.9, calibration=tokens())
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts: 0.1 bits per weight are out of reach"):
        torch_offload.compress(model_of(), bits=0.1, calibration=tokens())
    with pytest.raises(UnsupportedModelError, match="Linear has no experts"):
        torch_offload.compress(nn.Linear(2, 2), calibration=tokens())
    with pytest.raises(ConfigError, match="give the tokenizer"):
        torch_offload.compress(model_of(), calibration=["text"])
    with pytest.raises(ConfigError, match="no tokens"):
        torch_offload.compress(model_of(), calibration=[])
    with pytest.raises(ConfigError, match="coder: 'qmoe' is none of smallest, tun12, rans4"):
        torch_offload.compress(model_of(), calibration=tokens(), coder="qmoe")


def test_a_model_larger_than_the_budget_allows_is_no_damaged_checkpoint(tmp_path, scratch):
    """Loading under a budget that is too small says so; it is no damaged file."""
    model_of().save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("some words")
    with pytest.raises(OutOfTierMemory, match=r"host tier: .* needed for .*; give a ram of at least"):
        compress_folder(
            tmp_path / "model",
            bits=0.9,
            calibration=tmp_path / "texts.txt",
            out=tmp_path / "out",
            rows=1,
            config=Config(ram="64KiB", ssd=scratch),
        )


def test_a_full_budget_is_answered_with_what_helps_here(scratch):
    """Method: a budget in which the model is paged, but the rounding of one expert does not fit."""
    model = torch_offload.wrap(
        model_of(), ram="4MiB", ssd=scratch, config={"min_paged_bytes": 4096, "page_elements": 4096}
    )
    with pytest.raises(OutOfTierMemory) as caught:
        torch_offload.compress(model, bits=0.9, calibration=tokens())
    assert str(caught.value).endswith("available; raise `ram`")


def test_each_layer_is_a_line_where_there_is_no_terminal(capfd):
    torch_offload.compress(model_of(), bits=0.9, calibration=tokens())
    assert capfd.readouterr().err.splitlines() == [
        "coding experts: 1 of 2, model.layers.0",
        "coding experts: 2 of 2, model.layers.1",
    ]


def test_the_coder_is_a_choice(tmp_path):
    """Method: what the folder says of its tiles; the total holds for each coder."""
    for coder in ("tun12", "rans4"):
        done = torch_offload.compress(model_of(), bits=1.2, calibration=tokens(), coder=coder, out=tmp_path / coder)
        tiles = [set(module.tiles) for module in inspection.inspect(tmp_path / coder).modules]
        assert tiles == [{coder.upper()}, {coder.upper()}]
        assert 0.97 * done.target_bytes < done.coded_bytes <= done.target_bytes


def test_texts_are_cut_into_rows():
    model = model_of()

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    batches = calibration.batches_of(["abcd", "efg"], model, tokenizer=tokenizer, sequence=4)
    assert [batch["input_ids"].tolist() for batch in batches] == [[[97, 98, 99, 100]], [[101, 102, 103]]]


def test_pages_go_where_they_save_the_most():
    """Method: of three like matrices the one that counts ten times as much gets the most; all pages are given."""
    points = {"bits": [0.4, 0.8, 1.2], "errors": [0.5, 0.3, 0.2]}
    curves = [RateCurve.make(**points, energy=energy, weights=1 << 20) for energy in (1.0, 10.0, 1.0)]
    given = share_sectors(curves, sectors=90, planes=1)
    assert sum(sum(pages) for pages in given) == 90
    assert given[1] > given[0] >= given[2]
    with pytest.raises(ConfigError, match=r"2 sectors for 3 matrices in 1 planes, \d+ is the least; give more bits"):
        share_sectors(curves, sectors=2, planes=1)


def test_lines_of_a_file_of_texts_end_where_lines_do(tmp_path):
    """Method: characters at which Python's lines end and JSON's do not."""
    texts = ["one\u2028two", "three\u0085four", "five\u2029six"]
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(lines).encode())
    assert calibration.texts_in(path) == texts


def test_a_long_text_comes_in_pieces(tmp_path, monkeypatch):
    """Method: cut behind the line that a piece's length falls into; all of it is there."""
    monkeypatch.setattr(calibration, "_PIECE", 5)
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo three\nfour\nfive six seven")
    assert calibration.texts_in(path) == ["one\ntwo three\n", "four\nfive six seven"]
    path.write_text("")
    assert calibration.texts_in(path) == []


def test_texts_behind_the_rows_that_are_used_are_not_looked_at():
    """Method: a tokenizer that counts; the rows are the first ones of all."""
    seen: list[str] = []

    def tokenizer(text: str) -> dict[str, list[int]]:
        seen.append(text)
        return {"input_ids": [ord(letter) for letter in text]}

    texts = ["abcd", "efg", "hijkl", "mnop"]
    model = model_of()
    every = calibration.batches_of(texts, model, tokenizer=tokenizer, sequence=4)
    seen.clear()
    first = calibration.batches_of(texts, model, tokenizer=tokenizer, sequence=4, rows=2)
    assert seen == texts[:3]
    assert [batch["input_ids"].tolist() for batch in first] == [batch["input_ids"].tolist() for batch in every[:2]]


@pytest.mark.parametrize("samples", ["a text", Path("text.jsonl"), {"input_ids": torch.ones(1, 4)}])
def test_one_sample_in_place_of_several_is_refused(samples):
    with pytest.raises(ConfigError, match=f"calibration is one {type(samples).__name__}; give a list of texts"):
        torch_offload.compress(model_of(), calibration=samples, tokenizer=lambda text: {"input_ids": [1, 2]})


@pytest.mark.parametrize(("count", "warnings"), [(4095, 1), (4096, 0)])
def test_few_tokens_are_warned_of(count, warnings, caplog):
    """Method: compress with a rate that is refused right after."""
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="out of reach"):
        torch_offload.compress(model_of(), bits=0.1, calibration=[torch.ones(1, count, dtype=torch.int64)])
    assert caplog.text.count("calibration has only 4095 tokens") == warnings
    assert len(caplog.records) == warnings


def test_progress_is_a_bar_on_a_terminal():
    """Method: a console that takes itself for a terminal; the bar names the task, the step and how many are done."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress(console, "coding experts", uses_lines=True) as show:
        show("model.layers.1", 1, 2)
    shown = console.file.getvalue()
    assert "coding experts" in shown
    assert "1/2 model.layers.1" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
