"""First contact with a GPU: runs what has to be seen on one, in the order of what is learnt, each with a time limit.

    make gpu-contact                                     (all stages, into build/gpu-contact)
    python tools/gpu_contact.py --minutes 10 --stages environment driver kernels
    make gpu-rehearsal                                   (what can be, over a fake of the driver, without a GPU)
    make gpu-bundle                                      (beforehand, with a network: packages that may lack there)

Needs no network. Each stage writes STAGE.json (how it ended, in how many seconds) and STAGE.log as it runs, so whatever
is there is valid whenever the machine goes away. Started again it goes on with what has not passed.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "rich",
    "safetensors",
    "typer",
    "pytest",
    "transformers",
    "accelerate",
    "peft",
)
MOST_SWEEP_WORKERS = 14
OPERATORS_WITH_BARE_ADDRESSES = (  # kernels that torch compiles as it runs; their error says to use pinned()
    "jiterator_unary",
    "jiterator_binary",
    "jiterator_binary_return_by_ref",
    "jiterator_2inputs_2outputs",
    "jiterator_4inputs_with_extra_args",
)
PROGRAM = "driver_program"
BUNDLE = ROOT / "build" / "gpu-bundle"
SITE = "site"
OF_THE_BUNDLE = (
    *("--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"),
    *(word for tag in ("2_28", "2_17") for word in ("--platform", f"manylinux_{tag}_x86_64")),
    *("--platform", "manylinux2014_x86_64"),
)
Words = list[str]


Commands = Callable[[Path], list[Words]]
"""Given the folder for results: commands that run side by side."""


@dataclass(frozen=True)
class Stage:
    """One thing to be seen.

    Attributes:
        name: Of its files.
        commands: What is run.
        seconds: It is ended after as many.
        rehearsal: What is run in its place over the fake driver; None where only a GPU can show it.
    """

    name: str
    commands: Commands
    seconds: int
    rehearsal: Commands | None = None


def python(*words: str) -> Words:
    return [sys.executable, *words]


def pytest(*words: str) -> Commands:
    return lambda _: [python("-m", "pytest", "-o", "addopts=", "-v", "--tb=short", "--durations=5", *words)]


def benchmark(name: str, *options: str) -> Commands:
    return lambda _: [python(f"benchmarks/{name}.py", "--json", *options)]


def install(out: Path) -> list[Words]:
    """What `make gpu-bundle` gathered, to where only these stages look."""
    return unpacked(out / SITE)


def rehearse_install(out: Path) -> list[Words]:
    """The same as the Python of the bundle would, whichever runs here; to where nothing looks."""
    return unpacked(out / "site-of-the-bundle", *OF_THE_BUNDLE)


def unpacked(folder: Path, *options: str) -> list[Words]:
    wheels = [str(path) for path in sorted(BUNDLE.glob("*.whl"))]
    words = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(folder))
    return [python(*words, *options, *wheels)] if wheels else []


def sweep(*before: str) -> Commands:
    def commands(out: Path) -> list[Words]:
        module = ("-m", *before, "support.operator_sweep", "--device", "cuda", "--scratch", str(out))
        module += ("--without", *OPERATORS_WITH_BARE_ADDRESSES)
        workers = min(MOST_SWEEP_WORKERS, max(1, (os.cpu_count() or 1) - 2))
        shards = ("--shards", str(workers))
        return [python(*module, *shards, "--shard", str(shard)) for shard in range(workers)]

    return commands


def of_program(subcommand: str) -> tuple[Commands, Commands]:
    """The program that is built for the GPU at hand, and the one that ctest runs over the fake driver."""
    rehearsed = ROOT / "build/cpp-plain/tests/cpp/torch_offload_driver_rehearsal"
    return (
        lambda out: [[str(out / PROGRAM), subcommand, *([str(out)] if subcommand == "checks" else [])]],
        lambda out: [[str(rehearsed), subcommand, *([str(out)] if subcommand == "checks" else [])]],
    )


ENVIRONMENT = python(__file__, "--environment")
FAKE_TESTS = pytest("tests/python/runtime/test_fake_gpu.py", "-k", "real_gpu or addresses or capture or benchmark")
STAGES = (
    Stage("packages", install, 60, rehearsal=rehearse_install),
    Stage("environment", lambda _: [ENVIRONMENT], 60, rehearsal=lambda _: [ENVIRONMENT]),
    Stage("build", lambda _: [["make", ".gpu-build", f"GPU_PYTHON={sys.executable}"]], 240),
    Stage("doctor", lambda _: [python("-m", "torch_offload", "doctor")], 60),
    Stage("driver_program", lambda out: [python("tests/gpu/programs.py", PROGRAM, str(out / PROGRAM), "native")], 90),
    Stage("driver_checks", of_program("checks")[0], 110, rehearsal=of_program("checks")[1]),
    Stage("driver_timings", of_program("timings")[0], 60, rehearsal=of_program("timings")[1]),
    Stage("kernels", pytest("tests/gpu/test_kernels.py", "tests/gpu/test_codec.py"), 120),
    Stage("training", pytest("tests/gpu/test_training.py"), 400, rehearsal=FAKE_TESTS),
    Stage("sweep", sweep(), 240, rehearsal=pytest("tests/python/runtime/test_operator_sweep.py", "-k", "on_a_gpu")),
    Stage("sanitizers", pytest("tests/gpu/test_kernel_program.py"), 240),
    Stage("bench_kernels", benchmark("gpu_kernels"), 120),
    Stage("bench_training", benchmark("gpu_training"), 420),
    Stage("bench_training_backward", benchmark("gpu_training", "--update", "backward"), 300),
    Stage("bench_codec", benchmark("gpu_codec"), 180),
)


def answer(*words: str) -> str:
    """Return what a program prints, or why it cannot be asked."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    return (ended.stdout or ended.stderr).strip()


