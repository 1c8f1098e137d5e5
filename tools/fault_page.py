"""Writes the records of the fault programme and of random operations, and the page that says what came of them.

python tools/fault_page.py --collect build/fault        make benchmarks/results/faults.json of what `make fault` left
python tools/fault_page.py --collect build/fault-long   make faults_long.json beside it, after `make fault-long`
python tools/fault_page.py --collect build/operations   make benchmarks/results/operations.json, after `make operations`
python tools/fault_page.py                              write docs/reliability.md from them
python tools/fault_page.py --check                      change nothing; exit with 1 and a diff where it is not so
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lost_commits
from generated_parts import differences, write
from markdown_parts import table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RESULT, PAGE = "benchmarks/results/faults.json", "docs/reliability.md"
LONG_RESULT = "benchmarks/results/faults_long.json"
OPERATIONS = "benchmarks/results/operations.json"
LEAST_OPERATIONS = 1_000_000
STATES = ("zero", "stored", "loading", "loaded", "busy", "mapped", "evicting", "failed")
GOOD = ("exact", "typed", "lost")
DEFECTS = ("wrong", "untyped", "stuck", "leaked", "crashed", "hung")

Json = dict[str, Any]


@dataclass(frozen=True)
class Harness:
    """A test of the fault programme, and what is to be said of it."""

    name: str
    fault: str
    least: int  # cases, or faults where a case has several
    counts_faults: bool = False
    is_python: bool = False  # its record is not GoogleTest's, and holds what `run_of` returns


HARNESSES = (
    Harness("NthIo", "the Nth call of an I/O engine, transfer or growth of the scratch file fails", 2400),
    Harness("NthSystemCall", "the Nth call of mmap, mremap, mprotect, madvise, fallocate, open ... fails", 700),
    Harness("NthAllocation", "the Nth allocation of a thread fails", 600),
    Harness("FullDisk", "the disk is full but for 1 to 40 pages", 40),
    Harness("ChangedBytes", "bits flip on the disk; pages are swapped or stale", 40_000, counts_faults=True),
    Harness("Kill", "the process is killed (SIGKILL)", 1500, counts_faults=True),
    Harness("HungDisk", "the disk hangs, or is slow", 11),
    Harness("PythonSystemCall", "the Nth system call of a Python program fails, io_uring's too", 96, is_python=True),
    Harness(
        "Signals", "SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGSTOP, fork and exec at random moments", 40, is_python=True
    ),
    Harness("DegradedSystem", "a call, flag or file system that others have is missing", 10, is_python=True),
    Harness("LimitedMemory", "memory, addresses, locked memory or mappings are few", 6, is_python=True),
)


class ResultRefused(Exception):
    """A result that the page may not quote."""


def run_of(test: Json) -> Json:
    """Return what a test recorded, and how long it took."""
    run = {name: int(text) if text.isdecimal() else text for name, text in test.items() if isinstance(text, str)}
    for unused in ("name", "file", "status", "result", "timestamp", "classname"):
        run.pop(unused, None)
    return run | {"time": float(test["time"].rstrip("s")), "has_failed": "failures" in test}


def origin_of(folder: Path, command: str) -> Json:
    from benchmarks.harness import provenance

    return {
        "code": provenance.code() | {"command": command},
        "machine": provenance.machine(),
        "first_seed": (folder / "seed").read_text().strip(),
    }


def collected(folder: Path, command: str) -> Json:
    """Return the record of what the harnesses left in a folder, one file each."""
    harnesses = {}
    for harness in HARNESSES:
        content = json.loads((folder / f"{harness.name}.json").read_text())
        harnesses[harness.name] = content if harness.is_python else run_of(content["testsuites"][0]["testsuite"][0])
    return origin_of(folder, command) | {"harnesses": harnesses}


def collected_operations(folder: Path) -> Json:
    """Return the record of random operations, and of the orders of a page's steps."""
    content = json.loads((folder / "tests.json").read_text())
    tests = {test["name"]: run_of(test) for suite in content["testsuites"] for test in suite["testsuite"]}
    has_failed = any(test["has_failed"] for test in tests.values())
    return origin_of(folder, "make operations") | {
        "has_failed": has_failed,
        "operations": tests["OfManyThreadsKeepEveryByte"],
        "orders": tests["AreSoundInEveryOrder"],
    }


def number_of(run: Json, harness: Harness) -> int:
    return int(run["injected"] if harness.counts_faults else run["reached"])


def origin(content: Json) -> str:
    code, machine = content["code"], content["machine"]
    seconds = sum(run["time"] for run in content["harnesses"].values())
    return (
        f"Commit {lost_commits.named(code['commit'])}, {code['date'][:10]}, "
        f"first seed {content['first_seed']} (hexadecimal); "
        f"{machine['processor']}, {machine['cores']} cores, kernel {machine['kernel']}, "
        f"{machine['disk']['file_system']}; {seconds:.0f} s in all, two harnesses at once. Again: `{code['command']}`."
    )


def outcome_rows(content: Json) -> list[list[str]]:
    rows = []
    for harness in HARNESSES:
        run = content["harnesses"][harness.name]
        shown = [f"{run[name]:,}" for name in DEFECTS]
        tried = f"{number_of(run, harness):,} (at least {harness.least:,})"
        fault = f"{harness.fault} ({run['disk']})" if "disk" in run else harness.fault
        rows.append([fault, tried, *(f"{run[name]:,}" for name in GOOD), *shown, f"{run['time']:.0f} s"])
    return rows


