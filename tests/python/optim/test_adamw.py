"""torch_offload.AdamW computes its documented formula bit for bit, and stands where torch.optim.AdamW stood."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from support.adamw_reference import ReferenceAdamW, to_bf16
from support.bits import digest
from torch import Tensor, nn

import torch_offload

SHAPES = ((33, 65), (5,), (1,), (300, 257), (2, 3, 5, 7))
STEPS = 5


def make_parameters(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(parameters: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


def everything(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[tuple[str, str]]:
    states = [(name, digest(value)) for p in parameters for name, value in sorted(optimizer.state[p].items())]
    return [("weight", digest(p)) for p in parameters] + states


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "decay": {"lr": 1e-2, "weight_decay": 0.3},
    "no-decay": {"lr": 1e-2, "weight_decay": 0.0},
    "amsgrad": {"lr": 1e-2, "amsgrad": True},
    "maximize": {"lr": 1e-2, "maximize": True},
    "betas": {"lr": 1e-2, "betas": (0.3, 0.7), "eps": 1e-3},
    "momentum-off": {"lr": 1e-2, "betas": (0.0, 0.9)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_bf16_parameters_follow_the_formula_with_an_fp32_master(options, master):
    """Weights, masters and moments have the bits of the obvious implementation, which keeps whole masters."""
    parameters, plain = make_parameters(), make_parameters()
    optimizer = torch_offload.AdamW(parameters, master=master, **options)
    names = dict(options)
    beta1, beta2 = names.pop("betas", (0.9, 0.999))
    reference = ReferenceAdamW(beta1=beta1, beta2=beta2, **names)
    for step in range(STEPS):
        set_gradients(parameters, step)
        optimizer.step()
        reference.step(plain, [p.grad for p in parameters])
    for index, (parameter, expected) in enumerate(zip(parameters, plain, strict=True)):
        state = optimizer.state[parameter]
        assert digest(parameter) == digest(expected)
        assert digest(optimizer.master_of(parameter)) == digest(reference.masters[index])
        assert digest(parameter) == digest(to_bf16(optimizer.master_of(parameter)))
        moments = [state["exp_avg"], state["exp_avg_sq"], *([state["max_exp_avg_sq"]] if "amsgrad" in options else [])]
        for moment, reference_moment in zip(moments, reference.moments[index], strict=False):
            assert digest(moment) == digest(reference_moment)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_wide_parameters_have_the_bits_of_torch(dtype, options):
    """Parameters that need no master are updated as by torch.optim.AdamW(fused=True)."""
    ours, plain = make_parameters(dtype), make_parameters(dtype)
    optimizers = torch_offload.AdamW(ours, **options), torch.optim.AdamW(plain, fused=True, **options)
    train(ours, optimizers[0])
    train(plain, optimizers[1])
    assert everything(ours, optimizers[0]) == everything(plain, optimizers[1])


def test_small_steps_add_up():
    """A step below half the spacing of bf16 is lost in torch.optim.AdamW and kept by the master."""
    ours, plain = nn.Parameter(torch.ones(64, dtype=torch.bfloat16)), nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizers = torch_offload.AdamW([ours], lr=1e-4), torch.optim.AdamW([plain], lr=1e-4, fused=True)
    for parameter, optimizer in zip((ours, plain), optimizers, strict=True):
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert (plain == 1).all()
    assert math.isclose(ours[0].item(), 0.99, abs_tol=0.005)


def test_groups_schedules_and_tensor_rates():
    """Options by group, a schedule and a learning rate in a tensor reach the kernel."""
    results = []
    for use_tensor in (False, True):
        parameters = make_parameters()
        rate = torch.tensor(1e-2) if use_tensor else 1e-2
        groups = [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:], "betas": (0.5, 0.6)}]
        optimizer = torch_offload.AdamW(groups, lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(STEPS):
            set_gradients(parameters, step)
            optimizer.step()
            schedule.step()
        results.append([digest(p) for p in parameters])
    first, rest = make_parameters()[:2], make_parameters()[2:]
    references = ReferenceAdamW(weight_decay=0.0), ReferenceAdamW(beta1=0.5, beta2=0.6)
    for step in range(STEPS):
        set_gradients([*first, *rest], step)
        for reference, part in zip(references, (first, rest), strict=True):
            reference.lr = 1e-2 * 0.5**step
            reference.step(part, [p.grad for p in part])
    assert results[0] == [digest(p) for p in (*first, *rest)]
    # The rate in a tensor is 1e-2 rounded to fp32: a number of its own.
    assert results[1] != results[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_in_the_step_is_clipping_before_it(dtype, limit):
    """max_grad_norm gives the bits of clip_grad_norm_ followed by the step, whether it clips or not."""
    inside, before = make_parameters(dtype), make_parameters(dtype)
    clipping = torch_offload.AdamW(inside, lr=1e-2, max_grad_norm=limit)
    plain = torch_offload.AdamW(before, lr=1e-2)
    for step in range(STEPS):
        set_gradients(inside, step)
        set_gradients(before, step)
        norm = nn.utils.clip_grad_norm_(before, limit)
        clipping.step()
        plain.step()
        assert digest(clipping.grad_norm) == digest(norm)
    assert everything(inside, clipping) == everything(before, plain)


def test_a_gradient_scaler_unscales_and_skips():
    """The stock GradScaler hands its scale to the step, and a step with an overflow changes nothing."""
    parameters, plain = make_parameters(), make_parameters()
    optimizer = torch_offload.AdamW(parameters, lr=1e-2)
    reference = ReferenceAdamW(lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        set_gradients(plain, step)
        set_gradients(parameters, step, scale=scaler.get_scale() if step else 1024.0)
        scaler.scale(torch.ones(()))
        if step == 2:
            parameters[3].grad[0, 0] = math.inf
        before = everything(parameters, optimizer)
        # The scale is read before update() changes it.
        unscaled = [p.grad.float() / scaler.get_scale() for p in parameters]
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert everything(parameters, optimizer) == before
        else:
            reference.step(plain, unscaled)
    assert [digest(p) for p in parameters] == [digest(p) for p in plain]
    assert all(state["step"].item() == STEPS - 1 for state in optimizer.state.values())


def test_a_closure_returns_the_loss():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch_offload.AdamW([parameter], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter * parameter).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert (parameter < 1).all()


def test_layouts_of_weights_and_gradients():
    """A transposed weight, a gradient that lies otherwise and an expanded one give the numbers of contiguous ones."""
    results = []
    for make in (lambda: torch.ones(6, 10).t(), lambda: torch.ones(10, 6)):
        parameter = nn.Parameter(make().to(torch.bfloat16))
        optimizer = torch_offload.AdamW([parameter], lr=1e-2)
        parameter.grad = torch.arange(60.0).reshape(10, 6).to(torch.bfloat16)
        optimizer.step()
        parameter.grad = torch.ones(1, 6, dtype=torch.bfloat16).expand(10, 6)
        optimizer.step()
        results.append(digest(parameter.detach().contiguous()))
    assert results[0] == results[1]


# --- 8-bit moments --------------------------------------------------------------------------------------------------


def rounded_to_8_bits(moments: list[Tensor]) -> None:
    for moment, is_second in zip(moments[:2], (False, True), strict=True):
        packed = torch.ops.torch_offload.pack_moment(moment, is_second)
        moment.copy_(torch.ops.torch_offload.unpack_moment(packed, moment, is_second))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_8_bit_moments_are_moments_rounded_after_each_step(dtype):
    """The step uses the moments as updated; what is kept of them is what the packed format holds."""
    parameters, plain = make_parameters(dtype), make_parameters(dtype)
    optimizer = torch_offload.AdamW(parameters, lr=1e-2, moments="8bit")
    reference = ReferenceAdamW(lr=1e-2)
    for step in range(STEPS):
        set_gradients(parameters, step)
        optimizer.step()
        reference.step(plain, [p.grad for p in parameters])
        rounded_to_8_bits(reference.moments[3])
    large = parameters[3]
    assert digest(large) == digest(plain[3])
    assert digest(optimizer.master_of(large)) == digest(reference.masters[3])
    for moment, expected in zip(optimizer.moments_of(large), reference.moments[3], strict=False):
        assert digest(moment) == digest(expected)


def test_8_bit_states_are_small():
    """Two bytes per element and whole blocks; small parameters and float64 keep wide moments."""
    parameters = make_parameters()
    optimizer = torch_offload.AdamW(parameters, moments="8bit")
    train(parameters, optimizer, range(1))
    for parameter in parameters:
        state = optimizer.state[parameter]
        if parameter.numel() < 4096:
            assert state["exp_avg"].dtype == torch.float32
            continue
        blocks = -(-parameter.numel() // 2048)
        assert [state[name].nbytes for name in ("exp_avg", "exp_avg_sq")] == [2048 * blocks] * 2
    wide = make_parameters(torch.float64)
    optimizer = torch_offload.AdamW(wide, moments="8bit")
    train(wide, optimizer, range(1))
    assert optimizer.state[wide[3]]["exp_avg"].dtype == torch.float64


def test_8_bit_moments_of_a_transposed_weight():
    """Elements are packed in memory order; unpacked they stand where they belong."""
    parameter = nn.Parameter(torch.zeros(100, 64, dtype=torch.bfloat16).t())
    optimizer = torch_offload.AdamW([parameter], betas=(0.0, 0.0), moments="8bit")
    parameter.grad = torch.zeros(64, 100, dtype=torch.bfloat16)
    parameter.grad[3, 71] = 2.0
    optimizer.step()
    first, second = optimizer.moments_of(parameter)
    assert first.nonzero().tolist() == second.nonzero().tolist() == [[3, 71]]
    assert (first[3, 71].item(), second[3, 71].item()) == (2.0, 4.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_states_change_form_with_the_options_of_the_saved_groups(dtype):
    """From 8 bits to fp32 for torch and back, and from one master to the other: nothing is lost that was there."""
    parameters = make_parameters(dtype)
    first = torch_offload.AdamW(parameters, moments="8bit")
    train(parameters, first, range(2))
    forms = [first]
    for moments, master in (("fp32", "fp32"), ("8bit", "split")):
        saved = copy.deepcopy(forms[-1].state_dict())
        saved["param_groups"][0].update(moments=moments, master=master)
        forms.append(torch_offload.AdamW(parameters))
        forms[-1].load_state_dict(saved)
    wide, back = forms[1:]
    assert everything(parameters, back) == everything(parameters, first)
    assert wide.state[parameters[3]]["exp_avg"].dtype == torch.float32
    for parameter in parameters:
        assert digest(wide.master_of(parameter)) == digest(first.master_of(parameter))
        assert [*map(digest, wide.moments_of(parameter))] == [*map(digest, first.moments_of(parameter))]
    torch.optim.AdamW(parameters).load_state_dict(wide.state_dict())


def test_a_state_of_torch_is_packed_when_loaded():
    """torch.optim.AdamW's moments go to 8 bits where this optimizer keeps them so."""
    parameters = make_parameters(torch.float32)
    theirs = torch.optim.AdamW(parameters)
    train(parameters, theirs, range(2))
    ours = torch_offload.AdamW(parameters, moments="8bit")
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    packed = torch.ops.torch_offload.pack_moment(theirs.state[parameters[3]]["exp_avg"], False)
    assert digest(ours.state[parameters[3]]["exp_avg"]) == digest(packed)
    train(parameters, ours, range(2, 3))


