"""Whoever touches memory behind the dispatcher reads the right bytes, and asking for an address fetches nothing.

Method: a weight on SSD, one access, the same access to a plain copy, and the engine's counters. The cases are the
table "who touches memory behind the dispatcher" of the design.
"""

import copy
import ctypes
import hashlib
import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import accelerate
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
from support.bits import digest
from support.models import tiny_config
from support.paging import (
    assert_an_update_was_recorded,
    assert_bitwise_equal,
    page_out,
    reading,
    reading_nothing,
)
from torch import nn
from transformers import pytorch_utils

import torch_offload
from torch_offload import OffloadError
from torch_offload.hooks.patches import Patches
from torch_offload.runtime import raw_access, safetensors_writer
from torch_offload.runtime.process import PROCESS

ROWS, COLUMNS = 128, 192


class Holder(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)))


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer


def loaded(source):
    if isinstance(source, io.BytesIO):
        source.seek(0)
    return torch.load(source)


def through_file(write, read):
    def access(module, path):
        write(module, path)
        return read(path)

    return access


def raw_bytes(module, path):
    return ctypes.string_at(module.w.data_ptr(), module.w.nbytes)


def write_memoryview(module, path):
    with open(path, "wb") as file:
        file.write(memoryview(module.w.detach().numpy()))


def write_storage(module, path):
    with open(path, "wb") as file:
        module.w.untyped_storage()._write_file(file, True, False, 1)


def saved_with_accelerate(module, path):
    offload_state_dict(path, {"w": module.w.detach()})
    return np.array(OffloadedWeightsLoader(save_folder=path)["w"])


READERS = {
    "numpy": lambda module, path: module.w.detach().numpy().copy(),
    "numpy force": lambda module, path: module.w.numpy(force=True).copy(),
    "numpy of a view": lambda module, path: module.w.detach()[3:70, ::2].T.numpy().copy(),
    "asarray": lambda module, path: np.asarray(module.w.detach()).copy(),
    "numpy function": lambda module, path: np.sin(module.w.detach()),
    "tolist": lambda module, path: module.w.tolist(),
    "item": lambda module, path: module.w[-1, -1].item(),
    "repr": lambda module, path: repr(module.w[:3]),
    "dlpack": lambda module, path: torch.from_dlpack(module.w.detach()).clone(),
    "dlpack capsule": lambda module, path: torch.from_dlpack(torch.utils.dlpack.to_dlpack(module.w.detach())).clone(),
    "numpy from_dlpack": lambda module, path: np.from_dlpack(module.w.detach()).copy(),
    "pointer": raw_bytes,
    "bytes of the storage": lambda module, path: bytes(module.w.untyped_storage()),
    "storage clone": lambda module, path: bytes(module.w.untyped_storage().clone()),
    "storage copy, as dcp.async_save calls it": lambda module, path: bytes(
        torch.UntypedStorage(WEIGHT_BYTES).copy_(module.w.untyped_storage(), non_blocking=True)
    ),
    "hashlib": lambda module, path: hashlib.sha256(module.w.detach().numpy()).hexdigest(),
    "deepcopy": lambda module, path: copy.deepcopy(module).w,
    "pickle": lambda module, path: pickle.loads(pickle.dumps(module.w)),
    "pickle of the storage": lambda module, path: pickle.loads(pickle.dumps(module.w._typed_storage())).tolist(),
    "torch.save to memory": lambda module, path: loaded(saved(module.w)),
    "torch.save to memory, old format": lambda module, path: loaded(
        saved(module.state_dict(), _use_new_zipfile_serialization=False)
    ),
    "torch.save": through_file(lambda module, path: torch.save(module.state_dict(), path), loaded),
    "torch.save, old format": through_file(
        lambda module, path: torch.save(module.w, path, _use_new_zipfile_serialization=False), loaded
    ),
    "storage._write_file": through_file(write_storage, lambda path: path.read_bytes()),
    "safetensors.save": lambda module, path: safetensors.torch.save(module.state_dict()),
    "safetensors.save_file": through_file(
        lambda module, path: safetensors.torch.save_file(module.state_dict(), path, metadata={"format": "pt"}),
        lambda path: path.read_bytes(),
    ),
    "safetensors.save_model": through_file(
        lambda module, path: safetensors.torch.save_model(module, str(path)), lambda path: path.read_bytes()
    ),
    "numpy.save": lambda module, path: (
        np.save(f"{path}.npy", module.w.detach()),
        np.load(f"{path}.npy"),
    )[1],
    "tofile": through_file(lambda module, path: module.w.detach().numpy().tofile(path), lambda path: path.read_bytes()),
    "file.write": through_file(write_memoryview, lambda path: path.read_bytes()),
    "accelerate disk offload": saved_with_accelerate,
}


