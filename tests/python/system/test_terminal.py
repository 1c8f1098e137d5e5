"""What the commands say: names from files neither drive the terminal nor style what is shown."""

import contextlib
import io
import json
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.figures import MACHINE, device_statistics, statistics
from support.moe_models import tiny_moe

from torch_offload import Report
from torch_offload.activations.recompute import ActivationChoice
from torch_offload.cli import app
from torch_offload.diagnostics.check_result import CheckResult, DoctorReport, State
from torch_offload.diagnostics.ssd_benchmark import DepthFigures, SsdBenchmark
from torch_offload.moe import checkpoint, inspection
from torch_offload.moe.activate import code_experts
from torch_offload.moe.ternary import in_planes
from torch_offload.reporting import progress, status_line
from torch_offload.system import terminal

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.any_torch]

OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")
STYLE = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]|\x1b\[[12]?[AKG]|\r")
MARKUP = ["[/b]", "[bold]", "[/]", "[link=file:///]", ":smile:", "[red]x[/red]"]
hostile = st.lists(
    st.one_of(
        st.sampled_from([*MARKUP, "\x1b]52;c;aGk=\x07", "\x1b[2K", "\x9b1A", "\r", "\x7f", "\x00", "\n"]),
        st.characters(codec="utf-8"),
    ),
    min_size=1,
    max_size=6,
).map("".join)
thorough = settings(max_examples=200)


def said_by(*arguments: str) -> str:
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["torch-offload", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit),
    ):
        app.main()
    return out.getvalue() + err.getvalue()


def on_a_terminal(result: object) -> str:
    """What a console of somebody else shows, which styles and reads markup; without its own styles."""
    console = Console(file=io.StringIO(), force_terminal=True, width=400, color_system="truecolor")
    console.print(result)
    return STYLE.sub("", console.file.getvalue())


def assert_harmless(text: str) -> None:
    found = OBEYED.search(text)
    assert found is None, f"{found[0]!r} in {text!r}"


def test_what_a_terminal_obeys_is_spelled_out():
    assert terminal.printable("a\x1b[2K\x07\x7f\x9b\tb\nc é") == r"a\x1b[2K\x07\x7f\x9b\x09b" + "\nc é"
    assert terminal.printable("\u202edel \ud800") == r"\u202edel \ud800"
    assert terminal.one_line("a\nb") == r"a\x0ab"
    assert_harmless(terminal.printable("".join(map(chr, range(256)))))


def report_of(name: str) -> Report:
    content = statistics(read=3, written=5, stalls={name: 1.0}) | {
        "engine": name,
        "read_bytes": {name: 7},
        "device": device_statistics(to_device=1) | {"name": name, "to_host_bytes": {name: 1}},
        name: 3,
    }
    return Report.from_statistics(content, activations=ActivationChoice([name], [name], explanation=name))


@thorough
@given(name=hostile)
def test_names_of_a_report_are_shown_as_they_are(tmp_path_factory, name):
    """Method: a name that drives a terminal or is markup in each field that has words."""
    path = tmp_path_factory.getbasetemp() / "hostile-report.json"
    report_of(name).write_json(path)
    assert_harmless(said_by("report", str(path)))
    assert_harmless(on_a_terminal(report_of(name)))


@pytest.mark.parametrize("name", MARKUP)
def test_markup_in_a_report_is_no_markup(tmp_path, name):
    report_of(name).write_json(tmp_path / "r.json")
    assert f"I/O engine     {name}" in re.sub(r"[│ ]{2,}", "     ", said_by("report", str(tmp_path / "r.json")))
    assert name in on_a_terminal(report_of(name))


