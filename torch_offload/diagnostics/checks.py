"""Checks of the system that need no training run. Every function takes the root of the file system it reads."""

import os
import platform
import re
import resource
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from torch_offload import _C
from torch_offload._compat import REBUILD_COMMAND, parse_version, supported_range
from torch_offload.config import DEFAULT_PAGE_ELEMENTS, format_size
from torch_offload.diagnostics.check_result import CheckResult, State
from torch_offload.errors import ConfigError
from torch_offload.system import resources
from torch_offload.system.kernel_files import field_of, first_word, lines_of

OLDEST_KERNEL = (5, 7)
GOOD_KERNEL = (6, 1)
MIN_PAGE_BYTES = 2 * DEFAULT_PAGE_ELEMENTS
LITTLE_MEMORY_BYTES = 1 << 30
TESTED_WITH = {
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "trl": "1.16.0",
    "safetensors": "0.8.0",
}
"""The versions that the tests run with."""

_SYSTEM_ROOT = Path("/")
_STATUS = "proc/self/status"
_CAPABILITIES = re.compile("[0-9a-f]{1,16}")


def torch_result() -> CheckResult:
    """Whether the extension was built for this torch. One it was not built for is refused at import already."""
    found, built = torch.__version__, _C.built_against_torch
    if found == built:
        return CheckResult(name="torch", state=State.ok, what=f"{found}, the one that the extension was built against")
    return CheckResult(
        name="torch",
        state=State.warning,
        what=f"{found}; the extension was built against {built} (supported: {supported_range()})",
        remedy=f"if anything goes wrong, rebuild: {REBUILD_COMMAND} (in the source tree)",
    )


def _capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def cuda_result(
    *,
    architectures: tuple[str, ...] = _C.cuda_architectures,
    capability_of: Callable[[], tuple[int, int] | None] = _capability,
) -> CheckResult:
    """Whether the kernels for CUDA are there and run on the GPU, by its compute capability; None: there is no GPU."""
    name = "CUDA kernels"
    capability = capability_of()
    built = "built without CUDA"
    if architectures:
        built = "built for " + ", ".join("sm_" + version.replace(".", "") for version in architectures)
    if capability is None:
        return CheckResult(name=name, state=State.ok, what=f"{built}; no GPU found")
    if not architectures:
        return CheckResult(
            name=name,
            state=State.warning,
            what=f"{built}, and there is a GPU (sm_{capability[0]}{capability[1]})",
            remedy=f"install the CUDA toolkit and build again: FORCE_CUDA=1 {REBUILD_COMMAND} (in the source tree)",
        )
    if runs_on(capability, architectures):
        return CheckResult(name=name, state=State.ok, what=f"{built}; this GPU is sm_{capability[0]}{capability[1]}")
    wanted = f"{capability[0]}.{capability[1]}"
    return CheckResult(
        name=name,
        state=State.problem,
        what=f"{built}, not for this GPU, sm_{capability[0]}{capability[1]}",
        remedy=f"build again: FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST={wanted} {REBUILD_COMMAND} (in the source tree)",
    )


