"""Writes what documents say of benchmarks: README's figures, table and chart, all bars in docs/contributing/results.md.

    python tools/results_tables.py             write them
    python tools/results_tables.py --check     change nothing; exit with 1 and a diff where they are not as written

Reads benchmarks/results/*.json. A result that does not name the commit it measured, or that was measured with other
files than those of its commit, is refused. Those from before results named one lie in benchmarks/results/without_commit
until they are measured anew; they are listed apart, and marked as old where README has nothing newer.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lost_commits
from coding_costs import CODED, losses_table, shares_table
from generated_parts import Document, differences, names_of_parts, replace_parts, write
from markdown_parts import table, times
from readme_chart import CHARTED, QUOTED, draw, figures
from scale_tables import scale_tables

ROOT = Path(__file__).resolve().parents[1]
OLD = "*old:* measured before results recorded their commit, on code that has changed; to be measured again."
DISTURBED = "**Disturbed:** others took part of the machine, and too few rounds were quiet."
CODING_PAGE = "docs/concepts/coded-experts.md"
PAGE, CHART = "docs/contributing/results.md", "docs/images/step_by_memory.svg"
FAULTS = ("faults.json", "faults_long.json", "operations.json")  # have a page of their own: fault_page.py
MAX_OTHER_SHARE = 0.10  # of the machine, while a try of DeepSpeed counts

Json = dict[str, Any]
Table = list[list[str]]


class ResultRefused(Exception):
    """A result that no document may quote; the message names the file and what to run."""


@dataclass(frozen=True)
class Benchmark:
    """A result file, and what is to be known beside its bars."""

    stem: str
    title: str
    options: str = ""
    note: str = ""
    driver: str = ""  # where it is not called as the result is

    @property
    def command(self) -> str:
        driver = self.driver or self.stem.removesuffix("_fp32").removesuffix("_bf16")
        options = f" {self.options}" if self.options else ""
        return f"python benchmarks/{driver}.py --json{options} > benchmarks/results/{self.stem}.json"


IO = "--ssd DIR"
QUALITY = (
    "*upcycled* is SmolLM2-135M of whose 30 layers the last 5 have experts; the other 25 are not coded. The bits at "
    "QMoE's output error are found on the texts that calibrated both, so that error is in-sample; losses are held-out. "
    "QMoE is this project's implementation. The learning rate and the number of steps of the adapters were chosen on "
    "results of this model. It was trained and judged on one thread, in several runs of code that did not change."
)
SMALL_MODELS = (
    "Each model was trained and judged on one thread. What is said above of the in-sample error and of QMoE holds here "
    "too. Bars changed after numbers were seen: at 0.8 bits, as asked for, coding costs these models 0.0005 to 0.003 "
    "nat, and of two seeds of qwen3 adapters won back 0.26 and 0.74 against the dense model with adapters (0.39 for "
    "the worse one against that without), where 0.5 was the bar; the third was not run. Then the bar of these models "
    "was moved to 0.4 bits, and they were trained on other text. The bar at 0.8 bits, which was asked for, stands "
    "beside it."
)
PLAIN = (
    "A ratio below 1 does not show that interception costs nothing: paged and resident steps have another allocator "
    "than plain torch, whose memory was in huge pages in one of its two variants."
)
ADAPTERS = (
    f"{PLAIN} Embedding and head of a quantized base stay in bf16: 0.26 of 0.82 GB of that of 1.2 B, and half of "
    "SmolLM2's, whose budget is 1.03 of its base instead of half. In bf16 this processor computes without matrix units."
)
WAITS = (
    "Before is commit 846725f: waits that end, one driver for pages, no allocation that loses anything. The last step "
    "is longer by 0.65 %, of seven rounds whose ratios lie between 0.989 and 1.059."
)
PREDICTOR = (
    "Before is commit 505f56b: one predictor for both pagers, system calls without the pager's lock, pins that are "
    "counted, faults that raise. At 128 tokens 10 % faster was asked for. The tree called a6de924-dirty is 73039c1: "
    "its commit was looked up at the end, and documents had been edited by then."
)
PLANNER = (
    "After is commit 01ab73e, whose pager looks ahead on a thread of its own, before the commit that it was made of. "
    "It was not taken (ADR 0011)."
)
BUILDS = "Before is commit 15ec886, after the one above: a new place for each write, retries, undefined pages."
SLOW_STEPS = (
    "An earlier result of the same 3 B parameters, whose commit is not known, had steps of 246 to 498 s beside others "
    "of 73 s. Beside those of 489, 498 and 246 s the disk itself read at 0.35, 0.06 and 0.33 GB/s. One of 363 s had "
    "the same traffic, idle processors, 290 s of waiting for reads, and probes of 1.2 GB/s before and after; what "
    "happened in it is not known. With four transfers of 4 MiB in flight, the fewest that the engine keeps where more "
    "waits, it means about 100 ms for a transfer. The kernel's counters are now recorded for each "
    "step, so that another such step would tell a slow disk from an idle one."
)
REDESIGN = (
    "Before is commit d5bcc01, without anything of the redesign. At 128 tokens 10 % faster was asked for. Each build "
    "has its own default: d5bcc01 keeps activations in memory, this one pages them (ADR 0008), and the next section "
    "compares both with activations kept. There a step makes the same calls for memory in both; with the defaults 215 "
    "activations a step become pages here, and 120 MB more of memory are taken anew."
)
KEPT = (
    'The same two builds with activations="keep" in both: what the redesign alone costs or gains. 10 % faster was '
    "asked for at 128 tokens."
)
RESIDENT = (
    'Both with activations="keep" again. Of a resident step the three pairs of processes gave 1.07, 0.88 and 1.08, so '
    "the next section repeats it with seven: their medians lie between 0.96 and 1.19, five of seven at 1.02 or below."
)
GENERATE = (
    "A program that only runs forward read all of the weights in each pass before its passes were predicted. llama.cpp "
    "computes other tokens by other kernels, and keeps more of its file in memory, since its process is smaller. "
    "Sixteen rows keep both cores busy in memory already (8.9 s of processor time in 4.5 s), and what paging takes of "
    "them is missing in the share of the limit. In a profile of a paged process, 12.8 s a step, the thread that serves "
    "the disk has a tenth (it moves what begins off a sector, checks sums and calls the system), and a fifth passes in "
    "OpenMP, whose threads wait for each other at the end of each loop. On a machine that computes at 0.6 of the speed "
    "the shares were 0.86 and 0.72. "
    "Of 2,048 tokens, the loss takes memory after the last use of a page, which the least bytes do not know of: beside "
    "it, no order of pages reads less than 0.93 of what was read; the step is bound by computing."
)
PLANNED = (
    "Nearly everything is planned too fast. The speed of the machine is part of it: LoRA with 384 MiB is planned alike "
    'for activations="keep" and "ssd", and took 1.35 and 1.45 s. What paging costs the processor is measured once, at '
    "the beginning: a byte that is read cost 0.22 s/GB here, and 0.47 s/GB in the record at 8be8ff7, where generating "
    "for one row was planned within 0.11 of the seconds that it took. Bytes are off most where least is read: too few "
    "of generating with 192 MiB, too many of LoRA with 640 MiB."
)
PIECES = (
    "Before is commit 3fd58da (ADR 0013). This machine computed at two thirds of its speed when the section above was "
    "measured."
)
BLOCKS = "Before is commit a061ebf289e1 (ADR 0016)."
FOUND = " --deepspeed-settings JSON"
SETTINGS_FOUND = "DeepSpeed has the settings that its search found at 128 tokens, in the section of these."
PLAIN_BESIDE = "DeepSpeed takes {} times what plain torch takes in memory: a bar above that asks for more than paging."
RANKS = (
    "The first rank of a pipeline begins a step where its last one ended, so of four ranks with 1F1B a quarter of the "
    "updates is never in a wait. The least bytes by replay have what the budget leaves beside other memory at each "
    "use; where it is counted at its most between uses, two and four ranks are at 1.050 and 1.057. A store and its "
    "ranks are processes of one machine. Of a single step the store receives more or less than the weights once, by "
    "up to 6 %: gradients that the end of a step leaves in memory go in the next one. In all it is once. It sends less "
    "than twice the weights where a rank has some in memory from the forward pass on."
)
BENCHMARKS = (
    Benchmark("train_step", "A training step", IO, PLAIN),
    Benchmark("adapters", "LoRA over a base of twice the memory", IO, ADAPTERS),
    Benchmark(
        "adapters_before",
        "LoRA before and after temporaries are made of any page",
        f'--only "1.2 B" --before TREE {IO}',
        PIECES,
        driver="adapters",
    ),
    Benchmark(
        "adapters_before_blocks",
        "LoRA before and after temporaries are parts of blocks",
        f"--only smollm2-135m --before TREE --rounds 7 {IO}",
        BLOCKS,
        driver="adapters",
    ),
    Benchmark("generate", "Generating with a model of twice the memory", IO, GENERATE),
    Benchmark("plan_accuracy", "A plan beside what the run takes", IO, PLANNED),
    Benchmark("search", "The setup that a search chooses, beside all others", f"--reduced --kept FOLDER {IO}"),
    Benchmark("embedding", "Rows of a table of sixteen times the memory", IO),
    Benchmark("builds", "The step before and after failures lose nothing", f"--before TREE {IO}", BUILDS),
    Benchmark("builds_846725f", "The step before and after waits end", f"--before TREE {IO}", WAITS, driver="builds"),
    Benchmark(
        "builds_505f56b", "The step before and after one predictor", f"--before TREE {IO}", PREDICTOR, driver="builds"
    ),
    Benchmark(
        "builds_d5bcc01", "The step before and after the redesign", f"--before TREE {IO}", REDESIGN, driver="builds"
    ),
    Benchmark(
        "builds_d5bcc01_keep",
        "The step before and after the redesign, activations kept",
        f'--before TREE --activations keep --only "128 tokens" {IO}',
        KEPT,
        driver="builds",
    ),
    Benchmark(
        "builds_d5bcc01_keep_large",
        "The same, larger steps",
        f"--before TREE --activations keep --only resident --only 2048 {IO}",
        RESIDENT,
        driver="builds",
    ),
    Benchmark(
        "builds_d5bcc01_keep_resident",
        "The same, everything resident, more pairs of processes",
        f"--before TREE --activations keep --only resident --pairs 7 {IO}",
        driver="builds",
    ),
    Benchmark(
        "builds_planner",
        "Looking ahead on a thread of its own",
        f'--before TREE --after TREE --only "128 tokens" {IO}',
        PLANNER,
        driver="builds",
    ),
    Benchmark(
        "pins",
        "A pin before and after failures lose nothing",
        f"--before TREE {IO}",
        "Before is commit d5bcc01. A pin is what a call takes beyond the same one over an ordinary tensor: its median "
        "went from 991 to 1,016 ns; in the record before this one from 592 to 676 ns.",
    ),
    Benchmark("lock_waits", "Waiting for locks", IO),
    Benchmark(
        "io_thread",
        "A thread for I/O alone",
        IO,
        "The share is the most that such a thread could win. One was built, and won nothing (ADR 0011).",
    ),
    Benchmark("peers_fp32", "DeepSpeed and swap, fp32", f"{IO} --dtype fp32"),
    Benchmark("peers_bf16", "DeepSpeed, bf16", f"{IO} --dtype bf16"),
    *(
        Benchmark(
            f"peers_backward_{tokens}",
            f"DeepSpeed beside an update in the backward, {tokens} tokens",
            f"{IO} --sequence {tokens} --update backward --peers deepspeed{settings}",
            note,
            driver="peers",
        )
        for tokens, settings, note in (
            (32, FOUND, SETTINGS_FOUND),
            (128, "", PLAIN_BESIDE.format(3.86)),
            (512, FOUND, f"{SETTINGS_FOUND} {PLAIN_BESIDE.format(1.85)}"),
        )
    ),
    Benchmark(
        "peers_ranks",
        "DeepSpeed, two ranks",
        f"{IO} --ranks 2 --peers deepspeed{FOUND}",
        "DeepSpeed has the settings of one process, found by the search of peers_fp32; with those that suit two ranks "
        "best it would be faster. In memory plain torch with fully_shard takes 0.92 of the time that DeepSpeed takes.",
        driver="peers",
    ),
    Benchmark("peers_ranks_swap", "Swap, two ranks", f"{IO} --ranks 2 --peers swap", driver="peers"),
    Benchmark("size_fp32", "Size of the model", f"{IO} --dtype fp32", SLOW_STEPS),
    Benchmark("load_save", "Loading and saving", IO),
    Benchmark("activations", "A long row", IO, "Times are reported in the file, not judged."),
    Benchmark("distributed", "Ranks with DDP and FSDP2", IO, RANKS),
    Benchmark(
        "plain_calls",
        "Calls on plain tensors",
        IO,
        "Counted instructions. A call that makes a tensor takes 113 more, in the engine's allocator.",
    ),
    Benchmark("shared_disk", "A disk that several processes share", IO),
    Benchmark("scale", "Beyond these machines", IO, "What is simulated says what a distribution of reads costs ranks."),
    Benchmark("rank_failures", "A rank that fails", IO),
    Benchmark("three_tiers", "Three tiers", IO, "Device and SSD are slowed down to a card's ratios; no GPU was used."),
    Benchmark("io", "The I/O engine against fio", IO),
    Benchmark(
        "codec",
        "Coded matrices",
        note="The bars of bits and of speed belong together by coder: RANS4 is the default, TUN12 the fast one. This "
        "machine's memory gives bf16 a fifth of the 16.9 10^9 weights a second and core that it had where bars of one "
        "token were set, so those hold more easily here; where it was recorded before, encoders took half as long.",
    ),
    Benchmark("moe", "Paged experts", IO, "Weights are made up: only sizes and choices are those of a model."),
    Benchmark(
        "expert_quality_upcycled",
        "What coding experts costs, a model trained by others",
        "--models upcycled --work DIR",
        QUALITY,
        driver="expert_quality",
    ),
    Benchmark(
        "expert_quality_small",
        "What coding experts costs, small models",
        "--models mixtral qwen3 --work DIR",
        SMALL_MODELS,
        driver="expert_quality",
    ),
    *(
        Benchmark(
            f"activations_default{suffix}",
            f"Activations that may leave memory, {tokens} tokens",
            f'{IO} --only "fp32, {tokens}" --activations keep page',
            driver="train_step",
        )
        for suffix, tokens in (("", 256), ("_2048", 2048))
    ),
)


@dataclass(frozen=True)
class Result:
    """What a driver wrote."""

    benchmark: Benchmark
    content: Json
    is_old: bool = False
    notes: Json | None = None  # of an old one

    def bar(self, name: str) -> Json:
        return next(bar for bar in self.content["bars"] if bar["name"] == name)


def shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def benchmark_of(stem: str) -> Benchmark:
    known = {benchmark.stem: benchmark for benchmark in BENCHMARKS}
    return known.get(stem, Benchmark(stem, stem, IO))


def read_results(root: Path) -> list[Result]:
    """Return results that name their commit, in the order of `BENCHMARKS`; refuse others."""
    results = []
    for path in (root / "benchmarks/results").glob("*.json"):
        if path.name in FAULTS:
            continue
        benchmark, content = benchmark_of(path.stem), json.loads(path.read_text())
        code = content.get("code", {})
        if not code.get("commit"):
            raise ResultRefused(f"{shown(path, root)} names no commit; measure again: {benchmark.command}")
        if "--smoke" in code.get("command", ""):
            raise ResultRefused(f"{shown(path, root)} is of a smoke run; measure again: {benchmark.command}")
        if code.get("modified_files"):
            names = ", ".join(code["modified_files"])
            raise ResultRefused(
                f"{shown(path, root)} was measured with files that differ from commit {code['commit']}: {names}; "
                f"commit them and measure again: {benchmark.command}"
            )
        results.append(Result(benchmark, content))
    return in_order(results)


def read_old_results(root: Path) -> list[Result]:
    """Return results from before they named a commit."""
    folder = root / "benchmarks/results/without_commit"
    notes_path = folder / "notes.json"
    notes = json.loads(notes_path.read_text()) if notes_path.exists() else {}
    results = []
    for path in folder.glob("*.json"):
        if path == notes_path:
            continue
        if (folder.parent / path.name).exists():
            raise ResultRefused(f"{shown(path, root)} was measured anew: git rm {shown(path, root)}")
        content = json.loads(path.read_text())
        results.append(Result(benchmark_of(path.stem), content, is_old=True, notes=notes.get(path.stem, {})))
    return in_order(results)


def in_order(results: list[Result]) -> list[Result]:
    order = [benchmark.stem for benchmark in BENCHMARKS]
    places = {stem: place for place, stem in enumerate(order)}
    return sorted(results, key=lambda one: (places.get(one.benchmark.stem, len(order)), one.benchmark.stem))


# ---- how numbers look


def number(value: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if math.isnan(value):
        return "not a number"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def verdict(bar: Json) -> str:
    return "yes" if bar["holds"] else "**fails**"


def target(bar: Json) -> str:
    relation = bar["relation"] if "relation" in bar else ("at least" if bar["at_least"] else "at most")
    return f"{relation} {number(bar['target'])}"


# ---- all bars


def page(results: list[Result], old: list[Result]) -> str:
    """Return docs/contributing/results.md."""
    parts = [
        "# Results: every bar, and whether it holds\n",
        "Written by `tools/results_tables.py` from `benchmarks/results`; what each benchmark compares and what a bar "
        "means is in [benchmarks.md](benchmarks.md). Targets were set before the numbers were seen, unless a note says "
        "otherwise. A bar called *laxer* stands beside the one it is laxer than.\n",
        "## Bars that fail\n",
        table(["result", "bar", "target", "value"], failing(results) + failing(old)),
    ]
    parts += [section(result) for result in results]
    if old:
        parts.append(
            "## Measured before results recorded their commit\n\nOn code that has changed; to be measured again. Which "
            "version of torch, which disk and which day is not known of them.\n"
        )
        parts += [section(result) for result in old]
    return "\n".join(parts)


def failing(results: list[Result]) -> Table:
    rows = []
    for result in results:
        stem = f"{result.benchmark.stem} (old)" if result.is_old else result.benchmark.stem
        for bar in result.content["bars"]:
            correction = correction_of(result, bar)
            if not bar["holds"] or "**fails**" in correction:
                value = number(bar["value"]) if not correction else f"{number(bar['value'])}, but {correction}"
                rows.append([stem, bar["name"], target(bar), value])
    return rows


def correction_of(result: Result, bar: Json) -> str:
    corrections: Json = (result.notes or {}).get("corrections", {})
    return str(corrections.get(bar["name"], ""))


def section(result: Result) -> str:
    """Return one benchmark with all of its bars."""
    rows = [
        [bar["name"], target(bar), number(bar["value"]), correction_of(result, bar) or verdict(bar)]
        for bar in result.content["bars"]
    ]
    heading = f"### {result.benchmark.title} (old)" if result.is_old else f"## {result.benchmark.title}"
    parts = [f"{heading}\n", f"{origin(result)}\n"]
    notes = [result.benchmark.note, (result.notes or {}).get("note", "")]
    notes += [DISTURBED] if is_disturbed(result.content) else []
    parts += [f"{note}\n" for note in notes if note]
    parts.append(table(["bar", "target", "value", "holds"], rows))
    if result.content.get("deepspeed_settings_tried"):
        parts.append(settings_of_deepspeed(result.content))
    if result.benchmark.stem == "scale":
        parts.append(scale_tables(result.content))
    if result.benchmark.stem.startswith("size"):
        parts.append(steps_of_sizes(result.content))
    return "\n".join(parts)


def is_disturbed(content: object) -> bool:
    """Whether a part of a result says that too few rounds were quiet, so that all of them count."""
    if isinstance(content, dict):
        return bool(content.get("disturbed")) or any(is_disturbed(part) for part in content.values())
    return isinstance(content, list) and any(is_disturbed(part) for part in content)


def origin(result: Result) -> str:
    """Return which code on which machine."""
    machine = result.content["machine"]
    if result.is_old:
        kernel = machine.get("kernel", "not recorded")
        return f"No commit recorded, kernel {kernel}. Again: `{result.benchmark.command}`."
    code, disk = result.content["code"], machine["disk"]
    return (
        f"Commit {lost_commits.named(code['commit'])}, {code['date'][:10]}, torch {code['torch']}; "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB, "
        f"kernel {machine['kernel']}; disk {disk['device']} ({disk['model']}), {disk['file_system']}. "
        f"Again: `{result.benchmark.command}`."
    )


def settings_of_deepspeed(content: Json) -> str:
    """Return the settings of which no other one is as fast with less memory, and ours at the memory of each."""
    tried = [row for row in content["deepspeed_settings_tried"] if "seconds" in row and was_quiet(row)]
    fastest: Json = min(tried, key=lambda row: float(row["seconds"]), default={})
    winner = (content.get("deepspeed_final") or fastest).get("settings")
    rows: Table = []
    least = math.inf
    for row in sorted(tried, key=lambda row: row["seconds"]):
        if row["peak_resident_bytes"] < least:
            least = row["peak_resident_bytes"]
            peak = f"{least / 1e9:.2f} GB"
            rows.append([names_of(row["settings"]), f"{row['seconds']:.2f} s", peak, ours_beside(content, row, winner)])
    count = sum(not was_quiet(row) for row in content["deepspeed_settings_tried"] if "seconds" in row)
    said = "DeepSpeed's settings of which no other one is as fast with less memory."
    return f"{said} Tries that were not quiet do not count: {count}.\n\n" + table(
        ["settings", "a step", "peak", "ours at that peak: DeepSpeed over ours"], rows
    )


def was_quiet(row: Json) -> bool:
    return bool(row.get("quiet", max(row.get("other_share", [1.0])) <= MAX_OTHER_SHARE))


def names_of(settings: Json) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())


def ours_beside(content: Json, row: Json, winner: Json | None) -> str:
    if row["settings"] == winner:
        return times(content["times_ours"]["deepspeed over ours_at_peer"])
    for measured in content.get("deepspeed_pareto", []):
        if measured["settings"] == row["settings"] and "beside_ours" in measured:
            return times(measured["beside_ours"]["ratio"])
    return "not measured"


def steps_of_sizes(content: Json) -> str:
    """Return every step of every model, those that do not count included."""
    rows: Table = []
    for run in [*content["runs"], *([content["large"]] if content["large"] else [])]:
        name = f"{run['parameters'] / 1e9:.2f} B in {run['budget_bytes'] / (1 << 30):.2f} GiB"
        for step in run["steps"]:
            rates = [step["disk"].get(f"{way}_bytes_per_second") for way in ("read", "write", "mix")]
            disk = " / ".join("-" if rate is None else f"{rate / 1e9:.2f}" for rate in rates)
            busy = f"{step['disk_busy_share']:.0%}" if "disk_busy_share" in step else "-"
            quiet = "yes" if step["quiet"] else f"no, others {step['other_share']:.0%}"
            read = f"{step['disk_read_milliseconds']:.1f}" if "disk_read_milliseconds" in step else "-"
            seconds, waited = f"{step['seconds']:.1f}", f"{step['stall_read_seconds']:.1f}"
            rows.append([name, seconds, waited, disk, busy, read, quiet])
    head = [
        "model",
        "step, s",
        "waited for reads, s",
        "disk just before: read / write / mix, GB/s",
        "disk busy",
        "a read, ms",
        "quiet",
    ]
    return "Every step that was measured:\n\n" + table(head, rows)


# ---- README's table


def workload(result: Result, name: str) -> Json:
    found: Json = next(row for row in result.content["workloads"] if row["workload"]["name"] == name)
    return found


def resident(result: Result) -> str:
    spread = workload(result, "fp32, 2048 tokens")["variants"]["resident"]["ratio_to_plain"]
    names = [bar["name"] for bar in result.content["bars"]]
    beside_huge = "resident step over plain_huge step, fp32, 2048 tokens"
    huge = f", {result.bar(beside_huge)['value']:.2f}x where that has huge pages too" if beside_huge in names else ""
    return f"{times(spread)} times plain torch's step{huge}"


def quarter(result: Result) -> str:
    fp32, bf16 = (
        workload(result, f"{dtype}, 2048 tokens")["variants"]["quarter"]["ratio_to_plain"] for dtype in ("fp32", "bf16")
    )
    return f"{times(fp32)} times plain torch's step in fp32, {times(bf16)} in bf16"


def few_tokens(result: Result) -> str:
    variant = workload(result, "fp32, 128 tokens")["variants"]["quarter"]
    bar = result.bar("quarter share of what binds it, fp32, 128 tokens")
    share = f"{bar['value']:.2f} of what the disk allows ({target(bar)}: {'holds' if bar['holds'] else '**fails**'})"
    return f"{times(variant['ratio_to_plain'])} times; {share}"


def deepspeed(result: Result) -> str:
    dtype = result.content["dtype"]
    bar, peak = (
        result.bar(f"deepspeed over ours_at_peer, {dtype}"),
        result.content["times_ours"]["deepspeed over ours_at_peer"],
    )
    half = result.content["times_ours"]["deepspeed over ours_at_half"]
    fails = "" if bar["holds"] else f" ({target(bar)}: **fails**)"
    return f"{times(peak)} times as fast at its peak memory{fails}, {times(half)} at half of it"


def swap(result: Result) -> str:
    return f"{times(result.content['times_ours']['swap over ours_at_swap'])} times as fast"


def adapters(result: Result) -> str:
    row = workload(result, "2048 tokens")
    read, written = (row[f"ssd_{way}_bytes"]["median"] / 1e9 for way in ("read", "written"))
    return (
        f"{times(row['paged_over_plain'])} times PEFT in memory; {read:.2f} GB read and {written:.3f} GB written a step"
    )


def size(result: Result) -> str:
    run = result.content["runs"][-1]
    peak = f"{run['peak_resident_bytes'] / 1e9:.2f} GB"
    seconds = run["seconds"]
    return (
        f"{seconds['median']:.0f} s a step ({seconds['min']:.0f} to {seconds['max']:.0f}), peak of the process {peak}"
    )


ROWS: tuple[tuple[str, str, Callable[[Result], str]], ...] = (
    ("everything in memory, 2,048 tokens: what does interception cost?", "train_step", resident),
    ("a budget of 25 % of the state, 2,048 tokens a step", "train_step", quarter),
    ("the same with 128 tokens, where the disk is the bottleneck", "train_step", few_tokens),
    ("LoRA over a base of twice the budget, 2,048 tokens", "adapters", adapters),
    ("beside DeepSpeed ZeRO-3 on NVMe (CPU, 2 cores, batch 1 x 256), fp32", "peers_fp32", deepspeed),
    ("beside the system's swap, 40 % of the state", "peers_fp32", swap),
    ("3 B parameters, 48 GB of state, within 1 GiB", "size_fp32", size),
)


def short_table(newest: dict[str, Result]) -> str:
    """Return what stands between the markers in README."""
    rows: Table = []
    for question, stem, answer in ROWS:
        result = newest.get(stem)
        if result is None:
            rows.append([question, "not measured yet", ""])
            continue
        bars = result.content["bars"]
        fail = sum(not bar["holds"] or "**fails**" in correction_of(result, bar) for bar in bars)
        held = f"{len(bars) - fail} of {len(bars)} hold"
        rows.append([question, f"{'*old:* ' if result.is_old else ''}{answer(result)}", held])
    text = table(["question", "measured", "bars of that benchmark"], rows)
    if any(newest[stem].is_old for _, stem, _ in ROWS if stem in newest):
        text += f"\n{OLD}\n"
    return f"{text}\nMedians with the smallest and largest value.\n"


def readme(text: str, results: list[Result], old: list[Result]) -> str:
    """Return README with its generated parts made anew."""
    if names_of_parts(text).count("results") != 1:
        raise ResultRefused(
            "README.md needs the lines <!-- generated: results --> and <!-- end --> once, the table goes between them"
        )
    newest = {result.benchmark.stem: result for result in [*old, *results]}

    def quoted() -> str:
        if missing := [benchmark_of(stem).command for stem in QUOTED if stem not in newest]:
            raise ResultRefused(f"README.md quotes results that are not there; measure: {'; '.join(missing)}")
        return figures({stem: newest[stem].content for stem in QUOTED})

    return replace_parts(text, {"results": lambda: short_table(newest), "figures": quoted})


def coding_page(text: str, results: list[Result]) -> str:
    """Return the page on coded experts with its tables made anew."""
    contents = [result.content for stem in CODED for result in results if result.benchmark.stem == stem]
    parts = {"coding losses": lambda: losses_table(contents), "coding shares": lambda: shares_table(contents)}
    named = names_of_parts(text)
    if not contents and not named:
        return text
    if len(contents) < len(CODED) or sorted(named) != sorted(parts):
        raise ResultRefused(
            f"{CODING_PAGE} needs the results {' and '.join(CODED)}, of which {len(contents)} are there, and the "
            f"generated parts {' and '.join(parts)}, once each; it has {' and '.join(named) or 'none'}"
        )
    return replace_parts(text, parts)


def documents(root: Path) -> Iterator[Document]:
    """Yield each document and what it should say."""
    results, old = read_results(root), read_old_results(root)
    yield root / PAGE, page(results, old)
    yield root / "README.md", readme((root / "README.md").read_text(encoding="utf-8"), results, old)
    yield root / CODING_PAGE, coding_page((root / CODING_PAGE).read_text(encoding="utf-8"), results)
    yield from ((root / CHART, draw(one.content)) for one in [*results, *old] if one.benchmark.stem == CHARTED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, say what differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository (default: this one)")
    options = parser.parse_args()
    try:
        if not options.check:
            write(list(documents(options.root)))
        elif differing := differences(documents(options.root), options.root):
            sys.exit(f"{differing}\nrun: python tools/results_tables.py")
    except ResultRefused as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
