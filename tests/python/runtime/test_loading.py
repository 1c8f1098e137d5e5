"""Models larger than the budget are built and loaded without ever being in memory as a whole.

Method: tiny models under a budget below their size, counters of the engine, digests of the weights. Pages are copied
out of checkpoints; those that stay there are in test_checkpoint_pages.py.
"""

import copy
import gc
import os
import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bits import digest
from support.models import tiny_model
from support.paging import assert_bitwise_equal
from torch import nn
from transformers import AutoModelForCausalLM

import torch_offload
from torch_offload import _C, Config, ConfigError, OutOfTierMemory, TierIOError
from torch_offload.runtime.process import PROCESS
from torch_offload.system.environment import LOADING_IN_SEQUENCE


@pytest.fixture
def config(config: Config) -> Config:
    return config.replace(checkpoint_pages="copy")


@pytest.fixture
def saved(tmp_path):
    """A model's folder, its size and the digests of its weights."""
    model = tiny_model("llama", tied=False, layers=8)
    model.save_pretrained(tmp_path / "model")
    size_bytes = sum(weight.nbytes for weight in model.parameters())
    return tmp_path / "model", size_bytes, weights(model)


def train_one_step(model) -> tuple[str, dict[str, str]]:
    """Return the loss and the digests of the gradients and of the weights after the step."""
    ids = torch.arange(8)[None]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    gradients = {f"{name}.grad": digest(weight.grad) for name, weight in model.named_parameters()}
    return loss.item().hex(), gradients | weights(model)


