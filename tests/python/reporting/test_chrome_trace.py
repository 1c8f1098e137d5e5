"""The trace of resources: complete, true to the counters, well-formed; and what torch's profiler sees of the engine."""

import copy
import gzip
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from support.isolation import in_child
from support.training import STEPS, Case, Placement, train_paged
from torch import nn

import torch_offload
from torch_offload import ConfigError
from torch_offload.reporting import saved_reports
from torch_offload.reporting.chrome_trace import ROWS_PER_LANE, TITLES, trace_of

CASE = Case.parse("llama fused fp32 stored clip one untied full plain")
LINK = {"to_device", "to_host"}


def settled_report():
    """A report between two moments at which the counters are the same: what it holds belongs to one moment."""
    for _ in range(1000):
        torch_offload.flush()
        report, after = torch_offload.report(), torch_offload.report()
        if json.loads(report.to_json()) == json.loads(after.to_json()):
            return report
    raise AssertionError("the engine does not come to rest")


def traced_run(scratch, on_device):
    train_paged(CASE, Placement(device=on_device, trace=True), scratch)
    report = settled_report()
    report.write_trace(f"{scratch}/trace.json")
    report.write_trace(f"{scratch}/trace.json.gz")
    with open(f"{scratch}/trace.json", encoding="utf-8") as file:
        content = json.load(file)
    with gzip.open(f"{scratch}/trace.json.gz", "rt", encoding="utf-8") as file:
        assert json.load(file) == content
    assert sorted(os.listdir(scratch)) == ["trace.json", "trace.json.gz"]
    return content, report, report.activities.end_ns


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "emulated"])
def test_a_trace_is_true_to_the_counters(on_device, scratch):
    """Method: train with a trace; sums over each lane are what the report counts, to the byte and the nanosecond."""
    content, report, end_ns = in_child(traced_run, str(scratch), on_device)
    assert content["otherData"]["dropped"] == 0
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    lanes = set(TITLES) if on_device else set(TITLES) - LINK
    assert {event["cat"] for event in slices} == lanes
    moved, stalled = Counter(), Counter()
    for event in slices:
        moved[event["cat"]] += event["args"].get("bytes", 0)
        stalled[event["name"]] += event["dur"] if event["cat"] == "stall" else 0
    assert moved["ssd_read"] == report.ssd_read_bytes > 0
    assert moved["ssd_write"] == report.ssd_written_bytes > 0
    if on_device:
        assert moved["to_device"] == sum(report.device.to_device_bytes.values()) > 0
        assert moved["to_host"] == sum(report.device.to_host_bytes.values()) > 0
    for cause, seconds in report.stall_seconds.items():
        assert stalled[f"stall: {cause}"] / 1e6 == pytest.approx(seconds, abs=1e-6)
    updates = [event for event in slices if event["cat"] == "update"]
    assert len(updates) == report.counters["applied_pages"] > 0
    length_ns = end_ns - content["otherData"]["begin_ns"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    assert all(round((event["ts"] + event["dur"]) * 1000) <= length_ns for event in slices)


def test_rows_are_well_formed(scratch):
    """Nothing overlaps on a row but what lies inside; rows have names; compute and stalls tile the main thread."""
    content, _, _ = in_child(traced_run, str(scratch), True)
    rows = defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            rows[event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000), event))
    names = {event["tid"]: event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    assert set(names) == set(rows)
    for row, slices in rows.items():
        assert names[row].startswith(TITLES[slices[0][2]["cat"]])
        if names[row] != "steps":
            assert all(one[1] <= other[0] for one, other in pairwise(slices))
    shown = [event["name"] for _, _, event in rows[1]]
    assert shown == [name for step in range(1, STEPS + 1) for name in (f"step {step}", "optimizer step")]
    marks = [event["name"] for event in content["traceEvents"] if event["ph"] == "i"]
    assert marks == [f"end of step {step}" for step in range(1, STEPS + 1)]
    main = [
        slice_
        for row, slices in rows.items()
        if (row - 1) // ROWS_PER_LANE in (list(TITLES).index("compute"), list(TITLES).index("stall"))
        for slice_ in slices
        if slice_[2]["args"]["thread"] == content["traceEvents"][0]["pid"]
    ]
    main.sort(key=lambda slice_: slice_[:2])
    assert all(one[1] == other[0] for one, other in pairwise(main) if other[0] != other[1])


@dataclass
class Record:
    """What ``_C.ActivityRecord`` has, made by hand."""

    listed: list
    begin_ns: int = 1000
    end_ns: int = 9000
    dropped_count: int = 0

    def activities(self):
        return self.listed


def test_transfers_that_overlap_have_rows_of_their_own():
    listed = [("ssd_read", 5, begin, end, 1, "w") for begin, end in ((1000, 4000), (2000, 3000), (3000, 5000))]
    events = trace_of(Record(listed))["traceEvents"]
    reads = [event for event in events if event.get("cat") == "ssd_read"]
    assert [event["tid"] - reads[0]["tid"] for event in reads] == [0, 1, 1]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"][1:] == [
        "SSD read",
        "SSD read 2",
    ]


