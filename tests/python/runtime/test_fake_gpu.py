"""A module whose tensors are on a GPU, paged: all that runs above the driver and the kernels, on a fake of both."""

import ctypes
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.cases import CASES, differing
from support.fake_gpu import ROOT, driver, in_gpu_child
from support.gpu_training import check
from support.training import STEPS, Case, Placement, train_both
from torch import nn

import torch_offload
from torch_offload import Config, ConfigError, OffloadError, OutOfTierMemory, TierIOError

SIDES = ("gpu", "cpu")
ACTIVATIONS = ("page", "keep", "ram", "recompute")
# Their budget grows with what they would save without checkpointing, and has room for all that they do.
FITS_ABOVE_SSD = (
    "qwen3-sgd-bf16-nonreentrant-noclip-accumulate-tied-full-plain",
    "gpt2-fusedsgd-fp32-nonreentrant-clip-accumulate-tied-full-plain",
)
PLACED = [
    (case, Placement(device=True, kind="cuda", activations=choice, optimizer_device=SIDES[(index + turn) % 2]))
    for index, case in enumerate(CASES)
    for turn, choice in enumerate(ACTIVATIONS)
    if choice != "recompute" or case.checkpointing == "stored" or case.loop == "trainer"  # else refused: done already
]


@pytest.mark.rotating(parts=12)
@pytest.mark.parametrize(("case", "placement"), PLACED, ids=[f"{case.name}-{place.name}" for case, place in PLACED])
def test_paged_training_is_bitwise_equal(case: Case, placement: Placement, scratch, fake_gpu):
    """Losses, weights, gradients and states are those of the run in the GPU, and pages crossed every link both ways."""
    plain, paged, report = in_gpu_child(fake_gpu, train_both, case, str(scratch), placement)
    plain.assert_trained(STEPS * case.micro_batch_count)
    assert paged.losses == plain.losses
    assert differing(paged.digests, plain.digests) == []
    assert report.device.name.startswith("cuda:0")
    assert report.device.peak_bytes <= report.device.budget_bytes
    assert report.host_peak_bytes <= report.budget_bytes
    assert sum(report.device.to_device_bytes.values()) > 0
    assert sum(report.device.to_host_bytes.values()) > 0
    assert report.faults == 0
    assert (report.counters["saved_bytes"] > 0) == (placement.activations in ("page", "ram"))
    if placement.activations == "keep" or (placement.activations == "page" and case.name not in FITS_ABOVE_SSD):
        assert report.ssd_written_bytes > 0
        assert report.ssd_read_bytes > 0


def small_config(scratch: str, **settings: object) -> Config:
    """1 MiB of pages in the GPU over as much memory; what is below 1 KiB stays torch's."""
    defaults = {"gpu": "2MiB", "gpu_reserved": "1MiB", "ram": "1MiB", "ssd": scratch}
    return Config(**{**defaults, "page_elements": 4096, "min_paged_bytes": 1024, **settings})


