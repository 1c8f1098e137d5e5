"""The command line: what it understands, what it hands to the launcher, what it says about mistakes."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from support.command import run_main
from support.confined import command_line

from torch_offload import Config, Emulation, OutOfTierMemory
from torch_offload.cli import app
from torch_offload.cli.run_arguments import FLAGS, separate_script

pytestmark = pytest.mark.any_torch


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("run a.py --ram 2", "run -- a.py --ram 2"),
        ("run --ram 2GiB a.py --ram 3 -m x", "run --ram 2GiB -- a.py --ram 3 -m x"),
        ("run --ram=2GiB a.py --help", "run --ram=2GiB -- a.py --help"),
        ("run --no-status-line a.py", "run --no-status-line -- a.py"),
        ("run -m trl.scripts.sft --ram 3 --help", "run -m trl.scripts.sft -- --ram 3 --help"),
        ("run -mpkg --ssd x", "run -mpkg -- --ssd x"),
        ("run --module=pkg -- x", "run --module=pkg -- -- x"),
        ("run --ssd /a --module pkg", "run --ssd /a --module pkg"),
        ("run a.py -- --x", "run -- a.py -- --x"),
        ("run -- a.py --x", "run -- a.py --x"),
        ("run --ram", "run --ram"),
        ("doctor --ssd run", "doctor --ssd run"),
        ("", ""),
    ],
)
def test_what_belongs_to_the_script_is_set_apart(given, expected):
    assert separate_script(given.split()) == expected.split()


def test_the_flags_of_run_are_those_that_take_no_value():
    """Method: the parser that typer makes, against the table that finds the script's place."""
    commands = typer.main.get_command(app.app).commands
    flags = {
        name
        for option in commands["run"].params
        if getattr(option, "is_flag", False)
        for name in (*option.opts, *option.secondary_opts)
    }
    assert flags | {"-h", "--help"} == FLAGS


def test_run_has_an_option_for_every_setting():
    names = {option.name for option in typer.main.get_command(app.app).commands["run"].params}
    assert set(Config.model_fields) - {"emulation"} <= names
    assert {f"emulate_{name}" for name in Emulation.model_fields} <= names


def test_options_of_an_emulation_are_no_part_of_the_help():
    shown = command_line("run", "--help").stdout
    assert "--activations" in shown
    assert "--ram" in shown
    assert "--emulate" not in shown


@pytest.fixture
def launched(monkeypatch):
    """What the launcher is called with; it answers with the status 7."""
    calls = []

    def run(config, command, *, is_module, optimizer, fit):
        calls.append((config, command, is_module, optimizer))
        return 7

    stub = types.ModuleType("torch_offload.launch.runner")
    stub.run = run
    monkeypatch.setitem(sys.modules, "torch_offload.launch.runner", stub)
    monkeypatch.setattr("torch_offload.launch.runner", stub, raising=False)
    return calls


def test_run_hands_script_and_settings_to_the_launcher(monkeypatch, launched, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    arguments = (
        "--ram",
        "2GiB",
        "--ssd",
        str(tmp_path),
        "--queue-depth",
        "4",
        "--no-status-line",
        "--report",
        "r.json",
    )
    arguments += ("--trace", "t.json.gz")
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, "run", *arguments, str(script), "--ram", "1", "-m", "--help") == 7
    [(config, command, is_module, optimizer)] = launched
    wanted = Config(ram="2GiB", ssd=tmp_path, queue_depth=4, status_line=False, report=tmp_path / "r.json")
    wanted = wanted.replace(watchdog=True)
    wanted = wanted.replace(trace=tmp_path / "t.json.gz")
    assert config == wanted
    assert config.model_fields_set == wanted.model_fields_set
    assert command == [str(script), "--ram", "1", "-m", "--help"]
    assert is_module is False
    assert optimizer is None


