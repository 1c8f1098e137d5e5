"""What the extension was compiled for is what is in it.

Where it was built for CUDA, as `make test-versions` does on any machine, nothing here is left out.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_offload import _C

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import kernel_resources  # noqa: E402

TABLES = ROOT / "docs" / "contributing" / "kernel-resources.md"


def versions_of(option: str, kind: str) -> set[str]:
    """Return the architectures of all code of one kind in the extension: {"sm_80", ...}."""
    command = [kernel_resources.toolkit_program("cuobjdump"), option, _C.__file__]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
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


# As above.
@pytest.mark.skipif(not _C.built_with_cuda, reason="this extension was built without CUDA")
def test_kernels_take_what_the_tables_say():
    """Those of the architectures in them, by the compiler that wrote them; by any, no kernel has more stack."""
    kept = TABLES.read_text()
    found = kernel_resources.rows(kernel_resources.kernels_of(_C.__file__))
    assert found
    for architecture, cells in found.items():
        title = f"\n## {architecture}\n"
        if title not in kept:
            continue
        lines = [line for line in kept.split(title)[1].split("\n## ")[0].splitlines() if line.startswith("| `")]
        told = [line.strip("| ").split(" | ") for line in lines]
        assert [row[:2] for row in cells] == [row[:2] for row in told]
        assert all(int(row[-1]) <= int(other[-1]) for row, other in zip(cells, told, strict=True))
        if kernel_resources.compiler_release() in kept:
            assert cells == told


def test_a_build_without_cuda_lists_none():
    assert bool(_C.cuda_architectures) == _C.built_with_cuda
    assert all(re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", version) for version in _C.cuda_architectures)


@pytest.mark.parametrize(("suffix", "is_cuda"), [(".cu", True), (".cpp", False)])
def test_kernels_stand_apart(suffix, is_cuda):
    """A source that launches kernels is a .cu file, which a build without CUDA leaves out."""
    root = Path(__file__).resolve().parents[2] / "csrc"
    texts = [path.read_text() for path in root.rglob(f"*{suffix}")]
    assert any("<<<" in text for text in texts) is is_cuda
