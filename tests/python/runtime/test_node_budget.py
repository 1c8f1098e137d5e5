"""Ranks of a machine share its budget: who needs memory has more than an even part of it, as long as nobody else does.

Method: two processes over gloo with models of unequal sizes, and the figures of their shares.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.collectives import RANKS, in_each_rank
from support.isolation import ChildCrashError, in_child
from support.node_budgets import (
    BUDGET_BYTES,
    LAYER_STATE_BYTES,
    LAYERS,
    be_killed,
    outlive,
    report_beside_all_ranks,
    train,
)

from torch_offload.system import node_ledger


def test_unequal_ranks_train_with_equal_bits_and_share_memory(scratch):
    large, small = in_each_rank(train, str(scratch))
    for outcome in (large, small):
        assert outcome.plain == outcome.paged
        share = outcome.report["share"]
        assert share["shared_bytes"] == BUDGET_BYTES == 2 * share["equal_bytes"]
        assert 0 < share["guaranteed_bytes"] < share["equal_bytes"]
        assert share["leased_bytes"] <= share["most_leased_bytes"]
        assert outcome.report["host_peak_bytes"] <= outcome.report["budget_bytes"]
        assert outcome.report["budget_bytes"] == share["guaranteed_bytes"] + share["most_leased_bytes"]
        assert outcome.report["faults"] == 0
    assert LAYERS[0] * LAYER_STATE_BYTES > BUDGET_BYTES
    assert large.report["evictions"] > 0
    assert large.report["budget_bytes"] > large.report["share"]["equal_bytes"] * 5 // 4
    assert large.report["host_peak_bytes"] > large.report["share"]["equal_bytes"] * 5 // 4
    assert small.report["budget_bytes"] <= small.report["share"]["equal_bytes"]


def test_memory_of_a_killed_rank_goes_to_who_is_short(scratch):
    with ThreadPoolExecutor(2) as pool:
        killed = pool.submit(in_child, be_killed, str(scratch))
        left = pool.submit(in_child, outlive, str(scratch), 40)
        with pytest.raises(ChildCrashError, match="SIGKILL"):
            killed.result()
        share, theirs = left.result()
    assert theirs["guaranteed_bytes"] + theirs["leased_bytes"] > theirs["shared_bytes"] // 4
    assert share["guaranteed_bytes"] + share["leased_bytes"] > share["shared_bytes"] - (
        theirs["guaranteed_bytes"] + theirs["leased_bytes"]
    )


def test_a_ledger_is_found_in_other_processes_and_ends_with_the_last(tmp_path):
    first = node_ledger.join(str(tmp_path), budget_bytes=4 << 20, rank_count=2)
    assert in_child(budget_seen, str(tmp_path)) == 4 << 20
    first.close()
    del first
    assert in_child(budget_seen, str(tmp_path)) == 8 << 20


def budget_seen(launch: str) -> int:
    """Ask for one of 8 MiB, and return what there is."""
    joined = node_ledger.join(launch, budget_bytes=8 << 20, rank_count=2)
    joined.close()
    return joined.ledger.budget_bytes


def test_a_process_more_than_there_are_ranks_keeps_to_a_part_of_its_own(scratch):
    """Such as a child of a rank that trains as well."""
    report = in_child(report_beside_all_ranks, str(scratch))
    assert report.share is None
    assert report.budget_bytes == BUDGET_BYTES // RANKS


def test_without_a_ledger_each_keeps_to_its_part(tmp_path, caplog):
    """A budget that cannot be cut, and a name that somebody else has."""
    with caplog.at_level("INFO"):
        assert node_ledger.join(str(tmp_path), budget_bytes=1 << 16, rank_count=2) is None
    assert "share no pool of memory: a shared budget of 65536 bytes is too small" in caplog.text
    joined = node_ledger.join(str(tmp_path), budget_bytes=4 << 20, rank_count=2)
    assert node_ledger.join(str(tmp_path), budget_bytes=4 << 20, rank_count=2) is None, os.getpid()
    joined.close()
