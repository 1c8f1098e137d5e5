"""What is chosen for a GPU, of which torch does not have to see one."""

import pytest

from torch_offload.system import gpu

MI, GI = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("gpu_bytes", "ram_bytes", "elements"),
    [
        pytest.param(13 * GI, 64 * GI, 16 * MI, id="largest"),
        pytest.param(6 * GI, 64 * GI, 8 * MI, id="fewer of the GPU"),
        pytest.param(13 * GI, 1 * GI, 4 * MI, id="fewer of the host"),
        pytest.param(128 * MI, 64 * GI, 2 * MI, id="smallest"),
        pytest.param(1, 1, 2 * MI, id="next to no memory"),
    ],
)
def test_pages_are_as_large_as_memory_holds_enough_of(gpu_bytes: int, ram_bytes: int, elements: int) -> None:
    assert gpu.page_elements(gpu_bytes, ram_bytes) == elements