class Tied(nn.Module):
    """Two parameters over one storage, a small one, a buffer of integers and one of numbers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        memory = torch.randn(64, 64, generator=generator)
        self.first = nn.Parameter(memory)
        self.second = nn.Parameter(memory.view(32, 128))
        self.bias = nn.Parameter(torch.ones(8))
        self.register_buffer("order", torch.arange(4096))
        self.register_buffer("scale", torch.full((16,), 0.5))


def bring_and_take_back(scratch: str) -> None:
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    objects = [*module.parameters(), *module.buffers()]
    module.first.grad = torch.full((64, 64), 3.0)
    torch_offload.wrap(module, config=small_config(scratch))
    assert all(a is b for a, b in zip([*module.parameters(), *module.buffers()], objects, strict=True))
    assert all(tensor.is_cuda for tensor in (*objects, module.first.grad))
    assert module.first.untyped_storage().data_ptr() == module.second.untyped_storage().data_ptr()
    assert torch_offload.evict(module) == 0
    with torch.no_grad():
        module.first += 1
    assert same_bits(module.second.cpu(), before["second"] + 1)
    assert torch_offload.report().device.to_device_bytes["parameter"] > 0

    torch_offload.unwrap(module)
    assert all(a is b for a, b in zip([*module.parameters(), *module.buffers()], objects, strict=True))
    assert all(tensor.device.type == "cpu" for tensor in (*objects, module.first.grad))
    assert module.first.untyped_storage().data_ptr() == module.second.untyped_storage().data_ptr()
    assert same_bits(module.first, before["first"] + 1)
    assert same_bits(module.first.grad, torch.full((64, 64), 3.0))
    assert all(same_bits(module.state_dict()[name], before[name]) for name in ("bias", "order", "scale"))
    assert type(module.first) is nn.Parameter


def test_wrapping_brings_a_module_there_and_unwrapping_back(scratch, fake_gpu):
    """The same objects, tied ones still tied, gradients and what is too small to be paged along."""
    in_gpu_child(fake_gpu, bring_and_take_back, str(scratch))


def save_and_load(scratch: str) -> None:
    from safetensors.torch import load_file, save_file

    module = nn.Linear(128, 128)
    expected = module.weight.detach().clone()
    torch_offload.wrap(module, config=small_config(scratch))
    assert torch_offload.evict(module.weight) == 0
    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    assert same_bits(torch.load(saved, map_location="cpu")["weight"], expected)
    assert torch_offload.evict(module.weight) == 0
    file = Path(scratch) / "weights.safetensors"
    save_file(module.state_dict(), file)
    assert same_bits(load_file(file)["weight"], expected)


def test_what_is_saved_is_fetched_first(scratch, fake_gpu):
    """By torch, which reads storages behind the dispatcher, and by safetensors."""
    in_gpu_child(fake_gpu, save_and_load, str(scratch))


def hold_for_bare_addresses(scratch: str) -> None:
    module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    torch_offload.wrap(module, config=small_config(scratch))
    torch_offload.evict(module)
    with torch_offload.pinned(module[0]):
        assert torch_offload.is_resident(module[0].weight)
        assert torch_offload.evict(module) == module[0].weight.nbytes
    assert torch_offload.evict(module) == 0
    more = nn.Sequential(*(nn.Linear(128, 128) for _ in range(16)))
    torch_offload.wrap(more)
    with pytest.raises(OutOfTierMemory, match="device memory tier"), torch_offload.pinned(module, more):
        pass
    assert torch_offload.evict(module) == 0


def test_pinned_modules_stay(scratch, fake_gpu):
    """While the context is open; what does not fit at once is refused."""
    in_gpu_child(fake_gpu, hold_for_bare_addresses, str(scratch))


def refuse_a_small_device(scratch: str) -> None:
    module = nn.Linear(1024, 512).to("cuda")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(OutOfTierMemory, match=r"weight .*give a gpu"):
        torch_offload.wrap(module, config=small_config(scratch))
    assert all(same_bits(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not any(torch_offload._C.is_managed(tensor) for tensor in module.parameters())


def test_a_device_smaller_than_its_largest_tensor_is_refused(scratch, fake_gpu):
    """A module that is on the GPU already, the kind of device left open: refused before anything is brought."""
    in_gpu_child(fake_gpu, refuse_a_small_device, str(scratch))


def refuse_capture(scratch: str) -> None:
    module = nn.Linear(128, 128)
    torch_offload.wrap(module, config=small_config(scratch))
    batch = torch.ones(4, 128, device="cuda")
    expected = module(batch)
    driver().fake_gpu_set_capturing(True)
    with pytest.raises(ConfigError, match="a CUDA graph cannot be captured over memory that is paged"):
        module(batch)
    driver().fake_gpu_set_capturing(False)
    assert same_bits(module(batch), expected)


def test_capture_into_a_graph_is_refused(scratch, fake_gpu):
    """With the reason; outside of it the module works as before."""
    in_gpu_child(fake_gpu, refuse_capture, str(scratch))


def call_often(module: nn.Module, batch: torch.Tensor) -> None:
    """More than fits the pages' part: something has to come."""
    for _ in range(20):
        module(batch)