# --- States ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"master": "fp32"}, {"moments": "8bit"}], ids=str)
@pytest.mark.parametrize("way", ["state_dict", "file", "pickle", "deepcopy"])
def test_a_resumed_run_is_the_uninterrupted_run(options, way):
    """Saved after some steps in any way and loaded again, training goes on with the same bits."""
    straight = make_parameters()
    whole = torch_offload.AdamW(straight, lr=1e-2, **options)
    train(straight, whole, range(6))

    parameters = make_parameters()
    first = torch_offload.AdamW(parameters, lr=1e-2, **options)
    train(parameters, first, range(3))
    if way in ("pickle", "deepcopy"):
        second = pickle.loads(pickle.dumps(first)) if way == "pickle" else copy.deepcopy(first)
        resumed = second.param_groups[0]["params"]
    else:
        resumed = [nn.Parameter(p.detach().clone()) for p in parameters]
        second = torch_offload.AdamW(resumed, lr=1e-2, **options)
        state = copy.deepcopy(first.state_dict())
        if way == "file":
            buffer = io.BytesIO()
            torch.save(state, buffer)
            buffer.seek(0)
            state = torch.load(buffer, weights_only=True)
        second.load_state_dict(state)
    train(resumed, second, range(3, 6))
    assert everything(resumed, second) == everything(straight, whole)


