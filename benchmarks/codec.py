"""How near coded ternary matrices come to the entropy, and how fast they are coded and multiplied beside bf16.

    python benchmarks/codec.py --json > benchmarks/results/codec.json      (about a minute)
    python benchmarks/codec.py --json --before TREE > benchmarks/results/codec_before.json
    python benchmarks/codec.py --smoke

Runs codec.cpp, which also makes sure that every matrix comes back as it was. Rates are those of random matrices of
known odds, everything counted: header, tables, tiles. Speeds: in every round each kernel goes once over a matrix of
65536 x 2048, so that all meet the same machine; a ratio is the median of the rounds' ratios. `g_per_s` is by the clock,
`g_per_core_s` by the time that cores worked. Beside each stands the share of what bounds it: of memory's bandwidth for
bf16 and one token, of the core's multiply-adds for the others, both measured in the same rounds. Bits and speeds are
told by coder: RANS4 is what `torch_offload.compress` uses and has the fewest bits, TUN12 is the fast one.

With `--before TREE` the program of another tree and this one's take turns; what is told is by how much each kernel that
both have got faster.

Targets are those of two cores with AVX-512; without it only the rates are judged.
"""

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from harness import native_programs
from harness.machine import CpuSeconds
from harness.provenance import machine
from harness.reporting import at_least, at_most, emit, is_quiet, progress, spread

MIN_OF_ENTROPY = 0.96
MAX_BITS_AT_0885 = 0.665
QMOE_TIMES_BELOW_BF16 = (20.8, 21.4)  # as published, to that digit
MIN_OF_BF16 = 1.0
MIN_OF_BF16_WITH_INTEGERS = 1.3
MIN_GMACS_PER_CORE = 24.0
MIN_GMACS_WITH_INTEGERS = 55.0
BF16_PER_CORE_THEN = 16.9  # 10^9 weights a second of one core where that target was set
MIN_ENCODED = {"rans4": 1.0, "tun12": 0.5}  # the default coder first
BF16_BYTES = 2

PAIRS = 5

Speeds = dict[str, dict[str, Any]]


def run_program(*, is_smoke: bool, root: Path = native_programs.ROOT) -> dict[str, Any]:
    command = [str(native_programs.build("codec_benchmark", root)), *(["--smoke"] if is_smoke else [])]
    before = CpuSeconds.now()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {ended.returncode}: {ended.stderr.strip()}")
    used = CpuSeconds.now().since(before)
    return dict(json.loads(ended.stdout)) | {"quiet": is_quiet(used), "used": used}


def beside_before(before: Path, *, is_smoke: bool) -> dict[str, Any]:
    """Return the rates of this tree over those of another, by kernel; one run of each is a pair."""
    trees = {"before": before, "after": native_programs.ROOT}
    pairs = []
    for number in range(1 if is_smoke else PAIRS):
        turns = list(trees) if number % 2 == 0 else list(reversed(trees))
        pairs.append({name: summarise(run_program(is_smoke=is_smoke, root=trees[name])["speeds"]) for name in turns})
        progress(f"pair {number + 1} of {PAIRS}")
    kernels = [name for name in pairs[0]["after"] if name in pairs[0]["before"]]
    return {
        "pairs": pairs,
        "over_before": {
            kernel: spread([median_per_core(p["after"], kernel) / median_per_core(p["before"], kernel) for p in pairs])
            for kernel in kernels
        },
    }


def thread_count(name: str) -> int:
    return int(name.rsplit(", ", 1)[1].split()[0])


def summarise(rows: list[dict[str, Any]]) -> Speeds:
    """Return each kernel's spread and raw rounds by its name, with the share of what bounds it where that is known."""
    by_name: Speeds = {}
    for row in rows:
        rates = {unit: spread(row[unit]) for unit in ("g_per_s", "g_per_core_s")}
        by_name[row["kernel"]] = rates | {"rounds": {unit: row[unit] for unit in ("g_per_s", "g_per_core_s")}}
    for name, speed in by_name.items():
        speed["of_limit"] = share_of_limit(by_name, name)
    return by_name


def share_of_limit(speeds: Speeds, name: str) -> dict[str, float]:
    """Return the shares of memory's bandwidth and of the cores' multiply-adds, with as many threads."""
    threads = f"{thread_count(name)} threads"
    memory, arithmetic = f"bytes from memory, {threads}", f"multiply-adds in registers, {threads}"
    if "token" not in name or memory not in speeds:
        return {}
    shares = {"multiply_adds": ratio(speeds, name, arithmetic)}
    if name.startswith("bf16"):
        tokens = int(name.split(", ")[1].split()[0])
        shares["memory"] = ratio(speeds, name, memory) * BF16_BYTES / tokens
    return shares