def test_run_hands_modules_to_the_launcher(monkeypatch, launched):
    assert run_main(monkeypatch, "run", "-m", "trl.scripts.sft", "--ssd", "x", "-m", "--", "--version") == 7
    [(config, command, is_module, _)] = launched
    assert (config, command) == (
        Config(status_line=True, watchdog=True),
        ["trl.scripts.sft", "--ssd", "x", "-m", "--", "--version"],
    )
    assert is_module is True


def test_run_hands_the_optimizer_to_the_launcher(monkeypatch, launched):
    assert run_main(monkeypatch, "run", "--optimizer", "adamw-8bit", "-m", "trl.scripts.sft", "--optimizer", "x") == 7
    [(config, command, _, optimizer)] = launched
    assert (config, command) == (Config(status_line=True, watchdog=True), ["trl.scripts.sft", "--optimizer", "x"])
    assert optimizer == "adamw-8bit"


@pytest.mark.parametrize("raised", [OutOfTierMemory("full"), ValueError("no"), KeyboardInterrupt(), EOFError()])
def test_what_the_script_raises_comes_out_as_it_is(monkeypatch, launched, raised):
    """Also errors of ours: the traceback of the script is worth more than one line of this command."""

    def run(config, command, *, is_module, optimizer, fit):
        raise raised

    monkeypatch.setattr(sys.modules["torch_offload.launch.runner"], "run", run)
    monkeypatch.setattr(sys, "argv", ["torch-offload", "run", "-m", "x"])
    with pytest.raises(type(raised)) as caught:
        app.main()
    assert caught.value is raised
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu", "a.py"], "no such command 'rnu'. Did you mean 'run'?"),
        (["run", "--rma", "2GiB", "a.py"], "there is no option --rma; did you mean --ram?"),
        (["run", "--device", "2GiB", "a.py"], "there is no option --device; did you mean --gpu?"),
        (["run", "--offload-folder", "x", "a.py"], "there is no option --offload-folder; did you mean --ssd?"),
        (["doctor", "--sdd", "x"], "there is no option --sdd; did you mean --ssd?"),
        (["doctor", "--zzz"], "there is no option --zzz; see torch-offload doctor --help"),
        (["--device", "2GiB"], "there is no option --device; see torch-offload --help"),
        (["bench-ssd", "--secnds", "1"], "--seconds"),
        (["bench-ssd", "--seconds", "x"], "invalid value for '--seconds': "),
        (["report", "--htlm", "x"], "--html"),
        (["plan", "x", "--optimzer", "none"], "--optimizer"),
        (["plan"], "missing argument 'MODEL'; see torch-offload plan --help"),
        (["run", "--ram"], "requires an argument"),
        (["run", "--ssd", "{folder}/gone", "-m", "x"], "ssd: {folder}/gone does not exist; create it"),
        (["plan", "{folder}"], "there is no model configuration at {folder}/config.json; give a model's folder"),
        (["plan", "nobody/nothing"], "there is no folder nobody/nothing, and no such repository on the hub"),
        (["inspect", "nobody/nothing"], "there is no folder nobody/nothing, and no such repository on the hub"),
        (["verify", "nobody/nothing"], "there is no folder nobody/nothing, and no such repository on the hub"),
        (["plan", "{folder}", "--dtype", "fp32"], "dtype: 'fp32' is not known; there are: float32, bfloat16, float16"),
        (["plan", "{folder}", "--train", "lora:r=0"], "train: the rank r of lora must be a whole number of at least 1"),
        (["plan", "{folder}", "--train", "layer:2"], "train: did you mean layers? expected full, lora:r=16"),
        (["plan", "{folder}", "--generate", "0"], "--generate: must be at least 1, got 0"),
        (["plan", "{folder}", "--generate", "2", "--evaluate"], "--evaluate and --generate are two plans; give one"),
        (
            ["plan", "{folder}", "--generate", "2", "--train", "full", "--checkpointing"],
            "--train, --checkpointing: of training, which --generate has none of; leave --generate or them out",
        ),
        (
            ["plan", "{folder}", "--ranks", "2"],
            "--ranks: of a pipeline; give its --schedule as well, or --schedule auto",
        ),
        (["plan", "{folder}", "--schedule", "auto", "--evaluate"], "--schedule plans how to train; leave --evaluate"),
        (["plan", "{folder}", "--ram", "2GX"], "ram: cannot read '2GX' as a size; accepted: "),
        (["probe", "--ssd", "{folder}/gone"], "gone does not exist; create it"),
        (["run", "--ram", "2GX", "a.py"], "ram: cannot read '2GX' as a size; accepted: "),
        (["run", "--io-engine", "urin", "a.py"], "io_engine: "),
        (["run", "--optimizer", "adam", "a.py"], "--optimizer: expected one of adamw, adamw-8bit, got 'adam'"),
        (["run"], "nothing to run; name a script, an installed command, or a module with -m"),
        (["bench-ssd", "--block", "1000", "--ssd", "{folder}"], "block: must be a positive multiple of 4096"),
        (["bench-ssd", "--size", "4KiB", "--ssd", "{folder}"], "size: must be at least"),
        (["bench-ssd", "--ssd", "{folder}/gone"], "gone does not exist; create it"),
        (["report", "{folder}/gone.json"], "run --report"),
        (["store"], "missing option '--listen'; see torch-offload store --help"),
        (["store", "--listen", "nowhere"], "expected host:port, such as 10.0.0.1:7000 or [::1]:7000, got 'nowhere'"),
        (["store", "--listen", "[::1]:1", "--ssd", "store://h:1"], "ssd: a store keeps pages on a disk of its own"),
        (["probe", "--ssd", "store://h:1"], "ssd: this is about a disk of this machine, got store://h:1"),
        (["report", "{folder}"], "no report in"),
    ],
)
def test_mistakes_are_named_with_what_helps(monkeypatch, capsys, launched, scratch, arguments, expected):
    assert run_main(monkeypatch, *(argument.format(folder=scratch) for argument in arguments)) == 2
    message = capsys.readouterr().err
    assert expected.format(folder=scratch) in message
    assert message.startswith("torch-offload: ")
    assert message.count("\n") == 1
    assert launched == []


