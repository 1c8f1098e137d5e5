"""Defaults follow what the system allows. Method: small copies of /proc and /sys under a temporary root."""

import os
import types
from pathlib import Path

import pytest

from torch_offload import ConfigError
from torch_offload.system import resources

pytestmark = pytest.mark.any_torch

MIB = 1 << 20
GIB = 1 << 30
V2_MOUNT = "31 24 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"


class Machine:
    """Files under a root, written as the kernel writes them."""

    def __init__(self, root: Path):
        self.root = root

    def write(self, path, text):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
        return self

    def available(self, size_bytes):
        return self.write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:   {size_bytes // 1024} kB\nCached: 7 kB")

    def mounts(self, *lines):
        return self.write("proc/self/mountinfo", "\n".join(lines))

    def v2(self, group, limit, usage, cache=0):
        folder = f"sys/fs/cgroup{group}"
        self.write(f"{folder}/memory.max", limit).write(f"{folder}/memory.current", usage)
        return self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {cache}\nactive_file 5")

    def v1(self, group, limit, usage, cache=0):
        folder = f"sys/fs/cgroup/memory{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit).write(f"{folder}/memory.usage_in_bytes", usage)
        return self.write(f"{folder}/memory.stat", f"cache 1\ninactive_file 3\ntotal_inactive_file {cache}")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_cgroups_the_system_decides(machine):
    """MemAvailable is what counts, not MemFree or MemTotal."""
    machine.available(10 * GIB)
    assert resources.free_memory_bytes(root=machine.root) == 10 * GIB
    assert resources.default_ram_bytes(root=machine.root) == 8 * GIB - 256 * MIB


def test_little_memory_leaves_half(machine):
    """The reserve never eats more than half of what is free."""
    machine.available(400 * MIB)
    assert resources.default_ram_bytes(root=machine.root) == 200 * MIB


def test_v2_limit_less_usage_plus_droppable_cache(machine):
    """File cache that the kernel may drop is free memory."""
    machine.available(64 * GIB).mounts(V2_MOUNT).write("proc/self/cgroup", "0::/job")
    machine.v2("/job", 4 * GIB, 3 * GIB, cache=1 * GIB).v2("", "max", 9 * GIB)
    assert resources.free_memory_bytes(root=machine.root) == 2 * GIB


def test_v2_parents_count_too(machine):
    """A child without a limit is bound by its parent's."""
    machine.available(64 * GIB).mounts(V2_MOUNT).write("proc/self/cgroup", "0::/slice/job")
    machine.v2("/slice/job", "max", 1 * GIB).v2("/slice", 6 * GIB, 1 * GIB)
    assert resources.free_memory_bytes(root=machine.root) == 5 * GIB


def test_v1_limit(machine):
    """The hierarchical cache is taken, beside other controllers and a unified mount without memory."""
    machine.available(64 * GIB).mounts(V1_MOUNT.format(root="/"), V2_MOUNT.replace("cgroup rw", "cgroup/unified rw"))
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n0::/")
    machine.v1("/job", 3 * GIB, 2 * GIB, cache=512 * MIB).v1("", 2**63 - 4096, 20 * GIB)
    assert resources.free_memory_bytes(root=machine.root) == 1 * GIB + 512 * MIB


@pytest.mark.parametrize("mount_root", ["/docker/abc", "/"])
def test_v1_in_a_container(machine, mount_root):
    """The process sees the host's path while only its own part is mounted, with or without that path as root."""
    machine.available(64 * GIB).mounts(V1_MOUNT.format(root=mount_root))
    machine.write("proc/self/cgroup", "4:memory:/docker/abc").v1("", 2 * GIB, 1 * GIB)
    assert resources.free_memory_bytes(root=machine.root) == 1 * GIB


def test_usage_above_the_limit_is_no_free_memory(machine):
    """Never a negative budget."""
    machine.available(64 * GIB).mounts(V2_MOUNT).write("proc/self/cgroup", "0::/").v2("", 1 * GIB, 2 * GIB)
    assert resources.free_memory_bytes(root=machine.root) == 0


def test_what_a_process_may_have_in_all(machine):
    """The system's memory where no cgroup has less, the tightest limit of a cgroup otherwise; used or not."""
    assert resources.memory_limit_bytes(root=machine.root) is None
    machine.write("proc/meminfo", f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: 1 kB")
    assert resources.memory_limit_bytes(root=machine.root) == 8 * GIB
    machine.mounts(V2_MOUNT).write("proc/self/cgroup", "0::/slice/job")
    machine.v2("/slice/job", 9 * GIB, 1 * GIB).v2("/slice", 6 * GIB, 5 * GIB)
    assert resources.memory_limit_bytes(root=machine.root) == 6 * GIB


def test_a_silent_system_asks_for_a_budget(machine):
    """No guess."""
    with pytest.raises(ConfigError, match="give a budget, such as ram='8GiB'"):
        resources.free_memory_bytes(root=machine.root)


def test_this_machine_says_something():
    """The real files are read without surprise."""
    assert 0 < resources.default_ram_bytes() < resources.free_memory_bytes()


def test_the_innermost_mount_names_the_filesystem(machine, tmp_path):
    """A tmpfs below a disk is memory, also with a space in its name; a later mount hides an earlier one."""
    inner = tmp_path / "with space"
    inner.mkdir()
    place = str(inner).replace(" ", "\\040")
    machine.mounts(
        "1 0 8:1 / / rw - ext4 /dev/vda rw", f"2 1 0:5 / {place} rw - ext4 x rw", f"3 1 0:5 / {place} rw - tmpfs t rw"
    )
    assert resources.filesystem_of(tmp_path, root=machine.root) == "ext4"
    assert resources.filesystem_of(inner / "deeper", root=machine.root) == "tmpfs"
    refusal = resources.scratch_refusal(inner, root=machine.root)
    assert refusal == f"{inner} is on tmpfs, which is memory; name a directory on a disk"


def test_missing_directories_and_files_are_refused(machine, tmp_path):
    """Each with its reason."""
    file = machine.write("file", "x").root / "file"
    assert "does not exist" in resources.scratch_refusal(tmp_path / "missing")
    assert "is not a directory" in resources.scratch_refusal(file)


def test_the_default_scratch_directory_is_on_a_disk_with_room(machine, tmp_path, monkeypatch):
    """tmpfs is passed over; the first with room wins; without room anywhere the one with most."""
    memory, small, large = (tmp_path / name for name in ("memory", "small", "large"))
    for directory in (memory, small, large):
        directory.mkdir()
    machine.mounts("1 0 8:1 / / rw - ext4 /dev/vda rw", f"2 1 0:5 / {memory} rw - tmpfs t rw")
    monkeypatch.setattr(resources, "_usual_directories", lambda: iter([memory, small, large]))
    monkeypatch.setattr(resources, "free_disk_bytes", {small: 10, large: 1000}.__getitem__)
    for needed_bytes, chosen in ((5, small), (500, large), (5000, large)):
        found = resources.default_scratch_directory(needed_bytes=needed_bytes, keep_free=0, root=machine.root)
        assert found == chosen
    assert resources.default_scratch_directory(needed_bytes=5, keep_free=6, root=machine.root) == large


@pytest.mark.parametrize(("disk_gib", "kept_gib"), [(10, 1), (20, 1), (100, 5)])
def test_a_part_of_the_disk_is_kept_free(monkeypatch, tmp_path, disk_gib, kept_gib):
    """5 %, at least 1 GiB, unless something else is said; what is left is divided by max_spill evenly."""
    status = types.SimpleNamespace(f_blocks=disk_gib << 18, f_frsize=4096, f_bavail=2 * disk_gib << 15)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    free_bytes = disk_gib << 28
    assert resources.free_disk_bytes(tmp_path) == free_bytes
    assert resources.kept_bytes(tmp_path, keep_free=None) == kept_gib << 30
    assert resources.kept_bytes(tmp_path, keep_free=7) == 7
    room_bytes = free_bytes - (kept_gib << 30)
    assert resources.room_for_pages([tmp_path], keep_free=None) == room_bytes
    assert resources.room_for_pages([tmp_path] * 2, keep_free=0) == 2 * free_bytes
    assert resources.room_for_pages([tmp_path] * 2, keep_free=0, max_spill=1001) == 1000
    assert resources.room_for_pages([tmp_path], keep_free=1 << 50) == 0


@pytest.mark.parametrize(
    ("filesystem", "said"),
    [
        ("ext4", None),
        ("nfs4", "where its server goes away"),
        ("cifs", "where its server goes away"),
        ("fuse.sshfs", "which a program serves"),
    ],
)
def test_a_directory_that_may_go_away_is_said(machine, tmp_path, filesystem, said):
    machine.mounts("1 0 8:1 / / rw - ext4 /dev/vda rw", f"2 1 0:5 / {tmp_path} rw - {filesystem} server rw")
    warnings = list(resources.scratch_warnings(tmp_path, root=machine.root))
    assert [said in warning for warning in warnings] == ([] if said is None else [True])
    assert all("; name a local disk" in warning for warning in warnings)


@pytest.mark.parametrize(("mode", "is_said"), [(0o700, False), (0o775, False), (0o1777, False), (0o777, True)])
def test_a_directory_that_anybody_writes_to_is_said(machine, tmp_path, mode, is_said):
    machine.mounts("1 0 8:1 / / rw - ext4 /dev/vda rw")
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    assert any("no sticky bit" in warning for warning in resources.scratch_warnings(folder, root=machine.root)) == (
        is_said
    )


def test_no_scratch_directory_gives_every_reason(machine, tmp_path, monkeypatch):
    """The user learns why nothing fits and what to write."""
    monkeypatch.setattr(resources, "_usual_directories", lambda: iter([tmp_path / "a", tmp_path / "b"]))
    with pytest.raises(ConfigError, match=r"a does not exist.*b does not exist.*such as ssd="):
        resources.default_scratch_directory(needed_bytes=1, root=machine.root)


def test_temporary_directories_come_in_the_usual_order(monkeypatch):
    """TMPDIR first, the disk-backed /var/tmp before /tmp, nothing twice."""
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.delenv("TEMP", raising=False)
    monkeypatch.delenv("TMP", raising=False)
    assert list(resources._usual_directories())[:2] == [Path("/tmp"), Path("/var/tmp")]


def test_what_the_kernel_says_otherwise_is_not_known(machine, tmp_path):
    """Lines that no kernel of today writes, and a mount point whose name is not UTF-8."""
    machine.available(10 * GIB).write("proc/self/cgroup", "2:memory\n0::/user").v2("/user", limit="\u00b2", usage=1)
    (tmp_path / "proc/self/mountinfo").write_bytes(
        f"{V2_MOUNT}\n22 1 8:1 / /m\xe9dia rw - ext4 d rw\n".encode("latin-1")
    )
    assert resources.free_memory_bytes(root=machine.root) == 10 * GIB
    assert resources.filesystem_of(Path(os.fsdecode(b"/m\xe9dia/a")), root=machine.root) == "ext4"
    machine.write("proc/meminfo", "MemAvailable:")
    with pytest.raises(ConfigError, match="does not say how much memory"):
        resources.free_memory_bytes(root=machine.root)
