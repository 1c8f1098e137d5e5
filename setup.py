"""Builds the extension `torch_offload._C` from csrc/. Everything else about the package is in pyproject.toml.

Torch is imported when the extension is built, so that metadata and source distributions need none.

Variables that the build reads, those of torch's own extensions: FORCE_CUDA=1 builds the kernels for CUDA (0: never;
unset: where this torch has CUDA and sees a GPU), CUDA_HOME says where the toolkit is, TORCH_CUDA_ARCH_LIST for which
GPUs to compile. OFFLOAD_SANITIZE=undefined (or another of g++'s sanitizers) builds with checks at run time, in a
folder of objects of its own; only for tests of the extension.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LAYERS = ("base", "device", "storage", "codec", "net", "pager", "autograd", "optim", "bindings")
CUDA_ONLY = "_cuda_operator"  # what the names of sources end in that need the headers of a torch with CUDA
CUDA_ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
USUAL_CUDA_HOME = "/usr/local/cuda"
# Kernels for different processors give the same bits: no operation is fused with another, square roots are one.
ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno")
# Only code that was compiled for OpenMP shares the threads of torch: elsewhere at::parallel_for is a plain loop.
THREADS = ("-fopenmp",)
# Errors end the process, overflows too, which Python's own -fwrapv would allow. Not checked: what needs torch compiled
# with it as well (vptr); what makes g++ forget that functions have addresses, as registering operators asserts.
UNCHECKED = "vptr,null,nonnull-attribute,returns-nonnull-attribute"
CHECKED = (
    *("-O1", "-g1", "-fno-omit-frame-pointer"),
    *("-fno-wrapv", "-fno-sanitize-recover=all", f"-fno-sanitize={UNCHECKED}"),
)
CUDA_ARITHMETIC = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false")
COMPAT = runpy.run_path(str(ROOT / "torch_offload" / "_compat.py"))
NAME = "torch_offload._C"
BINARY_COMMANDS = {"bdist_wheel", "dist_info", "editable_wheel"}  # what they describe runs with one torch only


def cuda_home():
    """Return the first folder with a whole toolkit: the one named, the usual one, that of nvcc on the path; or None."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    found = [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    for folder in (*named, USUAL_CUDA_HOME, *found):
        if Path(folder, "bin/nvcc").is_file() and Path(folder, "include/cuda_runtime.h").is_file():
            return folder
    return None


def import_torch():
    """Import torch with the toolkit that is there; ends with a message where torch is missing or not supported."""
    home = cuda_home()
    if home is not None:
        os.environ["CUDA_HOME"] = home  # torch reads it when its module is imported
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        sys.exit(
            f"torch_offload: building needs torch {COMPAT['supported_range']()} in this environment ({error}). "
            f"Run: pip install torch && {COMPAT['BUILD_COMMAND']}"
        )
    unsupported = COMPAT["unsupported_reason"](torch.__version__)
    if unsupported is not None:
        sys.exit(f"torch_offload: {unsupported}")
    return torch, cpp_extension


def cuda_refusal(torch):
    """Say why kernels for CUDA cannot be compiled here, or return None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install one that has (pip install torch)"
    wanted = torch.version.cuda.split(".")[0]
    home = cuda_home()
    if home is None:
        return (
            f"no CUDA toolkit found (nvcc and cuda_runtime.h): install version {wanted} from "
            "https://developer.nvidia.com/cuda-downloads, and set CUDA_HOME if it is not in "
            f"{USUAL_CUDA_HOME}"
        )
    answer = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+)\.(\d+)", answer.stdout)
    if release is None:
        return f"{home}/bin/nvcc --version fails: {(answer.stderr or answer.stdout).strip()}"
    if release[1] != wanted:
        return (
            f"the toolkit in {home} is CUDA {release[1]}.{release[2]}, torch {torch.__version__} was built with "
            f"{torch.version.cuda}: set CUDA_HOME to a toolkit of version {wanted}"
        )
    return None


def builds_cuda(torch):
    """Decide whether kernels for CUDA are compiled; ends with a message where they are asked for and cannot be."""
    forced = os.environ.get("FORCE_CUDA", "")
    if forced not in ("", "0", "1"):
        sys.exit(f"torch_offload: FORCE_CUDA is 1, 0 or not set, got {forced!r}")
    if forced == "0" or (not forced and not (torch.version.cuda and torch.cuda.is_available())):
        return False
    refusal = cuda_refusal(torch)
    if refusal and forced:
        sys.exit(f"torch_offload: FORCE_CUDA=1, but {refusal}")
    if refusal:
        print(f"torch_offload: building without CUDA: {refusal}")
    return refusal is None


def cuda_architectures():
    """Return what to compile for as a list such as ["9.0", "12.0+PTX"]; torch reads the same variable."""
    text = os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or CUDA_ARCHITECTURES
    names = [name for name in re.split(r"[;\s]+", text) if name]
    for name in names:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", name):
            sys.exit(f"torch_offload: TORCH_CUDA_ARCH_LIST names versions, such as {CUDA_ARCHITECTURES}; got {name!r}")
    return names


def pkg_config(package, option):
    """Return what pkg-config prints for a package as a list, or None where the package is not installed."""
    if shutil.which("pkg-config") is None:
        return None
    answer = subprocess.run(["pkg-config", option, package], capture_output=True, text=True, check=False)
    return answer.stdout.split() if answer.returncode == 0 else None


def has_package(package):
    return pkg_config(package, "--exists") is not None


def sources(*, with_cuda):
    """Return every source of every layer, relative to the root as setuptools wants them."""
    found = [path for layer in LAYERS for path in sorted((ROOT / "csrc" / layer).glob("*.cpp"))]
    if with_cuda:
        found += [path for layer in LAYERS for path in sorted((ROOT / "csrc" / layer).glob("*.cu"))]
    return [str(path.relative_to(ROOT)) for path in found if with_cuda or not path.stem.endswith(CUDA_ONLY)]


def headers():
    found = [path for ending in ("h", "cuh") for path in (ROOT / "csrc").rglob(f"*.{ending}")]
    return [str(path.relative_to(ROOT)) for path in sorted(found)]


def xxhash_package():
    """Return flags to compile and to link with xxHash: the system's library, or the header that pyarrow carries."""
    if has_package("libxxhash"):
        return pkg_config("libxxhash", "--cflags"), pkg_config("libxxhash", "--libs")
    pyarrow = importlib.util.find_spec("pyarrow")
    for package in (pyarrow.submodule_search_locations or ()) if pyarrow else ():
        folder = Path(package, "include/arrow/vendored/xxhash")
        if (folder / "xxhash.h").is_file():
            print(f"torch_offload: libxxhash not found, checksums are compiled from {folder}; they are slower than its")
            return ["-DXXH_INLINE_ALL", f"-I{folder}"], []
    return sys.exit(
        "torch_offload: xxHash is needed for page checksums. Run: apt-get install libxxhash-dev pkg-config   "
        "(or, without root: pip install pyarrow, whose headers hold it)"
    )


