"""The command line: ``torch-offload`` and ``python -m torch_offload``."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from torch_offload import __version__
from torch_offload.cli.run_arguments import separate_script
from torch_offload.config import (
    DEFAULT_MIN_PAGED_BYTES,
    DEFAULT_PAGE_ELEMENTS,
    DEFAULT_QUEUE_DEPTH,
    Config,
    parse_size,
)
from torch_offload.errors import ConfigError, OffloadError
from torch_offload.reporting.saved_reports import REPORT_NAME

USAGE_ERROR = 2

app = typer.Typer(
    name="torch-offload",
    help="Train PyTorch models several times larger than memory, unmodified and with the same numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True)
class Launch:
    """A script to run, once the command line has been understood."""

    config: Config
    command: list[str]
    is_module: bool

    def run(self) -> int:
        """Run it; returns its exit status."""
        # Imported here: it replaces functions of torch, which the other commands do not need.
        from torch_offload.launch import runner

        status: int = runner.run(self.config, self.command, is_module=self.is_module)
        return status


Ram = Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Hard limit of memory, such as 24GiB.")]
Ssd = Annotated[str | None, typer.Option("--ssd", metavar="DIR", help="Directory on a real disk for pages.")]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="PATH", help="File, or directory for one file per process, for a trace."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="SIZE", help="Hard limit of a device's memory, to compute in it.")
]
DeviceKind = Annotated[
    str | None, typer.Option("--device-kind", metavar="NAME", help="Which device: cuda or emulated.")
]
DeviceUnpaged = Annotated[
    str | None,
    typer.Option("--device-unpaged", metavar="SIZE", help="Of a GPU's memory, what torch's own allocator may take."),
]
Activations = Annotated[
    str | None,
    typer.Option(
        "--activations",
        metavar="PLACE",
        help="What the backward pass needs waits: keep (where it is), ram, ssd, recompute or auto.",
    ),
]
UpdateOn = Annotated[
    str | None,
    typer.Option("--update-on", metavar="PLACE", help="Updates run on: device, host or auto (default auto)."),
]
EmulatedLink = Annotated[
    str | None,
    typer.Option("--emulated-link", metavar="SIZE", help="Bytes per second of an emulated device's link, each way."),
]
EmulatedSsd = Annotated[
    str | None,
    typer.Option("--emulated-ssd", metavar="SIZE", help="Bytes per second of the SSD, to try a slower one."),
]
PageElements = Annotated[
    int | None,
    typer.Option("--page-elements", metavar="COUNT", help=f"Elements per page (default {DEFAULT_PAGE_ELEMENTS})."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,  # noqa: FBT002
) -> None:
    """Hold the options that belong to no command."""
    if version:
        typer.echo(f"torch-offload {__version__}")
        raise typer.Exit


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Everything after SCRIPT, or after -m MODULE, belongs to the script.",
)
def run(
    context: typer.Context,
    *,
    script: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT ARGS", help="The script and its arguments.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", "--module", metavar="MODULE", help="Run a module, as python -m does.")
    ] = None,
    ram: Ram = None,
    ssd: Ssd = None,
    stripe_over: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="A further directory, on a disk of its own; may be given several times."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="File, or directory for one file per process, for a report at the end."),
    ] = None,
    trace: Trace = None,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Show one line of figures where stderr is a terminal.")
    ] = True,
    min_paged_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help=f"Smaller tensors stay in memory (default {DEFAULT_MIN_PAGED_BYTES})."),
    ] = None,
    page_elements: PageElements = None,
    queue_depth: Annotated[
        int | None, typer.Option(metavar="COUNT", help=f"SSD transfers in flight (default {DEFAULT_QUEUE_DEPTH}).")
    ] = None,
    io_engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, uring_fixed, uring or threads (default auto).")
    ] = None,
    device: Device = None,
    device_kind: DeviceKind = None,
    device_unpaged: DeviceUnpaged = None,
    activations: Activations = None,
    update_on: UpdateOn = None,
    emulated_link: EmulatedLink = None,
    emulated_ssd: EmulatedSsd = None,
) -> None:
    """Run a training script with its models paged between a device, memory and SSD."""
    given = {
        "ram": ram,
        "ssd": ssd,
        "stripe_over": stripe_over or None,
        "report": report,
        "trace": trace,
        "live": live,
        "min_paged_bytes": min_paged_bytes,
        "page_elements": page_elements,
        "queue_depth": queue_depth,
        "io_engine": io_engine,
        "device": device,
        "device_kind": device_kind,
        "device_unpaged": device_unpaged,
        "activations": activations,
        "update_on": update_on,
        "emulated_link": emulated_link,
        "emulated_ssd": emulated_ssd,
    }
    with _plain_errors():
        config = Config(**_given(given))
        command = [module, *(script or [])] if module is not None else list(script or [])
        if not command:
            raise ConfigError("nothing to run; name a script, or a module with -m")
        if module is None:
            _check_script(command[0])
    context.obj.append(Launch(config, command, is_module=module is not None))


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _check_script(path: str) -> None:
    script = Path(path)
    if not script.exists():
        near = _nearest_file(script)
        hint = f"did you mean {near}?" if near else "give the path of a Python file, or a module with -m"
        raise ConfigError(f"there is no script {path}; {hint}")
    if script.is_dir() and not (script / "__main__.py").exists():
        raise ConfigError(f"{path} is a directory without a __main__.py; name a Python file")


def _nearest_file(script: Path) -> str | None:
    from difflib import get_close_matches

    if not script.parent.is_dir():
        return None
    there = [entry.name for entry in script.parent.iterdir() if entry.suffix == ".py"]
    nearest = get_close_matches(script.name, there, n=1)
    return str(script.parent / nearest[0]) if nearest else None


@app.command()
def doctor(*, ram: Ram = None, ssd: Ssd = None, as_json: AsJson = False) -> None:
    """Say what works on this machine, and what to do about what does not. Exit status 1 if training cannot run."""
    from torch_offload.diagnostics import doctor as doctors

    with _plain_errors():
        wanted = Config(**_given({"ram": ram, "ssd": ssd}))
        diagnosis = doctors.examine(ram=wanted.ram, ssd=wanted.ssd)
    if as_json:
        _print_json(diagnosis.to_dict())
    else:
        _console().print(diagnosis)
    raise typer.Exit(0 if diagnosis.can_train else 1)


@app.command("bench-ssd")
def bench_ssd(
    *,
    ssd: Ssd = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the scratch file.")] = "1GiB",
    block: Annotated[str, typer.Option(metavar="SIZE", help="Size of a transfer.")] = "2MiB",
    seconds: Annotated[float, typer.Option(min=0.01, max=3600.0, help="Seconds per figure.")] = 2.0,
    io_engine: Annotated[str, typer.Option(metavar="NAME", help="auto, uring_fixed, uring or threads.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure what a directory's disk gives to pages, by queue depth, and recommend one."""
    from torch_offload.diagnostics import ssd_benchmark as benches

    with _plain_errors():
        checked = Config(**_given({"ssd": ssd, "io_engine": io_engine}))
        request = benches.Request(
            directory=benches.directory_for(checked.ssd, file_bytes=parse_size(size)),
            file_bytes=parse_size(size),
            block_bytes=parse_size(block),
            seconds=seconds,
            io_engine=checked.io_engine,
        )
        result = benches.measure_with_progress(request, progress_on=Console(stderr=True))
    if as_json:
        _print_json(result.to_dict())
    else:
        _console().print(result)