def test_states_have_the_layout_of_torch():
    """The same keys as in torch plus the low half; step is a tensor of one float32."""
    parameters = make_parameters()
    optimizer = torch_offload.AdamW(parameters)
    train(parameters, optimizer, range(1))
    saved = optimizer.state_dict()
    theirs = torch.optim.AdamW(make_parameters(torch.float32), fused=True)
    train(theirs.param_groups[0]["params"], theirs, range(1))
    expected = theirs.state_dict()
    assert set(saved["state"][0]) == set(expected["state"][0]) | {"master_low"}
    assert set(expected["param_groups"][0]) <= set(saved["param_groups"][0])
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert saved["state"][0][name].dtype == expected["state"][0][name].dtype
        assert saved["state"][0][name].shape == expected["state"][0][name].shape
    assert saved["state"][0]["master_low"].dtype == torch.int16


def test_float32_states_go_to_torch_and_back():
    """A run that changes the optimizer in the middle, in either direction, has the bits of one that does not."""
    plain = make_parameters(torch.float32)
    train(plain, torch.optim.AdamW(plain, lr=1e-2, fused=True), range(6))
    for first_class, second_class in (
        (torch.optim.AdamW, torch_offload.AdamW),
        (torch_offload.AdamW, torch.optim.AdamW),
    ):
        parameters = make_parameters(torch.float32)
        first = first_class(parameters, lr=1e-2, fused=True)
        train(parameters, first, range(3))
        second = second_class(parameters, lr=1e-2, fused=True)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(parameters, second, range(3, 6))
        assert [digest(p) for p in parameters] == [digest(p) for p in plain]


