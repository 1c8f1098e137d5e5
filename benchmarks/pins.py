"""Two builds of the engine take turns at an operator over a resident tensor: what a pin costs in each.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python benchmarks/pins.py --before ../before --json --ssd /mnt/nvme > build/pins.json
    python benchmarks/pins.py --before . --smoke

A pin is what a call over a paged tensor takes beyond the same call over an ordinary one; it pins one page once. Both
are timed in the same process, in turns: medians of short series. `--before` and `--after` are as in builds.py.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from builds import commits_of, finished, make_parser, pair_of, ratios_of, spreads_of, trees_of
from harness.provenance import machine
from harness.reporting import at_most, emit, usable
from harness.rounds import take_turns

KEYS = ("paged_ns", "plain_ns", "pin_ns")


def rounds_of(trees: dict[str, Path], ssd: str, *, wanted: int) -> tuple[list[dict[str, Any]], bool]:
    """Return rounds in which both had their turn, and whether too few of them were quiet."""
    with pair_of(trees, "pins", ["--ssd", ssd], ssd) as workers:
        for worker in workers.values():
            worker.ask("step")
        turns = {name: partial(worker.ask, "step") for name, worker in workers.items()}
        rounds = take_turns(turns, wanted=wanted, most=3 * wanted)
        final = finished(workers, trees)
    for name, answer in final.items():
        if answer["pins"] < answer["calls"]:
            raise SystemExit(f"{name}: {answer['calls']} calls took {answer['pins']} pins: not all were paged")
    return usable(rounds, wanted=wanted)


def main() -> None:
    parser = make_parser(__doc__, smoke="one round of one pair", rounds=7)
    options = parser.parse_args()
    trees = trees_of(parser, options)
    about = {"benchmark": "pins", "machine": machine(options.ssd), "trees": commits_of(trees)}
    pairs, rounds = (1, 1) if options.smoke else (options.pairs, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.ssd) as scratch:
        found = [rounds_of(trees, scratch, wanted=rounds) for _ in range(pairs)]
    steps = {name: [row["steps"][name] for rows, _ in found for row in rows] for name in trees}
    result = {
        "builds": {name: spreads_of(of_build, KEYS) for name, of_build in steps.items()},
        "after_over_before": {key: ratios_of(steps, key) for key in KEYS},
        "disturbed": any(is_disturbed for _, is_disturbed in found),
        "rounds": [rows for rows, _ in found],
    }
    bars = []
    if not options.smoke:
        bars = [at_most("a call over a resident paged tensor, after over before", ratio(result, "paged_ns"), 1)]
        bars += [at_most("a pin, after over before", ratio(result, "pin_ns"), 1)]
    emit(about | result | {"bars": bars}, as_json=options.json)


def ratio(result: dict[str, Any], key: str) -> float:
    return float(result["after_over_before"][key]["median"])


if __name__ == "__main__":
    main()
