"""PEP 517 backend: that of setuptools, and what an isolated build needs beside it.

The extension must be built against the torch it will run with. An isolated build sees nothing of the environment that
it builds for, so torch is asked for here: the version that TORCH_OFFLOAD_BUILD_TORCH names, else the one installed in
the environment (pip), else the newest that is supported (front ends that build in an environment of their own).
"""

import importlib.metadata
import os
import runpy
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the hooks that are not replaced below

COMPAT = runpy.run_path(str(Path(__file__).resolve().parents[1] / "torch_offload" / "_compat.py"))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + build_requirements()


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + build_requirements()


def build_requirements() -> list[str]:
    """Return what compiling needs: torch, and headers of xxHash where the system has none."""
    return [torch_requirement(), *([] if has_system_xxhash() else ["pyarrow"])]


def torch_requirement() -> str:
    named = os.environ.get("TORCH_OFFLOAD_BUILD_TORCH") or installed_torch()
    return f"torch=={named.split('+')[0]}" if named else str(COMPAT["requirement"]())


def installed_torch() -> str | None:
    """Return the version of torch in the environment whose Python this is, hidden from imports or not."""
    folders = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    return next((found.version for found in importlib.metadata.distributions(name="torch", path=folders)), None)


def has_system_xxhash() -> bool:
    if shutil.which("pkg-config") is None:
        return False
    return subprocess.run(["pkg-config", "--exists", "libxxhash"], check=False).returncode == 0