def ratio(speeds: Speeds, name: str, baseline: str, unit: str = "g_per_s") -> float:
    """Return the median of the rounds' ratios."""
    pairs = zip(speeds[name]["rounds"][unit], speeds[baseline]["rounds"][unit], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def speed_in_classes(speeds: Speeds) -> dict[str, float]:
    """Return what columns in four classes leave of the speed that products have with one."""
    mark = " in 4 classes"
    return {name: ratio(speeds, name, name.replace(mark, "")) for name in speeds if mark in name}


def rate_bars(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    best = [row for row in rates if row["coder"] == "smallest"]
    own_shapes = [row["times_below_bf16"] for row in rates if row["coder"] == "qmoe" and row["columns"] != 2048]
    least, most = QMOE_TIMES_BELOW_BF16
    return [
        at_least("share of the entropy, least of all", min(row["of_entropy"] for row in best), MIN_OF_ENTROPY),
        at_most("bits at p(0) = 0.885", max(row["bits"] for row in best if row["p0"] == 0.885), MAX_BITS_AT_0885),
        *(
            at_most(f"{coder}: bits at p(0) = 0.885", bits_at_0885(rates, coder), MAX_BITS_AT_0885)
            for coder in MIN_ENCODED
        ),
        at_least("QMoE on its own shapes, times below bf16", round(min(own_shapes), 1), least),
        at_most("QMoE on its own shapes, times below bf16", round(max(own_shapes), 1), most),
    ]


def bits_at_0885(rates: list[dict[str, Any]], coder: str) -> float:
    """Return the most bits per weight of one coder where 88.5 % are zeros."""
    return max(float(row["bits"]) for row in rates if row["coder"] == coder and row["p0"] == 0.885)


def speed_bars(speeds: Speeds) -> list[dict[str, Any]]:
    bars = [
        at_least(
            f"{coder} encode, 10^9 weights/s per core", median_per_core(speeds, f"{coder} encode, 1 threads"), least
        )
        for coder, least in MIN_ENCODED.items()
    ]
    if "bf16 avx512, 1 token, 1 threads" not in speeds:
        return bars
    return bars + [bar for coder in MIN_ENCODED for bar in product_bars(speeds, coder)]


def product_bars(speeds: Speeds, coder: str) -> list[dict[str, Any]]:
    """Judge products of one coder: by the clock, and, more laxly, beside bf16 on the same machine."""
    eight, one = f"{coder} avx512, 8 tokens, 1 threads", "bf16 avx512, 1 token, 1 threads"
    matvec = ratio(speeds, f"{coder} avx512, 1 token, 2 threads", "bf16 avx512, 1 token, 2 threads")
    times = ratio(speeds, eight, one, unit="g_per_core_s") / (MIN_GMACS_PER_CORE / BF16_PER_CORE_THEN)
    per_core = median_per_core(speeds, eight)
    return [
        at_least(f"{coder}: decode and matvec over bf16's, 2 threads", matvec, MIN_OF_BF16),
        at_least(
            f"{coder}: decode and matvec over bf16's, 2 threads, sums of integers", matvec, MIN_OF_BF16_WITH_INTEGERS
        ),
        at_least(f"{coder}: 8 tokens per decode, share of 24 GMAC/s per core", per_core / MIN_GMACS_PER_CORE, 1.0),
        at_least(
            f"{coder}: 8 tokens per decode, share of 55 GMAC/s per core, sums of integers",
            per_core / MIN_GMACS_WITH_INTEGERS,
            1.0,
        ),
        at_least(f"{coder}: 8 tokens per decode, share of 24/16.9 times bf16's rate (laxer)", times, 1.0),
    ]


def median_per_core(speeds: Speeds, name: str) -> float:
    return float(speeds[name]["g_per_core_s"]["median"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the bars")
    parser.add_argument("--smoke", action="store_true", help="small matrices, in seconds: shows that it runs")
    parser.add_argument("--before", type=Path, help="tree of an earlier commit, to measure beside this one")
    options = parser.parse_args()
    if options.before is not None:
        result = {"benchmark": "codec", "machine": machine()} | beside_before(options.before, is_smoke=options.smoke)
        emit(result | {"bars": []}, as_json=options.json)
        return
    measured = run_program(is_smoke=options.smoke)
    speeds = summarise(measured["speeds"])
    bars = [] if options.smoke else rate_bars(measured["rates"]) + speed_bars(speeds)
    result = {
        "benchmark": "codec",
        "machine": machine(),
        **{name: value for name, value in measured.items() if name != "speeds"},
        "disturbed": not measured["quiet"],
        "speeds": speeds,
        "speed_in_4_classes": speed_in_classes(speeds),
        "bars": bars,
    }
    emit(result, as_json=options.json)


if __name__ == "__main__":
    main()