PLANNED = ("--sequence", "8", "--dtype", "bfloat16", "--json")


@pytest.fixture
def configured(monkeypatch, scratch):
    """A directory with the configuration of a small model, on a machine that is known already."""
    from support.figures import MACHINE
    from support.models import tiny_config

    monkeypatch.setattr("torch_offload.diagnostics.probe.probe_with_progress", lambda *_, **__: MACHINE, raising=False)
    monkeypatch.setattr(sys.modules["torch_offload.diagnostics.probe"], "probe_with_progress", lambda *_, **__: MACHINE)
    tiny_config("llama", tied=False, hidden=128, layers=2).save_pretrained(scratch)
    return scratch


def test_a_plan_says_whether_it_fits(monkeypatch, capsys, configured):
    """By its exit status as well; with checkpointing, from a directory and from the file."""
    options = ("--ssd", str(configured), "--optimizer", "torch_offload.AdamW", *PLANNED)
    assert run_main(monkeypatch, "plan", str(configured), "--ram", "8MiB", "--checkpointing", *options) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["fits"], made["missing_bytes"], made["tokens_per_step"]) == (True, {}, 8)
    assert run_main(monkeypatch, "plan", str(configured / "config.json"), "--ram", "64KiB", *options) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["missing_bytes"]["ram"] == made["needed_bytes"]["ram"] - (64 << 10)


