"""How the programs of this folder are built, each with the layers that it tests; needs the toolkit, not torch.

By hand: python tests/gpu/programs.py driver_program build/driver_program sm_90
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {
    "kernel_program": ["optim"],
    "codec_program": ["base", "codec"],
    "driver_program": ["base", "device", "storage", "pager"],
}
ARITHMETIC = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false")


def xxhash_flags() -> list[str]:
    """The system's header, or the one that pyarrow carries; what is built needs no library of xxHash."""
    asked = subprocess.run(["pkg-config", "--exists", "libxxhash"], check=False) if shutil.which("pkg-config") else None
    if asked is not None and asked.returncode == 0:
        return ["-DXXH_INLINE_ALL"]
    pyarrow = importlib.util.find_spec("pyarrow")
    assert pyarrow is not None, "no xxHash: neither libxxhash nor pyarrow"
    folders = [f"{folder}/include/arrow/vendored/xxhash" for folder in pyarrow.submodule_search_locations or ()]
    return ["-DXXH_INLINE_ALL", *(f"-I{folder}" for folder in folders)]


def compile_command(name: str, built: Path, architecture: str) -> list[str]:
    """How a program of this folder is built with the layers that it tests, on all cores; without liburing."""
    folders = [ROOT / "csrc" / layer for layer in LAYERS[name]]
    sources = [path for folder in folders for path in folder.glob("*.c*") if path.suffix in (".cpp", ".cu")]
    sources = [path for path in sources if not path.stem.endswith("_operator")]
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc", path=os.pathsep.join([f"{home}/bin", os.environ["PATH"]]))
    assert nvcc is not None, "no nvcc: set CUDA_HOME"
    command = [nvcc, "-std=c++20", "-O2", f"-arch={architecture}", *ARITHMETIC, "-lineinfo", "--threads", "0"]
    command += ["-DTORCH_OFFLOAD_CUDA=1", "-Xcompiler", "-ffp-contract=off,-fno-math-errno"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/cpp'}", str(ROOT / f"tests/gpu/{name}.cu")]
    return [*command, *map(str, sorted(sources)), *xxhash_flags(), "-o", str(built)]


if __name__ == "__main__":
    sys.exit(subprocess.run(compile_command(sys.argv[1], Path(sys.argv[2]), sys.argv[3]), check=False).returncode)
