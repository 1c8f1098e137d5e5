"""What ``doctor`` and ``bench-ssd`` say in places where less is allowed, and that training runs where it can."""

import json
import re
import resource
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.confined import as_ordinary_user, command_line, small_disk, without_io_uring

import torch_offload
from torch_offload import Config, OffloadError
from torch_offload.diagnostics import checks, doctor, ssd_benchmark
from torch_offload.diagnostics.check_result import State

pytestmark = pytest.mark.any_torch

ROOT = Path(__file__).resolve().parents[3]
SHARED_MEMORY = Path("/dev/shm")


def findings_of(answer):
    return {result["name"]: result for result in json.loads(answer.stdout)["results"]}


def system(tmp_path, **files):
    """Return a root with these files; a double underscore stands for a slash."""
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


# --- what is said about the system, from what the system says --------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "state"), [("5.4.0-1-generic", State.problem), ("5.15.0", State.warning), ("6.18.44", State.ok)]
)
def test_kernel(release, state):
    assert checks.kernel_result(release=release).state is state


def test_io_engine_falls_back_with_the_remedy_of_the_cause(tmp_path):
    def refuses(*names):
        return lambda name: f"no {name}" if name in names else None

    assert checks.io_engine_result(refusal_of=refuses()).state is State.ok
    plain = checks.io_engine_result(refusal_of=refuses("uring_fixed"))
    assert plain.state is State.warning
    assert "ulimit -l" in plain.remedy
    everything = refuses("uring_fixed", "uring")
    switched_off = system(tmp_path / "a", proc__sys__kernel__io_uring_disabled="2\n")
    threads = checks.io_engine_result(refusal_of=everything, root=switched_off)
    assert "threads" in threads.what
    assert "kernel.io_uring_disabled is 2; as root: sysctl -w kernel.io_uring_disabled=0" in threads.remedy
    confined = system(
        tmp_path / "b", proc__sys__kernel__io_uring_disabled="0\n", proc__self__status="Name:\tx\nSeccomp:\t2\n"
    )
    assert "seccomp" in checks.io_engine_result(refusal_of=everything, root=confined).remedy


def test_locked_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    user = system(tmp_path / "user", proc__self__status="CapEff:\t0000000000000000\n")
    assert checks.memlock_result(needed_bytes=1 << 30, root=user).state is State.warning
    assert checks.memlock_result(needed_bytes=8 << 20, root=user).state is State.ok
    holder = system(tmp_path / "holder", proc__self__status="CapEff:\t0000000000004000\n")
    assert checks.memlock_result(needed_bytes=1 << 30, root=holder).state is State.ok


def test_memory_under_a_budget_that_does_not_fit(tmp_path):
    root = system(tmp_path, proc__meminfo="MemAvailable: 4194304 kB\n")
    assert checks.memory_result(ram=None, root=root).state is State.ok
    assert checks.memory_result(ram=1 << 30, root=root).state is State.ok
    too_much = checks.memory_result(ram=8 << 30, root=root)
    assert too_much.state is State.problem
    assert "give --ram at most 3020MiB" in too_much.remedy
    silent = checks.memory_result(ram=None, root=tmp_path / "empty")
    assert (silent.state, silent.remedy) == (State.problem, "give a budget with --ram")


def test_addresses(monkeypatch):
    assert checks.address_result().state is State.ok
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 32, 1 << 32))
    assert "ulimit -v unlimited" in checks.address_result().remedy


def test_mappings(tmp_path):
    root = system(tmp_path, proc__sys__vm__max_map_count="65530\n")
    assert checks.mappings_result(ram=16 << 30, root=root).state is State.ok
    many = checks.mappings_result(ram=128 << 30, root=root)
    assert (many.state, many.remedy) == (State.warning, "as root: sysctl -w vm.max_map_count=393216")


@pytest.mark.parametrize(
    ("text", "state"), [("always [madvise] never", State.ok), ("always madvise [never]", State.warning)]
)
def test_huge_pages(tmp_path, text, state):
    root = system(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=text)
    assert checks.huge_page_result(root=root).state is state


