"""Paging changes where bytes live, never what they are: 72 ways to train, each bit-identical to the in-memory run."""

import itertools

import pytest
from support.cases import CASES, NOT_DETERMINISTIC, differing
from support.isolation import in_child
from support.paging import KINDS
from support.training import BUDGET_SHARE, COLUMNS, STEPS, Case, train_both


@pytest.mark.rotating
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_paged_training_is_bitwise_equal(case: Case, scratch):
    """Losses, tensors of every sort and random states are equal, and pages of every kind left and came back."""
    plain, paged, report = in_child(train_both, case, str(scratch))
    plain.assert_trained(STEPS * case.micro_batch_count)
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    assert report.host_peak_bytes <= report.budget_bytes
    for kind in KINDS:
        assert report.written_bytes[kind] > 0, report.written_bytes
        assert report.read_bytes[kind] > 0, report.read_bytes
    is_recorded = report.counters["recorded_elements"] > 0
    assert is_recorded == (case.has_lists or case.clipping == "clip" or case.loop == "trainer")
    if case.has_lists:  # not all of it was done at the call
        assert report.counters["applied_pages"] > report.counters["applied_at_once"]


def test_table_meets_every_pair():
    """Every two values of two columns are trained together in at least one of 60 or more cases."""
    assert len(CASES) == len(set(CASES)) >= 60
    assert BUDGET_SHARE <= 0.30
    assert STEPS >= 8
    missing = {
        (x, y)
        for a, b in itertools.combinations(COLUMNS, 2)
        for x, y in itertools.product(COLUMNS[a], COLUMNS[b])
        if not any(getattr(case, a) == x and getattr(case, b) == y for case in CASES)
    }
    assert missing == NOT_DETERMINISTIC
