"""The command line: ``torch-offload`` and ``python -m torch_offload``."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn, cast

import typer

from torch_offload import __version__
from torch_offload.cli import plan_options
from torch_offload.cli.config_options import config_from, config_options
from torch_offload.cli.option_groups import option_group
from torch_offload.cli.pipeline_options import PipelineOptions
from torch_offload.cli.run_arguments import script_path, separate_script
from torch_offload.cli.search_options import SearchOptions
from torch_offload.config import RENAMED, Config, parse_size
from torch_offload.errors import CheckpointError, ConfigError, OffloadError, UnsupportedModelError
from torch_offload.integrations.trainer_optimizer import OPTIMIZERS
from torch_offload.reporting.result import Result
from torch_offload.reporting.saved_reports import REPORT_NAME
from torch_offload.runtime.preflight import check_directories
from torch_offload.system import environment
from torch_offload.system.terminal import echo, error_console, one_line, show

USAGE_ERROR = 2
INTERRUPTED = 130
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)
"""Of the parser inside of typer, which some versions import from click and others hold themselves."""

app = typer.Typer(
    name="torch-offload",
    help="Train PyTorch models several times larger than memory, unmodified and with the same numbers.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True)
class ScriptRun:
    """A script to run, once the command line has been understood."""

    config: Config
    command: list[str]
    is_module: bool
    optimizer: str | None = None
    fit: bool = False

    def run(self) -> int:
        """Run it; returns its exit status."""
        # Imported here: it replaces functions of torch, which the other commands do not need.
        from torch_offload.launch import runner

        status: int = runner.run(
            self.config, self.command, is_module=self.is_module, optimizer=self.optimizer, fit=self.fit
        )
        return status


TrustsCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code of the model's directory or repository, if it has any.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,  # noqa: FBT002
) -> None:
    """Hold the options that belong to no command."""
    if version:
        echo(f"torch-offload {__version__}")
        raise typer.Exit


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Everything after SCRIPT, or after -m MODULE, belongs to the script.",
)
@config_options()
def run(
    context: typer.Context,
    *,
    given: dict[str, Any],
    file: Path | None,
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT ARGS", help="A script, or an installed command; its arguments."),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as python -m does.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="adamw|adamw-8bit",
            help="Have a Trainer create torch_offload.AdamW, with moments in 32 or 8 bits, in place of torch's AdamW.",
        ),
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Have a Trainer split the rows of a step as the fastest plan splits them.")
    ] = False,
) -> None:
    """Run a training script with its models paged between GPU, memory and SSD.

    SCRIPT is the path of a Python file or the name of an installed command that is one, such as trl.
    """
    with _plain_errors():
        config = config_from(given, file, status_line=True, watchdog=True)
        command = [module, *(script or [])] if module is not None else list(script or [])
        _check_choice("--optimizer", optimizer, OPTIMIZERS)
        if not command:
            raise ConfigError("nothing to run; name a script, an installed command, or a module with -m")
        if module is None:
            command[0] = script_path(command[0])
        check_directories(config.directories_of(environment.local_rank()))
        if fit:
            _measure_machine(config)
    context.obj.append(ScriptRun(config, command, is_module=module is not None, optimizer=optimizer, fit=fit))


def _measure_machine(config: Config) -> None:
    """Have what plans are made from in the cache, before a budget is in force."""
    from torch_offload.diagnostics.probe import probe_with_progress

    probe_with_progress(config.scratch_directory, progress_on=error_console())


@app.command()
@config_options("ram", "ssd", "keep_free", "max_spill")
def doctor(*, given: dict[str, Any], file: Path | None, as_json: AsJson = False) -> None:
    """Check this machine and suggest what to change. Exit status 1 if training cannot run."""
    from torch_offload.diagnostics import doctor as doctors

    with _plain_errors():
        config = config_from(given, file)
        doctor_report = doctors.run_checks(
            ram=config.ram, ssd=config.scratch_directory, keep_free=config.keep_free, max_spill=config.max_spill
        )
    _show(doctor_report, as_json=as_json)
    raise typer.Exit(0 if doctor_report.can_train else 1)


@app.command("bench-ssd")
@config_options("ssd", "io_engine")
def bench_ssd(
    *,
    given: dict[str, Any],
    file: Path | None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the scratch file.")] = "1GiB",
    block: Annotated[str, typer.Option(metavar="SIZE", help="Size of a transfer.")] = "2MiB",
    seconds: Annotated[float, typer.Option(min=0.01, max=3600.0, help="Seconds per figure.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Measure the disk of a directory by queue depth, and recommend one."""
    from torch_offload.diagnostics import ssd_benchmark as benches

    with _plain_errors():
        config = config_from(given, file)
        request = benches.Request(
            directory=benches.directory_for(config.scratch_directory, file_bytes=parse_size(size)),
            file_bytes=parse_size(size),
            block_bytes=parse_size(block),
            seconds=seconds,
            io_engine=config.io_engine,
        )
        result = benches.measure_with_progress(request, progress_on=error_console())
    _show(result, as_json=as_json)


