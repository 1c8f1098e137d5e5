"""A device's memory above the host's above the SSD: bytes move on every link, and the numbers stay the same.

Method: the emulated device, whose memory is the host's and whose links are copies.
"""

import pytest
import torch
from support.isolation import in_child
from support.training import Case, train_both
from test_identity import CASES, differing
from torch import nn

import torch_offload
from torch_offload import Config, ConfigError, OutOfTierMemory


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_paged_training_is_bitwise_equal(case: Case, scratch):
    """Losses, weights, gradients and optimizer states are equal, and pages crossed every link both ways."""
    plain, paged, report = in_child(train_both, case, str(scratch), True)
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    assert report.device.peak_bytes <= report.device.budget_bytes
    assert report.host_peak_bytes <= report.budget_bytes
    assert sum(report.device.to_device_bytes.values()) > 0
    assert sum(report.device.to_host_bytes.values()) > 0
    assert report.ssd_written_bytes > 0
    assert report.ssd_read_bytes > 0


@pytest.fixture
def device_config(config: Config) -> Config:
    """A device of 1 MiB over memory of 1 MiB."""
    return config.replace(device="1MiB", device_kind="emulated", ram="1MiB")


def test_what_is_evicted_goes_to_the_ssd(device_config):
    """Through the host's memory, and comes back through it."""
    module = nn.Linear(256, 256)
    expected = module.weight.detach().clone()
    torch_offload.wrap(module, config=device_config)
    assert torch_offload.evict(module) == 0
    report = torch_offload.report()
    assert report.host_bytes["pages"] == 0
    assert report.ssd_bytes == expected.nbytes + 4096
    assert torch.equal(module.weight, expected)
    assert torch_offload.report().device.to_device_bytes["parameter"] >= expected.nbytes
    assert "from the host" in str(torch_offload.report())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "1MiB"}, "no GPU support in this build; device_kind='emulated'"),
        ({"device_kind": "emulated"}, "needs the bytes of its memory, such as device='1GiB'"),
    ],
)
def test_half_a_device_is_refused(config, settings, message):
    """Both settings or none."""
    with pytest.raises(ConfigError, match=message):
        torch_offload.wrap(nn.Linear(64, 64), config=config.replace(**settings))


def test_a_tensor_larger_than_the_device_is_refused(device_config):
    """The message names the tier and the setting."""
    with pytest.raises(OutOfTierMemory, match=r"device tier: .* give a device of at least"):
        torch_offload.wrap(nn.Linear(1024, 1024), config=device_config)


def test_memory_too_small_to_feed_a_device_is_refused(device_config):
    """What the links hold at once has to fit."""
    with pytest.raises(ConfigError, match="too small to feed a device"):
        torch_offload.wrap(nn.Linear(64, 64), config=device_config.replace(ram="64KiB"))