def test_processor(tmp_path):
    for name, flags, state in (("a", "sse avx2 avx512f", State.ok), ("b", "sse", State.warning)):
        root = system(tmp_path / name, proc__cpuinfo=f"processor : 0\nflags : {flags}\n")
        assert checks.processor_result(root=root).state is state


@pytest.mark.parametrize(
    ("architectures", "found", "state", "text"),
    [
        ((), None, State.ok, "built without CUDA; no GPU found"),
        ((), (9, 0), State.warning, "there is a GPU (sm_90)"),
        (("8.0", "9.0"), None, State.ok, "built for sm_80, sm_90; no GPU found"),
        (("8.0", "9.0"), (8, 9), State.ok, "this GPU is sm_89"),
        (("8.9", "9.0"), (8, 6), State.problem, "not for this GPU, sm_86"),
        (("9.0", "12.0+PTX"), (13, 0), State.ok, "sm_130"),
        (("9.0", "12.0+PTX"), (10, 0), State.problem, "sm_100"),
    ],
)
def test_cuda_kernels(architectures, found, state, text):
    result = checks.cuda_result(architectures=architectures, capability_of=lambda: found)
    assert (result.state, text in result.what) == (state, True), result
    assert bool(result.remedy) == (state is not State.ok)


def test_the_versions_called_tested_are_those_the_tests_run_with():
    """Method: the pins of the test environment."""
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "requirements/test.txt").read_text(), flags=re.MULTILINE))
    assert {name: pinned[name] for name in checks.TESTED_WITH} == checks.TESTED_WITH


def test_other_versions_are_named(monkeypatch):
    monkeypatch.setattr(checks.metadata, "version", lambda name: "4.0.1")
    assert {result.state for result in checks.package_results()} == {State.warning}


# --- the trial run ---------------------------------------------------------------------------------------------------


def test_the_trial_run_pages_and_leaves_nothing(scratch):
    found = doctor.training_result(scratch)
    assert found.state is State.ok, found
    assert torch_offload.report().ssd_read_bytes > 0
    assert torch_offload.report().evictions > 0
    assert torch_offload.runtime.process.PROCESS.session is None
    assert list(scratch.iterdir()) == []


def test_the_trial_run_sees_a_wrong_bit(scratch, monkeypatch):
    """Method: the paged run's model starts with one weight a little larger."""
    wrap = doctor.wrap

    def wrap_another(model, **options):
        with torch.no_grad():
            model[0].weight[0, 0] += 2**-10
        return wrap(model, **options)

    monkeypatch.setattr(doctor, "wrap", wrap_another)
    assert doctor.training_result(scratch).what == "a paged run gave other numbers than one in memory"


def test_a_failing_trial_run_is_a_problem_with_its_message(scratch, monkeypatch):
    def fail(model, **options):
        raise OffloadError("the frame is crooked; straighten it")

    monkeypatch.setattr(doctor, "wrap", fail)
    found = doctor.training_result(scratch)
    assert (found.state, found.what, found.remedy) == (State.problem, "the frame is crooked", "straighten it")


# --- whole commands in confined places -------------------------------------------------------------------------------


def test_doctor_here(scratch):
    answer = command_line("doctor", "--json", "--ssd", str(scratch), "--ram", "64MiB")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = findings_of(answer)
    assert json.loads(answer.stdout)["can_train"] is True
    assert "bit for bit" in found["trial run"]["what"]
    assert all(result["remedy"] for result in found.values() if result["state"] != "ok")
    shown = command_line("doctor", "--ssd", str(scratch), "--ram", "64MiB")
    assert "Training runs here" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_without_io_uring(scratch):
    """Under a seccomp profile as Docker's: threads serve, the remedy names the profile, training is exact."""
    inside = without_io_uring()
    answer = command_line("doctor", "--json", "--ssd", str(scratch), "--ram", "64MiB", inside=inside)
    found = findings_of(answer)
    assert answer.returncode == 0
    assert found["I/O engine"]["state"] == "warning"
    assert "threads" in found["I/O engine"]["what"]
    assert "Operation not permitted" in found["I/O engine"]["what"]
    assert "seccomp" in found["I/O engine"]["remedy"]
    assert "bit for bit" in found["trial run"]["what"]
    measured = command_line(
        "bench-ssd", "--json", "--ssd", str(scratch), "--size", "64MiB", "--seconds", "0.05", inside=inside
    )
    assert json.loads(measured.stdout)["io_engine"] == "threads"
    refused = command_line("bench-ssd", "--io-engine", "uring", "--ssd", str(scratch), inside=inside)
    assert refused.returncode == 2
    assert "io_uring_setup: Operation not permitted" in refused.stderr


