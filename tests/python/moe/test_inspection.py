"""The commands on coded models: what compress writes, inspect and verify say; what is damaged is named."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bits import same_bits
from support.command import run_main
from support.moe_models import EXPERTS, VOCABULARY, tiny_moe
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    SwitchTransformersForConditionalGeneration,
)

import torch_offload
from torch_offload import CheckpointError, Config, moe
from torch_offload.compression.compress import compress_folder
from torch_offload.moe import checkpoint, inspection, ternary
from torch_offload.moe.activate import experts_of
from torch_offload.moe.modules import CodedExperts

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.any_torch]

MODULE = "model.layers.1.mlp.experts"
PAGE = f"{MODULE}.coded.planes.1.blob_2"
SCALE = f"{MODULE}.coded.planes.0.down_row_scale"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A coded model of two planes."""
    folder = tmp_path_factory.mktemp("coded")
    model = tiny_moe("mixtral", hidden_size=192, intermediate_size=256, num_hidden_layers=2)
    torch.manual_seed(1)
    torch_offload.compress(model, bits=1.9, calibration=[torch.randint(1, VOCABULARY, (4, 32))], out=folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def experts_file(folder: Path) -> Path:
    return next(folder.glob("experts-*.safetensors"))


def change_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_inspect_says_what_is_there(whole):
    """Method: against the loaded model's buffers and decoded values."""
    content = inspection.inspect(whole)
    model = AutoModelForCausalLM.from_pretrained(whole)
    coded = {name: module for name, module in model.named_modules() if isinstance(module, CodedExperts)}
    assert [module.name for module in content.modules] == [name.removesuffix(".coded") for name in coded]
    for said, module in zip(content.modules, coded.values(), strict=True):
        pages = [plane.blob(expert) for plane in module.planes for expert in range(EXPERTS)]
        scales = sum(buffer.numel() * 2 for name, buffer in module.named_buffers() if name.endswith("_scale"))
        values = torch.cat(
            [torch_offload.moe.operators.decode(page, at).reshape(-1) for page in pages for at in (0, 1)]
        )
        assert said.coded_bytes == sum(page.numel() for page in pages) + scales
        assert said.zeros == pytest.approx(float((values == 0).float().mean()))
        assert (said.experts, said.planes) == (EXPERTS, 2)
        assert said.weights * 2 == values.numel() == said.bf16_bytes
        assert set(said.tiles) <= {"TUN12", "RANS4"}
        assert sum(said.tiles.values()) >= 2 * len(pages)
    assert content.total.bits == pytest.approx(1.9, rel=0.06)  # names and the fill of the file are not counted here
    assert content.total.coded_bytes == sum(module.coded_bytes for module in content.modules)


def test_inspect_as_a_command(whole, monkeypatch, capsys):
    assert run_main(monkeypatch, "inspect", str(whole)) == 0
    text = capsys.readouterr().out
    assert MODULE in text
    assert "bits/weight" in text
    assert run_main(monkeypatch, "inspect", str(whole), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [module["name"] for module in said["modules"]][1] == MODULE
    assert said["total"]["planes"] == 2


def test_verify_finds_nothing_in_a_good_folder(whole, monkeypatch, capsys):
    assert run_main(monkeypatch, "verify", str(whole)) == 0
    assert f"{2 * 2 * EXPERTS} blobs" in capsys.readouterr().out


def damage_page(folder: Path) -> str:
    change_tensors(experts_file(folder), lambda tensors: tensors[PAGE][300].bitwise_xor_(4))
    return f"expert 2 of {MODULE}, plane 1: "


def forge_page(folder: Path) -> str:
    """Another content with a checksum that is right."""

    def forge(tensors: dict[str, Tensor]) -> None:
        page = tensors[PAGE]
        first = torch_offload.moe.operators.extents(page)[0]
        page[first.coded_bytes // 2 : first.coded_bytes] = 0xFF
        checksum = xxhash.xxh3_64_intdigest(bytes(page[16 : first.size_bytes].tolist()))
        page[8:16] = torch.tensor(list(checksum.to_bytes(8, "little")), dtype=torch.uint8)
        assert torch_offload.moe.operators.extents(page)[0] == first

    change_tensors(experts_file(folder), forge)
    return f"expert 2 of {MODULE}, plane 1: "


def drop_page(folder: Path) -> str:
    change_tensors(experts_file(folder), lambda tensors: tensors.pop(PAGE))
    return f"expert 2 of {MODULE}, plane 1: "


def swap_matrices(folder: Path) -> str:
    def swap(tensors: dict[str, Tensor]) -> None:
        first = torch_offload.moe.operators.extents(tensors[PAGE])[0].size_bytes
        tensors[PAGE] = torch.cat([tensors[PAGE][first:], tensors[PAGE][:first]])

    change_tensors(experts_file(folder), swap)
    return "matrices of [(192, 256), (512, 192)], the model has [(512, 192), (192, 256)]"


def cut_file(folder: Path) -> str:
    path = experts_file(folder)
    path.write_bytes(path.read_bytes()[:-4096])
    return path.name


def delete_file(folder: Path) -> str:
    path = experts_file(folder)
    path.unlink()
    return path.name


def spoil_scale(folder: Path) -> str:
    change_tensors(folder / "model-00001-of-00001.safetensors", lambda tensors: tensors[SCALE].fill_(float("nan")))
    return f"{SCALE}: not all of it is finite"


def drop_dense_tensor(folder: Path) -> str:
    change_tensors(folder / "model-00001-of-00001.safetensors", lambda tensors: tensors.pop("lm_head.weight"))
    return "lm_head.weight is missing"


def claim_other_size(folder: Path) -> str:
    path = folder / "config.json"
    said = json.loads(path.read_text())
    said["quantization_config"]["experts"][MODULE]["blob_bytes"][1][2] += 4096
    path.write_text(json.dumps(said))
    return f"expert 2 of {MODULE}, plane 1: "


def change_model(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": EXPERTS + 1}))
    return f"{MODULE}: [{EXPERTS}] experts in the files, {EXPERTS + 1} in the model"


def forget_module(folder: Path) -> str:
    path = folder / "config.json"
    said = json.loads(path.read_text())
    del said["quantization_config"]["experts"][MODULE]
    path.write_text(json.dumps(said))
    return f"{MODULE}: the model has such experts, the configuration names no coded ones of them"


def forget_tensor(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    said = json.loads(path.read_text())
    del said["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(said))
    change_tensors(folder / "model-00001-of-00001.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    return "model.norm.weight: the model has such a tensor, the index does not name it"


def retype_page(folder: Path) -> str:
    change_tensors(experts_file(folder), lambda tensors: tensors.update({PAGE: tensors[PAGE].view(torch.float32)}))
    return "expected a 1-D torch.uint8 tensor, got torch.float32 of shape "


DAMAGES = [
    retype_page,
    damage_page,
    forge_page,
    drop_page,
    swap_matrices,
    cut_file,
    delete_file,
    spoil_scale,
    drop_dense_tensor,
    claim_other_size,
    change_model,
    forget_module,
    forget_tensor,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_what_is_damaged(folder, damage, monkeypatch, capsys):
    """Method: exit status 1, a line with the place; as JSON the same."""
    named = damage(folder)
    assert run_main(monkeypatch, "verify", str(folder)) == 1
    assert named in capsys.readouterr().out
    assert run_main(monkeypatch, "verify", str(folder), "--json") == 1
    assert any(named in problem for problem in json.loads(capsys.readouterr().out)["problems"])


@pytest.mark.parametrize("damage", [damage_page, forget_module, forget_tensor])
def test_verify_names_only_what_is_damaged(folder, damage):
    damage(folder)
    assert len(inspection.verify(folder).problems) == 1


@pytest.mark.parametrize(
    ("damage", "named"), [(forget_module, f"{MODULE}.gate_up_proj"), (forget_tensor, "model.norm.weight")]
)
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_folders_of_which_a_part_is_missing_are_not_opened(folder, damage, named, auto):
    """Method: transformers would fill such tensors with random numbers, whatever the model's head."""
    damage(folder)
    inside = named.removeprefix("model.") if auto is AutoModel else named
    with pytest.raises(CheckpointError, match=rf"are not in the files, the first {re.escape(inside)};"):
        auto.from_pretrained(folder)


def test_other_heads_are_opened(whole, config):
    """Method: a head that the saved model did not have is new; the same while what is loaded is paged."""
    assert AutoModel.from_pretrained(whole).layers[1].mlp.experts.coded is not None
    with torch_offload.loading(config=config):
        model = AutoModelForSequenceClassification.from_pretrained(whole)
    assert experts_of(model)[1].is_coded
    assert model.score.weight.any()


@pytest.mark.parametrize("name", ["mixtral", "switch"])
def test_tied_tensors_and_experts_as_they_were_are_not_missing(name, tmp_path):
    """Method: embeddings that are the head too, and one module of experts that is not coded."""
    model = tiny_moe(name, tie_word_embeddings=True, num_hidden_layers=2)
    model.tie_weights()
    moe.code_experts(model, functools.partial(ternary.in_planes, zeros=(0.6,)))
    plain = experts_of(tiny_moe(name, num_hidden_layers=2))[0]
    owner = model.get_submodule(plain.name.rpartition(".")[0])
    owner.experts = plain.module
    checkpoint.save(model, tmp_path)
    assert len(inspection.CodedFolder(tmp_path).config.experts) == 1
    assert inspection.verify(tmp_path).problems == []
    auto = SwitchTransformersForConditionalGeneration if name == "switch" else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path)
    assert [experts.is_coded for experts in experts_of(loaded)] == [False, True]
    assert same_bits(experts_of(loaded)[0].weight(1, 0), plain.weight(1, 0))


@pytest.mark.parametrize("damage", [damage_page, cut_file, delete_file])
def test_inspect_ends_with_one_line(folder, damage, monkeypatch, capsys):
    damage(folder)
    assert run_main(monkeypatch, "inspect", str(folder)) == 1
    said = capsys.readouterr()
    assert said.err.startswith("torch-offload: model.layers.")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_folders_of_something_else_are_named(command, tmp_path, monkeypatch, capsys):
    """Method: nothing, a plain model, a broken configuration."""
    assert run_main(monkeypatch, command, str(tmp_path / "gone")) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert run_main(monkeypatch, command, str(tmp_path)) == 2
    assert "has no coded experts" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"quantization')
    assert run_main(monkeypatch, command, str(tmp_path)) == 2
    assert "is damaged" in capsys.readouterr().err


def save_plain(folder: Path, **sizes: int) -> Path:
    """A model with a tokenizer of letters, and texts."""
    tiny_moe("mixtral", **sizes).save_pretrained(folder)
    letters = {chr(code): code for code in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    lines = [json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 3}) for _ in range(8)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A plain model of one layer."""
    folder = tmp_path_factory.mktemp("saved")
    return save_plain(folder, hidden_size=192, intermediate_size=256, num_hidden_layers=1)


def test_compress_as_a_command(saved, tmp_path, monkeypatch, capsys):
    """Method: the folder is good, opens with its tokenizer, and runs."""
    arguments = ("--bits", "1.1", "--calibration", str(saved / "text.jsonl"), "--sequence", "64", "--rows", "12")
    assert run_main(monkeypatch, "compress", str(saved), *arguments, "--out", str(tmp_path), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert 0.97 * 1.1 < said["bits"] <= 1.1
    assert sum(said["modules"][0]["tokens"]) == 2 * 12 * 64
    assert inspection.verify(tmp_path).problems == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert experts_of(model)[0].is_coded
    ids = PreTrainedTokenizerFast.from_pretrained(tmp_path)("the lazy fox", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.isfinite().all()
    with safe_open(str(experts_file(tmp_path)), framework="pt") as file:
        assert len(list(file.keys())) == EXPERTS


def test_the_tokenizer_is_there_before_the_folder_is_finished(saved, tmp_path, monkeypatch):
    """Method: a write of the model that fails, as the last thing that is done."""

    def fail(*args: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(checkpoint, "save", fail)
    with pytest.raises(OSError, match="no room"):
        compress_folder(
            saved,
            bits=1.1,
            calibration=saved / "text.jsonl",
            out=tmp_path / "out",
            rows=1,
            sequence=64,
            config=Config(ram="1GiB"),
        )
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")("the fox")["input_ids"]


def test_a_model_larger_than_memory_is_compressed(tmp_path, monkeypatch, capsys):
    """Method: a model of three times the budget, which is never exceeded; the same files as in memory."""
    saved = save_plain(tmp_path, hidden_size=128, intermediate_size=256, num_hidden_layers=24)
    files = {}
    for ram in ("1GiB", "12MiB"):
        out = tmp_path / ram
        arguments = ("--bits", "1.3", "--calibration", str(saved / "text.jsonl"), "--sequence", "64", "--rows", "2")
        assert run_main(monkeypatch, "compress", str(saved), *arguments, "--out", str(out), "--ram", ram) == 0
        report = torch_offload.report()
        files[ram] = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    model_bytes = (saved / "model.safetensors").stat().st_size
    assert model_bytes > 3 * report.budget_bytes
    assert report.host_peak_bytes <= report.budget_bytes == 12 << 20
    assert report.ssd_read_bytes > model_bytes, report
    assert len(files["1GiB"]) == 2
    assert files["12MiB"] == files["1GiB"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "{saved}/gone"}, "there is no folder"),
        ({"--calibration": "{saved}/gone.jsonl"}, "there is no calibration text at"),
        ({"--calibration": "{saved}/bad.jsonl"}, 'bad.jsonl:2: expected an object with a string "text"'),
        ({"--bits": "0.2"}, "0.2 bits per weight are out of reach"),
        ({"--bits": "many"}, "'--bits'"),
        ({"--coder": "zip"}, "coder: 'zip' is none of smallest, tun12, rans4"),
        ({"--out": "{saved}/../{saved.name}"}, "is the folder of the model itself, which would be lost"),
    ],
)
def test_mistakes_of_compress_are_named(saved, tmp_path, monkeypatch, capsys, changes, expected):
    (saved / "bad.jsonl").write_text('{"text": "a"}\n{"words": "b"}\n')
    given = {
        "model": "{saved}",
        "--bits": "1.1",
        "--calibration": "{saved}/text.jsonl",
        "--out": str(tmp_path),
    } | changes
    model, *options = given.items()
    arguments = [part.format(saved=saved) for option in options for part in option]
    assert run_main(monkeypatch, "compress", model[1].format(saved=saved), *arguments) == 2
    assert expected in capsys.readouterr().err
    assert not list(saved.glob("experts-*"))


def cut_weights(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    return f"{path} is damaged: "


def widen(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 320}))
    return f"{folder} holds no model that transformers can load: "


@pytest.mark.parametrize("damage", [cut_weights, widen])
def test_models_that_cannot_be_loaded_are_named(saved, tmp_path, damage, monkeypatch, capsys):
    """Method: a file that is cut short, and tensors of other shapes than the configuration's: a line, no traceback."""
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    expected = damage(copy)
    arguments = ("--bits", "1.1", "--calibration", str(saved / "text.jsonl"), "--out", str(tmp_path / "out"))
    assert run_main(monkeypatch, "compress", str(copy), *arguments) == 2
    assert f"torch-offload: {expected}" in capsys.readouterr().err


def test_what_save_pretrained_wrote_over_a_folder_is_not_taken_for_it(folder):
    """Its one file goes before the index and the pages that were there."""
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    for read in (inspection.verify, inspection.inspect):
        with pytest.raises(CheckpointError, match="was written by save_pretrained"):
            read(folder)


def test_a_future_format_is_refused(folder):
    path = folder / "config.json"
    said = json.loads(path.read_text())
    said["quantization_config"]["coded_format"] = 2
    path.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="expected coded experts of format 1, got format 2"):
        inspection.verify(folder)


CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
NO_FILE = "which is not in this folder"


def put(folder: Path, name: str, keys: tuple, text: str) -> None:
    """Put JSON, good or not, in place of a value in a file."""
    path = folder / name
    said = json.loads(path.read_text())
    owner = said
    for key in keys[:-1]:
        owner = owner[key]
    owner[keys[-1]] = "@"
    path.write_text(json.dumps(said).replace('"@"', text))


SPOILED_FILES = [
    (INDEX, ("weight_map", PAGE), "[" * 5000 + "]" * 5000, "is damaged"),
    (INDEX, ("metadata", "total_size"), "9" * 5000, "is damaged"),
    (INDEX, ("weight_map", PAGE), r'"\ud800.safetensors"', "is damaged"),
    (INDEX, ("weight_map", PAGE), "null", NO_FILE),
    (INDEX, ("weight_map", PAGE), "[]", NO_FILE),
    (INDEX, ("weight_map", PAGE), '"../copy/model-00001-of-00001.safetensors"', NO_FILE),
    (INDEX, ("weight_map", PAGE), r'"\u0000.safetensors"', NO_FILE),
    (INDEX, ("weight_map", "lm_head.weight"), "{}", NO_FILE),
]
SAID = "quantization_config"
NO_SIZES = ("1", "[]", "[[]]", "[1]", "{}", "[[8192.0]]", "[[true]]", "[[-4096]]", "[[4097]]", f"[[{1 << 70}]]")
SPOILED_CONFIGS = [
    ((SAID, "coded_format"), "[[[[[[[[]]]]]]]]", "format "),
    ((SAID, "planes"), '"best"', "planes: expected one of base, all, resident, got 'best'"),
    ((SAID, "planes"), "[]", "planes: "),
    ((SAID, "experts"), "null", "experts: expected a mapping of modules to blob sizes, got None"),
    ((SAID, "experts"), "[]", "experts: "),
    ((SAID, "experts", MODULE), "1", f"blob_bytes of {MODULE}"),
    ((SAID, "experts", MODULE), "{}", f"blob_bytes of {MODULE}"),
    *(((SAID, "experts", MODULE, "blob_bytes"), sizes, f"blob_bytes of {MODULE}") for sizes in NO_SIZES),
]


@pytest.mark.parametrize(("name", "keys", "text", "expected"), SPOILED_FILES)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_cannot_be_in_an_index_is_named(folder, command, name, keys, text, expected, monkeypatch, capsys):
    """Found by the fuzzer: nesting, numbers and characters that Python refuses; files that are none, or elsewhere."""
    put(folder, name, keys, text)
    assert run_main(monkeypatch, command, str(folder)) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("keys", "text", "expected"), SPOILED_CONFIGS)
def test_what_cannot_be_in_a_configuration_is_named(folder, keys, text, expected, monkeypatch, capsys):
    """Found by the fuzzer. Method: by inspect, by verify and by from_pretrained."""
    put(folder, CONFIG, keys, text)
    for command in ("inspect", "verify"):
        assert run_main(monkeypatch, command, str(folder)) == 2
        assert expected in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("num_hidden_layers", str(10**9), "num_hidden_layers is 1000000000, the index has "),
        ("num_local_experts", str(10**9), "num_local_experts is 1000000000, the index has "),
        ("num_attention_heads", "0", "describes no model that transformers knows: ZeroDivisionError"),
        ("eos_token_id", '"a"', "describes no model that transformers knows: StrictDataclass"),
        ("architectures", '["utils"]', "describes no model that transformers knows: AttributeError"),
        ("dtype", '"a"', "describes no model that transformers knows: AttributeError"),
    ],
)
def test_a_model_that_cannot_be_is_named(folder, name, text, expected, monkeypatch, capsys):
    """Found by the fuzzer: whatever transformers makes of such a value, verify ends with one line."""
    put(folder, CONFIG, (name,), text)
    assert run_main(monkeypatch, "verify", str(folder)) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert said.err.count("\n") == 1


def claim_many_columns(folder: Path) -> str:
    """A matrix of some GiB: the checksum of its few bytes is right."""

    def forge(tensors: dict[str, Tensor]) -> None:
        page = tensors[PAGE]
        size_bytes = torch_offload.moe.operators.extents(page)[0].size_bytes
        page[44:48] = torch.tensor(list((1 << 24).to_bytes(4, "little")), dtype=torch.uint8)
        checksum = xxhash.xxh3_64_intdigest(bytes(page[16:size_bytes].tolist()))
        page[8:16] = torch.tensor(list(checksum.to_bytes(8, "little")), dtype=torch.uint8)

    change_tensors(experts_file(folder), forge)
    return "matrices of [(512, 16777216), "


@pytest.mark.parametrize("damage", [retype_page, claim_many_columns])
def test_inspect_names_pages_that_cannot_be(folder, damage, monkeypatch, capsys):
    """Found by the fuzzer. Method: a page of another type; one whose matrix would fill any memory."""
    named = damage(folder)
    assert run_main(monkeypatch, "inspect", str(folder)) == 1
    assert f"{PAGE}: {named}" in capsys.readouterr().err


def test_names_are_no_markup():
    """Method: a folder and a module with names that rich would read as the end of a style."""
    module = inspection.ModuleContent("[/b]", 1, 1, 1, 0.5, {"TUN12": 1}, 4096)
    console = Console(width=160)
    with console.capture() as shown:
        console.print(inspection.FolderContent(Path("x[/a]"), [module]))
    assert "coded experts in x[/a]" in shown.get()
    assert "[/b]" in shown.get()
