"""Modules that are no transformers train with the same bits, buffers and random states as in memory.

Convolutions with batch normalization, an LSTM over sequences of changing length, a table with sparse gradients, and a
module whose batches, lengths and layers change from step to step, with evaluations in between.
"""

import pytest
from support.own_process import assert_same_but_paged, train_both

BUDGET_SHARES = {"convolutions": 0.5, "LSTM": 0.5, "sparse table": 0.6, "changing shapes": 0.5}


@pytest.mark.parametrize("name", BUDGET_SHARES)
def test_paged_training_is_bitwise_equal(scratch, name):
    """Method: each run in a process of its own, the plain one without the package."""
    settings = {"min_paged_bytes": 0, "page_elements": 4096}
    assert_same_but_paged(*train_both(name, scratch, budget_share=BUDGET_SHARES[name], **settings))
