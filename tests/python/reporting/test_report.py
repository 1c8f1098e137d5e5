"""Recording a run, and what is made of it: figures per step, JSON, a table, an HTML page."""

import _thread
import copy
import html.parser
import io
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from rich.console import Console
from support.bits import digest, same_bits
from support.confined import command_line
from support.figures import device_statistics, statistics
from support.models import tiny_model
from support.no_threads import refuse_thread
from support.paging import assert_was_paged, has_thread_in, wait_until
from torch import nn

import torch_offload
from torch_offload import ConfigError, OffloadError, Report
from torch_offload.reporting import recorder as recorders
from torch_offload.reporting import saved_reports
from torch_offload.reporting.bottleneck import bottleneck_of, wear_of
from torch_offload.reporting.timeline import Sample, Timeline, between
from torch_offload.runtime.process import PROCESS

pytestmark = pytest.mark.any_torch


def recorded(*, steps, seconds=2.0, read=3, written=5, stall=0.5, cause="read", on_device=False):
    """A run of even steps on a clock that stands still in between."""
    state = {"steps": 0}

    def totals():
        done = state["steps"]
        totals = statistics(read=read * done, written=written * done, stalls={cause: stall * done}, used=done)
        moved = device_statistics(to_device=7 * done, to_host=2 * done, used=done)
        return totals | {"device": moved} if on_device else totals

    class Run:
        def statistics(self):
            return totals()

        def modules(self):
            return []

    recorder = recorders.Recorder(Run(), clock=lambda: seconds * state["steps"])
    for _ in range(steps):
        state["steps"] += 1
        recorder.sample(is_step_end=True)
    return recorder.timeline()


# --- the recorder ----------------------------------------------------------------------------------------------------


def test_steps_are_what_lies_between_their_ends():
    timeline = recorded(steps=5)
    assert [step.seconds for step in timeline.steps()] == [2.0] * 4
    assert {step.ssd_read_bytes for step in timeline.steps()} == {3}
    assert {step.ssd_written_bytes for step in timeline.steps()} == {5}
    steady = timeline.steady()
    assert (steady.steps, steady.seconds, steady.compute_seconds, steady.stall_share) == (3, 6.0, 4.5, 0.25)


def test_the_first_step_is_left_out_of_the_steady_figures():
    ends = [step_end(seconds=10.0 * (n > 0) + n, steps=n + 1) for n in range(12)]
    assert Timeline(step_ends=ends).steady() == between(ends[1], ends[-1])
    assert Timeline(step_ends=ends[:1]).steady() is None


def step_end(*, seconds, steps):
    return Sample.from_statistics(statistics(), seconds=seconds, steps=steps, tokens=0, is_step_end=True)


def test_a_long_run_keeps_a_bounded_number_of_samples():
    """Method: five times as many steps as are kept; the run stays covered from its first step to its last."""
    count = 5 * recorders.STEP_SAMPLES + 3
    timeline = recorded(steps=count)
    assert len(timeline.recent) == recorders.RECENT_SAMPLES
    assert recorders.STEP_SAMPLES / 2 <= len(timeline.step_ends) <= recorders.STEP_SAMPLES + 1
    assert (timeline.step_ends[0].steps, timeline.step_ends[-1].steps) == (1, count)
    assert sum(step.ssd_read_bytes for step in timeline.steps()) == 3 * (count - 1)
    distances = {step.steps for step in timeline.steps()[:-1]}
    assert len(distances) == 1


