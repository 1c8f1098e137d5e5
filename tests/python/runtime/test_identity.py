"""Paging changes where bytes live, never what they are: 72 ways to train, each bit-identical to the in-memory run."""

import itertools

import pytest
from support.cases import CASES, NOT_DETERMINISTIC, differing
from support.isolation import in_child
from support.training import BUDGET_SHARE, COLUMNS, STEPS, Case, train_both


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_paged_training_is_bitwise_equal(case: Case, scratch):
    """Losses, weights, gradients and optimizer states are equal, and pages left for the SSD and came back."""
    plain, paged, report = in_child(train_both, case, str(scratch))
    assert paged.losses == plain.losses
    assert len(plain.losses) == STEPS * case.micro_batch_count
    assert differing(paged.digests, plain.digests) == []
    assert report.host_peak_bytes <= report.budget_bytes
    assert report.evictions > 0
    assert report.ssd_written_bytes > 0
    assert report.ssd_read_bytes > 0


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
