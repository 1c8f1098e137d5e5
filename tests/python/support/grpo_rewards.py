"""What TRL's script of GRPO takes by its name: a reward. It also says what moved in each phase of a step.

Each line on stdout is a phase that has ended, "generated" or "trained", and the engine's counters by then.
"""

import functools
import json
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

LINE = "phase: "
COUNTERS = ("read_bytes", "written_bytes")  # by kind of page


def distinct_characters(completions: list[str], **_: Any) -> list[float]:
    """Prefer completions of many different characters. TRL asks for it when it has generated, before it trains."""
    tell("generated")
    tell_of_steps()
    return [float(len(set(completion))) for completion in completions]


@functools.cache
def tell_of_steps() -> None:
    register_optimizer_step_post_hook(lambda *_: tell("trained"))


def tell(phase: str) -> None:
    package = sys.modules.get("torch_offload")
    if package is None or package.runtime.process.PROCESS.session is None:  # it pages nothing
        return
    report = package.report()
    sys.stdout.write(LINE + json.dumps({"name": phase, **{name: getattr(report, name) for name in COUNTERS}}) + "\n")


def phases_of(output: str) -> list[dict[str, Any]]:
    """Return the phases that a script told of, each with what moved in it."""
    lines = (line for line in output.splitlines() if line.startswith(LINE))
    ends = [json.loads(line.removeprefix(LINE)) for line in lines]
    phases = []
    for number, end in enumerate(ends):
        before = ends[number - 1] if number > 0 else {name: {} for name in COUNTERS}
        moved = {name: {kind: end[name][kind] - before[name].get(kind, 0) for kind in end[name]} for name in COUNTERS}
        phases.append({"name": end["name"]} | moved)
    return phases