@app.command()
def plan(
    *,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A HuggingFace model's directory, or its config.json.")
    ],
    ram: Ram = None,
    ssd: Ssd = None,
    device: Device = None,
    device_kind: DeviceKind = None,
    device_unpaged: DeviceUnpaged = None,
    activations: Activations = None,
    update_on: UpdateOn = None,
    emulated_link: EmulatedLink = None,
    emulated_ssd: EmulatedSsd = None,
    page_elements: PageElements = None,
    batch: Annotated[int, typer.Option(metavar="COUNT", help="Rows of a micro-batch.")] = 1,
    sequence: Annotated[int, typer.Option(metavar="COUNT", help="Tokens of a row.")] = 512,
    micro_batches: Annotated[int, typer.Option(metavar="COUNT", help="Micro-batches of a step.")] = 1,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16 or float16.")] = "float32",
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="adamw_torch_fused, torch_offload.AdamW or none.")
    ] = "adamw_torch_fused",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Layers run again in the backward pass.")
    ] = False,
    tbw: Annotated[str, typer.Option(metavar="SIZE", help="What the drive is rated to have written.")] = "600TB",
    ssd_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the SSD may hold (default: what is free there).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what training a model would need, move and take, without loading it. Exit status 1 if it does not fit."""
    from torch_offload.diagnostics.probe import probe_with_progress
    from torch_offload.integrations import hf_models
    from torch_offload.planning.api import plan as make_plan

    settings = {"ram": ram, "ssd": ssd, "device": device, "device_kind": device_kind, "activations": activations}
    settings |= {
        "device_unpaged": device_unpaged,
        "update_on": update_on,
        "emulated_link": emulated_link,
        "emulated_ssd": emulated_ssd,
    }
    with _plain_errors():
        config = Config(**_given({**settings, "page_elements": page_elements}))
        made = make_plan(
            hf_models.model_from(model, dtype=dtype, uses_checkpointing=checkpointing),
            hf_models.batch_of(batch, sequence),
            config=config,
            optimizer=None if optimizer == "none" else optimizer,
            micro_batches=micro_batches,
            probe=probe_with_progress(config.ssd, progress_on=Console(stderr=True)),
            ssd_bytes=ssd_bytes,
            endurance_bytes=tbw,
        )
    if as_json:
        typer.echo(made.to_json())
    else:
        _console().print(made)
    raise typer.Exit(0 if made.fits else 1)


@app.command()
def probe(
    *,
    ssd: Ssd = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what plans are made from: disk, memory, processor. Kept for the next time."""
    from torch_offload.diagnostics.probe import probe_with_progress

    with _plain_errors():
        config = Config(**_given({"ssd": ssd}))
        measured = probe_with_progress(config.ssd, refresh=refresh, progress_on=Console(stderr=True))
    if as_json:
        _print_json(measured.to_dict())
    else:
        _console().print(measured)