def cuda_options(architectures):
    """Return what CUDA adds: flags for the C++ compiler, flags for nvcc."""
    names = ",".join(f'"{name}"' for name in architectures)
    flags = [f"-DTORCH_OFFLOAD_CUDA_ARCHITECTURES={names}", "-DTORCH_OFFLOAD_CUDA=1"]
    return flags, ["-std=c++20", "-O3", "--threads", "2", "-DTORCH_OFFLOAD_CUDA=1", *CUDA_ARITHMETIC]


def sanitizer_options():
    """Return flags to compile and to link with the sanitizers that are asked for."""
    wanted = os.environ.get("OFFLOAD_SANITIZE")
    return ([f"-fsanitize={wanted}", *CHECKED], [f"-fsanitize={wanted}"]) if wanted else ([], [])


def extension(torch, cpp_extension, *, with_cuda):
    cflags, libraries = xxhash_package()
    macros = [("TORCH_OFFLOAD_BUILT_AGAINST", f'"{torch.__version__}"')]
    if has_package("liburing"):
        cflags, libraries = cflags + pkg_config("liburing", "--cflags"), libraries + pkg_config("liburing", "--libs")
        macros.append(("TORCH_OFFLOAD_HAVE_LIBURING", "1"))
    else:
        print("torch_offload: liburing not found, building without io_uring (apt-get install liburing-dev adds it)")
    cuda_flags, nvcc_flags = cuda_options(cuda_architectures()) if with_cuda else ([], [])
    checks, checks_library = sanitizer_options()
    cxx_flags = ["-std=c++20", "-O3", "-g0", *ARITHMETIC, *THREADS, *cflags, *cuda_flags, *checks]
    return (cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension)(
        name=NAME,
        sources=sources(with_cuda=with_cuda),
        include_dirs=[str(ROOT / "csrc")],
        depends=headers(),
        define_macros=macros,
        extra_compile_args={"cxx": cxx_flags, "nvcc": nvcc_flags},
        extra_link_args=[*libraries, *THREADS, *checks_library],
    )


class BuildForThisTorch(build_ext):
    """Builds with torch's own command, in a folder of objects per torch version; writes down which version it was."""

    def run(self):
        torch, cpp_extension = import_torch()
        with_cuda = builds_cuda(torch)
        self.distribution.ext_modules = [extension(torch, cpp_extension, with_cuda=with_cuda)]
        command = cpp_extension.BuildExtension(self.distribution)
        command.inplace, command.editable_mode, command.build_lib = self.inplace, self.editable_mode, self.build_lib
        command.force = True  # ninja knows better than setuptools what is up to date: it sees the included headers
        kind = "-cuda" if with_cuda else ""
        if os.environ.get("OFFLOAD_SANITIZE"):
            kind += "-" + os.environ["OFFLOAD_SANITIZE"]
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        command.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}-python-{python}{kind}")
        command.ensure_finalized()
        command.run()
        folders = [Path(self.build_lib) / "torch_offload"]
        if self.inplace or self.editable_mode:
            folders.append(ROOT / "torch_offload")
            objects = ROOT / "build" / "objects"  # the tests of the layers below link them
            objects.unlink(missing_ok=True)
            objects.symlink_to(Path(command.build_temp).name)
        for folder in folders:
            (folder / "_build_info.py").write_text(
                '"""Written by setup.py."""\n\n'
                f'BUILT_AGAINST_TORCH = "{torch.__version__}"\n'
                f'VERSION = "{self.distribution.get_version()}"\n'
            )


@functools.cache
def torch_pin():
    """Return the requirement on torch of what is built here, `torch==2.13.*`, or None where there is no torch."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return "torch=={}.{}.*".format(*COMPAT["parse_version"](version))


class PinTorch(Distribution):
    """Adds to a wheel's requirements the minor version of torch that its extension is built against."""

    def _finalize_requires(self):
        asked = BINARY_COMMANDS.intersection(self.script_args or ())
        if asked and self.install_requires and torch_pin() and torch_pin() not in self.install_requires:
            self.install_requires = [*self.install_requires, torch_pin()]
        super()._finalize_requires()


setup(ext_modules=[Extension(NAME, sources=[])], cmdclass={"build_ext": BuildForThisTorch}, distclass=PinTorch)
