"""wrap and unwrap change where bytes live and nothing else; bad input is refused and leaves everything usable."""

import copy
import json
import pickle
import resource
import warnings
import weakref

import pytest
import torch
from support.bits import digest
from support.paging import (
    assert_an_update_was_recorded,
    assert_bitwise_equal,
    assert_was_paged,
    page_out,
    reading,
    reading_nothing,
    wait_until,
)
from support.small_module import MIB, TIGHT, adamw, assert_usable, make_module, snapshot, step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_offload
from torch_offload import _C, OffloadError, OutOfTierMemory, TierIOError
from torch_offload.runtime import session
from torch_offload.runtime.process import PROCESS
from torch_offload.system import resources

# --- what wrap and unwrap do ------------------------------------------------------------------------------------------


def test_wrap_changes_nothing_that_can_be_seen(config):
    """Class, names, identity of parameters, addresses of storages over evictions, and values."""
    module = make_module()
    before = snapshot(module)
    parameters, names = list(module.parameters()), [name for name, _ in module.named_parameters()]
    assert torch_offload.wrap(module, config=config) is module
    assert type(module) is nn.Sequential
    assert [name for name, _ in module.named_parameters()] == names
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    addresses = [parameter.data_ptr() for parameter in parameters]
    page_out(module)
    with reading_nothing():
        assert [parameter.data_ptr() for parameter in parameters] == addresses
    with reading(sum(parameter.nbytes for parameter in parameters)):
        assert_bitwise_equal(snapshot(module), before)


def test_training_is_bitwise_equal_with_everything_paged_out_at_every_turn(config):
    """Parameters, gradients and moments leave before and after backward and the step."""
    plain, paged = make_module(), make_module()
    torch_offload.wrap(paged, config=config)
    plain_optimizer, paged_optimizer = adamw(plain), adamw(paged)
    for seed in range(4):
        expected = step(plain, plain_optimizer, seed)
        torch_offload.flush()
        torch_offload.evict(paged)
        assert_bitwise_equal(step(paged, paged_optimizer, seed), expected)
    torch_offload.evict(paged)
    assert_bitwise_equal(snapshot(paged, paged_optimizer), snapshot(plain, plain_optimizer))
    report = torch_offload.report()
    kinds = ("parameter", "gradient", "state")
    assert all(report.written_bytes[kind] > 0 for kind in kinds)
    assert report.ssd_read_bytes > 0
    assert report.host_peak_bytes <= report.budget_bytes


CLOSURE_OPTIMIZERS = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False),
    "lbfgs": lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3, history_size=3),
}


@pytest.mark.parametrize("name", CLOSURE_OPTIMIZERS)
def test_steps_with_a_closure_are_bitwise_equal(config, name):
    """The closure runs the model inside the optimizer's step."""
    outcomes = []
    for is_paged in (False, True):
        module = make_module()
        if is_paged:
            torch_offload.wrap(module, config=config)
        optimizer = CLOSURE_OPTIMIZERS[name](module)
        losses = []
        for seed in range(3):
            batch = torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))

            def closure(module=module, optimizer=optimizer, batch=batch, losses=losses):
                optimizer.zero_grad()
                loss = module(batch).square().mean()
                loss.backward()
                losses.append(loss.item().hex())
                return loss

            if is_paged:
                page_out(module)
            optimizer.step(closure)
        outcomes.append([losses, snapshot(module)])
    assert_bitwise_equal(outcomes[1], outcomes[0])
    assert torch_offload.report().ssd_read_bytes > 0


def test_momentum_made_from_a_decayed_gradient_is_paged(config):
    """SGD clones `gradient + decay * weight`, which is nobody's state before."""
    module = make_module()
    torch_offload.wrap(module, config=config)
    optimizer = CLOSURE_OPTIMIZERS["sgd"](module)
    step(module, optimizer)
    large = [parameter for parameter in module.parameters() if parameter.dim() == 2]
    assert all(_C.is_managed(optimizer.state[parameter]["momentum_buffer"]) for parameter in large)


