"""README's chart and leading figures, from results of benchmarks. Rows that a result does not have are left out."""

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

Json = dict[str, Any]

CHARTED = "peers_fp32"
QUOTED = ("train_step", "peers_fp32", "peers_bf16")
"""Stems of the results that figures are taken from."""
NO_COMMIT = "measured before results recorded their commit"
ROWS = {  # of the result, in the order of the chart
    "plain": "plain torch, all in memory",
    "plain_huge": "plain torch in huge pages",
    "ours_at_peer": "torch_offload, at DeepSpeed's peak",
    "deepspeed": "DeepSpeed ZeRO-3 on NVMe",
    "ours_at_half": "torch_offload, at half of that",
    "ours_at_swap": "torch_offload, at 40 % of the state",
    "swap": "plain torch with swap, at 40 %",
}
OURS, OTHERS = "#2b6cb0", "#a0aec0"
WIDTH, LEFT, RIGHT, TOP, ROW = 760, 270, 170, 56, 30
SCALE_SECONDS = 10.0  # a longer bar is cut; its number stands beside it


def commit_of(result: Json) -> str | None:
    """Return the first digits of the commit that was measured, None where the result does not say."""
    commit = result.get("code", {}).get("commit")
    return commit[:10] if commit else None


def times(ratio: dict[str, float]) -> str:
    """Return a ratio with its range."""
    median, least, most = (f"{ratio[name]:.{2 if ratio[name] < 10 else 0}f}" for name in ("median", "min", "max"))
    return f"{median}x ({least} to {most})"


def figures(results: Mapping[str, Json]) -> str:
    """Return the three points of the README that have numbers, from the results that `QUOTED` names."""
    quoted = [results[stem] for stem in QUOTED]
    steps, peers, _ = quoted
    bars = [bar for result in quoted for bar in result["bars"]]
    compared = [bar for bar in bars if "that differ" in bar["name"] and not bar["name"].startswith("swap")]
    differing = sum(bar["value"] for bar in compared)
    equality = (
        f"{differing:g} losses and weights differ" if differing else "All losses and weights were equal bit for bit"
    )
    ratio = {w["workload"]["name"]: w["variants"].get("quarter", {}).get("ratio_to_plain") for w in steps["workloads"]}
    state_bytes = steps["workloads"][0]["description"]["state_bytes"]
    commits = list(dict.fromkeys(commit for result in quoted if (commit := commit_of(result))))
    old = [stem for stem in QUOTED if not commit_of(results[stem])]
    origin = f"{'commits' if len(commits) > 1 else 'commit'} {', '.join(commits)}" if commits else ""
    if old:
        origin += f"{'; ' if commits else ''}{' and '.join(old)} {NO_COMMIT}"
    return f"""\
- **The same bits.** {equality} in {len(compared)} comparisons with runs in memory.
- **Little time where there is work to hide the disk behind.** With a quarter of the memory, a step of 2,048 tokens \
takes {times(ratio["fp32, 2048 tokens"])} as long as in plain torch ({state_bytes / 1e9:.1f} GB of weights, gradients \
and moments, fp32). With 128 tokens the disk is the bottleneck: {times(ratio["fp32, 128 tokens"])}.
- **Less time than the alternatives on a CPU.** At the same memory, swap takes \
{times(peers["times_ours"]["swap over ours_at_swap"])} as long; DeepSpeed ZeRO-3 on NVMe, at its own peak, where ours \
has everything in memory, {times(peers["times_ours"]["deepspeed over ours_at_peer"])}.

Medians and ranges of five rounds on two cores; {origin}.
"""


def bar(number: int, name: str, row: Json) -> str:
    """Return one bar with its label, its seconds and the most memory that its process had."""
    seconds, memory = row["seconds"]["median"], row["highest_resident_bytes"]
    top = TOP + number * ROW
    length = min(seconds / SCALE_SECONDS, 1.0) * (WIDTH - LEFT - RIGHT)
    color = OURS if name.startswith("ours") else OTHERS
    cut = f'<path d="M{LEFT + length - 14:.0f} {top - 3} l6 26" stroke="#fff" stroke-width="4"/>' * (
        seconds > SCALE_SECONDS
    )
    return (
        f'<text x="{LEFT - 10}" y="{top + 15}" text-anchor="end">{escape(ROWS[name])}</text>'
        f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="20" fill="{color}"/>{cut}'
        f'<text x="{LEFT + length + 8:.1f}" y="{top + 15}">{seconds:.1f} s, {memory / 1e9:.1f} GB</text>'
    )


def draw(result: Json) -> str:
    """Return the chart as SVG."""
    names = [name for name in ROWS if name in result["rows"]]
    state_bytes = result["rows"]["plain"]["description"]["state_bytes"]
    height = TOP + len(names) * ROW + 28
    commit = commit_of(result)
    origin = f"commit {commit}" if commit else NO_COMMIT
    bars = "\n".join(bar(number, name, result["rows"][name]) for number, name in enumerate(names))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" \
viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13" fill="#1a202c">
<rect width="{WIDTH}" height="{height}" fill="#fff"/>
<text x="16" y="24" font-size="15" font-weight="bold">Seconds per step, and the process's peak memory</text>
<text x="16" y="43" fill="#4a5568">Llama of {result["rows"]["plain"]["description"]["parameters"] / 1e6:.0f} M \
parameters, fp32, {state_bytes / 1e9:.1f} GB of weights, gradients and moments, 256 tokens a step</text>
{bars}
<text x="16" y="{height - 10}" font-size="11" fill="#4a5568">benchmarks/peers.py, \
{result["machine"]["cores"]} cores; {origin}</text>
</svg>
"""
