"""Every benchmark driver runs from end to end on something tiny and says in JSON what it found.

Times are no subject here: a smoke run judges none, so that others may run beside it.
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytestmark = [pytest.mark.any_torch, pytest.mark.rotating(among="file", parts=12)]

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed: apt-get install fio")


def run_smoke(name: str, *options: str, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Run a driver; the bars that it has hold."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--smoke", "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = dict(json.loads(ended.stdout))
    assert all({"name", "value", "target", "holds"} <= set(bar) for bar in result["bars"])
    assert [bar for bar in result["bars"] if not bar["holds"]] == []
    return result


def smoke(name: str, scratch: Path, *options: str) -> dict[str, Any]:
    """Run a driver; nothing may stay in its directory."""
    result = run_smoke(name, "--ssd", str(scratch), *options)
    assert list(scratch.iterdir()) == []
    return result


@needs_fio
def test_io_moves_the_same_bytes_as_fio(scratch):
    """Both programs did what they were asked to: the same bytes, and none of them free of charge."""
    result = smoke("io", scratch)
    assert len(result["cases"]) == 6
    for case in result["cases"].values():
        runs = case["rounds"][0]["runs"]
        assert {run["bytes"] for both in runs.values() for run in both} == {64 << 20}
        assert all(run["cpu_seconds"] >= 0 and run["seconds"] > 0 for both in runs.values() for run in both)


def test_interference_has_traffic_of_the_direction_asked_for(scratch):
    """Computation and traffic ran at once, and a reader wrote nothing."""
    result = smoke("interference", scratch)
    moves = {
        name: (result[name]["read_bytes_per_second"], result[name]["written_bytes_per_second"]) for name in DIRECTIONS
    }
    is_moving = {name: tuple(rate["median"] > 0 for rate in rates) for name, rates in moves.items()}
    assert is_moving == {"read": (True, False), "write": (False, True), "mix": (True, True)}
    assert result["operations_per_second"]["median"] > 0


DIRECTIONS = ("read", "write", "mix")


def test_peers_rows_compute_the_same_within_their_limits(scratch):
    """Ours ran paged under a limit on its process; its bars (peak, losses, weights) hold, and there are such bars."""
    result = smoke("peers", scratch)
    ours = result["rows"]["ours_at_peer"]
    assert ours["final"]["report"]["ssd_written_bytes"] > 0
    assert ours["final"]["weights_sha256"] == result["rows"]["plain"]["final"]["weights_sha256"]
    assert len(result["bars"]) == 3


def test_size_trains_models_beyond_the_budget(scratch):
    """Both models page, and the deeper one has more on SSD."""
    result = smoke("size", scratch)
    shallow, deep = result["runs"]
    assert 0 < shallow["ssd_file_bytes"] < deep["ssd_file_bytes"]
    assert deep["state_bytes"] > 2 * deep["budget_bytes"]
    assert len(result["bars"]) == 4


def test_train_step_compares_equal_work(scratch):
    """Both dtypes trained to the same bits, plain and paged, and a replay accounts for the bytes that paging moved.

    Furthest next use does not weigh that a dirty page moves twice, so on a tiny model it is no strict bound.
    """
    result = smoke("train_step", scratch)
    assert [row["workload"]["dtype"] for row in result["workloads"]] == ["fp32", "bf16"]
    for row in result["workloads"]:
        quarter = row["variants"]["quarter"]
        moved = quarter["ssd_read_bytes"]["median"] + quarter["ssd_written_bytes"]["median"]
        least = quarter["traffic"]["least_read_bytes"] + quarter["traffic"]["least_written_bytes"]
        assert 0.5 < moved / least < 2
        assert row["variants"]["plain"]["final"]["weights_sha256"] == quarter["final"]["weights_sha256"]
    in_backward = result["workloads"][0]["variants"]["quarter_in_backward"]["final"]
    assert in_backward["report"]["counters"]["gradients_applied"] > 0
    assert in_backward["weights_sha256"] == result["workloads"][0]["variants"]["plain"]["final"]["weights_sha256"]


def test_pins_are_counted_in_each_build(scratch):
    """A result without a paged call is refused; here each call took a pin, of either build."""
    result = smoke("pins", scratch, "--before", str(BENCHMARKS.parent))
    assert result["builds"].keys() == result["trees"].keys() == {"before", "after"}
    assert all(build["paged_ns"]["min"] > build["pin_ns"]["min"] for build in result["builds"].values())


def test_builds_run_the_package_of_each_tree(scratch):
    """Here twice the same one: equal weights, and traffic that says it paged."""
    result = smoke("builds", scratch, "--before", str(BENCHMARKS.parent))
    (compared,) = result["workloads"]
    assert compared["builds"].keys() == {"before", "after"}
    assert all(build["ssd_written_bytes"]["min"] > 0 for build in compared["builds"].values())
    assert compared["after_over_before"]["ssd_written_bytes"]["median"] == pytest.approx(1, abs=0.2)
    assert len(result["bars"]) == 1
    assert set(result["trees"]) == {"before", "after"}
    assert len(set(result["trees"].values())) == 1
    assert result["trees"]["after"].startswith(result["code"]["commit"])
    assert compared["ratio_by_pair"] == [compared["after_over_before"]["seconds"]["median"]]


def test_lock_waits_counts_the_locks_of_the_engine(scratch):
    """Locks of a step were counted, and their places named."""
    result = smoke("lock_waits", scratch)
    (case,) = result["cases"]
    places = {place for mutex in case["mutexes"] for place in mutex["waited_seconds_by_place"]}
    assert case["locks_per_step"] > 1000
    assert any(place.startswith("Pager::Impl::") for place in places)
    assert case["program_share"]["count"] == 2
    assert len(result["bars"]) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads registers of x86-64")
def test_plain_calls_take_no_instruction_more(scratch):
    """Its bars hold; that of the engine's own are seen, a tensor that is made says: its memory is the engine's."""
    result = smoke("plain_calls", scratch)
    assert len(result["bars"]) == 4
    assert {row["call"] for row in result["rows"] if row["added"] > 0} >= {"add", "make a tensor"}
    assert all(row["before"][0]["torch"] > 1000 for row in result["rows"])


def test_shared_disk_counts_every_process(scratch):
    """Each of four moved bytes, of every pattern."""
    result = smoke("shared_disk", scratch)
    (row,) = result["rounds"]
    assert set(row["rates"]) == {"read", "write", "mix"}
    for turns in row["rates"].values():
        assert {name: len(rates) for name, rates in turns.items()} == {
            "one": 1,
            "each": 4,
            "divided": 4,
            "one_of_divided": 1,
        }
        assert all(rate > 0 for rates in turns.values() for rate in rates)


def test_io_thread_is_seen_to_run(scratch):
    """The thread of the disk ran for a part of each step, and for a part of that part the disk had no request."""
    (case,) = smoke("io_thread", scratch)["cases"]
    assert 0 < case["thread_share"]["min"] < 1
    assert 0 <= case["idle_disk_share"]["min"] <= case["thread_share"]["max"]
    assert case["disk_busy_share"]["max"] > 0


def test_adapters_read_the_base_and_do_not_write_it(scratch):
    """Paged adapters over a base of twice the budget came out as in memory; of the base, everything was only read."""
    result = smoke("adapters", scratch)
    (row,) = result["workloads"]
    report = row["final"]["paged"]["report"]
    assert row["description"]["base_bytes"] >= 2 * row["budget_bytes"]
    assert row["ssd_read_bytes"]["min"] > 10 * row["ssd_written_bytes"]["max"] > 0
    assert report["written_bytes"]["parameter"] <= row["description"]["base_bytes"]  # once, when it first left
    assert len({step["steps"]["paged"]["loss"] for step in row["rounds"]}) > 1
    (row,) = result["folders"]
    sizes = {name: described["base_bytes"] for name, described in row["descriptions"].items()}
    assert sizes["plain_nf4"] == sizes["paged_nf4"] < 0.35 * sizes["plain_bf16"]
    assert row["budget_bytes"]["nf4"] == sizes["paged_nf4"] // 2
    assert all(step["steps"]["paged_nf4"]["weights_read_bytes"] > 0 for step in row["rounds"])
    assert len(result["bars"]) == 4 + 8


def test_generating_says_what_plain_torch_says(scratch):
    """A model of twice the budget was read again and again, beside a mapped file, accelerate's disk offload and, where
    it is installed, llama.cpp."""
    result = smoke("generate", scratch)
    (task,) = result["tasks"]
    has_llama_cpp = importlib.util.find_spec("llama_cpp") is not None
    assert task["seconds"].keys() == {"plain", "paged", "mapped", "disk", *(["llama_cpp"] if has_llama_cpp else [])}
    assert result["not_measured"] == ([] if has_llama_cpp else ["llama-cpp-python is not installed"])
    assert task["replay"]["passes"] == task["task"]["new_tokens"]
    assert 0 < task["replay"]["least_read_bytes"] <= task["replay"]["read_bytes"]
    assert len(result["bars"]) == 2


def test_plan_accuracy_puts_plans_beside_runs(scratch):
    """A full step, two of adapters and a generation were planned, then run; bytes were as planned to a half."""
    result = smoke("plan_accuracy", scratch)
    assert [row["setting"]["kind"] for row in result["settings"]] == ["full", "lora", "qlora", "generate"]
    for row in result["settings"]:
        assert row["measured"]["ssd_bytes"] > 0
        assert abs(row["errors"]["ssd_bytes"]) < 0.5
        assert row["plan"]["fits"]
    assert result["not_measured"] == []
    assert len(result["bars"]) == 1


def test_embedding_reads_pages_of_its_rows(scratch):
    """A table of eight times the budget was loaded, and rows of it were read."""
    result = smoke("embedding", scratch)
    assert result["table_bytes"] >= 8 * result["report"]["budget_bytes"]
    assert result["pages_per_row"]["min"] > 0
    assert len(result["bars"]) == 3


def test_distributed_compares_ranks(scratch):
    """Two ranks with DDP and with FSDP2 paged and were equal; both counts of ranks moved bytes; steps took turns."""
    result = smoke("distributed", scratch)
    assert {row["sharding"] for row in result["identity"]} == {"ddp", "fsdp", "fsdp bf16"}
    assert all(bar["holds"] for bar in result["bars"])
    assert [row["ranks"] for row in result["traffic"]] == [1, 2]
    assert all(row["bytes_per_parameter"]["read_bytes"]["median"] > 0 for row in result["traffic"])
    assert result["overhead"]["rounds"]
    (half,) = result["store_memory"]
    assert half["ssd_read_bytes"] > 0 < half["ssd_written_bytes"]
    assert [row["schedule"] for row in result["schedules"]] == ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"]
    assert all(row["all_moved_over_weights"] > 0 for row in result["schedules"])
    assert {row["operator"] for row in result["collectives"]["rows"]} >= {
        "c10d::allreduce_",
        "_c10d_functional::broadcast",
    }
    if "memory" in result:
        found = result["memory"]  # whether a tiny model keeps to a tiny limit says nothing
        assert found["base"]["steps"] == 2
        assert 0 < found["group_peak_bytes"] <= found["limit_bytes"]
        assert found["steps"] == 2 or found["failure"]
    else:  # where no memory cgroup can be made
        assert [line.partition(":")[0] for line in result["not_measured"]] == ["memory"]


def test_scale_counts_one_of_many_ranks_and_simulates_the_others(scratch):
    """One of eight ranks paged; a model was made of its reads, held against two ranks and asked about eight."""
    result = smoke("scale", scratch)
    (first,) = result["one_of_many"]
    assert first["step"]["evictions"] > 0
    assert first["replayed"]["moved_bytes"] > 0
    (compared,) = result["validation"]
    assert compared["measured_seconds"]["median"] > 0 < compared["model"]["step_seconds"]
    assert result["inputs"]["works"]["2"]["tail"]["reads_recorded"] > 0
    assert [row["ranks"] for row in result["simulated"]] == [2, 8]
    rows = [
        compared["model"],
        *(part for row in result["simulated"] for part in (row, row["today"], row["tail_margin"])),
    ]
    assert all(row["simulated"] is True for row in rows)
    assert len(result["bars"]) == 2


def test_ranks_end_with_one_that_fails_and_start_again(scratch):
    """One was killed, one had too little memory; what was trained on is that of a run without failure."""
    result = smoke("rank_failures", scratch)
    assert [row["way"] for row in result["failures"]] == ["killed", "budget too small"]
    assert result["restarts"]["checkpoints"] == 4
    assert len(result["bars"]) == 9


def test_load_save_moves_a_model_of_three_times_the_budget(scratch):
    """A process limited to base and budget loaded and saved it, and the files are the same."""
    result = smoke("load_save", scratch)
    measured = result["result"]
    assert measured["model_bytes"] >= 3 * measured["budget_bytes"]
    assert measured["rounds"][0]["load"]["ssd_written_bytes"] > 0
    assert measured["rounds"][0]["in_place"]["token"]["ssd_read_bytes"] > 0
    assert 0 < measured["adapters"]["scratch_file_bytes"] < measured["model_bytes"]
    assert len(result["bars"]) == 7


def test_three_tiers_computes_what_plain_torch_does(scratch):
    """Bytes crossed every link, within both budgets, and a plan was made."""
    result = smoke("three_tiers", scratch)
    (point,) = result["points"]
    assert all(point["busy_share"][name]["min"] > 0 for name in ("compute", "to device", "to host", "ssd"))
    assert point["prediction"]["predicted_seconds"] > 0
    assert len(result["bars"]) == 3


def test_codec_gives_back_what_it_coded():
    """Every coder was run both ways, near the entropy even of a small matrix, and every kernel had its turns."""
    result = run_smoke("codec")
    assert {row["coder"] for row in result["rates"]} == {"tun12", "rans4", "smallest", "qmoe"}
    assert all(row["of_entropy"] > 0.7 for row in result["rates"])
    assert {"tun12 encode, 1 threads", "rans4 encode, 1 threads"} <= set(result["speeds"])
    assert all(speed["g_per_core_s"]["min"] > 0 for speed in result["speeds"].values())


def test_moe_says_the_same_from_a_tenth_of_its_memory(scratch):
    """Paged experts gave the tokens and losses of resident ones, within the budget, from bytes that were read."""
    result = smoke("moe", scratch)
    assert len(result["bars"]) == 10
    assert result["final"]["paged"]["prefetches"] > 0


def test_expert_quality_judges_every_way():
    """Every way was judged, at no more bits than were asked for, and adapters were trained over the coded experts."""
    result = run_smoke("expert_quality", environment={"OMP_NUM_THREADS": "1"})  # many small operators
    (found,) = result["results"]
    methods = [row["method"] for row in found["variants"]]
    assert methods == ["bf16", "zeroed", "qmoe", "qmoe_of_equal_tokens", "nearest", "nearest", "ours", "ours"]
    assert [row["bits"] <= most for row, most in zip(found["variants"][-2:], (0.8, 2.0), strict=True)] == [True, True]
    assert len({row["loss"] for row in found["variants"]}) == len(methods)
    assert all(0 < ratio < 1 for ratio in found["rate_at_qmoes_error"])
    assert all(0 < ratio < 1.1 for row in found["bytes_by_classes"] for ratio in row.values())
    assert found["adapters"]["loss_adapted"] not in {row["loss"] for row in found["variants"]}


def test_search_is_held_against_a_sweep(scratch):
    """Every candidate was trained, the chosen one as well, and the accumulating script moved more bytes."""
    result = smoke("search", scratch)
    (problem,) = result["problems"]
    assert len(problem["sweep"]) == 2
    losses = [row["measured"]["loss"] for row in problem["sweep"]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert problem["regret"] >= 1
    for row in (problem, result["adapters"]):
        assert row["chosen"][:2] == [2, 1]
        assert 0 < row["baselines"]["1 row, accumulated"]["chosen_bytes_over_it"] < 1
