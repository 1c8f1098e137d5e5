"""Whatever a text that we read from elsewhere holds, reading it ends with what is in it or with words that say what is
wrong: reports, the probe's figures, settings, what a launcher handed on, what the kernel says of this machine.

    text_fuzz.py [LIBFUZZER_OPTION ...] FOLDER_OF_INPUTS
"""

import io
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["torch_offload"]):
    from torch_offload.config import Config, parse_size
    from torch_offload.diagnostics import checks, probe
    from torch_offload.errors import ConfigError
    from torch_offload.reporting import saved_reports
    from torch_offload.reporting.html_page import page_of
    from torch_offload.runtime import preflight
    from torch_offload.system import environment, resources

import torch
from damaged_folder import change_nodes
from rich.console import Console
from support.figures import MACHINE, whole_report

# What a process of a container reads of itself, each file as the kernel writes it.
MACHINE_FILES = {
    "proc/meminfo": b"MemTotal: 99 kB\nMemAvailable:   1048576 kB\nCached: 7 kB\n",
    "proc/self/cgroup": b"5:cpu,memory:/docker/1\n0::/user.slice\n",
    "proc/self/mountinfo": b"31 24 0:27 / /sys/fs/cgroup/v2 rw shared:1 - cgroup2 cgroup2 rw,nsdelegate\n"
    b"35 31 0:32 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n22 1 8:1 / / rw - ext4 /dev/sda rw\n"
    b"23 22 0:5 / /mnt/a\\040b rw - fuse.sshfs c d\n",
    "sys/fs/cgroup/v2/user.slice/memory.max": b"1073741824\n",
    "sys/fs/cgroup/v2/user.slice/memory.current": b"536870912\n",
    "sys/fs/cgroup/v2/user.slice/memory.stat": b"anon 1\ninactive_file 4096\nactive_file 5\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": b"9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": b"4096\n",
    "sys/fs/cgroup/memory/memory.stat": b"cache 1\ntotal_inactive_file 3\n",
    "proc/sys/vm/max_map_count": b"65530\n",
    "proc/sys/kernel/io_uring_disabled": b"2\n",
    "proc/self/status": b"Name:\tpython\nCapEff:\t000001ffffffffff\nSigCgt:\t0000000000000200\nSeccomp:\t2\n",
    "proc/cpuinfo": b"processor\t: 0\nmodel name\t: A B C\nflags\t\t: fpu avx2 avx512f\n",
    "sys/kernel/mm/transparent_hugepage/enabled": b"always [madvise] never\n",
}
SETTINGS = (
    b"ram: 24GiB\nssd: [/mnt/a, /mnt/b]\nactivations: auto\nemulation: {ssd_rate: 1000000000}\n",
    b'{"ram": 1024, "ssd": "/tmp", "trace": true, "report": "r.json", "min_paged_bytes": "1MiB"}',
    b"? [a]\n: &x {ram: *x}\n",
)
LAUNCH = b'{"name": "a", "config": {"ram": "8GiB", "page_elements": 4096}, "optimizer": null}'


def require(holds: bool, claim: str) -> None:
    if not holds:
        raise AssertionError(f"does not hold: {claim}")