@app.command()
@config_options("ram", "ssd", "keep_free", "max_spill", "queue_depth", "io_engine", "io_timeout")
def store(
    *,
    given: dict[str, Any],
    file: Path | None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="A private address of this machine, such as 10.0.0.1:7000.")
    ],
    updates: Annotated[
        bool, typer.Option(help="Run optimizers' updates here, so that their states do not cross the network.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Keep the pages of machines without an SSD, which say ssd=store://HOST:PORT, until it is interrupted.

    Whoever reaches the port can use it, and nothing is encrypted.
    """
    from torch_offload.runtime import serving

    with _plain_errors():
        config = config_from(given, file)
        served = serving.serve(listen, config, tell=lambda line: echo(line, err=True), updates=updates)
    echo(served.to_json(indent=1) if as_json else str(served))


def _search_instead(options: SearchOptions, others: Mapping[str, Any]) -> None:
    """Search, where that is asked for, and end with its exit status."""
    with _plain_errors():
        options.check(others)
        if not options.search:
            return
        from torch_offload.cli import plan_search

        status = plan_search.run(options, others)
    raise typer.Exit(status)


def _pipeline_instead(options: PipelineOptions, others: Mapping[str, Any]) -> None:
    """Plan a pipeline, where that is asked for, and end with its exit status."""
    with _plain_errors():
        options.check(others)
        if options.schedule is None:
            return
        from torch_offload.cli import plan_pipeline

        made = plan_pipeline.plan_from(options.schedule, options, others)
    _show(made, as_json=others["as_json"])
    raise typer.Exit(0 if made.fits else 1)


@app.command()
@config_options(
    "gpu",
    "ram",
    "ssd",
    "keep_free",
    "max_spill",
    "checkpoint_pages",
    "activations",
    "optimizer_device",
    "update",
    "gpu_reserved",
    "page_elements",
)
@option_group(SearchOptions, _search_instead)
@option_group(PipelineOptions, _pipeline_instead)
def plan(
    *,
    given: dict[str, Any],
    file: Path | None,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's directory, its config.json, or its name on the hub.")
    ],
    batch: plan_options.Batch = 1,
    sequence: plan_options.Sequence = 512,
    evaluate: plan_options.Evaluate = False,
    generate: plan_options.Generate = None,
    train: plan_options.Train = None,
    micro_batches: plan_options.MicroBatches = None,
    dtype: plan_options.Dtype = "float32",
    load_in_4bit: plan_options.LoadIn4bit = False,
    optimizer: plan_options.Optimizer = None,
    moments: plan_options.Moments = None,
    checkpointing: plan_options.Checkpointing = False,
    tbw: plan_options.Endurance = "600TB",
    ssd_bytes: plan_options.SsdBytes = None,
    trust_remote_code: TrustsCode = False,
    as_json: AsJson = False,
) -> None:
    """Predict memory, I/O and step time without loading the weights. Exit status 1 if it does not fit.

    Under torchrun, or with LOCAL_WORLD_SIZE set, it is the plan of one of these processes with its share of memory.
    With --search, of all ways to train a step; --ram then takes a list, such as 8GiB,16GiB. With --schedule, of the
    ranks of a pipeline, without times.
    """
    from torch_offload.diagnostics.probe import probe_with_progress
    from torch_offload.integrations import hf_models
    from torch_offload.integrations.trained_parts import TrainedParts
    from torch_offload.planning.api import DEFAULT_OPTIMIZER
    from torch_offload.planning.api import plan as make_plan

    with _plain_errors():
        training = {
            "--train": train,
            "--micro-batches": micro_batches,
            "--optimizer": optimizer,
            "--moments": moments,
            "--checkpointing": checkpointing or None,
        }
        work = plan_options.work_of(training, evaluate=evaluate, new_tokens=generate)
        parts = TrainedParts.of(train or "full")
        config = config_from(given, file)
        described = hf_models.model_from(
            model,
            dtype=dtype,
            uses_checkpointing=checkpointing,
            load_in_4bit=load_in_4bit,
            trust_remote_code=trust_remote_code,
        )
        made = make_plan(
            parts.apply(described.module),
            hf_models.batch_of(batch, sequence),
            config=config,
            work=work,
            new_tokens=generate,
            optimizer=None if optimizer == "none" else optimizer or DEFAULT_OPTIMIZER,
            moments=moments or "fp32",
            micro_batches=1 if micro_batches is None else micro_batches,
            loaded=described.loaded,
            processes=environment.process_count(),
            probe=probe_with_progress(config.scratch_directory, progress_on=error_console()),
            ssd_bytes=ssd_bytes,
            endurance_bytes=tbw,
        )
    _show(made, as_json=as_json)
    raise typer.Exit(0 if made.fits else 1)


@app.command()
@config_options("ssd")
def probe(
    *,
    given: dict[str, Any],
    file: Path | None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure disk, memory and processor for plans. The result is cached."""
    from torch_offload.diagnostics.probe import probe_with_progress

    with _plain_errors():
        config = config_from(given, file)
        measured = probe_with_progress(config.scratch_directory, refresh=refresh, progress_on=error_console())
    _show(measured, as_json=as_json)


@app.command()
def report(
    *,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="[PATH]", help="A report, or a directory: its newest, beside those of all ranks of that launch."
        ),
    ] = Path(f"{REPORT_NAME}.json"),
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one self-contained HTML page.")] = None,
    tbw: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Endurance rating of the drive (TBW), such as 600TB.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Put a plan beside it: what torch-offload plan --json wrote.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the report of a run, or those of all ranks of one: as a table, as JSON or as an HTML page of one of them."""
    from torch_offload.reporting import saved_reports

    with _plain_errors():
        ranks = saved_reports.of_ranks(path) if html is None and tbw is None and plan is None else None
        if ranks is not None:
            _show(ranks, as_json=as_json)
            return
        saved = saved_reports.load(path)
        if plan is not None:
            saved = saved_reports.with_plan(saved, plan)
        endurance_bytes = None if tbw is None else parse_size(tbw)
        if html is not None:
            saved.write_html(html, endurance_bytes=endurance_bytes)
    if as_json:
        _show(saved, as_json=True)
    elif html is not None:
        echo(f"{html} written")
    else:
        show(saved, *saved_reports.wear_lines(saved, endurance_bytes))


@app.command()
def dump(
    *, process: Annotated[int, typer.Argument(metavar="PID", help="A process that trains under the watchdog.")]
) -> None:
    """Show what a running process does: Python stacks, waits, transfers. Exit status 2 if it does not answer.

    Processes answer that were started by torch-offload run, or with the setting watchdog.
    """
    from torch_offload.system import dump_socket

    with _plain_errors():
        text = dump_socket.request(process)
    echo(text)


@app.command()
@config_options("ram", "ssd", "keep_free", "max_spill")
def compress(
    *,
    given: dict[str, Any],
    file: Path | None,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's directory, with its tokenizer, or its name on the hub.")
    ],
    calibration: Annotated[
        Path,
        typer.Option(metavar="FILE", help='Texts of the kind the model is meant for: .jsonl with "text", or a text.'),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the compressed model; an interrupted run resumes there.")
    ],
    bits: Annotated[
        float, typer.Option(min=0.05, max=8.0, metavar="COUNT", help="Bits per weight of the experts, scales included.")
    ] = 0.8,
    rows: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Rows of tokens to use, from the beginning.")] = 256,
    sequence: Annotated[int, typer.Option(min=2, metavar="COUNT", help="Tokens of a row.")] = 512,
    coder: Annotated[
        str, typer.Option(metavar="NAME", help="smallest, or tun12: some more bytes, multiplied by faster.")
    ] = "smallest",
    trust_remote_code: TrustsCode = False,
    pickled_weights: Annotated[
        bool, typer.Option("--pickled-weights", help="Also read weights that are pickles, not only safetensors.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compress the experts of a mixture-of-experts model to a number of bits per weight.

    The model may be larger than memory: it is paged while it is compressed.
    """
    with _plain_errors():
        config = config_from(given, file)
        with _needs_transformers():
            from torch_offload.compression.compress import compress_folder
        done = compress_folder(
            model,
            bits=bits,
            calibration=calibration,
            out=out,
            rows=rows,
            sequence=sequence,
            coder=coder,
            config=config,
            trust_remote_code=trust_remote_code,
            pickled_weights=pickled_weights,
        )
    if as_json:
        echo(done.to_json(indent=1))
    else:
        echo(f"{out} written: experts of {done.coded_bytes} bytes, {done.bits:.3f} bits per weight")


@app.command()
def inspect(
    *,
    folder: Annotated[str, typer.Argument(metavar="MODEL", help="A directory from compress, or its name on the hub.")],
    as_json: AsJson = False,
) -> None:
    """Show the size of a directory's coded experts by module: bits per weight, planes, zeros, coders, bytes."""
    from torch_offload.integrations.hf_models import model_folder

    with _coded_folders() as folders:
        content = folders.inspect(model_folder(folder))
    _show(content, as_json=as_json)


@app.command()
def verify(
    *,
    folder: Annotated[str, typer.Argument(metavar="MODEL", help="A directory from compress, or its name on the hub.")],
    as_json: AsJson = False,
) -> None:
    """Check every coded expert of a directory against its checksum and the model. Exit status 1 if damaged."""
    from torch_offload.integrations.hf_models import model_folder

    with _coded_folders() as folders:
        found = folders.verify(model_folder(folder))
    if as_json:
        echo(found.to_json(indent=1))
    else:
        for problem in found.problems:
            echo(one_line(problem))
        state = f"{len(found.problems)} problems" if found.problems else "no damage found"
        echo(f"{found.blobs} blobs, {found.read_bytes} bytes read: {state}")
    raise typer.Exit(1 if found.problems else 0)


@contextmanager
def _coded_folders() -> Iterator[ModuleType]:
    """Give what reads folders of coded experts; what is wrong with one becomes one line and an exit status."""
    with _plain_errors():
        with _needs_transformers():
            from torch_offload.moe import inspection
        yield inspection


@contextmanager
def _needs_transformers() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"coded experts need transformers: pip install transformers ({error})") from None