def test_an_optimizer_step_that_raises_leaves_the_engine_as_it_was(config):
    """Results of the forward after it are ordinary, and training goes on equal."""
    outcomes = []
    for is_paged in (False, True):
        module = make_module()
        if is_paged:
            torch_offload.wrap(module, config=config, ram=TIGHT)
        optimizer = adamw(module)
        step(module, optimizer)

        def closure():
            raise RuntimeError("from the closure")

        with pytest.raises(RuntimeError, match="from the closure"):
            optimizer.step(closure)
        assert not _C.is_managed(module(torch.randn(8, 128, generator=torch.Generator().manual_seed(9))))
        step(module, optimizer, seed=2)
        outcomes.append(snapshot(module, optimizer))
    assert_bitwise_equal(outcomes[1], outcomes[0])
    assert_was_paged()


def test_unwrap_gives_ordinary_tensors_back(config):
    """With pages away and an update pending. Values stay, nothing addresses memory of ours, hooks are gone."""
    plain, paged = make_module(), make_module()
    optimizers = [adamw(plain), adamw(paged)]
    for module, optimizer in zip((plain, paged), optimizers, strict=True):
        if module is paged:
            torch_offload.wrap(paged, config=config, ram=TIGHT)
        step(module, optimizer)
        module(torch.ones(8, 128)).square().mean().backward()
        if module is paged:
            page_out(paged)
        optimizer.step()
    assert_an_update_was_recorded()
    assert PROCESS.session.engine.has_pending_work(paged[0].weight)
    tensors = list(paged.parameters())
    tensors += [parameter.grad for parameter in tensors]
    tensors += [value for state in optimizers[1].state.values() for value in state.values()]
    assert not all(torch_offload.is_resident(tensor) for tensor in tensors)  # the engine may read some, not all, again
    assert torch_offload.unwrap(paged) is paged
    assert PROCESS.session is None
    assert not any(_C.is_managed(tensor) for tensor in tensors)
    assert all(not part._forward_pre_hooks for part in paged.modules())
    assert all(not parameter._post_accumulate_grad_hooks for parameter in paged.parameters())
    assert_bitwise_equal(snapshot(paged, optimizers[1]), snapshot(plain, optimizers[0]))
    for module, optimizer in zip((plain, paged), optimizers, strict=True):
        step(module, optimizer, seed=5)
    assert_bitwise_equal(snapshot(paged, optimizers[1]), snapshot(plain, optimizers[0]))


def test_modules_share_one_engine_and_what_they_share_stays_paged(config):
    """One budget for all; unwrapping one leaves the tied weight of the other paged."""
    first, second = nn.Linear(128, 128), nn.Linear(128, 128)
    second.weight = first.weight
    torch_offload.wrap(first, config=config)
    torch_offload.wrap(second)
    assert _C.engine_of(first.bias) is _C.engine_of(second.bias)
    torch_offload.unwrap(first)
    assert not _C.is_managed(first.bias)
    assert _C.is_managed(second.weight)
    torch_offload.unwrap(second)
    assert not _C.is_managed(second.weight)


def test_tied_parameters_are_one_segment(config):
    """They are paged once and read once."""
    module = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 64, bias=False))
    module[1].weight = module[0].weight
    torch_offload.wrap(module, config=config)
    page_out(module)
    with reading(module[0].weight.nbytes):
        module(torch.tensor([1, 2]))
    with reading_nothing():
        module[1].weight.sum()


def test_small_tensors_stay_in_memory(config):
    """min_paged_bytes decides; evict says what stayed."""
    module = make_module()
    torch_offload.wrap(module, config=config.replace(min_paged_bytes="64KiB"))
    assert _C.is_managed(module[0].weight)
    assert not _C.is_managed(module[0].bias)
    assert torch_offload.evict(module[0].bias) == module[0].bias.nbytes
    assert torch_offload.is_resident(module[0].bias)
    assert torch_offload.evict(module) == 0