def train(model, *, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(steps):
        ids = torch.randint(0, 256, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_training_run_is_recorded_when_asked(config, scratch):
    """Steps, tokens, traffic and memory; the totals of the last sample are those of the report."""
    model = tiny_model("llama", tied=True)
    torch_offload.wrap(model, config=config.replace(ram="3MiB", report=scratch / "reports"))
    train(model, steps=4)
    timeline = torch_offload.report().timeline
    wait_until(lambda: has_thread_in(recorders), "the recorder's thread had begun")
    assert [end.steps for end in timeline.step_ends] == [1, 2, 3, 4]
    assert [end.tokens for end in timeline.step_ends] == [0, 16, 32, 48]  # counted from the end of the first step on
    steady = timeline.steady()
    assert steady.ssd_read_bytes > 0
    assert steady.ssd_written_bytes > 0
    assert all(sum(sample.host_bytes.values()) <= 3 << 20 for sample in timeline.recent)
    PROCESS.close_session()
    final = torch_offload.report()
    assert final.timeline.step_ends == timeline.step_ends
    assert all(final.read_bytes[kind] >= size for kind, size in final.timeline.recent[-1].read_bytes.items())
    assert not has_thread_in(recorders)


def test_steps_are_recorded_where_there_is_no_room_for_a_thread(config, scratch, monkeypatch, caplog):
    """Training goes on, the log says what is left out."""
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse_thread)
        model = tiny_model("llama", tied=True)
        torch_offload.wrap(model, config=config.replace(report=scratch / "reports"))
        train(model, steps=3)
        assert [end.steps for end in torch_offload.report().timeline.step_ends] == [1, 2, 3]
        PROCESS.close_session()
    assert "no room for another thread" in caplog.text


def test_nothing_is_recorded_unless_asked(config):
    model = tiny_model("llama", tied=True)
    torch_offload.wrap(model, config=config)
    train(model, steps=2)
    assert PROCESS.monitors.recorder is None
    assert torch_offload.report().timeline is None
    assert not model.get_input_embeddings()._forward_pre_hooks


def test_recording_changes_no_bit_and_leaves_no_hook(config, scratch, monkeypatch):
    """Method: a run in memory, a paged one, and one with samples every millisecond, ten and more in each step."""
    monkeypatch.setattr(recorders, "MIN_PERIOD_SECONDS", 1e-3)
    monkeypatch.setattr(recorders, "SAMPLES_PER_STEP", 10**6)

    def wait_for_samples(*_) -> None:
        recorder = PROCESS.monitors.recorder
        taken = len(recorder.timeline().recent)
        wait_until(lambda: len(recorder.timeline().recent) >= taken + 10, "ten samples were taken")

    weights = []
    for settings in (None, {}, {"report": scratch / "report.json"}):
        torch.manual_seed(3)
        model = tiny_model("llama", tied=True)
        if settings is not None:
            torch_offload.wrap(model, config=config.replace(ram="3MiB", **settings))
        if settings:
            model.model.layers[1].register_forward_hook(wait_for_samples)
        train(model, steps=3)
        if settings is not None:
            assert_was_paged()
            torch_offload.unwrap(model)
        weights.append([digest(weight) for weight in model.parameters()])
        assert not model.get_input_embeddings()._forward_pre_hooks
    assert len(torch_offload.report().timeline.recent) > 3 * 10
    assert weights[2] == weights[1] == weights[0]


def test_a_report_is_written_when_the_process_ends(scratch):
    """Method: a script that asks for a report in a directory and another that names a file; one that wraps nothing."""
    script = textwrap.dedent("""
        import sys, torch, torch_offload
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        config = torch_offload.Config(ram="1MiB", ssd=sys.argv[1], min_paged_bytes=0, page_elements=4096)
        torch_offload.wrap(model, config=config.replace(report=sys.argv[2]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        import os; os.chdir("/")
    """)
    for name in ("reports", "named.json"):
        command = [sys.executable, "-c", script, str(scratch), str(scratch / name)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    [written] = (scratch / "reports").iterdir()
    assert re.fullmatch(rf"{saved_reports.REPORT_NAME}-[0-9]+\.json", written.name)
    for path in (written, scratch / "named.json"):
        assert len(Report.read_json(path).timeline.step_ends) == 3
    shown = command_line("report", str(scratch / "reports"))
    assert "bottleneck" in shown.stdout


def test_a_process_that_records_ends_with_its_own_status(scratch):
    """Python ends threads that ask for its lock once it is ending, and one inside the engine takes the process along.

    Method: the thread that takes samples never waits between them.
    """
    script = textwrap.dedent("""
        import sys, torch, torch_offload
        from torch_offload.reporting import recorder
        recorder.MIN_PERIOD_SECONDS = 0
        config = torch_offload.Config(ram="8MiB", ssd=sys.argv[1], min_paged_bytes=0, page_elements=4096)
        module = torch_offload.wrap(torch.nn.Linear(64, 64), config=config.replace(report=sys.argv[2]))
        sys.exit(3)
    """)
    command = [sys.executable, "-c", script, str(scratch), str(scratch / "report.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_where_nothing_was_wrapped_no_report_is_written(scratch, monkeypatch):
    monkeypatch.setattr(PROCESS, "_last_report", None)
    assert PROCESS.save_report(scratch / "report.json") is None
    assert list(scratch.iterdir()) == []


def test_a_report_goes_to_the_file_or_a_file_of_this_process(tmp_path):
    assert saved_reports.report_file(tmp_path / "a.json") == tmp_path / "a.json"
    assert saved_reports.report_file(tmp_path / "new") == tmp_path / "new" / f"torch-offload-report-{os.getpid()}.json"
    (tmp_path / "old.d").mkdir()
    assert saved_reports.report_file(tmp_path / "old.d").parent == tmp_path / "old.d"


# --- what is made of it ----------------------------------------------------------------------------------------------


def report_of(**options):
    return Report.from_statistics(statistics(used=7), timeline=recorded(**options))


def test_json_comes_back_equal(tmp_path):
    report = report_of(steps=4)
    report.write_json(tmp_path / "r.json")
    assert Report.read_json(tmp_path / "r.json") == report
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"io_engine": 1}', '{"timeline": {"recent": [{}]}}'])
def test_what_is_no_report_is_named(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json is not a report"):
        Report.read_json(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("stalls", "name", "remedy"),
    [
        ({"read": 0.2, "memory": 0.1}, "read", "--ram"),
        ({"read": 0.1, "memory": 3.0}, "memory", "smaller batch"),
        ({"update": 5.0, "fault": 0.1}, "update", "more tokens"),
        ({"cosmic rays": 5.0}, "cosmic rays", "--ram"),
        ({"read": 0.2, "memory": 0.2}, "compute", "paging costs little"),
    ],
)
def test_what_binds_is_named_with_what_to_change(stalls, name, remedy):
    limit = bottleneck_of(stalls, 10.0 if name in ("compute", "memory", "update", "cosmic rays") else 1.0)
    assert limit.name == name
    assert remedy in limit.suggestion
    assert 0 < limit.share <= 1


def test_threads_that_stall_side_by_side_are_no_more_than_all_the_time():
    assert bottleneck_of({"read": 30.0, "update": 5.0}, 10.0).share == 1.0
    assert bottleneck_of({"read": 1.0}, 0.0) is None


def test_wear_is_per_day_of_training():
    wear = wear_of(3 * 10**9, steps=3, seconds=6.0)
    assert wear.bytes_per_step == 10**9
    assert wear.bytes_per_day == 10**9 / 2 * 86400
    assert wear.days(432 * 10**11) == 1.0
    assert wear_of(0, steps=3, seconds=6.0).days(1) is None
    assert wear_of(1, steps=0, seconds=6.0) is None


def test_the_table_says_what_a_step_costs():
    console = Console(file=io.StringIO(), width=120)
    console.print(report_of(steps=4, seconds=2.0, stall=1.5, cause="cosmic rays"))
    text = console.file.getvalue()
    assert "2 s, 75.0% of it stalled" in text
    assert "'cosmic rays' (75% of the time)" in text
    assert "per day" in text


class Page(html.parser.HTMLParser):
    """Counts elements and collects what would be fetched from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.scripts, self.text = [], 0, []
        self.is_script = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href", "data", "action")]
        self.is_script = tag in ("script", "style")
        self.scripts += tag == "script"

    def handle_endtag(self, tag):
        self.is_script = False

    def handle_data(self, text):
        if not self.is_script:
            self.text.append(text.strip())


def test_the_page_needs_nothing_else(tmp_path):
    report_of(steps=40, stall=1.5, cause="cosmic </script> rays").write_html(
        tmp_path / "r.html", endurance_bytes=600 * 10**12
    )
    page = Page((tmp_path / "r.html").read_text())
    assert page.fetched == []
    assert page.scripts == 5  # plotly and four charts
    text = " ".join(page.text)
    for expected in ("The last steps", "Step by step", "Memory over time", "Bytes by kind", "SSD wear", "75 % of the"):
        assert expected in text
    assert "days that a drive rated for 600 TB lasts" in text


def test_the_page_knows_a_device(tmp_path):
    """Peak, bytes per step each way, charts; nothing of it without one."""
    device = device_statistics(to_device=5 * 10**9, to_host=2 * 10**9, used=7) | {"updates_on": "cpu"}
    content = statistics(used=7) | {"device": device}
    report = Report.from_statistics(content, timeline=recorded(steps=30, on_device=True))
    step = report.timeline.steps()[0]
    assert (step.to_device_bytes, step.to_host_bytes) == (7, 2)
    report.write_json(tmp_path / "r.json")
    assert Report.read_json(tmp_path / "r.json") == report
    report.write_html(tmp_path / "r.html")
    report_of(steps=30).write_html(tmp_path / "plain.html")
    shown, plain = (" ".join(Page((tmp_path / name).read_text()).text) for name in ("r.html", "plain.html"))
    for expected in (
        "of the device",
        "to the device per step",
        "The device's memory over time",
        "Bytes between device and host by kind",
        "from the host to the device 4.657 GiB",
    ):
        assert expected in re.sub(r"\s+", " ", shown)
    assert "device" not in plain


@pytest.mark.parametrize(
    ("name", "updates_on", "expected"),
    [
        ("emulated", "cpu", "the CPU"),
        ("cuda:0", "gpu", "the GPU"),
        ("cuda:0", "cpu", "the CPU, with other last bits than on the GPU"),
    ],
)
def test_the_table_says_where_updates_run(name, updates_on, expected):
    """And what that means for the bits."""
    device = device_statistics() | {"name": name, "updates_on": updates_on}
    console = Console(file=io.StringIO(), width=120)
    console.print(Report.from_statistics(statistics(used=7) | {"device": device}))
    assert re.search(rf"updates run on +│ {expected} +│", console.file.getvalue())


def test_a_page_without_steps_says_how_to_record_them(tmp_path):
    Report.from_statistics(statistics()).write_html(tmp_path / "r.html")
    text = " ".join(Page((tmp_path / "r.html").read_text()).text)
    assert "No steps were recorded" in text
    assert "The last steps" not in text


@pytest.mark.parametrize("missing", ["jinja2", "plotly"])
def test_a_page_without_its_packages_names_the_extra(tmp_path, monkeypatch, missing):
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "torch_offload.reporting.charts", raising=False)
    monkeypatch.delattr(torch_offload, "report_charts", raising=False)
    with pytest.raises(OffloadError, match=r"pip install 'torch-offload\[report\]'"):
        report_of(steps=3).write_html(tmp_path / "r.html")


def test_the_command_shows_and_writes(tmp_path):
    report = report_of(steps=30)
    report.write_json(tmp_path / "torch-offload-report-7.json")
    as_json = command_line("report", str(tmp_path), "--json")
    assert json.loads(as_json.stdout) == json.loads(report.to_json())
    written = command_line("report", str(tmp_path), "--html", str(tmp_path / "r.html"), "--tbw", "600TB")
    assert (written.returncode, written.stdout) == (0, f"{tmp_path}/r.html written\n")
    assert "plotly" in (tmp_path / "r.html").read_text()
    table = command_line("report", str(tmp_path), "--tbw", "600TB")
    assert "A drive rated for 600 TB written lasts" in table.stdout


def test_a_copy_of_a_recorded_model_carries_nothing_along(config, scratch, tmp_path):
    """Method: the hook that counts tokens is on the embedding; the model is copied and saved whole."""
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 64))
    model.get_input_embeddings = lambda: model[0]
    torch_offload.wrap(model, config=config.replace(report=scratch / "r.json"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert model[0]._forward_pre_hooks
    before = PROCESS.monitors.recorder.timeline().recent[-1].tokens
    torch.save(model[0], tmp_path / "embedding.pt")
    loaded = torch.load(tmp_path / "embedding.pt", weights_only=False)
    loaded.train()(torch.ones(2, 8, dtype=torch.long))
    assert PROCESS.monitors.recorder.sample().tokens == before
    copied = copy.deepcopy(model[0])
    assert same_bits(copied.weight, model[0].weight)
    copied(torch.ones(2, 8, dtype=torch.long))
    assert PROCESS.monitors.recorder.sample().tokens == before
    model[0](torch.ones(2, 8, dtype=torch.long))
    assert PROCESS.monitors.recorder.sample().tokens == before + 16