def lose_the_device(scratch: str) -> None:
    module = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    before = [weight.detach().clone() for weight in module.parameters()]
    torch_offload.wrap(module, config=small_config(scratch, gpu="1.25MiB"))
    torch_offload.evict(module)
    batch = torch.ones(4, 128, device="cuda")
    with torch.no_grad():
        module(batch)
        module[7].weight += 1
        driver().fake_gpu_fail_copy()
        for _ in range(2):
            with pytest.raises(TierIOError, match="is lost"):
                call_often(module, batch)
    with pytest.raises(TierIOError, match="is lost"):
        torch_offload.unwrap(module)
    changed = module[7].weight
    for weight, known in zip(module.parameters(), before, strict=True):
        if weight is changed:
            assert weight.is_cuda
        else:
            assert same_bits(weight, known)


def test_a_lost_device_is_a_typed_error(scratch, fake_gpu):
    """At the access that finds it and at every later one; nothing hangs, and unwrapping gives back what is intact."""
    in_gpu_child(fake_gpu, lose_the_device, str(scratch), timeout_seconds=60)


def train_with_own_optimizer(scratch: str, side: str) -> None:
    def losses(config: Config | None) -> tuple[list[str], list[bytes]]:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))).bfloat16()
        if config is None:
            module.cuda()
        else:
            torch_offload.wrap(module, config=config)
        optimizer = torch_offload.AdamW(module.parameters(), lr=1e-2, moments="8bit", max_grad_norm=0.1)
        found = []
        for _ in range(4):
            loss = module(torch.ones(4, 128, dtype=torch.bfloat16, device="cuda")).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item().hex())
        return found, [weight.cpu().view(torch.uint8).numpy().tobytes() for weight in module.parameters()]

    plain = losses(None)
    assert len(set(plain[0])) == 4
    settings = {"gpu": "400KiB", "gpu_reserved": "120KiB", "ram": "512KiB", "optimizer_device": side}
    assert losses(small_config(scratch, page_elements=8192, **settings)) == plain
    report = torch_offload.report()
    assert report.device.to_device_bytes["parameter"] > 0
    assert (report.device.to_device_bytes["state"] > 0) == (side == "gpu")


@pytest.mark.parametrize(
    ("optimizer", "activations", "update"),
    [("own", "ram", "step"), ("fused", "page", "step"), ("own", "page", "backward"), ("sgd", "keep", "backward")],
)
def test_what_runs_on_a_real_gpu_runs(scratch, fake_gpu, optimizer, activations, update):
    """The training of tests/gpu, smaller."""
    settings = {"activations": activations, "optimizer_device": "gpu", "update": update}
    check(*in_gpu_child(fake_gpu, train_bare, optimizer, str(scratch), settings))


def train_bare(optimizer: str, scratch: str, settings: dict[str, str]) -> Any:
    from support import gpu_training

    return gpu_training.train_both(optimizer, gpu_training.FAKE, scratch, settings)


@pytest.mark.parametrize("side", SIDES)
def test_own_optimizer_is_bitwise_equal(scratch, fake_gpu, side):
    """Split masters, moments of 8 bit, clipping; updates on either side."""
    in_gpu_child(fake_gpu, train_with_own_optimizer, str(scratch), side)


def train_bare_llama(scratch: str) -> dict[str, float]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from gpu_training import SMOKE, Training

    turns = [Training(SMOKE, is_paged=is_paged, ssd=scratch).turn() for is_paged in (False, True)]
    assert turns[0].keys() < turns[1].keys()
    return turns[1]