@pytest.mark.parametrize("theirs", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_bf16_states_of_torch_load(theirs):
    """Moments are widened, the master begins with the weight, and options that do not exist here are dropped."""
    parameters = make_parameters()
    before = torch.optim.AdamW(parameters, lr=1e-2, **theirs)
    train(parameters, before, range(3))
    optimizer = torch_offload.AdamW(parameters)
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    for parameter in parameters:
        state, former = optimizer.state[parameter], before.state[parameter]
        assert digest(state["exp_avg"]) == digest(former["exp_avg"].float())
        assert digest(state["exp_avg_sq"]) == digest(former["exp_avg_sq"].float())
        assert state["step"].item() == 3
        assert digest(optimizer.master_of(parameter)) == digest(parameter.detach().float())
    assert optimizer.param_groups[0]["lr"] == 1e-2
    train(parameters, optimizer, range(3, 4))


def test_our_bf16_states_load_into_torch():
    """torch takes them as its own, rounded to the dtype of its parameters, and trains on."""
    parameters = make_parameters()
    ours = torch_offload.AdamW(parameters)
    train(parameters, ours, range(2))
    theirs = torch.optim.AdamW(parameters, fused=True)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert theirs.state[parameters[0]]["exp_avg"].dtype == torch.bfloat16
    train(parameters, theirs, range(2, 3))


def test_a_state_of_another_shape_is_refused():
    """The message names both shapes, and the optimizer goes on with its own state."""
    parameters = make_parameters()
    optimizer = torch_offload.AdamW(parameters)
    train(parameters, optimizer, range(1))
    before = everything(parameters, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg of shape \(3,\) loaded for a parameter of \(33, 65\)"):
        optimizer.load_state_dict(state)
    assert everything(parameters, optimizer) == before


def test_weights_loaded_under_a_state_stay_what_was_loaded():
    """A weight written from outside keeps its value: its low half never rounds to another one."""
    parameter = make_parameters()[0]
    optimizer = torch_offload.AdamW([parameter], lr=1e-2)
    train([parameter], optimizer)
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape))
    assert digest(to_bf16(optimizer.master_of(parameter))) == digest(parameter.detach())


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foreach": True}, "takes no foreach=True"),
        ({"capturable": True}, "takes no capturable=True"),
        ({"differentiable": True}, "takes no differentiable=True"),
        ({"fused": False}, "no implementation but the fused one"),
        ({"master": "bf16"}, "master must be one of 'split', 'fp32', got 'bf16'"),
        ({"moments": "4bit"}, "moments must be one of 'fp32', '8bit', got '4bit'"),
        ({"moments": "8bit", "amsgrad": True}, "amsgrad keeps a third moment that has no 8-bit form"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be above 0"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"betas": (1.0, 0.9)}, "Invalid beta"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(ValueError, match=message):
        torch_offload.AdamW(make_parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=str)
def test_dtypes_that_cannot_be_trained(dtype):
    with pytest.raises(TypeError, match=f"trains bfloat16, float32 and float64, got {dtype}; convert"):
        torch_offload.AdamW(make_parameters(dtype))


def test_sparse_gradients_are_refused():
    parameter = make_parameters()[0]
    optimizer = torch_offload.AdamW([parameter])
    parameter.grad = torch.zeros_like(parameter).to_sparse()
    with pytest.raises(RuntimeError, match=r"dense gradients, got layout torch.sparse_coo; use torch.optim.SparseAdam"):
        optimizer.step()


def test_a_scaled_gradient_cannot_be_clipped_in_the_step():
    parameters = make_parameters()
    optimizer = torch_offload.AdamW(parameters, max_grad_norm=1.0)
    set_gradients(parameters, 0)
    optimizer.grad_scale = torch.tensor(8.0)
    with pytest.raises(RuntimeError, match=r"call scaler\.unscale_"):
        optimizer.step()


def operator_arguments(count: int = 2) -> dict[str, Any]:
    weights = [torch.ones(8, dtype=torch.bfloat16) for _ in range(count)]
    wide = [[torch.zeros(8) for _ in range(count)] for _ in range(2)]
    masters = [torch.zeros(8, dtype=torch.int16) for _ in range(count)]
    steps = [torch.ones(()) for _ in range(count)]
    lists = {"self": weights, "grads": weights, "exp_avgs": wide[0], "exp_avg_sqs": wide[1], "max_exp_avg_sqs": []}
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    return {**lists, "masters": masters, "state_steps": steps, **numbers, "amsgrad": False, "maximize": False}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grads": []}, ValueError, "grads has 0 tensors, expected 2"),
        ({"amsgrad": True}, ValueError, "max_exp_avg_sqs has 0 tensors, expected 2"),
        ({"masters": []}, ValueError, "a bfloat16 parameter needs a master"),
        ({"exp_avgs": [torch.zeros(8), torch.zeros(9)]}, ValueError, "exp_avgs must have the device, sizes"),
        ({"exp_avgs": [torch.zeros(2048).byte()] * 2}, TypeError, "exp_avg_sqs must be packed"),
        (
            {name: [torch.zeros(8).byte()] * 2 for name in ("exp_avgs", "exp_avg_sqs")},
            ValueError,
            "2048 contiguous bytes",
        ),
        ({"exp_avg_sqs": [torch.zeros(8).half()] * 2}, TypeError, "exp_avg_sqs must be Float, got Half"),
        ({"masters": [torch.zeros(8).double()] * 2}, TypeError, "masters must be Float, got Double"),
        ({"grads": [torch.zeros(8).half()] * 2}, TypeError, "a gradient must be float32 or"),
        ({"grads": [torch.zeros(4)] * 2}, ValueError, "a gradient must have the device and sizes"),
        ({"self": [torch.zeros(8).double()] * 2}, TypeError, "a parameter must be bfloat16 or float32, got Double"),
        ({"self": [torch.zeros(8)] * 2}, TypeError, "a gradient must be float32 or"),
        ({"self": [torch.zeros(16, dtype=torch.bfloat16)[::2]] * 2}, ValueError, "must be dense in memory"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_wrong_calls_of_the_operator(change, error, message):
    """A wrong call is refused by name before anything is written."""
    arguments = operator_arguments() | change
    before = digest(arguments["exp_avgs"][0])
    with pytest.raises(error, match=message):
        torch.ops.torch_offload.fused_adamw_(**arguments)
    assert digest(arguments["exp_avgs"][0]) == before
