"""What each CUDA kernel takes of a multiprocessor: registers, shared memory and stack, as the compiler says.

    python tools/kernel_resources.py EXTENSION > docs/contributing/kernel-resources.md

EXTENSION is a torch_offload/_C*.so that was built with CUDA for the architectures of the table, or a shared library of
csrc/*/*_cuda.cu alone, compiled with the options that setup.py has for them (`CUDA_ARITHMETIC`); no GPU is needed. Uses
cuobjdump of the CUDA toolkit, or the one that triton carries, and nvcc to name its release.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from markdown_parts import table

FUNCTION = re.compile(
    r"arch = (?P<arch>sm_\w+)"
    r"|Function (?P<name>\w+):\n\s*REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)"
)
SOURCE = re.compile(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+)_cu_[0-9a-f]+")
HEAD = """# What the CUDA kernels take

Written by `tools/kernel_resources.py` from an extension that {release} compiled. A test of builds with CUDA compares
what it has of these architectures with the tables.

- **registers** of a thread; a multiprocessor has 65,536.
- **shared memory** of a block in bytes, without what a launch adds to it.
- **stack** of a thread in bytes: registers that it spills, and arrays that it indexes by what only a run knows. It
  lies in memory.
"""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel for one architecture; sizes in bytes."""

    architecture: str
    source: str
    name: str
    registers: int
    shared: int
    stack: int


def toolkit_program(name: str) -> str:
    """Return the path of a program of the CUDA toolkit, or of the one that triton carries.

    Raises:
        FileNotFoundError: If there is none.
    """
    triton = importlib.util.find_spec("triton")
    carried = [f"{folder}/backends/nvidia/bin" for folder in triton.submodule_search_locations or ()] if triton else []
    places = [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin", *carried, os.environ["PATH"]]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise FileNotFoundError(f"no {name}: neither in the CUDA toolkit nor in triton; set CUDA_HOME")
    return found


def kernels_of(extension: str) -> list[Kernel]:
    """Return all kernels in an extension, by architecture, file and name."""
    command = [toolkit_program("cuobjdump"), "--dump-resource-usage", extension]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    architecture, found = "", []
    for match in FUNCTION.finditer(told):
        if match["arch"]:
            architecture = match["arch"]
            continue
        source = SOURCE.search(match["name"])
        found.append(
            Kernel(
                architecture=architecture,
                source=f"{source[1]}.cu" if source else "",
                name=short_name(match["name"]),
                registers=int(match["registers"]),
                shared=int(match["shared"]),
                stack=int(match["stack"]),
            )
        )
    return sorted(found, key=lambda kernel: (int(kernel.architecture[3:].rstrip("af")), kernel.source, kernel.name))


def short_name(mangled: str) -> str:
    """Return a kernel's name with the numbers that it is compiled for, such as ``product_kernel<3, 2, 1>``."""
    match = re.search(r"_cu_[0-9a-f]{8}\d+([a-z]\w*?_kernel)(?:(I\w+?E)Ev)?", mangled)
    if match is None:
        raise ValueError(f"not the name of a kernel: {mangled}")
    numbers = re.findall(r"L(?:[jb]|N\w+?E)(\d+)E", match[2] or "")
    return f"{match[1]}<{', '.join(numbers)}>" if numbers else match[1]


def compiler_release() -> str:
    """Return the release of the toolkit's compiler, such as ``nvcc 13.0``."""
    told = subprocess.run([toolkit_program("nvcc"), "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+\.\d+)", told)
    if release is None:
        raise ValueError(f"nvcc says no release: {told}")
    return f"nvcc {release[1]}"


def rows(kernels: list[Kernel]) -> dict[str, list[list[str]]]:
    """Return the cells of each architecture's table."""
    return {
        architecture: [
            [
                f"`{kernel.source}`",
                f"`{kernel.name}`",
                *map(str, (kernel.registers, kernel.shared, kernel.stack)),
            ]
            for kernel in group
        ]
        for architecture, group in groupby(kernels, key=lambda kernel: kernel.architecture)
    }


def document(kernels: list[Kernel]) -> str:
    head = ["file", "kernel", "registers", "shared memory", "stack"]
    parts = [f"\n## {architecture}\n\n{table(head, cells)}" for architecture, cells in rows(kernels).items()]
    return HEAD.format(release=compiler_release()) + "".join(parts)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    sys.stdout.write(document(kernels_of(sys.argv[1])))
