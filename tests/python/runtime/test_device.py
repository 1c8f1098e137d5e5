"""A device's memory above the host's above the SSD: bytes move on every link, and the numbers stay the same.

Method: the emulated device, whose memory is the host's and whose links are copies.
"""

from collections.abc import Iterator

import pytest
import torch
from support.bits import same_bits
from support.cases import CASES, differing
from support.isolation import in_child
from support.training import STEPS, Case, Placement, train_both
from torch import nn

import torch_offload
from torch_offload import Config, ConfigError, OutOfTierMemory

pytestmark = pytest.mark.any_torch


def placements() -> Iterator[tuple[Case, Placement]]:
    """Every case with activations on the SSD, updates on either side in turn; some on the other side, some in RAM."""
    sides = ("gpu", "cpu")
    for index, case in enumerate(CASES):
        side, other_side = sides[index % 2], sides[(index + 1) % 2]
        yield case, Placement(device=True, activations="page", optimizer_device=side)
        if index % 6 == 0:
            yield case, Placement(device=True, activations="page", optimizer_device=other_side)
        if index % 6 == 3:
            yield case, Placement(device=True, activations="ram", optimizer_device=side)
        if index % 12 == 9:
            yield case, Placement(device=True, activations="ram", optimizer_device=other_side)


PLACED = list(placements())


@pytest.mark.rotating(parts=6)
@pytest.mark.parametrize(("case", "placement"), PLACED, ids=[f"{case.name}-{place.name}" for case, place in PLACED])
def test_paged_training_is_bitwise_equal(case: Case, placement: Placement, scratch):
    """Losses, weights, buffers, gradients, states and random states are equal, and pages crossed every link both ways.

    Memory that has to keep activations is larger: what else is there may fit without the SSD.
    """
    plain, paged, report = in_child(train_both, case, str(scratch), placement)
    plain.assert_trained(STEPS * case.micro_batch_count)
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    assert report.device.peak_bytes <= report.device.budget_bytes
    assert report.host_peak_bytes <= report.budget_bytes
    assert sum(report.device.to_device_bytes.values()) > 0
    assert sum(report.device.to_host_bytes.values()) > 0
    assert report.counters["saved_bytes"] > 0
    if placement.activations == "page":
        assert report.ssd_written_bytes > 0
        assert report.ssd_read_bytes > 0
    if case.checkpointing == "stored":
        assert report.device.to_host_bytes["activation"] > 0
        assert report.device.to_device_bytes["activation"] > 0
    if placement.activations == "ram":
        assert report.written_bytes["activation"] == 0


def test_at_least_eighty_combinations():
    """That use all links; with activations in either place, and updates on either side in both."""
    assert sum(place.activations == "page" for _, place in PLACED) >= 80
    kinds = {(place.activations, place.optimizer_device) for _, place in PLACED}
    assert kinds == {(where, side) for where in ("ram", "page") for side in ("gpu", "cpu")}


def train_small(config: Config | None) -> list[str]:
    """Six layers, five steps of the stock optimizer; plain without a configuration."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    if config is not None:
        torch_offload.wrap(module, config=config)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    losses = []
    for _ in range(5):
        loss = module(torch.ones(8, 128)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


@pytest.mark.parametrize(("optimizer_device", "chosen"), [("gpu", "gpu"), ("cpu", "cpu"), ("auto", "cpu")])
def test_updates_run_where_they_should(config, optimizer_device, chosen):
    """On the host no state goes up, and of the gradients only what the norm reads after it had to leave.

    It is chosen where states do not fit the device.
    """
    settings = {"gpu": "600KiB", "emulation": {"gpu": True}, "ram": "1MiB", "optimizer_device": optimizer_device}
    plain = train_small(None)
    assert train_small(config.replace(**settings)) == plain
    report = torch_offload.report()
    assert report.device.to_device_bytes["parameter"] > 0
    is_on_host = chosen == "cpu"
    weight_bytes = 5 * 6 * 128 * 128 * 4  # of all steps
    assert (report.device.to_device_bytes["state"] == 0) == is_on_host
    assert report.device.to_device_bytes["gradient"] < weight_bytes / 2 or not is_on_host
    assert report.device.to_host_bytes["gradient"] > 0
    assert report.device.peak_bytes <= report.device.budget_bytes


def test_updates_run_on_a_device_that_holds_everything(config):
    """What is chosen there."""
    train_small(config.replace(gpu="8MiB", emulation={"gpu": True}, ram="1MiB"))
    assert sum(torch_offload.report().device.to_host_bytes.values()) == 0


@pytest.fixture
def device_config(config: Config) -> Config:
    """A device of 1 MiB over memory of 1 MiB."""
    return config.replace(gpu="1MiB", emulation={"gpu": True}, ram="1MiB")


def test_what_is_evicted_goes_to_the_ssd(device_config):
    """Through the host's memory, and comes back through it."""
    module = nn.Linear(256, 256)
    expected = module.weight.detach().clone()
    torch_offload.wrap(module, config=device_config)
    assert torch_offload.evict(module) == 0
    report = torch_offload.report()
    assert report.host_bytes["pages"] == 0
    assert report.ssd_bytes == expected.nbytes + 4096
    assert same_bits(module.weight, expected)
    assert torch_offload.report().device.to_device_bytes["parameter"] >= expected.nbytes
    assert "from the host" in str(torch_offload.report())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu": "1MiB"}, "torch sees no GPU: .*; or leave the setting out, or try emulation"),
        ({"emulation": {"gpu": True}}, "needs the size of the GPU's memory, such as gpu='1GiB'"),
    ],
)
def test_half_a_device_is_refused(config, settings, message):
    """Both settings or none."""
    with pytest.raises(ConfigError, match=message):
        torch_offload.wrap(nn.Linear(64, 64), config=config.replace(**settings))


def test_a_tensor_larger_than_the_device_is_refused(device_config):
    """The message names the tier and the setting."""
    with pytest.raises(OutOfTierMemory, match=r"device tier: .* give a gpu of at least"):
        torch_offload.wrap(nn.Linear(1024, 1024), config=device_config)


def test_memory_too_small_to_feed_a_device_is_refused(device_config):
    """What the links hold at once has to fit."""
    with pytest.raises(ConfigError, match="too small to feed a device"):
        torch_offload.wrap(nn.Linear(64, 64), config=device_config.replace(ram="64KiB"))