def test_a_full_recording_ends_where_it_was_full(tmp_path, caplog):
    """Method: activities were dropped; compute does not go on to the end of the record, and a warning says so."""
    record = Record([("stall_read", os.getpid(), 2000, 3000, 0, "")], dropped_count=4)
    torch_offload.reporting.chrome_trace.write_trace(record, tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    [compute] = [event for event in content["traceEvents"] if event.get("cat") == "compute"]
    assert (compute["ts"], compute["dur"]) == (0.0, 1.0)
    assert content["otherData"]["dropped"] == 4
    assert "4 activities came when its recording was full" in caplog.text


def test_without_a_recording_the_remedy_is_named(config, tmp_path):
    torch_offload.wrap(nn.Linear(64, 64), config=config)
    with pytest.raises(ConfigError, match=r"Config\(trace=True\)"):
        torch_offload.report().write_trace(tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_a_recorded_report_can_be_copied_and_saved(config, tmp_path):
    """What was recorded stays behind; a file that cannot be written leaves nothing."""
    model = nn.Linear(64, 64)
    torch_offload.wrap(model, config=config.replace(trace=True))
    report = torch_offload.report()
    report.write_json(tmp_path / "r.json")
    for other in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert other == report
        assert other.activities is None
    with pytest.raises(OSError, match="gone"):
        report.write_trace(tmp_path / "gone" / "t.json")
    torch_offload.unwrap(model)
    torch_offload.report().write_trace(tmp_path / "t.json")
    assert sorted(os.listdir(tmp_path)) == ["r.json", "t.json"]


def test_a_trace_is_written_when_the_process_ends(scratch):
    script = textwrap.dedent("""
        import sys, torch, torch_offload
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        config = torch_offload.Config(ram="1MiB", ssd=sys.argv[1], min_paged_bytes=0, page_elements=4096)
        torch_offload.wrap(model, config=config.replace(trace=sys.argv[2]))
        model(torch.ones(2, 64)).sum().backward()
    """)
    command = [sys.executable, "-c", script, str(scratch), str(scratch / "traces")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    [written] = (scratch / "traces").iterdir()
    assert written.name.startswith(saved_reports.TRACE_NAME)
    assert json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]


def profiled_run(scratch):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train_paged(CASE, Placement(), scratch)
    profile.export_chrome_trace(f"{scratch}/profile.json")
    with open(f"{scratch}/profile.json", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return Counter(event["name"] for event in events if event["name"].startswith("torch_offload::"))


def test_the_profiler_of_torch_shows_waits_and_updates(scratch):
    """Beside the operators of the program, as ranges."""
    ranges = in_child(profiled_run, str(scratch))
    assert set(ranges) == {"torch_offload::wait_for_pages", "torch_offload::update"}
