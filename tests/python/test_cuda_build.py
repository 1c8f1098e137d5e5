"""What the extension was compiled for is what is in it.

Where it was built for CUDA, as `make test-versions` does on any machine, nothing here is left out.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torch_offload import _C


def cuobjdump() -> str:
    """The one of the toolkit, or the one that triton carries, on which torch with CUDA depends."""
    triton = importlib.util.find_spec("triton")
    carried = [f"{folder}/backends/nvidia/bin" for folder in triton.submodule_search_locations] if triton else []
    toolkit = [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    found = shutil.which("cuobjdump", path=os.pathsep.join([*toolkit, *carried, os.environ["PATH"]]))
    assert found is not None, "no cuobjdump: neither in the CUDA toolkit nor in triton"
    return found


def versions_of(option: str, kind: str) -> set[str]:
    """Return the architectures of all code of one kind in the extension: {"sm_80", ...}."""
    ended = subprocess.run([cuobjdump(), option, _C.__file__], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return set(re.findall(rf"\.(sm_\w+)\.{kind}$", ended.stdout, flags=re.MULTILINE))


def sm(version: str) -> str:
    return "sm_" + version.removesuffix("+PTX").replace(".", "")


# `make test-versions`, which CI runs, builds with CUDA; `make test` does not.
@pytest.mark.skipif(not _C.built_with_cuda, reason="this extension was built without CUDA")
def test_the_extension_holds_code_for_every_architecture():
    listed = _C.cuda_architectures
    assert versions_of("--list-elf", "cubin") == {sm(version) for version in listed}
    assert versions_of("--list-ptx", "ptx") == {sm(version) for version in listed if version.endswith("+PTX")}


def test_a_build_without_cuda_lists_none():
    assert bool(_C.cuda_architectures) == _C.built_with_cuda
    assert all(re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", version) for version in _C.cuda_architectures)


@pytest.mark.parametrize(("suffix", "is_cuda"), [(".cu", True), (".cpp", False)])
def test_kernels_stand_apart(suffix, is_cuda):
    """A source that launches kernels is a .cu file, which a build without CUDA leaves out."""
    root = Path(__file__).resolve().parents[2] / "csrc"
    texts = [path.read_text() for path in root.rglob(f"*{suffix}")]
    assert any("<<<" in text for text in texts) is is_cuda