def _check_choice(option: str, value: str | None, choices: Collection[str]) -> None:
    """Refuse a value that an option does not have.

    Raises:
        ConfigError: The message names the choices.
    """
    if value is not None and value not in choices:
        raise ConfigError(f"{option}: expected one of {', '.join(choices)}, got {value!r}")


def _show(result: Result, *, as_json: bool) -> None:
    """Print a result on stdout, for a reader or for a program."""
    if as_json:
        echo(result.to_json(indent=1))
    else:
        show(result)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn what is wrong with the command line or the machine into one line and an exit status."""
    try:
        yield
    except (ConfigError, CheckpointError, UnsupportedModelError) as error:
        _fail(error, USAGE_ERROR)
    except (OffloadError, OSError) as error:
        _fail(error, 1)


def _fail(error: Exception, status: int) -> NoReturn:
    echo(f"torch-offload: {error}", err=True)
    raise typer.Exit(status)


def _usage_message(error: Any) -> str:
    """Return one line for a command line that cannot be understood.

    Args:
        error: Of the parser: with a list of options like an unknown one, or only with a message.
    """
    command = "torch-offload" if error.ctx is None else error.ctx.command_path
    option = getattr(error, "option_name", None)
    if option is None or not hasattr(error, "possibilities"):
        message = " ".join(error.format_message().split()).removesuffix(".")
        return f"{message[:1].lower()}{message[1:]}; see {command} --help"
    known = () if error.ctx is None else {flag for each in error.ctx.command.params for flag in each.opts}
    renamed = f"--{RENAMED.get(option.lstrip('-').replace('-', '_'), '')}"
    nearest = [renamed] if renamed in known else list(error.possibilities or ())
    hint = f"did you mean {nearest[0]}?" if nearest else f"see {command} --help"
    return f"there is no option {option}; {hint}"


def main() -> NoReturn:
    """Entry point of the console script."""
    script_runs: list[ScriptRun] = []
    arguments = separate_script(sys.argv[1:]) or ["--help"]
    try:
        status = app(args=arguments, prog_name="torch-offload", obj=script_runs, standalone_mode=False)
    except _UsageError as error:
        echo(f"torch-offload: {_usage_message(error)}", err=True)
        sys.exit(USAGE_ERROR)
    except typer.Abort:
        sys.exit(INTERRUPTED)
    # Out here, so that what the script raises is handled as in a Python without us.
    sys.exit(script_runs[0].run() if script_runs and not status else status or 0)
