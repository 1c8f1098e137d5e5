"""Builds io_engine.cpp and runs it: our I/O engine by itself, without torch and without pages."""

import json
import subprocess
from pathlib import Path
from typing import Any

from harness import native_programs

BLOCK_BYTES = 2 << 20
DEPTH = 16


def build() -> Path:
    """Build the program where it is out of date; return its path."""
    return native_programs.build("io_engine_benchmark")


def command_of(program: Path, file: Path, *, file_bytes: int, direction: str, **options: object) -> list[str]:
    """Return the command of a run; `options` are named as on the command line, a True one is a flag."""
    words = [str(program), "--file", str(file), "--file-mib", str(file_bytes >> 20), "--direction", direction]
    for name, value in options.items():
        if value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def run(program: Path, file: Path, **options: Any) -> dict[str, Any]:
    """Run to the end; return what the program says."""
    command = command_of(program, file, **options)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {ended.returncode}: {ended.stderr.strip()}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))