def transition_rows(content: Json) -> list[list[str]]:
    seen: dict[tuple[str, str], int] = {}
    for run in content["harnesses"].values():
        for entry in filter(None, str(run["transitions"]).split(", ")):
            change, count = entry.split(" ")
            before, after = change.split(">")
            seen[before, after] = seen.get((before, after), 0) + int(count)
    return [
        [before, *(f"{seen[before, after]:,}" if (before, after) in seen else "" for after in STATES)]
        for before in STATES
    ]


def operations_part(content: Json) -> list[str]:
    run, orders, code = content["operations"], content["orders"], content["code"]
    kinds = [name for name in run if name not in ("operations", "time", "has_failed")]
    counts = ", ".join(f"{name.replace('_', ' ')} {run[name]:,}" for name in kinds)
    return [
        "## Threads against each other\n",
        f"{run['operations']:,} operations of a pager by several threads at once, drawn at random, in a build with "
        "ThreadSanitizer, which found nothing; each byte that was looked at was the one written last, and the budget "
        f"held. By kind: {counts}. It took {run['time']:.0f} s.\n",
        "What threads do next with a page is a table (`csrc/pager/page_steps.h`). Four threads with any wishes and a "
        f"transfer, in every order of their steps: {orders['models']:,} models, {orders['states']:,} states, "
        f"{orders['moves']:,} moves between them, none of them unsound.\n",
        f"Commit {lost_commits.named(code['commit'])}, {code['date'][:10]}, "
        f"first seed {content['first_seed']} (hexadecimal); "
        f"{content['machine']['processor']}, {content['machine']['cores']} cores. Again: `{code['command']}`.\n",
    ]


def page(content: Json, long: Json, operations: Json) -> str:
    """Return docs/reliability.md."""
    parts = [
        "# What was broken on purpose\n",
        f"Written by `tools/fault_page.py` from `{RESULT}`, `{LONG_RESULT}` and `{OPERATIONS}`; how the harnesses "
        "work and how to add one is in [architecture](contributing/architecture.md#faults-on-purpose).\n",
        f"{origin(content)}\n",
        "## Faults, and what came of them\n",
        "A case is a training in small in a process of its own, every byte of which is known, with one kind of fault; "
        "the last four rows are of programs in Python. *exact*: the program saw no error, and every byte was right. "
        "*typed*: it saw typed errors, lost nothing, and went on exactly once the fault was over. *lost*: bytes were "
        "lost, since the system gave no access to their memory any more; whoever asked for them was told so, and "
        "another training in the same engine was exact. In the last row it is a process that the kernel ended: its "
        "group of processes had less memory than it takes without a model, and the budget. The others are defects: "
        "*wrong* bytes without an error, an error of another type, a training that did not go on, something *leaked*, "
        "a crash, a hang; no page is written from a record that has one.\n",
        table(["fault", "came to pass", *GOOD, *DEFECTS, "took"], outcome_rows(content)),
        "## The same, every number and many more seeds\n",
        f"{origin(long)}\n",
        table(["fault", "came to pass", *GOOD, *DEFECTS, "took"], outcome_rows(long)),
        "## Changes of a page's state that were seen\n",
        "From the row's state to the column's. Each is in the table of `tests/cpp/fault/transitions.cpp`.\n",
        table(["", *STATES], transition_rows(content)),
        *operations_part(operations),
    ]
    return "\n".join(parts)


def read_record(root: Path, name: str) -> Json:
    content: Json = json.loads((root / name).read_text())
    if content["code"]["modified_files"]:
        again = content["code"]["command"]
        raise ResultRefused(f"{name} was measured with files that differ from its commit; commit them, {again}")
    return content


def read_operations(root: Path) -> Json:
    content = read_record(root, OPERATIONS)
    if content["has_failed"] or content["operations"]["operations"] < LEAST_OPERATIONS:
        raise ResultRefused(f"{OPERATIONS} has no passing run of {LEAST_OPERATIONS:,} operations: make operations")
    return content


def read_faults(root: Path, name: str) -> Json:
    content = read_record(root, name)
    for harness in HARNESSES:
        run = content["harnesses"].get(harness.name)
        if run is None or run["has_failed"] or number_of(run, harness) < harness.least:
            raise ResultRefused(f"{name} has no whole, passing run of {harness.name}: {content['code']['command']}")
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="make the record of what was left there")
    parser.add_argument("--check", action="store_true", help="change nothing, say what differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository (default: this one)")
    options = parser.parse_args()
    try:
        if options.collect and (options.collect / "tests.json").exists():
            record = collected_operations(options.collect)
            write([(options.root / OPERATIONS, json.dumps(record, indent=1) + "\n")])
        elif options.collect:
            is_long = options.collect.name == "fault-long"
            name, command = (LONG_RESULT, "make fault-long") if is_long else (RESULT, "make fault")
            write([(options.root / name, json.dumps(collected(options.collect, command), indent=1) + "\n")])
        results = [read_faults(options.root, name) for name in (RESULT, LONG_RESULT)]
        documents = [(options.root / PAGE, page(*results, read_operations(options.root)))]
    except ResultRefused as reason:
        sys.exit(str(reason))
    if not options.check:
        write(documents)
    elif differing := differences(documents, options.root):
        sys.exit(f"{differing}\nrun: python tools/fault_page.py")


if __name__ == "__main__":
    main()
