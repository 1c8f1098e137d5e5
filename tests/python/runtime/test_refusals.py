"""What cannot be paged or wrapped is refused in words that say what to do, and everything stays usable."""

import os

import pytest
import torch
from support.paging import page_out
from support.small_module import MIB, assert_usable, make_module
from torch import nn

import torch_offload
from torch_offload import Config, ConfigError, OffloadError, OutOfTierMemory
from torch_offload.runtime import preflight, session
from torch_offload.runtime.monitors import Monitors
from torch_offload.runtime.process import PROCESS
from torch_offload.system import resources


def test_a_budget_below_the_largest_parameter_is_refused_before_anything_moves(config, scratch):
    """The message names the tier, the bytes needed and available, and a remedy that works."""
    module = make_module()
    with pytest.raises(OutOfTierMemory) as caught:
        torch_offload.wrap(module, config=config, ram="128KiB")
    message = str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert all(part in message for part in ("host tier", "0.weight", "131072 bytes (128 KiB) available"))
    assert PROCESS.session is None
    remedy = int(message.rsplit(" ", 1)[1])
    torch_offload.wrap(module, config=config, ram=remedy)
    torch_offload.unwrap(module)
    assert_usable(scratch)


@pytest.mark.parametrize("ram", ["24G", "lots", -1, 0, 1.5])
def test_a_budget_that_does_not_parse_is_refused(scratch, ram):
    """Before an engine is made."""
    with pytest.raises(ConfigError, match="ram"):
        torch_offload.wrap(make_module(), ram=ram, ssd=scratch)
    assert PROCESS.session is None
    assert_usable(scratch)


def test_an_engine_that_the_system_has_no_thread_for_is_refused(scratch, monkeypatch):
    """What C++ raises then is the system's own words, and no type of this package."""

    def refuse(**options):
        raise RuntimeError("Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(session._C, "Engine", refuse)
        with pytest.raises(OffloadError, match=r"cannot be started: Resource temporarily unavailable; .*ulimit -u"):
            torch_offload.wrap(make_module(), ram=8 * MIB, ssd=scratch)
    assert PROCESS.session is None
    assert_usable(scratch)


@pytest.mark.parametrize("function", [(Monitors, "begin"), (session.Session, "report")], ids=["begin", "report"])
def test_an_engine_is_closed_where_what_watches_it_fails(config, scratch, monkeypatch, function):
    """While it opens, and while it closes."""

    def fail(*args, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(*function, fail)
        with pytest.raises(MemoryError):
            torch_offload.unwrap(torch_offload.wrap(make_module(), config=config))
    assert PROCESS.session is None
    assert "numpy" not in vars(torch.Tensor)
    assert_usable(scratch)


def test_directories_that_cannot_hold_pages_are_refused(scratch):
    """Missing, a file, in memory; each with its reason."""
    file = scratch / "file"
    file.write_text("")
    cases = {scratch / "missing": "does not exist", file: "not a directory"}
    if os.path.isdir("/dev/shm"):
        cases["/dev/shm"] = "is on tmpfs, which is memory"
    for directory, reason in cases.items():
        with pytest.raises(ConfigError, match=reason):
            torch_offload.wrap(make_module(), ram=8 * MIB, ssd=directory)
    assert_usable(scratch)


def test_a_directory_that_cannot_be_written_is_refused(scratch):
    """/proc refuses root too."""
    with pytest.raises(OffloadError):
        torch_offload.wrap(make_module(), ram=8 * MIB, ssd="/proc/self")
    assert_usable(scratch)


def test_a_disk_without_room_for_the_parameters_is_refused(config, scratch, monkeypatch):
    """Naming the tier and the bytes."""
    monkeypatch.setattr("torch_offload.system.resources.free_disk_bytes", lambda _: 4096)
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40)))
    with pytest.raises(OutOfTierMemory, match=r"ssd tier: .* 4096 bytes are free;"):
        torch_offload.wrap(module, config=config.replace(keep_free=0))
    with pytest.raises(
        OutOfTierMemory, match=r" 96 bytes are free beside 4000 that stay so \(keep_free\) and of at mo"
    ):
        torch_offload.wrap(module, config=config.replace(keep_free=4000, max_spill="1GiB"))
    monkeypatch.undo()
    assert_usable(scratch)


