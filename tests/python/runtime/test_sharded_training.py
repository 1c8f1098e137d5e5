"""Training with `fully_shard`, each rank within 40 % of its state: every bit is that of the same run in memory.

Method: two to four processes over gloo. Counters show that pages left and came back, and that no fault fetched them;
that updates were deferred and norms taken from what was kept.
"""

import functools

import pytest
import torch
from support.collectives import in_each_rank
from support.sharded_training import (
    ACTIVATION_BYTES,
    BLOCKS,
    LAYERS,
    SHARDS_BYTES,
    STEPS,
    WEIGHTS,
    Case,
    lives_on_after_wrapping,
    loaded_from_safetensors,
    resumed,
    run_ranks,
    run_unwrapped,
    said_of_8_bit_moments,
    said_of_room,
    saved_and_loaded,
    train_language_model,
)

CASES = {
    "fused": Case(),
    "foreach": Case(optimizer="foreach"),
    "for each tensor": Case(optimizer="default"),
    "sgd": Case(optimizer="sgd", clips=False),
    "own optimizer": Case(optimizer="own", clips=False),
    "own optimizer of bf16": Case(optimizer="own", clips=False, dtype=torch.bfloat16),
    "two micro steps": Case(micro_steps=2),
    "held gradients": Case(micro_steps=2, holds_gradients=True),
    "held gradients of bf16": Case(micro_steps=2, holds_gradients=True, is_mixed=True),
    "bf16": Case(is_mixed=True),
    "activations stay": Case(activations="keep"),
    "uneven shards": Case(ranks=3),
    "partly frozen": Case(is_partly_frozen=True),
    "replicated shards": Case(ranks=4, layout="replicated shards"),
    "held sums of replicated shards": Case(ranks=4, layout="replicated shards", micro_steps=2, holds_sums=True),
    "fewer and larger shards until the backward": Case(ranks=4, resharded=2),
    "gathered until the backward": Case(resharded=False),
    "replicas": Case(layout="replicas"),
    "divided matrices": Case(layout="tensor parallel"),
    "divided matrices in shards": Case(ranks=4, layout="both"),
}


@pytest.mark.rotating(parts=6)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_shards_are_paged_with_equal_bits(scratch, case):
    for plain, paged, figures in run_ranks(case, str(scratch)):
        assert plain == paged
        assert figures["faults"] == 0
        assert figures["memory"]["peak_bytes"] <= case.budget_bytes
        assert figures["evictions"] > 0
        assert figures["misses"] > 0
        trained = WEIGHTS // 2 if case.is_partly_frozen else WEIGHTS
        if case.clips:
            assert figures["norms_from_cache"] == trained * STEPS


def test_updates_are_deferred_and_gathered_weights_are_no_activations(scratch):
    """Clipping and AdamW's own update, of every gradient on every rank."""
    for _, _, figures in run_ranks(Case(), str(scratch)):
        assert figures["recorded_elements"] == 2 * WEIGHTS * STEPS
        assert figures["saved_bytes"] == ACTIVATION_BYTES * (STEPS + 1)


REFUSED = "refused: host tier: out of memory. fully_shard has all of 0 in memory at once"


@pytest.mark.rotating(parts=6)
@pytest.mark.parametrize(
    ("units", "case", "said", "remedy"),
    [
        (1.9, Case(), REFUSED, "or call fully_shard on smaller modules"),
        (2.1, Case(), "ram: fully_shard takes up to some 3.0", "or call fully_shard on smaller modules"),
        (6.1, Case(), "", ""),
        (1.4, Case(is_mixed=True), REFUSED, ""),
        (4.6, Case(is_mixed=True), "", ""),
        (BLOCKS + 0.9, Case(resharded=False), REFUSED, "or call fully_shard with reshard_after_forward=True"),
        (BLOCKS + 1.1, Case(resharded=False), "ram: fully_shard takes up to some 10.55", "reshard_after_forward=True"),
        (BLOCKS + 5.1, Case(resharded=False), "", ""),
        (BLOCKS + 0.9, Case(layout="shards of blocks"), REFUSED, "reshard_after_forward=True"),
        (6.1, Case(layout="shards of blocks", resharded=True), "", ""),
    ],
)
def test_what_is_gathered_at_once_is_checked_before_the_first_step(scratch, units, case, said, remedy):
    """In times a block in fp32: less than twice is refused, less than what trains is warned of, with its name; with
    blocks that stay gathered for the backward, as each does that is in no sharded module, beside all others.
    """
    for found in in_each_rank(said_of_room, case, str(scratch), units):
        assert found.startswith(said)
        assert remedy in found
        assert bool(found) == bool(said)