TRAINING = """
import sys, torch, torch_offload
model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(12)))
config = torch_offload.Config(ram="1MiB", ssd=sys.argv[1], min_paged_bytes=0, page_elements=4096, report=sys.argv[1])
torch_offload.wrap(model, config=config)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("place", "io_engine", "said"),
    [
        (without_io_uring, "threads", ["I/O engine: threads, which take more processor time; no io_uring with fixed"]),
        (as_ordinary_user, "io_uring with fixed buffers", []),
    ],
)
def test_training_and_its_report_in_a_confined_place(anybodys_scratch, place, io_engine, said):
    """Method: a script trains there with a report and says what is slow there, the command shows it there."""
    inside, scratch = place(), anybodys_scratch
    command = [*inside, sys.executable, "-c", TRAINING, str(scratch)]
    trained = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert trained.returncode == 0
    assert [line[: len(words)] for line, words in zip(trained.stderr.splitlines(), said, strict=True)] == said
    content = json.loads(command_line("report", str(scratch), "--json", inside=inside).stdout)
    assert content["io_engine"] == io_engine
    assert content["ssd_read_bytes"] > 0
    assert len(content["timeline"]["step_ends"]) == 3
    page = scratch / "report.html"
    written = command_line("report", str(scratch), "--html", str(page), inside=inside)
    assert (written.returncode, written.stderr) == (0, "")
    assert "Step by step" in page.read_text()


@pytest.fixture
def anybodys_scratch():
    """A directory on a disk that every user may reach and write to; those of pytest are for one user."""
    parent = Path("/var/tmp")
    reason = torch_offload.system.resources.scratch_refusal(parent)
    if reason is not None:
        pytest.skip(f"no directory on a disk for every user: {reason}")
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def test_as_an_ordinary_user_with_little_lockable_memory(anybodys_scratch):
    """Who may lock 8 MiB hears of it and trains all the same."""
    inside, scratch = as_ordinary_user(), anybodys_scratch
    answer = command_line("doctor", "--json", "--ssd", str(scratch), "--ram", "64MiB", inside=inside)
    found = findings_of(answer)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert found["locked memory"]["state"] == "warning"
    assert "at most 8 MiB" in found["locked memory"]["what"]
    assert "ulimit -l" in found["locked memory"]["remedy"]
    assert "bit for bit" in found["trial run"]["what"]
    measured = command_line(
        "bench-ssd", "--json", "--ssd", str(scratch), "--size", "256MiB", "--seconds", "0.05", inside=inside
    )
    assert measured.returncode == 0, measured.stderr
    assert all(row["read"] > 0 for row in json.loads(measured.stdout)["figures"])


def test_on_a_disk_that_is_nearly_full(scratch):
    """With 100 MB free: a warning with the size that still fits; what fits trains, what does not is refused by type."""
    with small_disk(scratch, free_mib=100) as disk:
        kept = findings_of(command_line("doctor", "--json", "--ssd", str(disk), "--ram", "1GiB"))["directory"]
        assert (kept["state"], "0 bytes free beside 1 GiB that stay so" in kept["what"]) == ("problem", True)
        assert "lower --keep-free" in kept["remedy"]
        answer = command_line("doctor", "--json", "--ssd", str(disk), "--ram", "1GiB", "--keep-free", "0")
        found = findings_of(answer)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        assert found["directory"]["state"] == "warning"
        assert "larger disk" in found["directory"]["remedy"]
        assert "bit for bit" in found["trial run"]["what"]
        measured = json.loads(command_line("bench-ssd", "--json", "--ssd", str(disk), "--seconds", "0.05").stdout)
        assert measured["file_bytes"] <= 52 << 20
        assert any("little free space" in note for note in measured["notes"])
        assert [row["queue_depth"] for row in measured["figures"]] == [1, 2, 4, 8]
        layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(40)))
        with pytest.raises(torch_offload.OutOfTierMemory, match="ssd tier"):
            torch_offload.wrap(layers, config=Config(ram="32MiB", ssd=disk, keep_free=0))
        assert list(disk.iterdir()) == [disk / "lost+found"]


def test_a_directory_that_anybody_may_change_is_a_warning(scratch):
    (scratch / "shared").mkdir()
    (scratch / "shared").chmod(0o777)
    found = doctor._space_result(scratch / "shared", ram=0, limits=doctor.Limits(keep_free=0))
    assert (found.state, found.remedy) == (State.warning, "chmod +t it, or name another directory")
    assert "no sticky bit" in found.what


def fill(disk):
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(1 << 12)):
            pass


def test_on_a_full_disk(scratch):
    """Without a free byte the directory is a problem, not a crash."""
    with small_disk(scratch, free_mib=4) as disk:
        fill(disk)
        answer = command_line("doctor", "--json", "--ssd", str(disk), "--ram", "64MiB")
        assert answer.returncode == 1
        assert findings_of(answer)["directory"]["state"] == "problem"
        measured = command_line("bench-ssd", "--ssd", str(disk))
        assert measured.returncode == 1
        assert "larger disk" in measured.stderr


@pytest.mark.skipif(
    torch_offload.system.resources.filesystem_of(SHARED_MEMORY) != "tmpfs",
    reason="/dev/shm is no tmpfs on this machine",
)
def test_on_tmpfs():
    answer = command_line("doctor", "--json", "--ssd", str(SHARED_MEMORY), "--ram", "64MiB")
    found = findings_of(answer)["directory"]
    assert answer.returncode == 1
    assert (found["state"], found["what"]) == ("problem", "/dev/shm is on tmpfs, which is memory")
    example = torch_offload.system.resources.default_scratch_directory(needed_bytes=64 << 20)
    assert found["remedy"] == f"name a directory on a disk (--ssd), such as {example}"
    measured = command_line("bench-ssd", "--ssd", str(SHARED_MEMORY))
    assert measured.returncode == 2
    assert "/dev/shm is on tmpfs, which is memory; name a directory on a disk" in measured.stderr


# --- bench-ssd -------------------------------------------------------------------------------------------------------


def test_bench_ssd_measures_every_depth_and_leaves_nothing(scratch):
    request = ssd_benchmark.Request(
        directory=scratch, file_bytes=8 << 20, block_bytes=128 << 10, seconds=0.03, io_engine="threads"
    )
    shown = []
    result = ssd_benchmark.measure(request, show=lambda what, done, total: shown.append((what, done, total)))
    assert [row.queue_depth for row in result.figures] == list(ssd_benchmark.DEPTHS)
    assert all(min(row.read, row.write, row.mix) > 0 for row in result.figures)
    assert result.io_engine == "threads"
    assert shown[0] == ("read at depth 1", 0, 54)
    assert len(shown) == 54
    assert list(scratch.iterdir()) == []


def test_the_recommended_depth_is_the_smallest_that_is_good_enough():
    def rows(*rates):
        return [
            ssd_benchmark.DepthFigures(queue_depth=depth, read=read, write=write, mix=mix)
            for depth, read, write, mix in rates
        ]

    assert ssd_benchmark.recommended_depth(rows((1, 5, 5, 5), (2, 10, 9.6, 10), (4, 10, 10, 10))) == 2
    assert ssd_benchmark.recommended_depth(rows((1, 10, 5, 5), (2, 5, 10, 6), (4, 9, 9, 5))) == 2


def test_the_progress_of_a_measurement_is_for_terminals(scratch):
    """Nothing on stderr but what went wrong."""
    measured = command_line("bench-ssd", "--ssd", str(scratch), "--size", "64MiB", "--seconds", "0.02")
    assert (measured.returncode, measured.stderr) == (0, "")
    assert "Recommended: --queue-depth" in measured.stdout
