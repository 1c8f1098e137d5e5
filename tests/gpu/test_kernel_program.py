"""The kernels without torch: equal to those for processors for every grid, and clean under compute-sanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = ("1", "9", "2047", "2049", "40000", "1000003")
SMALL_LENGTHS = ("9", "2049")
ARITHMETIC = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false")


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/gpu/kernel_program.cu with the kernels, for the GPU at hand."""
    sources = [path for path in (ROOT / "csrc/optim").glob("*.c*") if path.suffix in (".cpp", ".cu")]
    sources = [path for path in sources if not path.stem.endswith("_operator")]
    built = tmp_path_factory.mktemp("kernels") / "kernel_program"
    capability = "{}{}".format(*torch.cuda.get_device_capability())
    nvcc = shutil.which("nvcc", path=os.pathsep.join([f"{cpp_extension.CUDA_HOME}/bin", os.environ["PATH"]]))
    assert nvcc is not None, "no nvcc: set CUDA_HOME"
    command = [nvcc, "-std=c++20", "-O2", f"-arch=sm_{capability}", *ARITHMETIC, "-lineinfo"]
    command += ["-Xcompiler", "-ffp-contract=off,-fno-math-errno", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/cpp'}"]
    command += [str(ROOT / "tests/gpu/kernel_program.cu"), *map(str, sorted(sources)), "-o", str(built)]
    run(command)
    return built


def run(command: list[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def test_kernels_equal_those_for_processors(program):
    """Method: all forms of a parameter, aligned and not; departures in 1, 3 and 1000 blocks; margins around arrays."""
    assert f"{len(LENGTHS)} lengths, 0 differences" in run([str(program), *LENGTHS])


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_kernels_are_clean_under(program, tool):
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer is not None, "no compute-sanitizer on the path: it is a part of the CUDA toolkit"
    answer = run([sanitizer, "--tool", tool, "--error-exitcode", "1", str(program), *SMALL_LENGTHS])
    assert "0 errors" in answer or "0 hazards" in answer, answer
