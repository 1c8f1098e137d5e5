"""The kernels without torch: equal to those for processors for every grid, and clean under compute-sanitizer."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {"kernel_program": ["optim"], "codec_program": ["base", "codec"]}
SIZES = {
    "kernel_program": ("1", "9", "2047", "2049", "40000", "1000003"),
    "codec_program": ("1", "7", "16", "65", "1000", "3001"),
}
SMALL_SIZES = {"kernel_program": ("9", "2049"), "codec_program": ("9", "700")}
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ARITHMETIC = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false")


def xxhash_flags() -> list[str]:
    """The system's library, or the header that pyarrow carries, as setup.py has it."""
    asked = subprocess.run(["pkg-config", "--exists", "libxxhash"], check=False) if shutil.which("pkg-config") else None
    if asked is not None and asked.returncode == 0:
        return ["-lxxhash"]
    pyarrow = importlib.util.find_spec("pyarrow")
    assert pyarrow is not None, "no xxHash: neither libxxhash nor pyarrow"
    folders = [f"{folder}/include/arrow/vendored/xxhash" for folder in pyarrow.submodule_search_locations or ()]
    return ["-DXXH_INLINE_ALL", *(f"-I{folder}" for folder in folders)]


def compile_command(name: str, built: Path, architecture: str) -> list[str]:
    """How a program of this folder is built with the layers that it tests."""
    folders = [ROOT / "csrc" / layer for layer in LAYERS[name]]
    sources = [path for folder in folders for path in folder.glob("*.c*") if path.suffix in (".cpp", ".cu")]
    sources = [path for path in sources if not path.stem.endswith("_operator")]
    nvcc = shutil.which("nvcc", path=os.pathsep.join([f"{cpp_extension.CUDA_HOME}/bin", os.environ["PATH"]]))
    assert nvcc is not None, "no nvcc: set CUDA_HOME"
    command = [nvcc, "-std=c++20", "-O2", f"-arch={architecture}", *ARITHMETIC, "-lineinfo"]
    command += ["-Xcompiler", "-ffp-contract=off,-fno-math-errno", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/cpp'}"]
    return [*command, str(ROOT / f"tests/gpu/{name}.cu"), *map(str, sorted(sources)), *xxhash_flags(), "-o", str(built)]


def run(command: list[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="session", params=list(LAYERS))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of this folder with the kernels, for the GPU at hand."""
    built = tmp_path_factory.mktemp("kernels") / str(request.param)
    run(compile_command(built.name, built, "sm_{}{}".format(*torch.cuda.get_device_capability())))
    return built


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
