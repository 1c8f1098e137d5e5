"""Settings are read exactly or refused in words that say what to write instead."""

import ast
import contextlib
import copy
import dataclasses
import inspect
import pickle
import sys
import types
from decimal import Decimal
from pathlib import Path

import pytest
from accelerate.utils.memory import should_reduce_batch_size
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import HfArgumentParser, TrainingArguments

import torch_offload
from torch_offload import Config, ConfigError, Emulation, OffloadError, OutOfTierMemory
from torch_offload.config import format_size, parse_size, setting_fields
from torch_offload.runtime.settings import requested

pytestmark = pytest.mark.any_torch

BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
DECIMAL = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {"": 1, "B": 1} | BINARY | DECIMAL


@given(count=st.integers(0, 10**6), unit=st.sampled_from(sorted(UNITS)), gap=st.sampled_from(["", " ", "  "]))
def test_whole_sizes_mean_count_times_unit(count, unit, gap):
    """Every unit, with and without a space, in any case."""
    for text in (f"{count}{gap}{unit}", f" {count}{gap}{unit.lower()} ", f"{count}{gap}{unit.upper()}"):
        assert parse_size(text) == count * UNITS[unit]


@given(count=st.decimals(0, 4096, places=3), unit=st.sampled_from(sorted(UNITS)))
def test_fractions_are_exact_down_to_the_byte(count, unit):
    """No rounding through binary floating point."""
    assert parse_size(f"{count}{unit}") == int(Decimal(count) * UNITS[unit])


@given(size=st.integers(0, 2**62))
def test_numbers_are_bytes(size):
    """A number needs no unit."""
    assert parse_size(size) == size
    assert parse_size(str(size)) == size


@given(text=st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text):
    """No other exception, no silent guess."""
    with contextlib.suppress(ConfigError):
        assert parse_size(text) >= 0


