"""Parameters that are updated during the backward have the bits of plain torch without clipping, and their gradients
never reach the SSD. What cannot be done with gradients any more is an error that names the setting.

Method: small modules under a quarter of their state, beside plain torch; counters of the engine.
"""

import copy
import io
from collections.abc import Callable, Iterator

import pytest
import safetensors.torch
import torch
from support.bits import digest
from support.cases import CASES, differing
from support.fake_gpu import in_gpu_child
from support.isolation import in_child
from support.training import BUDGET_SHARE, COLUMNS, STEPS, Case, Outcome, Placement, train_both
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import torch_offload
from torch_offload import Config, OffloadError, OutOfTierMemory

WIDTH = 128
LAYERS = 12
STATE_BYTES = 16 * LAYERS * WIDTH * WIDTH
SETTING = 'update="backward"'

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

UNCLIPPED = [case for case in CASES if case.clipping == "noclip" and case.micro_batches == "one"]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adamw-single": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, maximize=True, weight_decay=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, foreach=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, foreach=True),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "offload-adamw": lambda p: torch_offload.AdamW(p, lr=1e-2),
    "offload-adamw-8bit": lambda p: torch_offload.AdamW(p, lr=1e-2, moments="8bit"),
}


@pytest.fixture
def backward(config: Config) -> Config:
    """A quarter of the state."""
    return config.replace(ram=STATE_BYTES // 4, update="backward")


def make_module(dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(dtype)


def wrapped(config: Config, layers: int = LAYERS) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A module and an optimizer that has taken its first step, an ordinary one."""
    module = torch_offload.wrap(make_module(layers=layers), config=config)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    train(module, optimizer)
    return module, optimizer


def loss_of(module: nn.Module, number: int = 0) -> torch.Tensor:
    weight = next(module.parameters())
    return module(torch.full((3, WIDTH), 1 + number / 10, dtype=weight.dtype)).square().mean()


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, *, set_to_none: bool = True
) -> list[str]:
    losses = []
    for number in range(steps):
        loss = loss_of(module, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item().hex())
    return losses


def raise_in_the_middle(gradient: torch.Tensor) -> None:
    raise OSError("in the middle")


def applied_count() -> int:
    return int(torch_offload.report().counters["gradients_applied"])


def digests(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    states = [optimizer.state.get(parameter, {}) for parameter in module.parameters()]
    values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return [digest(tensor) for tensor in (*module.parameters(), *values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_bits_are_those_of_plain_torch(backward, make: MakeOptimizer, dtype):
    """Losses, weights and states; all gradients but those of the first step are applied and never written."""
    if dtype is torch.bfloat16 and make is OPTIMIZERS["sgd-nesterov"]:
        dtype = torch.float64  # its fused kernel does not give the same bits twice in plain torch
    plain = make_module(dtype)
    expected = make(plain.parameters())
    losses = train(plain, expected, STEPS)

    size_bytes = sum(weight.nbytes for weight in plain.parameters())
    config = backward.replace(ram=2 * size_bytes)  # of which a gradient, and what an update computes, take a part
    module = make_module(dtype)
    optimizer = make(module.parameters())
    torch_offload.wrap(module, config=config)
    found = train(module, optimizer)
    torch_offload.flush()
    first = torch_offload.report()
    found += [loss for number in range(1, STEPS) for loss in _one_step(module, optimizer, number)]
    report = torch_offload.report()
    assert found == losses
    assert digests(module, optimizer) == digests(plain, expected)
    assert [type(value) for value in optimizer.state_dict()["state"]] == [int] * len(expected.state)
    assert list(optimizer.state_dict()["state"]) == list(expected.state_dict()["state"])
    assert report.counters["gradients_applied"] == LAYERS * (STEPS - 1)
    assert report.written_bytes["gradient"] == first.written_bytes["gradient"]
    assert report.host_peak_bytes <= report.budget_bytes


def _one_step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> list[str]:
    loss = loss_of(module, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item().hex()]


@pytest.mark.parametrize("make", [OPTIMIZERS["adamw-fused"], OPTIMIZERS["rprop"]], ids=["adamw", "rprop"])
def test_gradients_that_become_zeros(backward, make: MakeOptimizer):
    """`zero_grad(set_to_none=False)` gives the next gradient the place of the last."""
    plain = make_module()
    expected = make(plain.parameters())
    losses = train(plain, expected, STEPS, set_to_none=False)
    module = torch_offload.wrap(make_module(), config=backward)
    optimizer = make(module.parameters())
    assert train(module, optimizer, STEPS, set_to_none=False) == losses
    assert digests(module, optimizer) == digests(plain, expected)
    assert all(not parameter.grad.any() for parameter in module.parameters())
    assert applied_count() == LAYERS * (STEPS - 1)


@pytest.mark.rotating
@pytest.mark.parametrize("case", UNCLIPPED, ids=lambda case: case.name)
def test_identity(case: Case, scratch):
    """The rows of the identity table without clipping and accumulation, stock Trainers among them."""
    plain, paged, report = in_child(train_both, case, str(scratch), Placement(update="backward"))
    plain.assert_trained(STEPS)
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    assert report.host_peak_bytes <= report.budget_bytes
    assert report.counters["gradients_applied"] > 0
    assert BUDGET_SHARE <= 0.30


@pytest.mark.parametrize("activations", ["page", "recompute"])
@pytest.mark.parametrize("row", ["llama fused fp32 stored noclip one untied full trainer"])
def test_identity_with_long_rows(row: str, activations: str, scratch):
    """Activations that leave memory, or are computed again, beside updates of the backward."""
    case = Case.parse(row)
    placement = Placement(update="backward", activations=activations)
    plain, paged, report = in_child(train_both, case, str(scratch), placement)
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    assert report.counters["gradients_applied"] > 0


ON_A_DEVICE = [
    (case, activations)
    for case in UNCLIPPED
    for activations in ("keep", "page")
    if activations == "keep" or case.checkpointing == "stored"
]


def check_on_a_device(plain: Outcome, paged: Outcome, report: torch_offload.Report) -> None:
    """Equal, within the budgets, with updates in the GPU, whose states crossed the link both ways."""
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    assert report.counters["gradients_applied"] > 0
    assert report.device.updates_on == "gpu"
    assert report.device.peak_bytes <= report.device.budget_bytes
    assert report.host_peak_bytes <= report.budget_bytes
    assert min(report.device.to_device_bytes["state"], report.device.to_host_bytes["state"]) > 0
    assert report.faults == 0


@pytest.mark.rotating(parts=6)
@pytest.mark.parametrize(("case", "activations"), ON_A_DEVICE, ids=lambda value: getattr(value, "name", value))
def test_identity_on_an_emulated_device(case: Case, activations: str, scratch):
    """Updates in the backward, in the memory of a device above that of the host."""
    placement = Placement(update="backward", device=True, activations=activations)
    check_on_a_device(*in_child(train_both, case, str(scratch), placement))


@pytest.mark.rotating(parts=6)
@pytest.mark.parametrize(("case", "activations"), ON_A_DEVICE, ids=lambda value: getattr(value, "name", value))
def test_identity_on_a_gpu(case: Case, activations: str, scratch, fake_gpu):
    """The same on the fake GPU, as in its memory."""
    placement = Placement(update="backward", device=True, kind="cuda", activations=activations)
    check_on_a_device(*in_gpu_child(fake_gpu, train_both, case, str(scratch), placement))


def test_there_are_twelve_rows():
    """Every optimizer, precision and way to checkpoint, with tied and untied heads, full and LoRA, in both loops."""
    assert len(UNCLIPPED) >= 12
    for column in ("model", "optimizer", "precision", "checkpointing", "head", "tuning", "loop"):
        assert {getattr(case, column) for case in UNCLIPPED} == set(COLUMNS[column]), column


# --- What steps still do --------------------------------------------------------------------------------------------
def test_schedules_and_hooks_run_as_before(backward):
    """The learning rate of the backward is that of the step; hooks of the program run once per step."""

    def run(module: nn.Module) -> tuple[list[str], list[int]]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
        seen: list[int] = []
        optimizer.register_step_pre_hook(
            lambda o, *_: seen.append(sum(p.grad is not None for p in module.parameters()))
        )
        for number in range(STEPS):
            loss_of(module, number).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return digests(module, optimizer), seen

    expected = run(make_module())
    assert run(torch_offload.wrap(make_module(), config=backward)) == expected
    assert expected[1] == [LAYERS] * STEPS
    assert applied_count() == LAYERS * (STEPS - 1)


def test_clipping_that_does_not_clip(backward):
    """The norm of applied gradients is known; a coefficient of one changes nothing, as in plain torch."""

    def run(module: nn.Module) -> tuple[list[str], list[str]]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        norms = []
        for number in range(STEPS):
            loss_of(module, number).backward()
            norms.append(clip_grad_norm_(module.parameters(), 1e9).item().hex())
            norms.append(clip_grad_norm_(module.parameters(), float("inf")).item().hex())
            optimizer.step()
            optimizer.zero_grad()
        return digests(module, optimizer), norms

    expected = run(make_module())
    assert run(torch_offload.wrap(make_module(), config=backward)) == expected
    assert applied_count() == LAYERS * (STEPS - 1)


def test_parameters_that_a_step_leaves_out(backward):
    """Frozen for some steps, or without a gradient."""

    def run(module: nn.Module) -> list[str]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        for number in range(STEPS):
            module[0].weight.requires_grad_(number % 3 != 1)
            loss_of(module[: LAYERS - number % 2], number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return digests(module, optimizer)

    expected = run(make_module())
    assert run(torch_offload.wrap(make_module(), config=backward)) == expected
    assert applied_count() > 0


def test_a_weight_that_is_used_twice(backward):
    """Its gradient is complete once in a backward, after both uses; non-reentrant checkpointing keeps that."""

    def run(module: nn.Sequential, *, is_checkpointed: bool) -> list[str]:
        shared = module[0]
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
        for number in range(STEPS):
            values = torch.full((3, WIDTH), 1 + number / 10)
            for part in (shared, *module[1:], shared):
                values = checkpoint(part, values, use_reentrant=False) if is_checkpointed else part(values)
            values.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return digests(module, optimizer)

    for is_checkpointed in (False, True):
        expected = run(make_module(), is_checkpointed=is_checkpointed)
        module = torch_offload.wrap(make_module(), config=backward)
        assert run(module, is_checkpointed=is_checkpointed) == expected
        assert applied_count() == LAYERS * (STEPS - 1)
        torch_offload.unwrap(module)


def test_resuming_from_a_checkpoint(backward, tmp_path):
    """States that were saved and loaded are those of the run in memory."""
    plain = make_module()
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for steps in (1, 1, 3):
        train(plain, expected, steps)
    module, optimizer = wrapped(backward)
    train(module, optimizer)
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    content = torch.load(tmp_path / "checkpoint.pt")
    module.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    train(module, optimizer, 3)
    assert digests(module, optimizer) == digests(plain, expected)


# --- What cannot be done any more -----------------------------------------------------------------------------------
def test_clipping_is_refused_before_it_scales(backward):
    """Nothing of the list is scaled, small parameters included."""
    module, _ = wrapped(backward)
    loss_of(module).backward()
    with pytest.raises(OffloadError, match=SETTING):
        clip_grad_norm_(module.parameters(), 1e-9)


@pytest.mark.parametrize(
    "read",
    [
        lambda gradient: gradient.norm(),
        lambda gradient: gradient + 1,
        lambda gradient: gradient.mul_(0.5),
        lambda gradient: torch._foreach_add_([gradient], 1.0),
        lambda gradient: torch._foreach_norm([gradient], 1),
        lambda gradient: gradient.numpy(),
        lambda gradient: torch.save(gradient, io.BytesIO()),
        lambda gradient: get_total_norm([gradient], foreach=False),
        lambda gradient: copy.deepcopy(gradient),
    ],
    ids=["norm", "add", "in-place", "foreach", "other-norm", "numpy", "save", "no-foreach", "copy"],
)
def test_a_gradient_that_is_read_is_an_error(backward, read):
    """Before the step, and after it until there is another one."""
    module, optimizer = wrapped(backward)
    loss_of(module).backward()
    with pytest.raises(OffloadError, match=SETTING):
        read(module[3].weight.grad)
    optimizer.step()
    with pytest.raises(OffloadError, match=f"gradient of 3.weight was applied.*{SETTING}"):
        read(module[3].weight.grad)


def test_a_gradient_that_is_overwritten_has_bytes_again(backward):
    """A script that fills it in itself."""
    module, optimizer = wrapped(backward)
    loss_of(module).backward()
    optimizer.step()
    gradient = module[3].weight.grad
    gradient.fill_(2.0)
    assert gradient.sum() == 2 * gradient.numel()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_accumulation_is_an_error(backward, is_dropped):
    """The second forward before a step, and its backward where no wrapped module was called; gradients None or not."""
    module, optimizer = wrapped(backward)
    loss_of(module).backward()
    if is_dropped:
        optimizer.zero_grad()
    with pytest.raises(OffloadError, match=SETTING):
        loss_of(module)
    with pytest.raises(OffloadError, match=SETTING):
        module[7](torch.ones(3, WIDTH)).sum().backward()


def test_a_graph_that_needs_values_from_before_the_update_is_an_error(backward):
    """The backward of a forward that ran before: as torch says it of any write in place."""
    module, _ = wrapped(backward)
    losses = [loss_of(module) for _ in range(2)]
    losses[0].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


def test_accumulation_within_one_backward_is_an_error(backward):
    """Reentrant checkpointing completes the gradient of a shared weight once for each use."""
    module, _ = wrapped(backward)
    values = torch.ones(3, WIDTH, requires_grad=True)
    for part in (module[0], module[1], module[0]):
        values = checkpoint(part, values, use_reentrant=True)
    with pytest.raises(OffloadError, match=SETTING):
        values.sum().backward()


def test_a_backward_under_a_graph_is_an_error(backward):
    """Gradients that are to be differentiated again."""
    module, _ = wrapped(backward)
    with pytest.raises(OffloadError, match="create_graph"):
        loss_of(module).backward(create_graph=True)


def test_a_model_is_not_used_between_backward_and_step(backward, tmp_path):
    """Its parameters are those of after the step already: evaluation and saving raise, and go on after the step."""
    module, optimizer = wrapped(backward)
    loss_of(module).backward()
    for use in (
        lambda: loss_of(module),
        lambda: torch.save(module.state_dict(), tmp_path / "half.pt"),
        lambda: safetensors.torch.save_file(module.state_dict(), tmp_path / "half.safetensors"),
    ):
        with pytest.raises(OffloadError, match=f"{SETTING}, and step\\(\\) of AdamW was not called"):
            use()
    optimizer.step()
    loss_of(module)
    torch.save(module.state_dict(), tmp_path / "whole.pt")


def test_a_learning_rate_that_changes_before_the_step_is_an_error(backward):
    """Numbers and tensors; the same value again is none."""
    module, optimizer = wrapped(backward)
    loss_of(module).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(OffloadError, match=rf"lr was 0.01 at the backward and is 0.5.*{SETTING}"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()


def test_gradients_that_are_dropped_or_replaced_are_an_error(backward):
    """Before the step: plain torch would not have updated, or with other numbers."""
    module, optimizer = wrapped(backward)
    loss_of(module).backward()
    kept, module[2].weight.grad = module[2].weight.grad, None
    with pytest.raises(OffloadError, match=SETTING):
        optimizer.step()
    module[2].weight.grad = kept
    optimizer.step()


def test_optimizers_that_look_at_more_than_one_parameter_are_errors(backward):
    """LBFGS, a class of the program's own, clipping inside the step, a closure, scaled gradients."""

    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step()

    module = torch_offload.wrap(make_module(), config=backward)
    loss_of(module).backward()
    weights = list(module.parameters())
    plain = torch.optim.SGD(weights, lr=0.1)
    for optimizer, step in (
        (torch.optim.LBFGS(weights), lambda o: o.step(lambda: loss_of(module))),
        (Own(weights, lr=0.1), lambda o: o.step()),
        (torch_offload.AdamW(weights, max_grad_norm=1.0), lambda o: o.step()),
        (plain, lambda o: o.step(lambda: loss_of(module))),
        (plain, lambda o: o.step(closure=lambda: loss_of(module))),
    ):
        with pytest.raises(OffloadError, match=SETTING):
            step(optimizer)
    scaled = torch.optim.AdamW(weights, fused=True)
    scaled.grad_scale = torch.tensor(8.0)
    with pytest.raises(OffloadError, match=SETTING):
        scaled.step()


def test_another_optimizer_over_the_same_parameters_is_an_error(backward):
    """The backward cannot know which of the two will step."""
    module, first = wrapped(backward)
    second = torch.optim.SGD(module.parameters(), lr=0.1)
    loss_of(module).backward()
    with pytest.raises(OffloadError, match=f"SGD over a parameter that AdamW has updated.*{SETTING}"):
        second.step()
    first.step()


def test_two_optimizers_that_share_parameters_update_in_their_steps(backward):
    """Plain torch lets both do so, and the backward leaves it to them."""

    def run(module: nn.Module) -> list[str]:
        optimizers = [torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9) for lr in (0.01, 0.02)]
        for number in range(STEPS):
            loss_of(module, number).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [digest(weight) for weight in module.parameters()]

    expected = run(make_module())
    assert run(torch_offload.wrap(make_module(), config=backward)) == expected
    assert applied_count() == 0


def test_an_error_in_the_middle_of_a_backward(backward, tmp_path):
    """The step is missing for what was updated: no further backward and no saving, until a checkpoint is loaded."""
    plain = make_module()
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    train(plain, expected)
    losses = train(plain, expected, STEPS)
    module, optimizer = wrapped(backward)
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    handle = module[4].weight.register_hook(raise_in_the_middle)
    with pytest.raises(OSError, match="in the middle"):
        loss_of(module).backward()
    handle.remove()
    for use in (lambda: torch.save(module.state_dict(), io.BytesIO()), lambda: loss_of(module)):
        with pytest.raises(OffloadError, match=SETTING):
            use()
    content = torch.load(tmp_path / "checkpoint.pt")
    module.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    optimizer.zero_grad()
    assert train(module, optimizer, STEPS) == losses
    assert digests(module, optimizer) == digests(plain, expected)


def test_unwrapping_drops_gradients_without_bytes(backward):
    """They are None afterwards; training goes on in memory."""
    module, optimizer = wrapped(backward)
    loss_of(module).backward()
    optimizer.step()
    torch_offload.unwrap(module)
    assert all(parameter.grad is None for parameter in module.parameters())
    train(module, optimizer)


def test_the_setting_needs_updates_where_the_module_computes():
    """Where gradients are complete."""
    with pytest.raises(torch_offload.ConfigError, match="update: 'backward' updates where the module computes"):
        Config(gpu="1GiB", optimizer_device="cpu", update="backward")
    assert issubclass(OutOfTierMemory, OffloadError)