def test_a_module_that_is_sharded_after_it_was_wrapped(scratch):
    """Within the same budget: its shards are paged as they are made."""
    case = Case(wraps_first=True)
    for plain, paged, figures in run_ranks(case, str(scratch)):
        assert plain == paged
        assert figures["faults"] == 0
        assert figures["shards_bytes"] == SHARDS_BYTES // case.ranks
        assert figures["memory"]["peak_bytes"] <= case.budget_bytes
        assert figures["norms_from_cache"] == WEIGHTS * STEPS


def test_shards_get_memory_after_they_were_wrapped(scratch):
    """As a model is loaded that no process could hold whole: its shards are pages as soon as they have memory."""
    case = Case(ranks=3, is_on_meta=True)
    outcomes = run_ranks(case, str(scratch))
    for plain, paged, figures in outcomes:
        assert plain == paged
        assert figures["faults"] == 0
        assert figures["memory"]["peak_bytes"] <= case.budget_bytes
        assert figures["norms_from_cache"] == WEIGHTS * STEPS
    assert sum(figures["shards_bytes"] for _, _, figures in outcomes) == SHARDS_BYTES


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_are_loaded_from_files_of_whole_parameters(scratch, ranks):
    """Each rank reads its part of a file of safetensors into pages, of a model that was never in memory."""
    case = Case(ranks=ranks, is_on_meta=True)
    for plain, paged, figures in in_each_rank(loaded_from_safetensors, case, str(scratch), ranks=ranks):
        assert plain == paged
        assert figures["faults"] == 0
        assert figures["evictions"] > 0
        assert figures["memory"]["peak_bytes"] <= case.budget_bytes
        assert figures["norms_from_cache"] == WEIGHTS * STEPS


def test_one_rank_may_recompute_what_the_other_saves(scratch):
    """As `activations="auto"` may decide on ranks that are not alike: recomputing gathers nothing."""
    folders = [scratch / name for name in ("plain", "paged")]
    for folder in folders:
        folder.mkdir()
    plain = in_each_rank(train_language_model, ("", ""), str(folders[0]))
    paged = in_each_rank(train_language_model, ("recompute", "page"), str(folders[1]))
    assert [seen for seen, _, _ in paged] == [seen for seen, _, _ in plain]
    assert [layers for _, layers, _ in paged] == [LAYERS, 0]
    assert [saved_bytes > 0 for _, _, saved_bytes in paged] == [False, True]


def test_training_goes_on_after_unwrapping(scratch):
    case = Case()
    for outcome in in_each_rank(run_unwrapped, case, str(scratch), ranks=case.ranks):
        assert outcome.plain == outcome.paged
        assert outcome.managed_count == 0
        assert outcome.was_replaced
        assert not outcome.is_replaced


@pytest.mark.parametrize("in_background", [False, True])
def test_a_distributed_checkpoint_of_shards(scratch, in_background):
    """Saved at once, and by async_save, whose copy of the shards is within the budget too."""
    case = Case()
    save = functools.partial(saved_and_loaded, in_background=in_background)
    for paged, plain, figures in in_each_rank(save, case, str(scratch), ranks=case.ranks):
        assert paged == plain
        assert figures["faults"] == 0
        assert figures["evictions"] > 0
        assert figures["memory"]["peak_bytes"] <= case.budget_bytes


@pytest.mark.parametrize("optimizer", ["fused", "own"])
def test_training_goes_on_from_a_distributed_checkpoint(scratch, optimizer):
    """With the states of torch's optimizer, and of the engine's own, whose masters of bf16 are among them."""
    dtype = torch.bfloat16 if optimizer == "own" else torch.float32
    case = Case(optimizer=optimizer, clips=False, dtype=dtype)
    for trained_on, loaded, figures in in_each_rank(resumed, case, str(scratch), ranks=case.ranks):
        assert loaded == trained_on
        assert figures["faults"] == 0
        assert figures["evictions"] > 0


def test_moments_in_8_bits_are_refused(scratch):
    """Their blocks are of a rank's part, and nothing would tell who loads them."""
    for said in in_each_rank(said_of_8_bit_moments, Case(), str(scratch)):
        assert "use moments='fp32' with DTensors" in said


def test_nothing_keeps_a_sharded_module(scratch):
    case = Case()
    assert in_each_rank(lives_on_after_wrapping, case, str(scratch), ranks=case.ranks) == [False, False]
