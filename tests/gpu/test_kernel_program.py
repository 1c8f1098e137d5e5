"""The kernels without torch: equal to those for processors for every grid, and clean under compute-sanitizer."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from programs import compile_command

SIZES = {
    "kernel_program": ("1", "9", "2047", "2049", "40000", "1000003"),
    "codec_program": ("1", "7", "16", "65", "1000", "3001"),
}
SMALL_SIZES = {"kernel_program": ("9", "2049"), "codec_program": ("9", "700")}
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def run(command: list[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def build(name: str, folder: Path) -> Path:
    """A program of this folder, for the GPU at hand."""
    built = folder / name
    run(compile_command(name, built, "sm_{}{}".format(*torch.cuda.get_device_capability())))
    return built


@pytest.fixture(scope="session", params=list(SIZES))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with kernels."""
    return build(str(request.param), tmp_path_factory.mktemp("kernels"))


def test_kernels_equal_those_for_processors(program):
    """Method: all forms of a parameter, aligned and not; writebacks in 1, 3 and 1000 blocks; margins around arrays.

    Coded matrices of each coder, decoded and multiplied by 1 to 70 tokens, forward and transposed.
    """
    sizes = SIZES[program.name]
    answer = run([str(program), *sizes])
    assert answer.startswith(f"{len(sizes)} ")
    assert answer.endswith(", 0 differences\n")


@pytest.mark.parametrize("tool", TOOLS)
def test_kernels_are_clean_under(program, tool):
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer is not None, "no compute-sanitizer on the path: it is a part of the CUDA toolkit"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", str(program), *SMALL_SIZES[program.name]]
    answer = run(command)
    assert "0 errors" in answer or "0 hazards" in answer, answer


def test_the_driver_keeps_what_the_engine_relies_on(tmp_path):
    """Method: every contract by itself, without torch; pages move beside kernels that use them."""
    program = build("driver_program", tmp_path)
    ended = subprocess.run([str(program), "checks", str(tmp_path)], capture_output=True, text=True, check=False)
    report = json.loads(ended.stdout.splitlines()[-1])
    assert {check["name"]: check["seen"] for check in report["entries"] if not check["held"]} == {}
    assert ended.returncode == 0, ended.stderr
    assert not report["is_rehearsal"]
