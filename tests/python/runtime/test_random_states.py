"""Nothing that pages tensors draws a random number: what a script draws next is what it would have drawn without us.

Method: hashes of the states of the generators of torch, NumPy and Python around every verb, and a model with dropout
that is seeded once, before it is built, against the same script in a process without the package.
"""

from collections.abc import Callable

import pytest
import torch
from support.own_process import WIDTH, adamw, assert_same_but_paged, drawn_loss, dropping, train_both
from support.training import random_states, seed_all
from torch import nn

import torch_offload
from torch_offload import Config

pytestmark = pytest.mark.usefixtures("one_thread")

VERBS: dict[str, Callable[[nn.Module], object]] = {
    "evict": torch_offload.evict,
    "prefetch": torch_offload.prefetch,
    "is_resident": lambda module: torch_offload.is_resident(module[0].weight),
    "flush": lambda module: torch_offload.flush(),
    "report": lambda module: str(torch_offload.report()),
    "pinned": lambda module: torch_offload.pinned(module[0]).__enter__(),
    "wrap another": lambda module: torch_offload.wrap(nn.Embedding.from_pretrained(torch.ones(WIDTH, WIDTH))),
    "unwrap": torch_offload.unwrap,
}


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_draws_no_random_number(config: Config, name: str) -> None:
    """With pages away and updates pending, as in the middle of a run."""
    module = torch_offload.wrap(dropping(), config=config.replace(ram="512KiB"))
    [optimizer] = adamw(module)
    for step in range(2):
        drawn_loss(module, step).backward()
        optimizer.step()
    seed_all(3)
    before = random_states()
    VERBS[name](module)
    assert random_states() == before
    assert torch_offload.report().counters["recorded_elements"] > 0


def test_wrapping_draws_no_random_number(config: Config) -> None:
    """The first module, which also starts the engine."""
    module = dropping()
    seed_all(3)
    before = random_states()
    torch_offload.wrap(module, config=config)
    assert random_states() == before


def test_loading_draws_what_building_draws(config: Config) -> None:
    """The block itself draws nothing; a module that is built in it draws its weights and no more."""
    seed_all(3)
    before = random_states()
    dropping()
    built = random_states()
    seed_all(3)
    with torch_offload.loading(config=config.replace(ram="256KiB")):
        assert random_states() == before
        module = dropping()
    assert random_states() == built != before
    assert torch_offload.evict(module) == 0


def test_dropout_draws_the_same_masks_without_another_seed(scratch) -> None:
    """Losses, weights, running statistics and the generators at the end."""
    plain, paged = train_both("dropout", scratch, budget_share=0.3, min_paged_bytes=0, page_elements=4096)
    assert_same_but_paged(plain, paged)