@pytest.mark.parametrize(
    "size", ["24G", "GiB", "", "1,5GiB", "1e9", "-3GiB", "0x10", "12 parsecs", "١GiB", 1.5, True, None, []]
)
def test_a_size_that_does_not_parse_names_the_accepted_forms(size):
    """The message can be acted on without the manual."""
    with pytest.raises(ConfigError, match=r"accepted: a whole number of bytes, or a string such as '24GiB'"):
        parse_size(size)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_written_in_the_largest_unit(size, text):
    """What messages show."""
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ramm": "1GiB"}, "unknown setting 'ramm'; did you mean 'ram'?"),
        ({"min_page_bytes": 0}, "did you mean 'min_paged_bytes'?"),
        ({"io": "auto"}, "did you mean 'io_engine'?"),
        (
            {"zzz": 1},
            "there are: gpu, ram, ssd, keep_free, max_spill, checkpoint_pages, activations, optimizer_device, "
            "update, gpu_reserved, report, plan, trace, status_line, watchdog, min_paged_bytes, page_elements, "
            "queue_depth, io_engine, io_timeout, emulation",
        ),
        ({"ram": 0}, "ram: expected more than 0, got 0"),
        ({"ram": -1}, "ram: a size cannot be negative, got -1"),
        ({"ram": "24G"}, "ram: cannot read '24G' as a size"),
        ({"page_elements": 1000}, "page_elements: expected a multiple of 4096, got 1000"),
        ({"page_elements": 0}, "page_elements: expected more than 0, got 0"),
        ({"queue_depth": 0}, "queue_depth: expected at least 1, got 0"),
        ({"queue_depth": "8"}, "queue_depth: expected a whole number, got '8'"),
        ({"queue_depth": 8192}, "queue_depth: expected at most 4096, got 8192"),
        ({"io_timeout": 0}, "io_timeout: expected at least 1, got 0"),
        ({"io_engine": "aio"}, "io_engine: expected 'auto', 'uring_fixed', 'uring' or 'threads', got 'aio'"),
        ({"gpu": "cuda"}, "gpu: cannot read 'cuda' as a size"),
        ({"device": "24GiB"}, "unknown setting 'device'; did you mean 'gpu'?"),
        ({"emulation": {"gppu": True}}, "unknown setting 'emulation.gppu'; did you mean 'emulation.gpu'?"),
        ({"emulation": 7}, "emulation: expected a mapping of settings, got 7"),
        ({"emulation": {1: 2}}, "emulation: expected the names of settings, such as 'ram', as keys, got 1"),
        ({"ssd": 7}, "ssd: expected a directory or a list of directories, got 7"),
        ({"ssd": [7]}, "ssd.0: expected a path, got 7"),
        ({"ssd": "store://h"}, "ssd: expected host:port, such as 10.0.0.1:7000 or [::1]:7000, got 'h'"),
        ({"ssd": "store://h:65536"}, "ssd: expected host:port"),
        ({"ssd": "store://h:0"}, "ssd: a store listens at a port from 1 on, got h:0"),
        ({"ssd": ["a", "store://h:1"]}, "ssd: store://h:1 cannot be together with directories; give stores, or dir"),
        ({"ssd": "store://h:1,a"}, "ssd: expected host:port, such as 10.0.0.1:7000 or [::1]:7000, got 'a'"),
        ({"ssd": "store://h:1,,i:1"}, "ssd: expected a comma between two stores only, such as store://10.0.0.1:7000,"),
        ({"ssd": "store://h:1,"}, "7000, got 'store://h:1,'"),
        ({"ssd": "store://h:1,i:0"}, "ssd: a store listens at a port from 1 on, got i:0"),
        ({"ssd": "store://h:1,i:1,h:1/"}, "ssd: h:1 is there twice; name each store once"),
        ({"ssd": ["store://h:1", "store://h:1"]}, "ssd: h:1 is there twice; name each store once"),
        ({"ssd": "store://h:1", "keep_free": 0}, "keep_free: this is of a disk here, and pages go to store://h:1"),
        ({"ssd": "store://h:1", "max_spill": 1}, "max_spill: this is of a disk here, and pages go to store://h:1"),
        ({"ssd": "store://h:1", "emulation": {"ssd_rate": 1}}, "emulation: ssd_rate is of a disk here, and pages go"),
        ({"report": 7}, "report: expected a path, got 7"),
        ({"trace": 7}, "trace: expected true, false or the path of a file, got 7"),
        ({"status_line": 1}, "status_line: expected true or false, got 1"),
    ],
)
def test_bad_settings_are_config_errors(settings, message):
    """Unknown names come with the nearest one, bad values with what was expected and got."""
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert message in str(caught.value)
    assert not any(word in str(caught.value) for word in ("Input", "valid", "pathlib", "lax"))
    assert isinstance(caught.value, OffloadError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("engine", "io_engine"),
        ("depth", "queue_depth"),
        ("ssd_dir", "ssd"),
        ("gpu_memory", "gpu"),
        ("rm", "ram"),
        ("config", None),
        ("directory", None),
        ("memory", None),
        ("threads", None),
    ],
)
def test_a_name_is_suggested_where_it_shares_a_word_or_most_letters(name, nearest):
    """A setting that has nothing to do with the unknown name sends its reader the wrong way."""
    with pytest.raises(ConfigError) as caught:
        Config(**{name: 1})
    suggested = "; there are: " if nearest is None else f"; did you mean {nearest!r}?"
    assert f"unknown setting {name!r}{suggested}" in str(caught.value)


@pytest.mark.parametrize("address", ["10.0.0.1:7000", "node-3:1", "[fe80::1]:65535"])
def test_a_store_is_one_place_and_stays_what_it_is(address):
    """In a list or alone, through the text that child processes get, and for every rank."""
    config = Config(ssd=f"store://{address}")
    assert config == Config(ssd=[f"store://{address}/"]) == Config(**config.model_dump(mode="json", exclude_unset=True))
    assert (config.stores, config.directories_of(3)) == ((address,), ())
    assert config.replace(ram="1GiB").stores == (address,)
    with pytest.raises(ConfigError, match="about a disk of this machine"):
        _ = config.scratch_directory


@pytest.mark.parametrize(
    "written",
    [
        "store://node-1:7,[::1]:8,10.0.0.1:9",
        "store://node-1:7/, store://[::1]:8/,10.0.0.1:9",
        ["store://node-1:7", "store://[::1]:8,10.0.0.1:9"],
    ],
)
def test_several_stores_are_one_text_however_they_are_written(written):
    """In one text, with or without the scheme of each, or as the command line gives an option that comes twice."""
    config = Config(ssd=written)
    assert config.ssd == "store://node-1:7,[::1]:8,10.0.0.1:9"
    assert config.stores == ("node-1:7", "[::1]:8", "10.0.0.1:9")
    assert config == Config(**config.model_dump(mode="json", exclude_unset=True))


def test_every_bad_setting_is_named_at_once():
    """One run shows all mistakes."""
    with pytest.raises(ConfigError) as caught:
        Config(ramm=1, queue_depth=0, io_engine="x")
    assert all(word in str(caught.value) for word in ("'ramm'", "queue_depth", "io_engine"))