@pytest.fixture(scope="module")
def coded(tmp_path_factory) -> Path:
    """One layer of two coded experts."""
    folder = tmp_path_factory.mktemp("coded")
    model = tiny_moe("mixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2)
    code_experts(model, lambda weight: in_planes(weight, [0.5]))
    checkpoint.save(model, folder)
    return folder


CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def rename(folder: Path, place: str, name: str) -> None:
    """Put a name into a folder of coded experts at one of the places that hold words."""
    config, index = (json.loads((folder / file).read_text()) for file in (CONFIG, INDEX))
    said, weights = config["quantization_config"], index["weight_map"]
    [module] = said["experts"]
    if place == "module":
        said["experts"][name] = said["experts"].pop(module)
    elif place == "file":
        weights["lm_head.weight"] = f"{name}.safetensors"
    elif place == "tensor":
        weights[name] = weights["lm_head.weight"]
    elif place == "model_type":
        config["model_type"] = name
    elif place == "architecture":
        config["architectures"] = [name]
    else:
        said[place] = name
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / INDEX).write_text(json.dumps(index))


PLACES = ("module", "file", "tensor", "model_type", "architecture", "planes", "coded_format")


@thorough
@given(name=hostile, place=st.sampled_from(PLACES), command=st.sampled_from(["verify", "inspect"]))
def test_names_of_a_model_folder_are_shown_as_they_are(coded, tmp_path_factory, name, place, command):
    """Method: a name that drives a terminal or is markup at one place of the configuration or the index."""
    folder = tmp_path_factory.getbasetemp() / "hostile-folder"
    shutil.copytree(coded, folder, dirs_exist_ok=True)
    rename(folder, place, name)
    said = said_by(command, str(folder))
    assert said
    assert_harmless(said)


@pytest.mark.parametrize("name", ["\x1b[1A\x1b[2K", "a\nno damage found"])
def test_a_problem_is_one_line(coded, tmp_path, name):
    """A hostile name neither hides its line nor adds one."""
    rename(Path(shutil.copytree(coded, tmp_path / "copy")), "tensor", name)
    said = said_by("verify", str(tmp_path / "copy"))
    assert len(said.splitlines()) == 2
    assert terminal.one_line(name) in said.splitlines()[0]


def test_an_error_names_what_it_is_about_harmlessly(tmp_path):
    folder = tmp_path / "a\x1b]0;title\x07[/b]"
    for command in ("verify", "plan", "report", "compress"):
        more = ("--calibration", "x", "--out", "y") if command == "compress" else ()
        said = said_by(command, str(folder), *more)
        assert r"a\x1b]0;title\x07[/b]" in said
        assert_harmless(said)
    assert_harmless(said_by("\x1b[2K"))
    assert_harmless(said_by("run", "--\x1b[2K"))


@thorough
@given(name=hostile)
def test_other_tables_show_names_as_they_are(name):
    """Method: doctor's, those of measurements and of coded experts, on a console that reads markup."""
    results = (
        DoctorReport([CheckResult(name=name, state=State.problem, what=name, remedy=name)]),
        SsdBenchmark(
            directory=name,
            filesystem=name,
            io_engine=name,
            is_direct=True,
            file_bytes=1,
            block_bytes=1,
            figures=[DepthFigures(queue_depth=1, read=1.0, write=1.0, mix=1.0)],
            recommended_queue_depth=1,
            notes=[name],
        ),
        MACHINE.model_copy(update={"key": {name: name}, "gemm": {name: 1.0}}),
        inspection.FolderContent(Path("a"), [inspection.ModuleContent(name, 1, 1, 1, 0.5, {name: 1}, 4096)]),
    )
    for result in results:
        assert_harmless(on_a_terminal(result))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_shows_names_as_they_are(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=200)
    with progress.progress(console, "coding", uses_lines=True) as show:
        show("\x1b]0;t\x07[/b]layer", 0, 2)
    shown = STYLE.sub("", console.file.getvalue())
    assert r"\x1b]0;t\x07[/b]layer" in shown
    assert_harmless(shown)


def test_the_status_line_shows_causes_as_they_are():
    shown = STYLE.sub("", status_line.rendered(["\x1b[2K[/b]\n"], width=80))
    assert r"\x1b[2K[/b]\x0a" in shown
    assert_harmless(shown)