@app.command()
def report(
    *,
    path: Annotated[
        Path, typer.Argument(metavar="[PATH]", help="A report, or a directory whose newest report is meant.")
    ] = Path(f"{REPORT_NAME}.json"),
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one self-contained HTML page.")] = None,
    tbw: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the drive is rated to have written, such as 600TB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a report that a run has written: as a table, as JSON or as an HTML page."""
    from torch_offload.reporting import saved_reports

    with _plain_errors():
        saved = saved_reports.load(path)
        endurance_bytes = None if tbw is None else parse_size(tbw)
        if html is not None:
            saved.write_html(html, endurance_bytes=endurance_bytes)
    if as_json:
        typer.echo(saved.to_json())
    elif html is not None:
        typer.echo(f"{html} written")
    else:
        console = _console()
        console.print(saved)
        for line in saved_reports.wear_lines(saved, endurance_bytes):
            console.print(line)


@app.command()
def compress(
    *,
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A HuggingFace model's directory, with its tokenizer.")
    ],
    calibration: Annotated[
        Path,
        typer.Option(metavar="FILE", help='Texts of the kind the model is meant for: .jsonl with "text", or a text.'),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the coded model; an ended run goes on there.")
    ],
    bits: Annotated[
        float, typer.Option(min=0.05, max=8.0, metavar="COUNT", help="Bits per weight of experts, everything counted.")
    ] = 0.8,
    rows: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Rows of tokens to use, from the beginning.")] = 256,
    sequence: Annotated[int, typer.Option(min=2, metavar="COUNT", help="Tokens of a row.")] = 512,
    coder: Annotated[
        str, typer.Option(metavar="NAME", help="smallest, or tun12: some more bytes, multiplied by faster.")
    ] = "smallest",
    ram: Ram = None,
    ssd: Ssd = None,
    as_json: AsJson = False,
) -> None:
    """Code the experts of a mixture-of-experts model to so many bits per weight. Everything else stays as it is.

    The model may be larger than memory: it is paged while it is compressed.
    """
    with _plain_errors():
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
            ram=ram,
            ssd=ssd,
        )
    if as_json:
        _print_json(done.to_dict())
    else:
        typer.echo(f"{out} written: experts of {done.coded_bytes} bytes, {done.bits:.3f} bits per weight")


@app.command()
def inspect(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that compress has written.")],
    as_json: AsJson = False,
) -> None:
    """Show what a directory's coded experts take, by module: bits per weight, planes, zeros, coders, bytes."""
    with _coded_folders() as folders:
        content = folders.inspect(folder)
    if as_json:
        _print_json(content.to_dict())
    else:
        _console().print(content)


@app.command()
def verify(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that compress has written.")],
    as_json: AsJson = False,
) -> None:
    """Read every coded page of a directory and hold it against checksum and model. Exit status 1 if damaged."""
    with _coded_folders() as folders:
        found = folders.verify(folder)
    if as_json:
        _print_json(found.to_dict())
    else:
        for problem in found.problems:
            typer.echo(problem)
        state = f"{len(found.problems)} problems" if found.problems else "all of it is what was written"
        typer.echo(f"{found.pages} pages, {found.read_bytes} bytes read: {state}")
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


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=1))


def _console() -> Console:
    """Return a console that does not break lines where the output is not a terminal."""
    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal else 160, soft_wrap=not is_terminal, highlight=False)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn what is wrong with the command line or the machine into one line and an exit status."""
    try:
        yield
    except ConfigError as error:
        _fail(error, USAGE_ERROR)
    except (OffloadError, OSError) as error:
        _fail(error, 1)


def _fail(error: Exception, status: int) -> NoReturn:
    typer.echo(f"torch-offload: {error}", err=True)
    raise typer.Exit(status)


def main() -> NoReturn:
    """Entry point of the console script."""
    launches: list[Launch] = []
    try:
        app(args=separate_script(sys.argv[1:]), prog_name="torch-offload", obj=launches)
    except SystemExit as end:
        if end.code or not launches:
            raise
    # Out here, so that what the script raises is handled as in a Python without us.
    sys.exit(launches[0].run() if launches else 0)