def test_a_plan_finds_a_model_by_its_name_on_the_hub(monkeypatch, capsys, configured, tmp_path):
    """Method: a cache of the hub that holds one configuration, as a download leaves it; the hub is not asked."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--somebody--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (configured / "config.json").rename(repository / "snapshots" / commit / "config.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    options = ("--ram", "8MiB", "--ssd", str(configured), "--checkpointing", *PLANNED)
    assert run_main(monkeypatch, "plan", "somebody/tiny", *options) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_a_model_quantized_by_others_is_not_planned(monkeypatch, capsys, configured):
    """Its weights are not what its configuration says."""
    config = configured / "config.json"
    said = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "torch_offload", "experts": {}}}
    config.write_text(json.dumps(said))
    assert run_main(monkeypatch, "plan", str(configured), "--ram", "8MiB", "--ssd", str(configured), *PLANNED) == 2
    said = capsys.readouterr().err
    assert "is of a model quantized by torch_offload, which cannot be planned" in said
    assert "knows" not in said


def test_a_model_of_4_bits_is_planned_as_its_configuration_says(monkeypatch, capsys, configured):
    """Half a byte a number, and LoRA over it; a pass without gradients is refused."""
    common = ("--ram", "8MiB", "--ssd", str(configured), "--train", "lora:r=2,targets=q_proj", *PLANNED)
    assert run_main(monkeypatch, "plan", str(configured), *common) == 0
    plain = json.loads(capsys.readouterr().out)
    config = configured / "config.json"
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))
    assert run_main(monkeypatch, "plan", str(configured), *common) == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["parameters"] == plain["parameters"]
    assert packed["state_bytes"] < 0.6 * plain["state_bytes"]
    without = ("--ram", "8MiB", "--ssd", str(configured), "--evaluate", *PLANNED)
    assert run_main(monkeypatch, "plan", str(configured), *without) == 2
    assert "only training can be planned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "work"),
    [
        (("--train", "lora:r=2,targets=q_proj"), "train"),
        (("--train", "layers:1", "--accumulate", "2"), "train"),
        (("--train", "lora:r=2,targets=q_proj", "--load-in-4bit"), "train"),
        (("--optimizer", "torch_offload.AdamW", "--moments", "8bit"), "train"),
        (("--activations", "recompute"), "train"),
        (("--activations", "auto"), "train"),
        (("--evaluate",), "evaluate"),
        (("--generate", "3"), "generate"),
    ],
)
def test_all_that_a_run_can_do_is_planned(monkeypatch, capsys, configured, options, work):
    common = ("--ram", "8MiB", "--ssd", str(configured), *PLANNED)
    assert run_main(monkeypatch, "plan", str(configured), *common, *options) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["work"], made["fits"]) == (work, True)


def test_a_plan_is_of_one_of_the_processes_that_share_a_machine(monkeypatch, capsys, configured):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_main(monkeypatch, "plan", str(configured), "--ram", "16MiB", "--ssd", str(configured), *PLANNED) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["processes"], made["budget_bytes"]["ram"]) == (2, 8 << 20)


def test_ranks_of_a_pipeline_are_planned_by_each_schedule(monkeypatch, capsys, configured):
    """As JSON and as a table. The directory has a model of two layers: only two stages can be made of it."""
    common = ("--ram", "2MiB", "--ssd", str(configured), "--sequence", "8", "--micro-batches", "4", "--ranks", "2")
    more = ("--activations", "keep", "--page-elements", "4096")
    assert run_main(monkeypatch, "plan", str(configured), *common, *more, "--schedule", "auto", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["fits"], made["micro_batches"]) == (True, 4)
    assert {(each["name"], each["stages"], each["layers"]) for each in made["candidates"]} == {
        (name, 2, 1) for name in ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
    }
    assert all(len(each["ranks"]) == 2 for each in made["candidates"])
    assert run_main(monkeypatch, "plan", str(configured), *common, *more, "--schedule", "loopedbfs") == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("plan: fits", "LoopedBFS", "SSD read a step", "peak of ram"))
    assert run_main(monkeypatch, "plan", str(configured), *common, "--schedule", "2F2B") == 2
    assert "schedule: '2F2B' is not known; there are: auto, 1F1B" in capsys.readouterr().err


def test_a_plan_is_shown_as_a_table(monkeypatch, capsys, configured):
    assert run_main(monkeypatch, "plan", str(configured), "--ram", "64KiB", "--ssd", str(configured)) == 1
    shown = capsys.readouterr().out
    assert all(
        words in shown for words in ("plan: does not fit", "bytes missing", "suggestion", "tokens/s", "SSD read")
    )


def test_a_script_that_is_not_there_is_named_with_its_neighbour(monkeypatch, capsys, launched, tmp_path):
    (tmp_path / "train.py").touch()
    assert run_main(monkeypatch, "run", str(tmp_path / "trian.py"), "--x") == 2
    assert f"there is no script {tmp_path}/trian.py; did you mean {tmp_path}/train.py?" in capsys.readouterr().err
    assert run_main(monkeypatch, "run", str(tmp_path)) == 2
    assert "a directory without a __main__.py" in capsys.readouterr().err
    assert launched == []


def test_the_module_runs_and_gives_its_version():
    import torch_offload

    shown = command_line("--version")
    assert (shown.returncode, shown.stdout) == (0, f"torch-offload {torch_offload.__version__}\n")
    helped = command_line("--help")
    assert helped.returncode == 0
    assert all(name in helped.stdout for name in ("run", "doctor", "bench-ssd", "report", "--version"))


def test_the_library_imports_nothing_of_the_command_line():
    """A training script that wraps by itself pays for none of it."""
    code = (
        "import sys, torch_offload; "
        "found = {'typer', 'rich', 'jinja2', 'plotly', 'transformers'} & set(sys.modules); print(sorted(found))"
    )
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (imported.returncode, imported.stdout) == (0, "[]\n")


def test_a_file_of_settings_comes_before_the_variable_and_after_the_options(monkeypatch, launched, tmp_path, capsys):
    """Method: three settings, one from each of three places, and each place also has those of the places before it."""
    file = tmp_path / "offload.yaml"
    file.write_text("ram: 2GiB\nqueue_depth: 8\nemulation:\n  ssd_rate: 1GB\n")
    monkeypatch.setenv("TORCH_OFFLOAD_CONFIG", '{"ram": "1GiB", "queue_depth": 4, "min_paged_bytes": "1MiB"}')
    options = ("--config", str(file), "--ram", "3GiB", "--emulate-gpu", "--gpu", "1GiB")
    assert run_main(monkeypatch, "run", *options, "-m", "x") == 7
    [(config, *_)] = launched
    assert config.ram == 3 << 30
    assert (config.queue_depth, config.min_paged_bytes) == (8, 1 << 20)
    assert config.emulation == Emulation(gpu=True, ssd_rate="1GB")
    assert capsys.readouterr().err.splitlines() == [
        "torch-offload: --ram on the command line overrides environment variable TORCH_OFFLOAD_CONFIG",
        f"torch-offload: --ram on the command line overrides {file}",
    ]


def test_an_option_that_overrides_an_emulation_is_named(monkeypatch, launched, capsys):
    monkeypatch.setenv("TORCH_OFFLOAD_CONFIG", '{"emulation": {"gpu": true, "ssd_rate": 1}}')
    assert run_main(monkeypatch, "run", "--gpu", "1GiB", "--emulate-ssd-rate", "2", "-m", "x") == 7
    assert launched[0][0].emulation == Emulation(gpu=True, ssd_rate=2)
    assert "torch-offload: --emulate-ssd-rate on the command line overrides" in capsys.readouterr().err


def test_a_file_can_hide_the_status_line(monkeypatch, launched, tmp_path, capsys):
    """It is on where nothing says otherwise; then no option was given that could override the file."""
    file = tmp_path / "offload.yaml"
    file.write_text("status_line: false\n")
    assert run_main(monkeypatch, "run", "--config", str(file), "-m", "x") == 7
    assert launched[0][0].status_line is False
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ram: 2GiB\nqueue_dept: 8\n", "{file}:2: unknown setting 'queue_dept'; did you mean 'queue_depth'?"),
        ("ram: 24G\n", "{file}:1: ram: cannot read '24G' as a size"),
        ("emulation:\n  gppu: true\n", "{file}:2: unknown setting 'emulation.gppu'; did you mean 'emulation.gpu'?"),
        ("ram: 2GiB\n1: 2\n", "{file}:2: expected the name of a setting, such as 'ram', got 1"),
        ("ram: [\n", "{file}:2: not valid YAML or JSON"),
        ("[" * 5000, "{file}: expected settings such as 'ram: 24GiB': maximum recursion depth"),
        (f"ram: {'9' * 5000}\n", "{file}: expected settings such as 'ram: 24GiB': Exceeds the limit"),
        ("ram: 2001-02-31\n", "{file}: expected settings such as 'ram: 24GiB': day is out of range"),
        ("&x {ram: *x}\n", "{file}:1: ram: "),
        ("- ram\n", "{file}: expected settings such as 'ram: 24GiB', got list"),
    ],
)
def test_mistakes_in_a_file_are_named_with_their_line(monkeypatch, tmp_path, capsys, text, expected):
    file = tmp_path / "offload.yaml"
    file.write_text(text)
    assert run_main(monkeypatch, "run", "--config", str(file), "-m", "x") == 2
    assert expected.format(file=file) in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(monkeypatch, tmp_path, capsys):
    assert run_main(monkeypatch, "doctor", "--config", str(tmp_path / "gone.yaml")) == 2
    assert f"cannot read the configuration {tmp_path / 'gone.yaml'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"ramm": 1}', ":1: unknown setting 'ramm'; did you mean 'ram'?"),
        ('{"ram": ', ":1: not valid YAML or JSON: "),
        ("ram=8GiB", ": expected the path of a YAML or JSON file, or a JSON object such as "),
        ("/nowhere/offload.yaml", ": expected the path of a YAML or JSON file, or a JSON object such as "),
        ("{folder}/offload.yaml", ": {folder}/offload.yaml:1: ram: cannot read '24G' as a size"),
    ],
)
def test_a_variable_that_does_not_parse_is_named_once(monkeypatch, capsys, tmp_path, value, expected):
    (tmp_path / "offload.yaml").write_text("ram: 24G\n")
    monkeypatch.setenv("TORCH_OFFLOAD_CONFIG", value.replace("{folder}", str(tmp_path)))
    assert run_main(monkeypatch, "run", "-m", "x") == 2
    message = capsys.readouterr().err
    expected = expected.replace("{folder}", str(tmp_path))
    assert message.startswith(f"torch-offload: environment variable TORCH_OFFLOAD_CONFIG{expected}")
    assert message.count("TORCH_OFFLOAD_CONFIG") == 1


@pytest.mark.parametrize(("name", "expected"), [("trll", "did you mean trl?"), ("bash", "is no Python script")])
def test_what_is_no_script_and_no_command_is_named_with_the_nearest(monkeypatch, capsys, name, expected):
    assert run_main(monkeypatch, "run", name, "sft") == 2
    assert expected in capsys.readouterr().err


def test_an_installed_command_is_run_by_its_file(monkeypatch, launched):
    assert run_main(monkeypatch, "run", "trl", "sft", "--help") == 7
    [(_, command, is_module, _)] = launched
    assert Path(command[0]).name == "trl"
    assert Path(command[0]).is_file()
    assert (command[1:], is_module) == (["sft", "--help"], False)


def test_the_reference_is_current():
    """Settings, options and replaced functions in docs/reference are generated from the code."""
    root = Path(__file__).resolve().parents[3]
    checked = subprocess.run(
        [sys.executable, str(root / "tools" / "reference.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stdout + checked.stderr
