"""Full state dicts of divided models, larger than the budget of the rank that gathers them: the same bytes, and files,
as of the same ranks in memory.

Method: two or three processes over gloo, each within 40 % of its state. Counters show that what was gathered became
pages that left, and that no fault fetched them.
"""

import functools

import pytest
from support import full_states
from support.collectives import in_each_rank
from support.full_states import FULL_BYTES
from support.sharded_training import Case

CASES = {
    "shards": Case(),
    "uneven shards": Case(ranks=3),
    "divided matrices": Case(layout="tensor parallel"),
}


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("in_every_rank", [False, True])
def test_a_full_state_dict_is_gathered_in_pages(scratch, case, in_every_rank):
    assert case.budget_bytes < FULL_BYTES / 3 * 2
    gather = functools.partial(full_states.gathered, in_every_rank=in_every_rank)
    outcomes = in_each_rank(gather, case, str(scratch), ranks=case.ranks)
    for rank, (plain, paged) in enumerate(outcomes):
        assert paged.digests == plain.digests
        has_all = rank == 0 or in_every_rank
        assert bool(paged.digests) == has_all
        assert paged.managed_bytes > (0.9 * FULL_BYTES if has_all else -1)
        assert paged.figures["faults"] == 0
        assert paged.figures["evictions"] > 0
        assert paged.figures["memory"]["peak_bytes"] <= case.budget_bytes
    for name in ("full.pt", "model.safetensors"):
        assert (scratch / "paged" / name).read_bytes() == (scratch / "plain" / name).read_bytes()


@pytest.mark.parametrize("case", [Case(), Case(layout="tensor parallel")], ids=["shards", "divided matrices"])
def test_training_goes_on_from_a_full_state_dict_of_the_first_rank(scratch, case):
    for trained_on, loaded, figures in in_each_rank(full_states.resumed, case, str(scratch), ranks=case.ranks):
        assert loaded == trained_on
        assert figures["faults"] == 0
        assert figures["evictions"] > 0
        assert figures["memory"]["peak_bytes"] <= case.budget_bytes