def environment() -> dict[str, Any]:
    """Describe machine, driver, toolkit and packages."""
    import importlib.metadata

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    found: dict[str, Any] = {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "free_disk_bytes": shutil.disk_usage(ROOT).free,
        "nvidia-smi": answer(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used,mig.mode.current", "--format=csv"
        ),
        "nvcc": answer("nvcc", "--version").splitlines()[-1:],
        "compute-sanitizer": shutil.which("compute-sanitizer"),
        "locked memory": answer("bash", "-c", "ulimit -l"),
        "link": answer("nvidia-smi", "--query-gpu=pcie.link.gen.current,pcie.link.width.current", "--format=csv"),
    }
    if versions["torch"] != "missing":
        import torch

        found["cuda of torch"] = torch.version.cuda
        found["gpu is available"] = torch.cuda.is_available()
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            found["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory}
    return found


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command with whatever it started."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, ending)
            process.wait(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run_stage(name: str, commands: list[Words], out: Path, seconds: float) -> dict[str, Any]:
    """Run the commands of a stage for so long at most; their output is in files from the first line on."""
    paths = [str(ROOT), str(ROOT / "tests/python"), str(out / SITE), os.environ.get("PYTHONPATH", "")]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    settings |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # what makes cuBLAS deterministic, read when it begins
    begin = time.monotonic()
    processes = []
    for number, words in enumerate(commands):
        ending = "" if len(commands) == 1 else f".{number}"
        with (out / f"{name}{ending}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    words, cwd=ROOT, env=settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    statuses: list[int | str] = []
    for process in processes:
        try:
            statuses.append(process.wait(timeout=max(0.1, begin + seconds - time.monotonic())))
        except subprocess.TimeoutExpired:
            end_group(process)
            statuses.append("cut")
    ended = "passed" if all(status == 0 for status in statuses) else "cut" if "cut" in statuses else "failed"
    return {
        "stage": name,
        "ended": ended,
        "statuses": statuses,
        "seconds": round(time.monotonic() - begin, 1),
        "limit_seconds": seconds,
        "commands": [" ".join(words) for words in commands],
    }


def last_ending(out: Path, name: str) -> str | None:
    """Return how a stage ended before, None if it never did."""
    path = out / f"{name}.json"
    return json.loads(path.read_text())["ended"] if path.is_file() else None


def run(stage: Stage, out: Path, *, until: float, is_rehearsal: bool, again: bool) -> str:
    """Run a stage if it has not passed, and write down how it ended; return that for a person."""
    commands = stage.rehearsal if is_rehearsal else stage.commands
    if commands is None:
        return "not in a rehearsal"
    if not again and last_ending(out, stage.name) == "passed":
        return "passed before"
    left = until - time.monotonic()
    if left < 1:
        return "no time left"
    result = run_stage(stage.name, commands(out), out, min(stage.seconds, left))
    part = out / f".{stage.name}.part"
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(out / f"{stage.name}.json")
    return f"{result['ended']} in {result['seconds']} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-contact", help="folder for the results")
    parser.add_argument("--minutes", type=float, default=30, help="end after as many (default: 30)")
    parser.add_argument(
        "--stages", nargs="+", choices=[stage.name for stage in STAGES], help="only these, in their order"
    )
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--rehearsal", action="store_true", help="over the fake driver, on a machine without a GPU")
    parser.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.environment:
        print(json.dumps(environment(), indent=1))
        return
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    endings = {}
    for stage in STAGES:
        if options.stages and stage.name not in options.stages:
            continue
        endings[stage.name] = run(stage, out, until=until, is_rehearsal=options.rehearsal, again=options.again)
        print(f"{stage.name}: {endings[stage.name]}", flush=True)
    if not all(ending.startswith(("passed", "not in")) for ending in endings.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