def test_benchmark_of_training_runs(scratch, fake_gpu):
    """Its models train, in the GPU and paged."""
    turn = in_gpu_child(fake_gpu, train_bare_llama, str(scratch))
    assert turn["to device"] > 0
    assert turn["to host"] > 0


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Read a tensor as a kernel does: at its bare address."""
    content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return torch.frombuffer(bytearray(content), dtype=tensor.dtype).view(tensor.shape)


def run_a_fused_norm(scratch: str) -> tuple[torch.Tensor, torch.Tensor]:
    calls = []

    def fused(value, shape, weight, epsilon):
        calls.append(shape)
        return torch.rms_norm(host_copy(value), shape, host_copy(weight), epsilon).cuda(), value[:, :1]

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", fused, "CUDA")
    norm = nn.RMSNorm(4 * 4096)
    nn.init.uniform_(norm.weight)
    batch = torch.randn(2, 4 * 4096)
    with torch.no_grad():
        expected = norm(batch)
        torch_offload.wrap(norm, config=small_config(scratch))
        assert torch_offload.evict(norm) == 0
        found = norm(batch.cuda()).cpu()
    assert len(calls) == 1
    return found, expected


def test_composites_with_a_kernel_of_the_gpu_are_given_their_pages(scratch, fake_gpu):
    """`_fused_rms_norm` is one: what it uses is there when it runs, since it is not taken apart on a GPU."""
    found, expected = in_gpu_child(fake_gpu, run_a_fused_norm, str(scratch))
    assert same_bits(found, expected)


def refuse(*_: object, **__: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("refused")


def overwrite_in_vain(scratch: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    overwrites = {
        "normal_": lambda weight: weight.normal_(generator=torch.Generator()),
        "copy_": lambda weight: weight.copy_(torch.ones(weight.shape, dtype=torch.float64)),
    }
    module = nn.Sequential(*(nn.Linear(128, 128) for _ in range(24)))
    weight = module[0].weight
    before = weight.detach().clone()
    torch_offload.wrap(module, config=small_config(scratch))
    with torch.no_grad():
        module[1:](torch.ones(1, 128, device="cuda"))  # so that no frame still has the bytes by chance
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, refuse, "CUDA", allow_override=True)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="refused"):
        overwrites[name](weight)
    library._destroy()
    return weight.detach().cpu(), before


@pytest.mark.parametrize("name", ["normal_", "copy_"])
def test_what_a_gpu_may_refuse_keeps_its_bytes(scratch, fake_gpu, name):
    """A generator of the host, and a copy of another dtype, for which torch needs memory of its own."""
    found, before = in_gpu_child(fake_gpu, overwrite_in_vain, str(scratch), name)
    assert same_bits(found, before)


def ask_for_addresses(scratch: str) -> None:
    module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    torch_offload.wrap(module, config=small_config(scratch))
    weight = module[0].weight
    elsewhere = weight.untyped_storage().data_ptr()
    assert elsewhere not in (0, module[1].weight.untyped_storage().data_ptr())
    for read_only in (False, True):
        with pytest.raises(RuntimeError, match=r"torch_offload\.pinned"):
            weight.data_ptr()
        with torch_offload.pinned(module, read_only=read_only), torch_offload.pinned(weight):
            assert weight.data_ptr() == weight.view(-1).data_ptr() == elsewhere
    with pytest.raises(RuntimeError, match=r"torch_offload\.pinned"):
        weight.data_ptr()
    assert module[0].bias.data_ptr() == module[0].bias.untyped_storage().data_ptr()  # too small to be paged


def test_addresses_are_refused_outside_of_pins(scratch, fake_gpu):
    """What would lose a real device raises; storages can still be told apart."""
    in_gpu_child(fake_gpu, ask_for_addresses, str(scratch))


def meet_another_gpu(scratch: str) -> None:
    other = nn.Linear(128, 128).to("cuda:1")
    with pytest.raises(ConfigError, match=r"weight is on cuda:1, and pages are on cuda:0; .*set_device\(1\)"):
        torch_offload.wrap(other, config=small_config(scratch))
    module = nn.Linear(128, 128)
    expected = module.weight.detach().clone()
    torch_offload.wrap(module, config=small_config(scratch))
    source = torch.full((128, 128), 2.0, device="cuda:1")
    for write in (module.weight.copy_, lambda tensor: torch._foreach_copy_([module.weight], [tensor])):
        with torch.no_grad(), pytest.raises(ConfigError, match=r"paged on cuda:0 .* from one on cuda:1.*to\(\"cuda:0"):
            write(source)
    with pytest.raises(OffloadError, match=r"cannot move Linear from cuda:0 to cuda:1"):
        module.to("cuda:1")
    assert same_bits(module.weight.detach().to("cuda:1").cpu(), expected)
    with torch.no_grad():
        module.weight.copy_(source.to("cuda:0"))
    assert torch_offload.evict(module) == 0
    assert same_bits(module.weight.detach().cpu(), torch.full((128, 128), 2.0))


def test_another_gpu_does_not_write_to_pages(scratch, fake_gpu):
    """It has no access to them and both would be lost: copies from it, a module there and a move there are refused,
    with what to do; reading from here to there works."""
    in_gpu_child(fake_gpu, meet_another_gpu, str(scratch))


def look_for_a_gpu_that_is_not_visible(scratch: str) -> None:
    torch.cuda.current_device = lambda: 1
    with pytest.raises(ConfigError, match=r"no device cuda:1: there are 1; check CUDA_VISIBLE_DEVICES"):
        torch_offload.wrap(nn.Linear(128, 128), config=small_config(scratch))


def test_a_gpu_that_the_driver_does_not_show_is_named(scratch, fake_gpu):
    """As where CUDA_VISIBLE_DEVICES has changed since torch looked."""
    in_gpu_child(fake_gpu, look_for_a_gpu_that_is_not_visible, str(scratch))


def call_operators_that_say_too_little(scratch: str) -> None:
    library = torch.library.Library("too_little_said", "DEF")
    library.define("clear(Tensor x) -> ()")
    library.define("sum_and_view(Tensor(a) x) -> Tensor(a)")
    sums = []

    def clear(x: torch.Tensor) -> None:
        ctypes.memset(x.data_ptr(), 0, x.nbytes)

    def sum_and_view(x: torch.Tensor) -> torch.Tensor:
        sums.append(host_copy(x).sum())
        return x.view(-1)

    library.impl("clear", clear, "CUDA")
    library.impl("sum_and_view", sum_and_view, "CUDA")
    module = nn.Linear(128, 128)
    before = module.weight.detach().clone()
    torch_offload.wrap(module, config=small_config(scratch))
    with torch.no_grad():
        assert torch_offload.evict(module) == 0
        viewed = torch.ops.too_little_said.sum_and_view(module.weight)
        assert same_bits(torch.stack(sums), before.sum().view(1))
        assert viewed.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()
        assert torch_offload.evict(module) == 0
        torch.ops.too_little_said.clear(module.weight)
    assert torch_offload.evict(module) == 0
    assert not module.weight.detach().cpu().any()


def test_operators_of_others_that_say_too_little_are_served(scratch, fake_gpu):
    """One that returns a view has its bytes to read; what one that returns nothing writes, unsaid, is kept."""
    in_gpu_child(fake_gpu, call_operators_that_say_too_little, str(scratch))


def load_steps_of_a_gpu() -> None:
    parameter = nn.Parameter(torch.ones(64, 64).cuda())
    optimizer = torch_offload.AdamW([parameter])
    parameter.grad = torch.ones(64, 64).cuda()
    with torch.device("cuda"):
        optimizer.step()
    assert optimizer.state[parameter]["step"].device.type == "cpu"
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = saved["state"][0]["step"].cuda()
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[parameter]["step"].device.type == "cpu"
    assert optimizer.state[parameter]["step"].item() == 2


def test_counts_of_steps_stay_on_the_host(fake_gpu):
    """Also where they were saved on a GPU: each parameter's would be waited for in every step."""
    in_gpu_child(fake_gpu, load_steps_of_a_gpu)


