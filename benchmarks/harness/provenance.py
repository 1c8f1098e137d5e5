"""What a result must say of itself to be worth anything later: which code, which versions, which machine, when."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch_offload.system.environment import processor_name

ROOT = Path(__file__).resolve().parents[2]
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEASURED = ("benchmarks", "csrc", "torch_offload", "examples/demo_*.py", "setup.py", ":!benchmarks/results")


def git(*arguments: str) -> str:
    """Return what git says here; nothing outside of a repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def commit_of(tree: Path) -> str:
    """Return the commit of a tree, with -dirty where files differ from it, if called before it is measured."""
    return git("-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


COMMIT = git("rev-parse", "HEAD")  # when the driver started: what it measures


def code() -> dict[str, Any]:
    """Return the commit that is measured, the files of the measured code that differ from it, and how it was called."""
    changed = git("diff", "--name-only", COMMIT, "--", *MEASURED) if COMMIT else ""
    added = git("ls-files", "--others", "--exclude-standard", "--", *MEASURED)
    return {
        "commit": COMMIT,
        "modified_files": sorted([*changed.splitlines(), *added.splitlines()]),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": version("torch"),
    }


def machine(directory: str = ".") -> dict[str, Any]:
    """Describe the machine, and the disk below a directory."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor_name() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "kernel": platform.release(),
        "huge_pages": HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "",
        "disk": disk(directory),
    }


def disk(directory: str) -> dict[str, str]:
    """Return device, file system and model of the disk that a directory is on, as the kernel names them."""
    command = ["findmnt", "--noheadings", "--output", "SOURCE,FSTYPE", "--target", directory]
    device, file_system = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[:2]
    block = Path("/sys/class/block", Path(device).name).resolve()  # of a partition, the disk is the folder above
    models = [path for path in (block / "device/model", block.parent / "device/model") if path.exists()]
    return {
        "device": device,
        "file_system": file_system,
        "model": models[0].read_text().strip() if models else "not named by the kernel",
    }
