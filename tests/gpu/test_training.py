"""Whole models in a GPU, paged: bit for bit the run in the GPU, with deterministic kernels."""

import os
from collections.abc import Iterator

import pytest
import torch
from support.bits import same_bits
from support.gpu_training import REAL, check, train, train_both

import torch_offload
from torch_offload import ConfigError, OutOfTierMemory

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what makes cuBLAS deterministic


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("activations", ["keep", "ram", "page"])
@pytest.mark.parametrize("optimizer", ["own", "fused", "foreach", "sgd"])
def test_paged_training_is_bitwise_equal(tmp_path, optimizer, activations):
    """Losses, weights and states; updates run on the GPU, as in the plain run."""
    settings = {"activations": activations, "optimizer_device": "gpu"}
    check(*train_both(optimizer, REAL, str(tmp_path), settings))


@pytest.mark.parametrize("optimizer", ["own", "fused"])
def test_updates_of_the_backward_are_bitwise_equal(tmp_path, optimizer):
    """Each gradient is applied by its optimizer as soon as it is complete."""
    plain, paged, report = train_both(optimizer, REAL, str(tmp_path), {"activations": "ram", "update": "backward"})
    check(plain, paged, report)
    assert report.counters["gradients_applied"] > 0


def test_updates_on_the_host_train(tmp_path):
    """Their kernel is another, so the first loss is equal and the others are near."""
    config = REAL.config(str(tmp_path), optimizer_device="cpu")
    (plain_losses, _), _ = train("own", REAL.shape, None)
    (paged_losses, _), report = train("own", REAL.shape, config)
    plain = [float.fromhex(loss) for loss in plain_losses]
    paged = [float.fromhex(loss) for loss in paged_losses]
    assert paged[0] == plain[0]
    assert paged == pytest.approx(plain, rel=0.02)
    assert paged[-1] < paged[0]
    assert report.device.to_device_bytes["state"] == 0


# Pages have 16 MiB. Torch's part holds the workspaces of cuBLAS, which are 32 MiB for each stream.
SMALL = {"gpu": "272MiB", "gpu_reserved": "256MiB", "ram": "192MiB", "page_elements": 1 << 19}


def test_capture_into_a_graph_is_refused(tmp_path):
    """With the reason, and the module works afterwards."""
    module = torch.nn.Linear(1024, 1024)
    torch_offload.wrap(module, config=REAL.config(str(tmp_path), **SMALL))
    batch = torch.ones(4, 1024, device="cuda")
    expected = module(batch)
    with pytest.raises(ConfigError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(batch)
    assert same_bits(module(batch), expected)
    torch_offload.unwrap(module)
    assert module.weight.device.type == "cpu"


def test_torch_and_pages_keep_to_their_parts(tmp_path):
    """Torch's allocator stops at its cap, pages at their budget."""
    layers = [torch.nn.Linear(1024, 1024) for _ in range(5)]
    torch_offload.wrap(layers[0], config=REAL.config(str(tmp_path), **SMALL))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    for layer in layers[1:]:
        torch_offload.wrap(layer)
    with pytest.raises(OutOfTierMemory), torch_offload.pinned(*layers):
        pass
    for layer in layers:
        torch_offload.unwrap(layer)
    assert torch.empty(512 << 20, dtype=torch.uint8, device="cuda").numel() > 0
