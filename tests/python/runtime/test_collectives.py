"""Collectives of gloo on paged tensors: pages stay until the collective has ended, and every bit is plain torch's.

Method: two processes; the first begins, has what it uses sent away, and only then does the other begin. gloo's threads
use bare addresses in system calls, which fail where a page is absent and end the process.
"""

import pytest
from support import collectives
from support.collectives import BUDGET_BYTES, ELEMENTS, MANY, RANKS, Outcome, run_ranks

BYTES = 4 * ELEMENTS
UNDER_WAY = [
    collectives.all_reduce,
    collectives.broadcast,
    collectives.all_gather,
    collectives.reduce_scatter,
    collectives.messages,
]


def check(outcomes: list[Outcome]) -> None:
    """Equal bits in every process, and pages that were away, read by no fault."""
    assert len(outcomes) == RANKS
    for outcome in outcomes:
        assert outcome.plain
        assert outcome.paged == outcome.plain
        assert outcome.statistics["faults"] == 0
        assert outcome.statistics["misses"] > 0


@pytest.mark.parametrize("program", UNDER_WAY, ids=lambda program: program.__name__)
def test_pages_stay_until_the_work_has_completed(scratch, program):
    """And may leave afterwards."""
    outcomes = run_ranks(program, scratch)
    check(outcomes)
    first, _ = outcomes
    assert first.stayed
    assert all(stayed >= BYTES for stayed in first.stayed), first.stayed
    assert all(outcome.stayed_afterwards == [0] for outcome in outcomes)


@pytest.mark.parametrize(
    "program", [collectives.functional_all_reduce, collectives.synchronous], ids=lambda program: program.__name__
)
def test_functional_and_synchronous_collectives(scratch, program):
    """Their inputs are used, or copied, before the call returns, or stay until it may be waited for."""
    check(run_ranks(program, scratch))


def test_more_at_once_than_the_budget_holds(scratch):
    """The next waits until one under way has ended."""
    assert MANY * BYTES > 2 * BUDGET_BYTES
    outcomes = run_ranks(collectives.many_at_once, scratch)
    check(outcomes)
    for outcome in outcomes:
        assert outcome.statistics["evictions"] > 0
        assert outcome.statistics["memory"]["peak_bytes"] <= BUDGET_BYTES