def test_large_buffers_are_paged(config):
    """In-place updates of running statistics included."""
    plain, paged = make_module(), make_module()
    torch_offload.wrap(paged, config=config)
    assert _C.is_managed(paged[3].running_mean)
    for module in (plain, paged):
        torch_offload.evict(paged)
        module(torch.randn(4, 128, generator=torch.Generator().manual_seed(0)))
    assert_bitwise_equal(dict(paged.named_buffers()), dict(plain.named_buffers()))


def test_prefetch_reads_ahead_and_evict_sends_away(config):
    """Hints for a tensor and for a module, without any other access; unknown things are a TypeError."""
    module = make_module()
    torch_offload.wrap(module, config=config)
    tensors = [*module.parameters(), module[3].running_mean]
    for target, hinted in ((module[0].weight, tensors[:1]), (module, tensors)):
        page_out(module)
        assert not any(torch_offload.is_resident(tensor) for tensor in tensors)
        torch_offload.prefetch(target)
        wait_until(lambda hinted=hinted: all(map(torch_offload.is_resident, hinted)), "a prefetch had read its pages")
        with reading_nothing():
            assert [tensor.detach().sum() for tensor in hinted]
    assert torch_offload.evict(module[0].weight) == 0
    assert not torch_offload.is_resident(module[0].weight)
    for verb in (torch_offload.evict, torch_offload.prefetch):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module or a torch\.Tensor"):
            verb("module")


