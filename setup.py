"""Builds the extension `torch_offload._C` from csrc/. Everything else about the package is in pyproject.toml."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LAYERS = ("base", "device", "storage", "codec", "pager", "autograd", "optim", "comm", "bindings")
OTHER_DEVICES = ("cuda",)  # files of devices that this build does not include
# Kernels for different processors give the same bits: no operation is fused with another, square roots are one.
ARITHMETIC = ("-ffp-contract=off", "-fno-math-errno")
COMPAT = runpy.run_path(str(ROOT / "torch_offload" / "_compat.py"))

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        f"torch_offload: building needs torch {COMPAT['supported_range']()} in this environment ({error}). "
        f"Run: pip install torch && {COMPAT['BUILD_COMMAND']}   (without --no-build-isolation pip hides torch)"
    )
UNSUPPORTED = COMPAT["unsupported_reason"](torch.__version__)
if UNSUPPORTED is not None:
    sys.exit(f"torch_offload: {UNSUPPORTED}")


def pkg_config(package, option):
    """Return what pkg-config prints for a package as a list, or None where the package is not installed."""
    if shutil.which("pkg-config") is None:
        return None
    answer = subprocess.run(["pkg-config", option, package], capture_output=True, text=True, check=False)
    return answer.stdout.split() if answer.returncode == 0 else None


def has_package(package):
    return pkg_config(package, "--exists") is not None


def sources():
    """Return every source of every layer, relative to the root as setuptools wants them."""
    found = (path for layer in LAYERS for path in sorted((ROOT / "csrc" / layer).glob("*.cpp")))
    return [str(path.relative_to(ROOT)) for path in found if not path.stem.startswith(OTHER_DEVICES)]


def extension():
    if not has_package("libxxhash"):
        sys.exit("torch_offload: libxxhash is needed for page checksums. Run: apt-get install libxxhash-dev pkg-config")
    packages = ["libxxhash"]
    macros = [("TORCH_OFFLOAD_BUILT_AGAINST", f'"{torch.__version__}"')]
    if has_package("liburing"):
        packages.append("liburing")
        macros.append(("TORCH_OFFLOAD_HAVE_LIBURING", "1"))
    else:
        print("torch_offload: liburing not found, building without io_uring (apt-get install liburing-dev adds it)")
    cflags = [flag for package in packages for flag in pkg_config(package, "--cflags")]
    libraries = [flag for package in packages for flag in pkg_config(package, "--libs")]
    return CppExtension(
        name="torch_offload._C",
        sources=sources(),
        include_dirs=[str(ROOT / "csrc")],
        depends=[str(path.relative_to(ROOT)) for path in sorted((ROOT / "csrc").rglob("*.h"))],
        define_macros=macros,
        extra_compile_args=["-std=c++20", "-O3", "-g0", *ARITHMETIC, *cflags],
        extra_link_args=libraries,
    )


class BuildForThisTorch(BuildExtension):
    """Keeps one folder of objects per torch version and writes down which one the extension was built against."""

    def finalize_options(self):
        super().finalize_options()
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.build_temp = str(ROOT / "build" / f"torch-{torch.__version__}-python-{python}")
        self.force = True  # ninja knows better than setuptools what is up to date: it sees the included headers

    def run(self):
        super().run()
        folders = [Path(self.build_lib) / "torch_offload"]
        if self.inplace or self.editable_mode:
            folders.append(ROOT / "torch_offload")
        for folder in folders:
            (folder / "_build_info.py").write_text(
                f'"""Written by setup.py."""\n\nBUILT_AGAINST_TORCH = "{torch.__version__}"\n'
            )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildForThisTorch})