class Place:
    """A folder with the files that are read, of which an input changes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self._whole = {self.root / name: text for name, text in MACHINE_FILES.items()}
        for path, text in self._whole.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)

    def written(self, name: str, text: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(text)
        return path

    def read_report(self, text: bytes) -> None:
        found = saved_reports.load(self.written("report.json", text))
        Console(file=io.StringIO(), width=200).print(found)
        require(bool(str(found)), "a report has a summary")
        require("<script>alert" not in page_of(found, endurance_bytes=10**15), "a report is no page of its own")

    def read_probe(self, text: bytes) -> None:
        probe._cached(self.written("probe.json", text), {})

    def read_settings(self, text: bytes) -> None:
        Config.from_file(self.written("settings.yaml", text))

    def read_size(self, text: bytes) -> None:
        require(parse_size(text.decode(errors="surrogateescape")) >= 0, "a size is none below zero")

    def read_launch(self, text: bytes) -> None:
        """No variable holds a byte of zero."""
        with environment.variables({environment.LAUNCH: os.fsdecode(text.replace(b"\0", b"0"))}):
            environment.launch_of_parent()

    def read_configured(self, text: bytes) -> None:
        with environment.variables({environment.CONFIG: os.fsdecode(text.replace(b"\0", b"0"))}):
            environment.configured()

    def read_machine(self, text: bytes) -> None:
        """The first byte says of which file the others are the content."""
        path = list(self._whole)[text[0] % len(self._whole)] if text else next(iter(self._whole))
        path.write_bytes(text[1:])
        try:
            self.ask_machine()
        finally:
            path.write_bytes(self._whole[path])

    def ask_machine(self) -> None:
        """All that is asked of the kernel, whatever the answers before."""
        root = self.root
        resources.filesystem_of(self.folder, root=root)
        resources.scratch_refusal(self.folder, root=root)
        list(resources.scratch_warnings(self.folder, root=root))
        require(bool(environment.processor_name(root=root).strip()), "a processor has a name")
        refusal_of = {"uring_fixed": "not", "uring": "not"}.get
        for result in (
            checks.io_engine_result(refusal_of=refusal_of, root=root),
            checks.memlock_result(needed_bytes=1 << 60, root=root),
            checks.memory_result(ram=1 << 30, root=root),
            checks.memory_result(ram=None, root=root),
            checks.mappings_result(ram=1 << 30, root=root),
            checks.huge_page_result(root=root),
            checks.processor_result(root=root),
        ):
            require(bool(result.what), "a check says what it found")
        preflight.check_mappings(Config(ram="8MiB", ssd=self.folder), [torch.zeros(1)], root=root)
        require(resources.free_memory_bytes(root=root) >= 0, "no less than nothing is free")


@dataclass(frozen=True)
class Reader:
    """One way of reading, what is read that is right, and whether its values are changed one by one as well."""

    read: Callable[[Place, bytes], None]
    seeds: tuple[bytes, ...]
    is_json: bool = False


READERS = (
    Reader(Place.read_report, (whole_report().to_json().encode(),), is_json=True),
    Reader(Place.read_probe, (MACHINE.to_json().encode(),), is_json=True),
    Reader(Place.read_settings, SETTINGS),
    Reader(Place.read_size, (b"24GiB", b"0.5 TB", b"1_000")),
    Reader(Place.read_launch, (LAUNCH,), is_json=True),
    Reader(Place.read_configured, (SETTINGS[1], b"~/settings.yaml"), is_json=True),
    Reader(Place.read_machine, tuple(bytes([index]) + text for index, text in enumerate(MACHINE_FILES.values()))),
)


def read_text(place: Place, said: bytes) -> None:
    """By whom in the first byte; in the second, for JSON, whether the others are the text or change values in one."""
    if len(said) < 2:
        return
    reader, text = READERS[said[0] % len(READERS)], said[2:]
    if reader.is_json and said[1] % 2:
        text = change_nodes(Path("text.json"), reader.seeds[0], text)
    try:
        reader.read(place, text)
    except ConfigError as error:
        require(len(str(error)) > 10, "an error says something")


def write_seeds(seeds: Path) -> None:
    """Write what is right, and small changes of what is JSON."""
    seeds.mkdir()
    for number, reader in enumerate(READERS):
        texts = [bytes([number, 0]) + text for text in reader.seeds]
        if reader.is_json:
            texts += [bytes([number, 1, place, 0, kind]) for place in range(8) for kind in (0, 6, 30)]
        for index, text in enumerate(texts):
            (seeds / f"{number}-{index}").write_bytes(text)


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        seeds = Path(scratch, "seeds")
        write_seeds(seeds)
        place = Place(Path(scratch, "place"))
        for reader in READERS:
            for text in reader.seeds[:1]:
                reader.read(place, text)  # what is right is read
        atheris.Setup([*sys.argv, str(seeds)], lambda said: read_text(place, said))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