@pytest.mark.parametrize(("given", "processes", "expected"), [(None, "4", 32), (None, "1", 128), ("48MiB", "4", 48)])
def test_processes_that_train_together_share_the_usual_budget(given, processes, expected, scratch, monkeypatch):
    """As torchrun says it: without ``ram`` each takes its part, with it each has what was given."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setattr(resources, "default_ram_bytes", lambda: 128 * MIB)
    torch_offload.wrap(make_module(), ram=given, ssd=scratch)
    assert torch_offload.report().budget_bytes == expected * MIB


def test_ordinary_tensors_pass_through_every_verb():
    """Without any engine too."""
    tensor = torch.ones(5)
    assert torch_offload.evict(tensor) == 20
    assert torch_offload.is_resident(tensor)
    torch_offload.prefetch(tensor)
    torch_offload.flush()


# --- modules that change after they were wrapped ----------------------------------------------------------------------


def test_parameters_registered_later_are_paged(config):
    """By assignment, by load_state_dict(assign=True), and with a whole submodule."""
    module = make_module()
    torch_offload.wrap(module, config=config)
    module[0].weight = nn.Parameter(torch.randn(256, 128))
    assert _C.is_managed(module[0].weight)
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    assert _C.is_managed(module[2].weight)
    module[2] = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 128))
    assert _C.is_managed(module[2][0].weight)
    optimizer = adamw(module)
    step(module, optimizer)
    assert _C.is_managed(module[2][0].weight.grad)


def test_parameters_made_trainable_later_are_hooked_and_equal(config):
    """Frozen when wrapped, trained afterwards."""
    plain, paged = make_module(), make_module()
    for module in (plain, paged):
        module.requires_grad_(False)
        if module is paged:
            torch_offload.wrap(paged, config=config, ram=TIGHT)
        module.requires_grad_(True)
        optimizer = adamw(module)
        step(module, optimizer)
        step(module, optimizer)
    assert _C.is_managed(paged[0].weight.grad)
    assert_bitwise_equal(snapshot(paged), snapshot(plain))
    assert_was_paged()


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.double, lambda module: module.to(torch.float16)])
def test_converted_modules_stay_paged(config, convert):
    """Parameters get other storages and keep being paged."""
    plain, paged = convert(make_module()), make_module()
    torch_offload.wrap(paged, config=config)
    page_out(paged)
    convert(paged)
    paged.eval()(torch.zeros(2, 128, dtype=paged[0].weight.dtype))
    assert all(_C.is_managed(parameter) for parameter in paged.parameters())
    page_out(paged)
    assert_bitwise_equal(dict(paged.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "still loading"])
def test_a_paged_module_is_not_moved_to_another_device(config, is_wrapped):
    """As a Trainer does where it sees a GPU: what is there is not paged. Method: a fake tensor of a GPU."""
    module = make_module()
    before = snapshot(module)
    if is_wrapped:
        torch_offload.wrap(module, config=config)
    else:
        with torch_offload.loading(config=config):
            module = make_module()
    with FakeTensorMode():
        on_gpu = torch.empty(1, device="cuda")
    with pytest.raises(OffloadError) as refused:
        module._apply(lambda tensor: on_gpu)  # as module.to("cuda") calls it
    assert str(refused.value) == (
        "cannot move Sequential from cpu to cuda:0, where nothing would page it; to page it through the GPU give its "
        "memory, such as gpu='24GiB'; to train on the CPU leave the move out (TrainingArguments(use_cpu=True))"
    )
    assert_bitwise_equal(snapshot(module), before)
    assert module.to("cpu") is module


def test_states_loaded_into_an_optimizer_are_paged(config):
    """optimizer.load_state_dict makes new states; training goes on equal."""
    plain, paged = make_module(), make_module()
    for module in (plain, paged):
        if module is paged:
            torch_offload.wrap(paged, config=config, ram=TIGHT)
        optimizer = adamw(module)
        step(module, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = adamw(module)
        optimizer.load_state_dict(saved)
        step(module, optimizer)
        step(module, optimizer)
    assert _C.is_managed(optimizer.state[paged[0].weight]["exp_avg"])
    assert_bitwise_equal(snapshot(paged), snapshot(plain))
    assert_was_paged()


def test_copies_and_pickles_are_ordinary_modules(config):
    """A copy computes the same and is not paged; a pickle names nothing of ours."""
    module = make_module().eval()
    batch = torch.randn(3, 128)
    expected = module(batch)
    torch_offload.wrap(module, config=config)
    page_out(module)
    duplicate = copy.deepcopy(module)
    page_out(module)
    content = pickle.dumps(module)
    assert b"torch_offload" not in content
    for twin in (duplicate, pickle.loads(content)):
        assert_bitwise_equal(twin(batch), expected)
        assert not any(_C.is_managed(parameter) for parameter in twin.parameters())
    torch_offload.wrap(duplicate)
    page_out(duplicate)
    assert_bitwise_equal(duplicate(batch), expected)


def test_a_module_that_is_dropped_can_be_followed_by_another(config):
    """Nothing here keeps it alive, a reference cycle does not block the next budget."""
    module = make_module()
    module.itself = [module]
    gone = weakref.ref(module)
    torch_offload.wrap(module, config=config)
    del module
    torch_offload.wrap(make_module(), config=config.replace(ram="16MiB"))
    assert gone() is None


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_counts_and_can_be_written_as_json(config):
    """Every field of the issue is there, and the last report outlives the engine."""
    module = make_module()
    torch_offload.wrap(module, config=config)
    page_out(module)
    module(torch.zeros(2, 128))
    report = torch_offload.report()
    content = json.loads(report.to_json())
    assert content["budget_bytes"] == 8 * MIB
    assert content["ssd_read_bytes"] == sum(content["read_bytes"].values()) > 0
    assert content["ssd_written_bytes"] == sum(content["written_bytes"].values()) > 0
    assert 0 <= content["hit_rate"] <= 1
    assert content["evictions"] > 0
    assert set(content["stall_seconds"]) == {"read", "memory", "update", "fault", "network"}
    assert set(content["read_bytes"]) == {"parameter", "gradient", "state", "activation", "other"}
    assert "of 8 MiB" in str(report)
    torch_offload.unwrap(module)
    assert torch_offload.report().ssd_read_bytes >= report.ssd_read_bytes


# --- bad input --------------------------------------------------------------------------------------------------------


def test_unwrapping_reads_pages_while_it_copies_others(config):
    """All but what is read when it is wanted: the first page of each tensor at most."""
    module = nn.Linear(256, 256)
    expected = digest(module.weight)
    torch_offload.wrap(module, config=config)
    page_out(module)
    before = torch_offload.report()
    torch_offload.unwrap(module)
    after = torch_offload.report()
    assert after.ssd_read_bytes - before.ssd_read_bytes >= module.weight.nbytes
    assert after.prefetches - before.prefetches >= module.weight.numel() // config.page_elements - 1
    assert digest(module.weight) == expected


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_that_cannot_be_paged_are_named_in_one_warning(config):
    """Sparse, quantized, a subclass and shared memory stay as they are; the rest is paged."""

    class Packed(nn.Parameter):
        pass

    module = make_module()
    module.sparse = nn.Parameter(torch.eye(4).to_sparse())
    module.packed = Packed(torch.ones(4))
    module.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    module.register_buffer("shared", torch.ones(4).share_memory_())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_offload.wrap(module, config=config)
    messages = [str(warning.message) for warning in caught if "torch_offload" in str(warning.message)]
    assert len(messages) == 1
    assert all(name in messages[0] for name in ("sparse", "packed", "quantized", "shared"))
    assert caught[0].filename == __file__
    assert _C.is_managed(module[0].weight)
    assert not any(_C.is_managed(tensor) for tensor in (module.packed, module.shared))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module[0](torch.ones(2, 128))
        torch_offload.unwrap(module)


@pytest.mark.parametrize("swaps", [False, True])
def test_what_has_no_memory_yet_is_paged_when_it_has(config, swaps):
    """Parameters on the meta device are no memory that could stay, so there is nothing to warn of."""
    with torch.device("meta"):
        module = make_module()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch_offload.wrap(module, config=config)
        module.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    module(torch.ones(2, 128))
    assert _C.is_managed(module[0].weight)


def test_an_error_midway_leaves_nothing_wrapped(config, scratch, monkeypatch):
    """All or nothing: tensors paged before the error are ordinary again, hooks and engine are gone."""
    module = make_module()
    before = snapshot(module)
    real = session.WrappedModule._adopt
    adopted = []

    def failing(self, label, *args):
        if len(adopted) == 2:
            raise TierIOError("the disk went away")
        adopted.append(label)
        return real(self, label, *args)

    monkeypatch.setattr(session.WrappedModule, "_adopt", failing)
    with pytest.raises(TierIOError, match="the disk went away"):
        torch_offload.wrap(module, config=config)
    monkeypatch.undo()
    assert len(adopted) == 2
    assert not any(_C.is_managed(parameter) for parameter in module.parameters())
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert PROCESS.session is None
    assert_bitwise_equal(snapshot(module), before)
    assert_usable(scratch)


def test_an_operator_too_large_for_the_budget_is_a_typed_error_and_training_goes_on(config):
    """The exception comes out of forward; afterwards everything works."""
    plain, module = make_module(), make_module()
    expected = step(plain, adamw(plain))
    torch_offload.wrap(module, config=config, ram="4MiB")
    batch = torch.zeros(4096, 128)
    with pytest.raises(OutOfTierMemory, match="budget of 4194304 bytes"):
        module(batch)
    del batch
    assert_bitwise_equal(step(module, adamw(module)), expected)


def test_a_disk_that_fills_up_is_a_typed_error_and_nothing_is_lost(config):
    """Method: a limit on the size of files. Once there is room again the same pages leave."""
    module = make_module()
    before = snapshot(module)
    torch_offload.wrap(module, config=config)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(TierIOError):
            torch_offload.evict(module)
        assert_bitwise_equal(snapshot(module), before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    page_out(module)
    assert torch_offload.report().ssd_written_bytes >= sum(weight.nbytes for weight in module.parameters())
    assert_bitwise_equal(snapshot(module), before)