def test_wrapping_twice_is_refused(config, scratch):
    """The module stays wrapped and usable."""
    module = make_module()
    torch_offload.wrap(module, config=config)
    with pytest.raises(OffloadError, match="unwrap"):
        torch_offload.wrap(module)
    page_out(module)
    module(torch.zeros(2, 128))
    torch_offload.unwrap(module)
    assert_usable(scratch)


def test_unwrapping_what_is_not_wrapped_is_refused(config):
    """A part of a wrapped module is not wrapped itself."""
    module = make_module()
    with pytest.raises(OffloadError, match="not wrapped"):
        torch_offload.unwrap(module)
    torch_offload.wrap(module, config=config)
    with pytest.raises(OffloadError, match="not wrapped"):
        torch_offload.unwrap(module[0])


def test_a_second_budget_beside_a_running_engine_is_refused(config):
    """The same settings, or none, join."""
    first, second = make_module(), make_module()
    torch_offload.wrap(first, config=config)
    with pytest.raises(ConfigError, match="ram"):
        torch_offload.wrap(second, ram="9MiB")
    torch_offload.wrap(second, ram="8MiB")


def test_only_modules_can_be_wrapped():
    """Not a tensor, not a list."""
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        torch_offload.wrap(torch.ones(3))


def test_more_pages_than_the_system_maps_are_refused(tmp_path, scratch):
    """Three mappings a page, of what the model and its training can fill; the message names the limit and a remedy."""
    limit = tmp_path / "proc/sys/vm/max_map_count"
    limit.parent.mkdir(parents=True)
    config = Config(ram="8MiB", ssd=scratch, page_elements=4096)
    paged = [torch.zeros(1 << 19)]  # with gradient and moments they fill the budget: 512 pages of 16 KiB
    limit.write_text("1536\n")
    preflight.check_mappings(config, paged, root=tmp_path)
    limit.write_text("1535\n")
    with pytest.raises(ConfigError, match="take up to 1536 memory mappings; this system allows 1535") as refused:
        preflight.check_mappings(config, paged, root=tmp_path)
    assert "sysctl -w vm.max_map_count=3072" in str(refused.value)
    preflight.check_mappings(config, [torch.zeros(1 << 17)], root=tmp_path)  # does not fill it


@pytest.mark.parametrize(("free_bytes", "is_warned"), [((8 << 20) - 1, True), (8 << 20, False)])
def test_a_disk_too_small_for_gradients_and_moments_is_said(monkeypatch, caplog, scratch, free_bytes, is_warned):
    """The parameters alone fit: 4 MiB of them, four times as much for training, half of that in memory."""
    monkeypatch.setattr(resources, "free_disk_bytes", lambda _: free_bytes)
    weight = torch.nn.Parameter(torch.zeros(1 << 20))
    config = Config(ram="8MiB", ssd=scratch, keep_free=0)
    preflight.resolve(config, [weight])
    assert ("two moments each" in caplog.text) == is_warned
    caplog.clear()
    preflight.resolve(config, [weight.requires_grad_(False)])
    assert caplog.text == ""


@pytest.mark.parametrize(("limit_bytes", "is_warned"), [((8 << 20) - 1, True), (8 << 20, False), (None, False)])
def test_a_budget_beyond_what_a_process_may_have_is_said(monkeypatch, caplog, scratch, limit_bytes, is_warned):
    monkeypatch.setattr(resources, "memory_limit_bytes", lambda: limit_bytes)
    preflight.resolve(Config(ram="8MiB", ssd=scratch))
    assert ("the system would end it before the budget is full; lower ram" in caplog.text) == is_warned