KEPT: list[nn.Module] = []


def leave_pages_to_the_end(scratch: str) -> None:
    KEPT.append(nn.Sequential(*(nn.Linear(128, 128) for _ in range(24))))
    torch_offload.wrap(KEPT[0], config=small_config(scratch))
    KEPT[0](torch.ones(4, 128, device="cuda")).sum().backward()
    driver().fake_gpu_end_at_exit()


def test_a_program_ends_after_its_driver(scratch, fake_gpu):
    """With pages on the GPU that nobody took back: the driver refuses every call by the time they go."""
    in_gpu_child(fake_gpu, leave_pages_to_the_end, str(scratch), timeout_seconds=60)


def write_by_address(scratch: str) -> None:
    module = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    torch_offload.wrap(module, config=small_config(scratch))
    weights = [layer.weight for layer in module]
    assert torch_offload.evict(module) == 0
    with torch_offload.pinned(module):
        for weight in weights:
            ctypes.memset(weight.data_ptr(), 0, weight.nbytes)
    target, source = weights[0].untyped_storage(), torch.full((128, 128), 3.0).cuda().untyped_storage()
    target.copy_(source)
    assert torch_offload.evict(module) == 0
    assert same_bits(weights[0].detach().cpu(), torch.full((128, 128), 3.0))
    assert all(not weight.detach().cpu().any() for weight in weights[1:])