def weights(model) -> dict[str, str]:
    return {name: digest(weight) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_larger_than_the_budget_is_loaded_and_trained(saved, config, dtype):
    """A third of the weights as budget; loaded as stored, and converted; trained one step: the bits of plain torch."""
    folder, stored_bytes, stored = saved
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    expected = weights(plain)
    assert (expected == stored) == (dtype is torch.float32)
    trained = train_one_step(plain)
    del plain
    size_bytes = stored_bytes * dtype.itemsize // 4
    with torch_offload.loading(config=config, ram=size_bytes // 3):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    report = torch_offload.report()
    assert report.host_peak_bytes <= report.budget_bytes
    assert report.written_bytes["parameter"] >= size_bytes - size_bytes // 3
    assert report.faults == 0
    assert all(_C.is_managed(weight) for weight in model.parameters())
    torch_offload.wrap(model)
    assert_bitwise_equal(weights(model), expected)
    assert_bitwise_equal(train_one_step(model), trained)
    assert all(_C.is_managed(weight.grad) for weight in model.parameters())
    assert torch_offload.report().host_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("is_cached", [False, True])
def test_large_tensors_are_read_past_the_page_cache(config, scratch, is_cached):
    """From a file that is not in the page cache; from one that is, they are copied out of it. The same weights."""
    layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    path = scratch / "layers.safetensors"
    save_file(layers.state_dict(), path)
    mapped = load_file(path)  # reads ahead itself
    with path.open("rb") as file:
        file.read()
        os.fsync(file.fileno())
        if not is_cached:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with torch.device("meta"):
        loaded = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    weight_bytes = sum(layer.weight.nbytes for layer in layers)
    with torch_offload.loading(config=config, ram=weight_bytes // 2):
        loaded.load_state_dict(mapped, assign=True)
    counters = torch_offload.report().counters
    assert counters["direct_bytes"] == (0 if is_cached else weight_bytes)
    assert torch_offload.report().host_bytes["temporaries"] == 0, "blocks for reading ahead were kept"
    assert_bitwise_equal(weights(loaded), weights(layers))


def test_a_file_is_not_read_twice(config, scratch):
    """Safetensors looks at each tensor's first element through the mapping: the system reads little around it."""
    path = scratch / "layers.safetensors"
    save_file({str(i): torch.full((1024, 2048), float(i)) for i in range(16)}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    layers = nn.ParameterList()
    with torch_offload.loading(config=config, ram="64MiB"), safe_open(path, "pt") as tensors:
        read_before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        for name in sorted(tensors.keys(), key=int):
            layers.append(nn.Parameter(tensors.get_slice(name)[...]))
        read_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - read_before) * 512
    size_bytes = path.stat().st_size
    assert torch_offload.report().counters["direct_bytes"] > size_bytes * 0.99
    assert read_bytes < 1.4 * size_bytes
    assert [float(layer[0, 0]) for layer in layers] == [float(i) for i in range(16)]


def test_a_model_that_is_built_inside_is_the_same_model(config):
    """Drawn weight by weight: the same random numbers as in memory."""
    expected = weights(tiny_model("llama", tied=True, layers=8))
    with torch_offload.loading(config=config, ram="1MiB"):
        model = tiny_model("llama", tied=True, layers=8)
    assert torch_offload.report().evictions > 0
    assert all(_C.is_managed(weight) for weight in model.parameters())
    assert_bitwise_equal(weights(torch_offload.wrap(model)), expected)


def test_experts_are_fused_while_they_are_loaded(config, tmp_path):
    """Stored one by one, registered as one parameter per layer."""
    plain = tiny_model("mixtral", tied=False)
    plain.save_pretrained(tmp_path / "model")
    with torch_offload.loading(config=config, ram="3MiB"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    report = torch_offload.report()
    assert report.evictions > 0
    assert report.host_peak_bytes <= report.budget_bytes
    assert_bitwise_equal(weights(model), weights(plain))


def test_a_tensor_larger_than_the_budget_is_refused_before_the_file_is_read(saved, config, monkeypatch):
    """The layout is known before the first byte: the message names the tensor and what would do."""
    folder, _, _ = saved
    read = []
    monkeypatch.setattr("transformers.modeling_utils.safe_open", lambda *args, **_: read.append(args))
    with (
        pytest.raises(OutOfTierMemory, match=r"Linear\.weight \(65536 bytes\).*ram of at least"),
        torch_offload.loading(config=config, ram="150KiB"),
    ):
        AutoModelForCausalLM.from_pretrained(folder)
    assert read == []


def test_a_copy_that_is_made_inside_is_paged(config):
    """A reference model, larger than the budget by itself."""
    with torch_offload.loading(config=config, ram="1MiB"):
        model = tiny_model("llama", tied=True, layers=8)
        reference = copy.deepcopy(model)
    assert torch_offload.report().host_peak_bytes <= 1 << 20
    assert all(_C.is_managed(weight) for weight in reference.parameters())
    assert_bitwise_equal(weights(reference), weights(model))


def test_experts_of_a_model_that_was_only_loaded_are_saved(config, tmp_path):
    """Loaded and saved, never wrapped: the same file."""
    tiny_model("mixtral", tied=False).save_pretrained(tmp_path / "model")
    with torch_offload.loading(config=config, ram="1MiB"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_buffers_are_paged_and_small_tensors_are_not(config):
    """As wrap does."""
    with torch_offload.loading(config=config.replace(min_paged_bytes="16KiB")):
        module = nn.Linear(128, 128)
        module.register_buffer("table", torch.arange(8192.0))
    assert [_C.is_managed(tensor) for tensor in (module.weight, module.table, module.bias)] == [True, True, False]


def test_nothing_is_paged_outside_of_the_block(config):
    """What existed before and what comes after stay ordinary, unless wrap is told."""
    before = nn.Linear(128, 128)
    with torch_offload.loading(config=config):
        inside = nn.Linear(128, 128)
    after = nn.Linear(128, 128)
    assert [_C.is_managed(module.weight) for module in (before, inside, after)] == [False, True, False]


def test_the_engine_lives_as_long_as_what_was_loaded(config):
    """Wrap joins it with its settings; without the module it goes, and so do the hooks."""
    with torch_offload.loading(config=config), torch_offload.loading():
        module = nn.Linear(128, 128)
    with pytest.raises(ConfigError, match="ram"):
        torch_offload.wrap(module, ram="9MiB")
    engine = PROCESS.session.engine
    assert _C.engine_of(torch_offload.wrap(module).weight) is engine
    torch_offload.unwrap(module)
    assert PROCESS.session is None
    with torch_offload.loading(config=config):
        nn.Linear(128, 128)
        gc.collect()
    assert PROCESS.session is None
    assert PROCESS.registrations.installed_count == 0


def test_settings_of_the_process_are_put_back(config, monkeypatch):
    """Also when the block raises."""
    (name,) = LOADING_IN_SEQUENCE
    monkeypatch.delenv(name, raising=False)
    seen = []

    def fail():
        seen.append(os.environ.get(name))
        raise RuntimeError("as ever")

    with pytest.raises(RuntimeError, match="as ever"), torch_offload.loading(config=config):
        fail()
    assert seen == ["1"]
    assert name not in os.environ
    assert PROCESS.session is None


def test_a_disk_that_fills_up_while_loading_is_a_typed_error(saved, config):
    """Method: a limit on the size of files. Afterwards there is room again and the same load succeeds."""
    folder, size_bytes, expected = saved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(TierIOError), torch_offload.loading(config=config, ram=size_bytes // 3):
            AutoModelForCausalLM.from_pretrained(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()
    with torch_offload.loading(config=config, ram=size_bytes // 3):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_bitwise_equal(weights(model), expected)