PAGE_BYTES = 4096 * 4
WEIGHT_BYTES = ROWS * COLUMNS * 4
# What reads a part of the weight: the last element, and three rows.
READ_BYTES = {"item": PAGE_BYTES, "repr": PAGE_BYTES}


@pytest.fixture
def paged(config) -> Holder:
    """The weight is on SSD."""
    module = torch_offload.wrap(Holder(), config=config)
    page_out(module)
    return module


@pytest.mark.parametrize("name", READERS)
def test_every_reader_gets_the_bytes(paged, tmp_path, name):
    """Equal to the same access to ordinary memory; the weight was really read from SSD."""
    expected = READERS[name](Holder(), tmp_path / "plain")
    with reading(READ_BYTES.get(name, WEIGHT_BYTES)):
        found = READERS[name](paged, tmp_path / "paged")
    assert_bitwise_equal(as_tensors(found), as_tensors(expected))


@pytest.mark.parametrize("name", READERS)
def test_every_reader_sees_a_deferred_update(config, tmp_path, name):
    """The step is recorded, not run, when the access comes."""
    results = []
    for is_paged in (False, True):
        module = torch_offload.wrap(Holder(), config=config) if is_paged else Holder()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        (module.w * torch.arange(COLUMNS)).sum().backward()
        if is_paged:
            page_out(module)
        optimizer.step()
        optimizer.zero_grad()
        if is_paged:
            assert_an_update_was_recorded()
        results.append(as_tensors(READERS[name](module, tmp_path / str(is_paged))))
    assert_bitwise_equal(results[1], results[0])