def test_mappings_are_checked_like_arguments():
    """A Config read from a file obeys the same rules."""
    assert Config.model_validate({"ram": "2GiB"}) == Config(ram=2 << 30)
    with pytest.raises(ConfigError, match="did you mean 'ram'"):
        Config.model_validate({"rm": 1})


def test_a_key_that_is_no_string_is_refused():
    """In a dict of Python; in a file, with its line."""
    for read in (Config.combine, Config.model_validate):
        with pytest.raises(ConfigError, match="expected the names of settings, such as 'ram', as keys, got 1"):
            read({1: 2})
    for text, line in (("ram: 1GiB\n1: 2", 2), ("emulation:\n  gpu: true\n  1: 2", 3)):
        with pytest.raises(ConfigError, match=f"offload.yaml:{line}: expected the name of a setting, .* got 1"):
            Config.from_text(text, source="offload.yaml")


def test_a_config_does_not_change():
    """A changed copy is checked like a new one, and the original stays."""
    config = Config(ram="1GiB", ssd="~/scratch")
    with pytest.raises(ConfigError, match=r"replace\(ram=\.\.\.\)"):
        config.ram = 3
    assert config.replace(queue_depth=4) == Config(ram=1 << 30, ssd=Path.home() / "scratch", queue_depth=4)
    with pytest.raises(ConfigError, match="queue_depth"):
        config.replace(queue_depth=0)
    assert config.queue_depth == 16