def runs_on(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether code for one of these runs on a GPU: of the same generation and not later, or compiled by its driver."""
    for name in architectures:
        major, minor = (int(number) for number in name.removesuffix("+PTX").rstrip("af").split("."))
        if capability[0] == major and capability[1] >= minor:
            return True
        if name.endswith("+PTX") and capability >= (major, minor):
            return True
    return False


def kernel_result(*, release: str | None = None) -> CheckResult:
    """Whether the kernel can move memory as pages need it."""
    release = (platform.release() if release is None else release).split("-")[0]
    version = parse_version(release)
    if version < OLDEST_KERNEL:
        return CheckResult(
            name="kernel",
            state=State.problem,
            what=f"Linux {release} cannot move memory between addresses (MREMAP_DONTUNMAP)",
            remedy="use Linux 5.7 or newer; 6.1 or newer is best",
        )
    if version < GOOD_KERNEL:
        return CheckResult(
            name="kernel",
            state=State.warning,
            what=f"Linux {release} works; io_uring is cheaper from 6.1 on",
            remedy="use Linux 6.1 or newer",
        )
    return CheckResult(name="kernel", state=State.ok, what=f"Linux {release}")


def io_engine_result(
    *, refusal_of: Callable[[str], str | None] = _C.io_engine_refusal, root: Path = _SYSTEM_ROOT
) -> CheckResult:
    """Try each of the three ways to read and write with a transfer."""
    fixed = refusal_of("uring_fixed")
    if fixed is None:
        return CheckResult(name="I/O engine", state=State.ok, what="io_uring with fixed buffers")
    plain = refusal_of("uring")
    if plain is None:
        return CheckResult(
            name="I/O engine",
            state=State.warning,
            what=f"io_uring without fixed buffers, a little more work per transfer ({fixed})",
            remedy=_memlock_remedy(),
        )
    return CheckResult(
        name="I/O engine",
        state=State.warning,
        what=f"threads with preadv and pwritev, which take more processor time: no io_uring ({plain})",
        remedy=_io_uring_remedy(root),
    )


def _io_uring_remedy(root: Path) -> str:
    if not _C.has_liburing:
        return f"install liburing's headers (apt-get install liburing-dev) and rebuild: {REBUILD_COMMAND}"
    setting = first_word(root / "proc/sys/kernel/io_uring_disabled")
    if setting not in (None, "0"):
        return f"kernel.io_uring_disabled is {setting}; as root: sysctl -w kernel.io_uring_disabled=0"
    if field_of(root / _STATUS, "Seccomp") not in (None, "0"):
        return (
            "this process runs under a seccomp profile, as containers do by default; allow io_uring_setup, "
            "io_uring_enter and io_uring_register in it (docker run --security-opt seccomp=PROFILE.json)"
        )
    return "raise the limit on locked memory (ulimit -l), or use Linux 5.11 or newer"


def memlock_result(*, needed_bytes: int, root: Path = _SYSTEM_ROOT) -> CheckResult:
    """Whether the buffers of the whole budget may be registered with io_uring."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes == resource.RLIM_INFINITY or _may_lock_anything(root):
        return CheckResult(name="locked memory", state=State.ok, what="no limit")
    text = f"at most {format_size(limit_bytes)}"
    if limit_bytes >= needed_bytes:
        return CheckResult(name="locked memory", state=State.ok, what=text)
    return CheckResult(
        name="locked memory",
        state=State.warning,
        what=f"{text}: pages beyond it are read and written through plain io_uring or threads",
        remedy=_memlock_remedy(),
    )


def _memlock_remedy() -> str:
    return "raise it: ulimit -l unlimited, or memlock in /etc/security/limits.conf, or docker run --ulimit memlock=-1"


def _may_lock_anything(root: Path) -> bool:
    """Whether the process holds CAP_IPC_LOCK."""
    capabilities = field_of(root / _STATUS, "CapEff")
    if capabilities is None or not _CAPABILITIES.fullmatch(capabilities):
        return False
    return bool(int(capabilities, 16) >> 14 & 1)


def memory_result(*, ram: int | None, root: Path = _SYSTEM_ROOT) -> CheckResult:
    """Whether the budget fits into what is free under the memory cgroup."""
    try:
        free_bytes = resources.free_memory_bytes(root=root)
    except ConfigError as error:
        state = State.problem if ram is None else State.warning
        return CheckResult(name="memory", state=state, what=str(error), remedy="give a budget with --ram")
    free = f"{format_size(free_bytes)} free"
    if ram is None:
        ram = resources.default_ram_bytes(root=root)
        what = f"{free} under the memory limits of system and cgroup; the budget without --ram is {format_size(ram)}"
        if free_bytes >= LITTLE_MEMORY_BYTES:
            return CheckResult(name="memory", state=State.ok, what=what)
        return CheckResult(
            name="memory", state=State.warning, what=what, remedy="free memory, or raise the cgroup's limit"
        )
    if ram > free_bytes:
        return CheckResult(
            name="memory",
            state=State.problem,
            what=f"a budget of {format_size(ram)}, {free}: the system would end the process",
            remedy=f"give --ram at most {resources.default_ram_bytes(root=root) >> 20}MiB, or raise the cgroup's limit",
        )
    return CheckResult(name="memory", state=State.ok, what=f"a budget of {format_size(ram)}, {free}")


def address_result() -> CheckResult:
    """Whether the process may reserve addresses, of which every model takes as many as it has bytes."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes == resource.RLIM_INFINITY:
        return CheckResult(name="addresses", state=State.ok, what="no limit")
    return CheckResult(
        name="addresses",
        state=State.problem,
        what=f"at most {format_size(limit_bytes)}; pages need addresses, not memory, for all of the model",
        remedy="lift it: ulimit -v unlimited",
    )


def mappings_result(*, ram: int, root: Path = _SYSTEM_ROOT) -> CheckResult:
    """Whether the kernel allows as many mappings as the budget has pages."""
    allowed = resources.max_mappings(root=root)
    if allowed is None:
        return CheckResult(name="mappings", state=State.ok, what="the system does not say how many it allows")
    needed = resources.MAPPINGS_PER_PAGE * ram // MIN_PAGE_BYTES
    what = f"vm.max_map_count is {allowed}; the budget may take {needed}"
    if allowed >= needed:
        return CheckResult(name="mappings", state=State.ok, what=what)
    remedy = f"as root: sysctl -w vm.max_map_count={2 * needed}"
    return CheckResult(name="mappings", state=State.warning, what=what, remedy=remedy)


def huge_page_result(*, root: Path = _SYSTEM_ROOT) -> CheckResult:
    """Whether pages may lie in huge pages, which are cheaper to move."""
    words = " ".join(lines_of(root / "sys/kernel/mm/transparent_hugepage/enabled")).split()
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), None)
    if chosen in ("always", "madvise"):
        return CheckResult(name="huge pages", state=State.ok, what=chosen)
    return CheckResult(
        name="huge pages",
        state=State.warning,
        what="never: moving memory costs more" if chosen == "never" else "not known here",
        remedy="as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def processor_result(*, root: Path = _SYSTEM_ROOT) -> CheckResult:
    """Name the vector instructions that checksums and torch's kernels can use."""
    cpuinfo = root / "proc/cpuinfo"
    flags = (field_of(cpuinfo, "flags") or field_of(cpuinfo, "Features") or "").split()
    best = next((text for flag, text in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), None)
    count = len(os.sched_getaffinity(0))
    cores = f"{count} core" if count == 1 else f"{count} cores"
    if best is not None:
        return CheckResult(name="processor", state=State.ok, what=f"{cores}, {best}")
    return CheckResult(
        name="processor",
        state=State.warning,
        what=f"{cores} without AVX2: checksums and training are slower",
        remedy="use a machine with AVX2, or give the virtual machine the host's processor type",
    )


def package_results() -> list[CheckResult]:
    """Compare the versions of the packages around torch with those that the tests run with."""
    return [_package_result(name, tested) for name, tested in TESTED_WITH.items()]


def _package_result(name: str, tested: str) -> CheckResult:
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return CheckResult(name=name, state=State.ok, what="not installed")
    if found.split(".")[:2] == tested.split(".")[:2]:
        return CheckResult(name=name, state=State.ok, what=found)
    return CheckResult(
        name=name,
        state=State.warning,
        what=f"{found}, not tested; the tests run with {tested}",
        remedy=f"if anything goes wrong: pip install {name}=={tested}",
    )