def test_writes_by_bare_addresses_are_kept(scratch, fake_gpu):
    """Of a kernel that nobody sees, inside a pin, and of a copy between storages: they count as written."""
    in_gpu_child(fake_gpu, write_by_address, str(scratch))


class Thrice(nn.Module):
    """Three operators save the same storage, one of them through a view; then it changes and is saved again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128, 128))
        self.addresses: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        self.addresses = [hidden.data_ptr()]
        first = (hidden * self.weight).sum() + (hidden * self.weight).sum() + (hidden.t() * self.weight).sum()
        self.addresses.append(hidden.data_ptr())
        with torch.no_grad():
            changed = hidden.detach().clone()
        second = (changed * self.weight).sum()
        with torch.no_grad():
            changed += 1
        return first + (changed * self.weight).sum() + 0 * second.detach()


def save_what_is_in_use(scratch: str) -> int:
    module, batch = Thrice(), torch.rand(128, 128)
    module(batch).backward()
    expected = module.weight.grad.clone()
    module.weight.grad = None
    torch_offload.wrap(module, config=small_config(scratch, activations="page"))
    module(batch.cuda()).backward()
    assert same_bits(module.weight.grad.cpu(), expected)
    assert len(set(module.addresses)) == 1
    return int(torch_offload.report().counters["saved_bytes"])


def test_what_is_saved_stays_where_kernels_use_it(scratch, fake_gpu):
    """Its bytes are copied into pages, once for all that saved the same; an earlier state is not taken for a later."""
    assert in_gpu_child(fake_gpu, save_what_is_in_use, str(scratch)) == 3 * 128 * 128 * 4


def cap_and_lift(scratch: str) -> list[float]:
    fractions: list[float] = []
    torch.cuda.get_per_process_memory_fraction = lambda *_: 0.75
    torch.cuda.set_per_process_memory_fraction = lambda fraction, _: fractions.append(fraction)
    module = nn.Linear(128, 128)
    torch_offload.wrap(module, config=small_config(scratch, gpu="65MiB", gpu_reserved="64MiB"))
    torch_offload.unwrap(module)
    return fractions


def test_the_cap_of_before_is_put_back(scratch, fake_gpu):
    """A script's own cap on torch's memory is what it was, once nothing is paged any more."""
    assert in_gpu_child(fake_gpu, cap_and_lift, str(scratch)) == [64 / 4096, 0.75]


def ask_for_too_much(scratch: str) -> list[bool]:
    torch.cuda.mem_get_info = lambda *_: (100 << 20, 512 << 20)
    module = nn.Linear(128, 128)
    with pytest.raises(ConfigError, match=r"gpu: 200 MiB do not fit cuda:0, where 100 MiB of 512 MiB are free"):
        torch_offload.wrap(module, config=small_config(scratch, gpu="200MiB", gpu_reserved="64MiB"))
    assert module.weight.device.type == "cpu"
    settings = {"gpu": "48MiB", "ram": "192MiB", "ssd": scratch}
    small, large = nn.Linear(256, 256), nn.Linear(512, 1024)
    torch_offload.wrap(nn.ModuleList([small, large]), **settings)
    assert small.weight.is_cuda
    return [torch_offload._C.is_managed(layer.weight) for layer in (small, large)]


def test_a_budget_is_held_against_what_is_free(scratch, fake_gpu):
    """Others use the GPU as well. Tensors that would waste most of a frame of 2 MiB stay torch's, unless asked."""
    assert in_gpu_child(fake_gpu, ask_for_too_much, str(scratch)) == [False, True]