def test_a_config_can_be_copied_and_pickled():
    """It travels to worker processes."""
    config = Config(ram="1.5GiB", min_paged_bytes="1MiB", io_engine="threads")
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_the_typed_constructor_has_every_setting_with_its_default():
    """The signature that type checkers see is written by hand; the settings are defined by the fields."""
    for model in (Config, Emulation):
        body = next(
            node
            for node in ast.walk(ast.parse(inspect.getsource(sys.modules[model.__module__])))
            if isinstance(node, ast.ClassDef) and node.name == model.__name__
        )
        typed = next(node for node in ast.walk(body) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        names = [argument.arg for argument in typed.args.kwonlyargs]
        known = vars(sys.modules[model.__module__])
        defaults = [eval(ast.unparse(default), known) for default in typed.args.kw_defaults]
        fields = {name: field.default for name, field in model.model_fields.items()}
        assert dict(zip(names, defaults, strict=True)) == fields


def test_a_dict_is_a_configuration(scratch):
    module = torch_offload.wrap(nn.Linear(64, 64), config={"ram": "8MiB", "ssd": str(scratch), "min_paged_bytes": 0})
    assert torch_offload.report().budget_bytes == 8 << 20
    torch_offload.unwrap(module)
    with pytest.raises(ConfigError, match="unknown setting 'rma'; did you mean 'ram'"):
        torch_offload.wrap(module, config={"rma": "8MiB"})
    with pytest.raises(ConfigError, match=r"expected a torch_offload\.Config, a dict or 'auto', got int"):
        torch_offload.wrap(module, config=8)
    with pytest.raises(
        ConfigError, match=r"got 'offload\.yaml'; read a file by config=torch_offload\.Config\.from_file"
    ):
        torch_offload.wrap(module, config="offload.yaml")


def test_an_argument_that_is_none_is_named_with_the_one_to_use():
    for function in (
        torch_offload.wrap,
        lambda _, **options: torch_offload.loading(**options).__enter__(),
        lambda model, **options: torch_offload.plan(model, {}, **options),
    ):
        with pytest.raises(ConfigError, match=r"has no argument 'device'; give gpu= the size of the GPU memory"):
            function(nn.Linear(1, 1), device="cuda")
        with pytest.raises(ConfigError, match="unknown setting 'rma'; did you mean 'ram'"):
            function(nn.Linear(1, 1), rma="1GiB")
        with pytest.raises(ConfigError, match="has no argument 'queue_depth'; give it as config="):
            function(nn.Linear(1, 1), queue_depth=4)


def test_arguments_come_before_the_configuration_and_that_before_the_variable(scratch, monkeypatch):
    monkeypatch.setenv("TORCH_OFFLOAD_CONFIG", '{"ram": "4MiB", "min_paged_bytes": 0, "page_elements": 4096}')
    assert requested(None, ram="8MiB") == Config(ram="8MiB", min_paged_bytes=0, page_elements=4096)
    assert requested({"queue_depth": 4}, ram="8MiB") == Config(ram="8MiB", queue_depth=4)
    module = torch_offload.wrap(nn.Linear(64, 64), ssd=scratch)
    assert torch_offload.report().budget_bytes == 4 << 20
    torch_offload.unwrap(module)


def test_arguments_of_a_script_are_settings(tmp_path):
    """Method: the parser of transformers, with training arguments beside ours."""
    file = tmp_path / "offload.yaml"
    file.write_text("queue_depth: 8\nram: 1GiB\n")
    parser = HfArgumentParser((torch_offload.OffloadArguments, TrainingArguments))
    words = f"--output_dir {tmp_path} --offload_ram 2GiB --offload_ssd {tmp_path} --offload_activations page".split()
    arguments, training = parser.parse_args_into_dataclasses([*words, "--offload_config", str(file)])
    assert arguments.to_config() == Config(ram="2GiB", ssd=tmp_path, activations="page", queue_depth=8)
    assert training.output_dir == str(tmp_path)
    names = {field.name.removeprefix("offload_") for field in dataclasses.fields(torch_offload.OffloadArguments)}
    assert names == {*Config.model_fields, "config"} - {"emulation"}


def test_arguments_of_a_script_that_override_are_named(tmp_path, caplog, monkeypatch):
    """Once for the file, once for the variable; an argument that overrides nothing is not."""
    file = tmp_path / "offload.yaml"
    file.write_text("ram: 1GiB\nqueue_depth: 8\n")
    arguments = torch_offload.OffloadArguments(offload_ram="2GiB", offload_page_elements=4096)
    assert arguments.to_config().ram == 2 << 30
    assert caplog.messages == []
    arguments.offload_config = str(file)
    assert arguments.to_config() == Config(ram="2GiB", page_elements=4096, queue_depth=8)
    assert caplog.messages == [f"--offload_ram on the command line overrides {file}"]
    caplog.clear()
    arguments.offload_config = None
    monkeypatch.setenv("TORCH_OFFLOAD_CONFIG", '{"ram": 8, "page_elements": 8192}')
    assert arguments.to_config() == Config(ram="2GiB", page_elements=4096)
    assert caplog.messages == [
        "--offload_page_elements, --offload_ram on the command line override environment variable TORCH_OFFLOAD_CONFIG"
    ]


def test_the_parser_prints_the_help_of_settings(capsys):
    """argparse formats help texts, which have a percent sign here and there."""
    with pytest.raises(SystemExit):
        HfArgumentParser(torch_offload.OffloadArguments).parse_args(["--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    for setting in setting_fields():
        assert f"--offload_{setting.name}" in help_text
        assert " ".join(setting.description.replace("``", "").split()) in help_text.replace("- ", "-")
    assert "`" not in help_text


def test_the_kind_of_a_setting_follows_from_its_type():
    """A field is the whole definition of a setting; a type that no option is made for is an error, not a size."""

    class Settings(Config):
        rate: float = 1.0

    kinds = {setting.name: setting.kind for setting in setting_fields()}
    assert kinds["gpu"] == kinds["min_paged_bytes"] == "size"
    assert (kinds["ssd"], kinds["report"], kinds["trace"]) == ("paths", "path", "path")
    assert (kinds["activations"], kinds["queue_depth"], kinds["status_line"]) == ("choice", "count", "flag")
    with pytest.raises(TypeError, match="setting rate has type <class 'float'>"):
        setting_fields(Settings)


def test_settings_that_cannot_be_used_raise_a_public_type():
    """Of all of them at once, through a pickle too: a launcher's child sends errors to its parent."""
    with pytest.raises(ConfigError) as raised:
        Config(ram="3 lots", queue_depth=0, emulation={"gpus": True})
    assert type(raised.value) is ConfigError
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (str(copied), copied.problems) == (str(raised.value), raised.value.problems)
    assert [name for name, _ in raised.value.problems] == ["ram", "queue_depth", "emulation.gpus"]


def test_running_out_of_memory_has_trainers_try_a_smaller_batch():
    """accelerate knows such errors by type and words; a full disk is none of them."""
    for message in ("host tier: 8 bytes needed", "device memory tier: an operation needs 8 bytes"):
        error = OutOfTierMemory(message)
        assert should_reduce_batch_size(error)
        assert isinstance(error, MemoryError)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert not should_reduce_batch_size(OutOfTierMemory("ssd tier: 8 bytes needed"))


def test_public_names_are_all_there_and_none_is_a_module_by_accident():
    assert {name for name in torch_offload.__all__ if not hasattr(torch_offload, name)} == set()
    assert set(torch_offload.__all__) <= set(dir(torch_offload))
    modules = {name for name in torch_offload.__all__ if isinstance(getattr(torch_offload, name), types.ModuleType)}
    assert modules == {"moe"}