def as_tensors(value):
    """Arrays as tensors, for the comparison of bits."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def trainer_like_prepare(module):
    accelerate.Accelerator(cpu=True).prepare(module)


IDENTITIES = {
    "data_ptr": lambda module: module.w.data_ptr(),
    "storage data_ptr": lambda module: module.w.untyped_storage().data_ptr(),
    "last address": lambda module: module.w.view(-1)[-1].data_ptr(),
    "state_dict": lambda module: module.state_dict(),
    "metadata": lambda module: (module.w.size(), module.w.stride(), module.w.nbytes, module.w._version, hash(module.w)),
    "module.to(cpu)": lambda module: module.to("cpu"),
    "module.to(same dtype)": lambda module: module.to(dtype=torch.float32),
    "module.float()": lambda module: module.float(),
    "contiguous": lambda module: module.w.contiguous(),
    "views": lambda module: module.w.detach().T[2:5].unsqueeze(0).expand(2, -1, -1),
    "zeros_like": lambda module: (torch.zeros_like(module.w), torch.empty_like(module.w), module.w.new_zeros(3)),
    "is_shared": lambda module: module.w.is_shared(),
    "is_pinned": lambda module: module.w.is_pinned(),
    "requires_grad_": lambda module: module.requires_grad_(False).requires_grad_(True),
    "transformers id_tensor_storage": lambda module: pytorch_utils.id_tensor_storage(module.w),
    "safetensors shared tensors": lambda module: safetensors.torch._find_shared_tensors(module.state_dict()),
    "safetensors duplicates": lambda module: safetensors.torch._remove_duplicate_names(module.state_dict()),
    "Accelerator.prepare": trainer_like_prepare,
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identities_fetch_nothing(paged, name):
    """Neither a read nor a fault, and the weight is where it was."""
    with reading_nothing():
        IDENTITIES[name](paged)
    assert not torch_offload.is_resident(paged.w)


def test_overwrites_fetch_nothing(paged):
    """What is replaced as a whole is not read first."""
    with reading_nothing(), torch.no_grad():
        paged.w.zero_()
        paged.w.copy_(torch.ones(ROWS, COLUMNS))
    page_out(paged)
    assert_bitwise_equal(paged.w.detach(), torch.ones(ROWS, COLUMNS))


# --- results that outlive the call ------------------------------------------------------------------------------------

HOLDERS = {
    "numpy": lambda w: w.detach().numpy(),
    "numpy force": lambda w: w.numpy(force=True),
    "a slice of an array": lambda w: w.detach().numpy()[5:].T,
    "dlpack": lambda w: torch.from_dlpack(w.detach()),
    "numpy dlpack": lambda w: np.from_dlpack(w.detach()),
    "capsule": lambda w: torch.utils.dlpack.to_dlpack(w.detach()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_result_stays_in_memory_while_it_lives(paged, name):
    """An eviction reports the bytes that stay; they leave once the result is gone."""
    result = HOLDERS[name](paged.w)
    assert torch_offload.evict(paged.w) >= paged.w.nbytes
    assert torch_offload.is_resident(paged.w)
    del result
    page_out(paged)


def test_an_array_shares_memory_in_both_directions(paged):
    """Writes of either side are seen by the other and survive an eviction."""
    array = paged.w.detach().numpy()
    array[0, :] = 7
    assert paged.w[0, 0].item() == 7
    with torch.no_grad():
        paged.w[1, :] = 8
    assert array[1, 0] == 8
    expected = array.copy()
    del array
    page_out(paged)
    assert_bitwise_equal(paged.w.detach(), torch.from_numpy(expected))


def test_an_array_sees_the_optimizer_at_once(config):
    """What is held is updated when the step runs, as in plain torch."""
    results = []
    for is_paged in (False, True):
        module = torch_offload.wrap(Holder(), config=config) if is_paged else Holder()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        array = module.w.detach().numpy()
        module.w.square().sum().backward()
        optimizer.step()
        results.append(torch.from_numpy(array.copy()))
        assert_bitwise_equal(torch.from_numpy(array.copy()), module.w.detach().clone())
    assert_bitwise_equal(results[1], results[0])


def test_a_held_result_outlives_the_module(config):
    """The array keeps its memory."""
    module = torch_offload.wrap(Holder(), config=config)
    page_out(module)
    array = module.w.detach().numpy()
    del module
    assert_bitwise_equal(torch.from_numpy(array.copy()), Holder().w.detach())


def test_refusals_of_torch_stay_as_they_are(paged):
    """Same exception as for an ordinary tensor, and nothing is read."""
    for refused, kind in ((lambda w: w.numpy(), RuntimeError), (lambda w: w.__dlpack__(), BufferError)):
        with pytest.raises(kind) as plain:
            refused(Holder().w)
        with reading_nothing(), pytest.raises(kind) as found:
            refused(paged.w)
        assert str(found.value) == str(plain.value)


# --- other processes --------------------------------------------------------------------------------------------------


def test_sharing_is_refused_and_nothing_changes(paged):
    """share_memory_, of the module too, and every way to send a tensor."""
    refusals = (
        lambda: paged.w.share_memory_(),
        lambda: paged.share_memory(),
        lambda: paged.w.untyped_storage().share_memory_(),
        lambda: ForkingPickler.dumps(paged.w),
    )
    for share in refusals:
        with pytest.raises(OffloadError, match="unwrap"):
            share()
    assert not paged.w.is_shared()
    assert_bitwise_equal(paged.w.detach(), Holder().w.detach())


def test_what_is_not_paged_is_shared_as_ever(paged):
    """Ordinary tensors do not notice."""
    tensor = torch.ones(5).share_memory_()
    assert tensor.is_shared()
    ForkingPickler.dumps(tensor)


def test_a_forked_child_raises_and_the_parent_is_unharmed(paged):
    """Every way in: an operator, an array, a verb of ours."""
    ways = (
        lambda: paged.w.sum(),
        lambda: paged.w.detach().numpy(),
        lambda: torch_offload.evict(paged.w),
        lambda: torch_offload.wrap(Holder()),
    )
    child = os.fork()
    if child == 0:
        errors = 0
        for way in ways:
            try:
                way()
            except OffloadError:
                errors += 1
            except BaseException:  # noqa: BLE001 (a child must never return into pytest)
                os._exit(100)
        os._exit(errors)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(ways)
    assert_bitwise_equal(paged.w.detach(), Holder().w.detach())


def test_a_forked_child_begins_no_pass(paged):
    """A lock that the parent held as it forked is held for ever. Method: the list of uses, in the child and here."""
    engine = PROCESS.session.engine
    engine.start_use_log()
    child = os.fork()
    if child == 0:
        try:
            engine.begin_pass(1)
            os._exit(len(engine.take_use_log()))
        finally:
            os._exit(100)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    engine.begin_pass(1)
    assert len(engine.take_use_log()) == 1


def test_workers_of_a_data_loader_read_their_tensors(paged):
    """Fork keeps its meaning for tensors that are not paged, large ones included."""
    rows = torch.arange(300_000.0).reshape(100, 3000)
    batches = list(torch.utils.data.DataLoader(rows, batch_size=50, num_workers=1, multiprocessing_context="fork"))
    assert_bitwise_equal(torch.cat(batches), rows.clone())
    assert_bitwise_equal(paged.w.detach(), Holder().w.detach())


# --- files larger than the budget -------------------------------------------------------------------------------------


def wide_module(seed=0) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    module.brain = nn.Parameter(torch.randn(3, 256).bfloat16())
    module.register_buffer("scalar", torch.tensor(2.5))
    module.register_buffer("empty", torch.empty(0, 4))
    return module


def wrapped_wide_module(config) -> nn.Module:
    """1.6 MB in a budget of 1 MiB."""
    module = torch_offload.wrap(wide_module(), config=config, ram="1MiB")
    torch_offload.evict(module)
    return module


def assert_budget_kept() -> None:
    report = torch_offload.report()
    assert report.host_peak_bytes <= report.budget_bytes


def save_file(module, path):
    safetensors.torch.save_file(module.state_dict(), path, metadata={"format": "pt"})


def save_model(module, path):
    safetensors.torch.save_model(module, str(path))


@pytest.mark.parametrize("save", [save_file, save_model])
def test_a_safetensors_file_larger_than_the_budget_is_the_same_file(config, tmp_path, save):
    """Byte for byte, with metadata and tensors of other types, under the budget, through a link too."""
    save(wide_module(), tmp_path / "plain")
    directory = tmp_path / "saved"
    directory.mkdir()
    (tmp_path / "link").symlink_to(directory / "paged")
    module = wrapped_wide_module(config)
    save(module, tmp_path / "link")
    assert_budget_kept()
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(directory) == ["paged"]
    assert (directory / "paged").read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "old format"])
def test_torch_save_of_more_than_the_budget_is_the_same_content(config, tmp_path, options):
    """One storage at a time is in memory."""
    module = wrapped_wide_module(config)
    torch.save(module.state_dict(), tmp_path / "paged", **options)
    assert_budget_kept()
    PROCESS.close_session()
    assert_bitwise_equal(dict(torch.load(tmp_path / "paged")), dict(wide_module().state_dict()))


def test_a_file_larger_than_the_budget_can_be_loaded(config, tmp_path):
    """What is read beyond a share of the budget is paged as it comes, and reads the same."""
    plain = wide_module().state_dict()
    expected = {name: digest(value) for name, value in plain.items()}
    torch.save(plain, tmp_path / "plain")
    module = torch_offload.wrap(Holder(), config=config, ram="1MiB")
    content = torch.load(tmp_path / "plain")
    assert_budget_kept()
    assert torch_offload.report().written_bytes["other"] > 0
    assert {name: digest(value) for name, value in content.items()} == expected
    assert_budget_kept()
    assert_bitwise_equal(module.w.detach(), Holder().w.detach())


def test_a_file_that_cannot_be_finished_does_not_appear(config, tmp_path, monkeypatch):
    """An earlier file of that name stays whole, nothing is left beside it, and the next save succeeds."""
    module = wrapped_wide_module(config)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"earlier")
    before = sorted(os.listdir(tmp_path))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_writer.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        save_file(module, path)
    monkeypatch.undo()
    assert path.read_bytes() == b"earlier"
    assert sorted(os.listdir(tmp_path)) == before
    save_file(module, path)
    PROCESS.close_session()
    content, expected = safetensors.torch.load_file(path), wide_module().state_dict()
    assert_bitwise_equal({name: content[name] for name in expected}, dict(expected))


def test_the_library_refuses_what_it_always_refuses(paged, tmp_path):
    """Tensors that share memory, with the library's own words."""
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file({"a": paged.w.detach(), "b": paged.w.detach()}, tmp_path / "x")


