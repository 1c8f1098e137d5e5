"""The same bits where operators share their work between threads: matrices of a million elements, on two threads.

Method: rows of the identity table made wide, in memory and paged, each in a process of its own.
"""

import pytest
from support.cases import CASES, differing
from support.isolation import in_child
from support.paging import KINDS
from support.training import Case, Placement, train_paged, train_plain

pytestmark = pytest.mark.alone

WIDE = Placement(threads=2, hidden=1024, layers=3, page_elements=1 << 16, steps=3)
NAMES = (
    "llama-fused-autocast-nonreentrant-noclip-accumulate-tied-full-plain",
    "qwen3-foreach-fp32-stored-clip-one-untied-full-plain",
    "gpt2-fused-bf16-nonreentrant-noclip-one-tied-full-trainer",
    "bert-fusedsgd-fp32-reentrant-noclip-one-untied-lora-plain",
)
ROWS = [case for case in CASES if case.name in NAMES]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_paged_training_is_bitwise_equal(case: Case, scratch):
    """Losses, tensors of every sort and random states are equal, and pages of every kind left and came back."""
    plain = in_child(train_plain, case, WIDE)
    paged, report = in_child(train_paged, case, WIDE, str(scratch))
    plain.assert_trained(WIDE.steps * case.micro_batch_count)
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    for kind in KINDS:
        assert report.written_bytes[kind] > 0, report.written_bytes
        assert report.read_bytes[kind] > 0, report.read_bytes
    assert report.host_peak_bytes <= report.budget_bytes


def test_every_row_is_in_the_table():
    assert [case.name for case in ROWS] == sorted(NAMES, key=[case.name for case in CASES].index)
    assert len(ROWS) == len(NAMES)
