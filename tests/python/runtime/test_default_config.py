"""Training with the settings that a user gets: pages of 4 MiB, huge pages, registered buffers, small tensors resident.

Method: an embedding of 41 MB and layers of 17 MB each, so that every large tensor is several pages, with less than a
third of the state as memory; in memory and paged, each in a process of its own.
"""

import pytest
from support.huge_pages import skip_where_there_are_none
from support.own_process import assert_same_but_paged, train_both

from torch_offload import _C

pytestmark = pytest.mark.alone


def test_paged_training_is_bitwise_equal(scratch):
    """With a directory and a budget and nothing else set; memory lies in huge pages, the SSD knows the buffers."""
    plain, paged = train_both("large", scratch, budget_share=0.3, threads=2)
    assert_same_but_paged(plain, paged)
    report = paged.report
    assert report.ssd_written_bytes > report.budget_bytes
    if _C.io_engine_refusal("uring_fixed") is None:
        assert report.io_engine == "io_uring with fixed buffers"
    skip_where_there_are_none()
    assert paged.huge_page_bytes - plain.huge_page_bytes > report.budget_bytes // 4