# --- compiled code ----------------------------------------------------------------------------------------------------


def decoder_layer() -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    config = tiny_config("llama", tied=False, hidden=64, layers=1)
    model = transformers.LlamaModel(config)
    hidden = torch.randn(2, 8, 64)
    position = torch.arange(8)[None]
    embeddings = model.rotary_emb(hidden, position)
    return model.layers[0], {"hidden_states": hidden, "position_embeddings": embeddings, "position_ids": position}


def test_a_compiled_decoder_layer_reads_what_is_away_and_what_is_pending(config):
    """inductor, forward and backward, three steps; everything leaves before each; bits as compiled in memory."""
    outcomes = []
    torch._dynamo.reset()
    for is_paged in (False, True):
        layer, inputs = decoder_layer()
        if is_paged:
            torch_offload.wrap(layer, config=config)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        compiled = torch.compile(layer, backend="inductor")
        outputs = []
        for _ in range(3):
            if is_paged:
                torch_offload.evict(layer)
            output = compiled(**inputs)
            output = output[0] if isinstance(output, tuple) else output
            output.square().mean().backward()
            outputs.append(output.detach().clone())
            if is_paged:
                torch_offload.evict(layer)
            optimizer.step()
            optimizer.zero_grad()
            if is_paged:
                assert_an_update_was_recorded()
        outcomes.append([outputs, {name: weight.detach().clone() for name, weight in layer.named_parameters()}])
    torch._dynamo.reset()
    assert_bitwise_equal(outcomes[1], outcomes[0])
    assert torch_offload.report().ssd_read_bytes > 0


# --- installing and removing ------------------------------------------------------------------------------------------


def replaced_functions() -> list:
    owners = (torch.Tensor, torch.UntypedStorage, torch._C.PyTorchFileWriter, torch.utils.dlpack, safetensors.torch)
    return [dict(vars(owner)) for owner in owners] + [torch.to_dlpack]


def test_everything_is_put_back(config):
    """The functions of torch and safetensors are the very same objects after the last unwrap."""
    before = replaced_functions()
    module = torch_offload.wrap(Holder(), config=config)
    assert replaced_functions() != before
    torch_offload.unwrap(module)
    assert replaced_functions() == before


def test_a_replacement_on_top_of_ours_is_left_alone():
    """Somebody who wrapped our function keeps a function that works."""
    patches = Patches()
    raw_access.install(patches, budget_bytes=1 << 20, check=lambda: None)
    ours = torch.Tensor.numpy
    torch.Tensor.numpy = lambda tensor: ours(tensor)
    try:
        patches.undo()
        assert torch.ones(3).numpy().sum() == 3
    finally:
        del torch.Tensor.numpy


def test_ordinary_tensors_take_the_original_path(config):
    """Results are the same objects' memory, refusals the same."""
    torch_offload.wrap(Holder(), config=config)
    tensor = torch.arange(6.0)
    assert tensor.numpy().ctypes.data == tensor.data_ptr()
    assert torch.from_dlpack(tensor).data_ptr() == tensor.data_ptr()
    assert_bitwise_equal(loaded(saved(tensor)), tensor)
    assert PROCESS.session is not None
