"""Hooks on optimizer steps: what no other hook saw is paged, and a step that has settled visits no parameter.

Method: a small module under a budget below its state, counts of searches and of bytes by kind.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from support.bits import digest
from support.paging import assert_bitwise_equal
from torch import nn

import torch_offload
from torch_offload import _C
from torch_offload.runtime.optimizer_hooks import STEPS_BETWEEN_SEARCHES, OptimizerHooks
from torch_offload.runtime.process import PROCESS


def make_module(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers)))


def train(module, optimizer, steps: int = 1) -> None:
    for step in range(steps):
        module(torch.full((2, 128), step / 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def searches(monkeypatch) -> list[torch.optim.Optimizer]:
    """The optimizers that were searched, in order."""
    found = []
    real = OptimizerHooks._adopt_gradients
    monkeypatch.setattr(
        OptimizerHooks,
        "_adopt_gradients",
        lambda self, optimizer: (found.append(optimizer), real(self, optimizer))[1],
    )
    return found


def test_a_settled_step_visits_no_parameter(config, searches):
    """Searched until nothing turned up, then once in a while."""
    module = torch_offload.wrap(make_module(), config=config)
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, 4)
    assert 1 <= len(searches) <= 3
    searches.clear()
    train(module, optimizer, STEPS_BETWEEN_SEARCHES)
    assert len(searches) == 1


def test_changes_are_searched_for(config, searches):
    """A group that is added, a state_dict that is loaded, a module that is wrapped later."""
    first, second = make_module(), make_module(2)
    torch_offload.wrap(first, config=config)
    optimizer = torch.optim.AdamW(first.parameters())
    other = torch.optim.SGD(second.parameters(), momentum=0.9)
    train(first, optimizer, 4)
    train(second, other, 4)
    assert other not in searches
    searches.clear()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(64))]})
    train(first, optimizer)
    assert searches == [optimizer]
    train(first, optimizer, 2)
    searches.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    train(first, optimizer)
    assert searches == [optimizer]
    torch_offload.wrap(second)
    train(second, other)
    assert other in searches
    states = [state["momentum_buffer"] for state in other.state.values()]
    assert all(_C.is_managed(state) for state in states)


def test_gradients_that_the_script_sets_are_paged_at_every_step(config, searches):
    """Such an optimizer never settles."""
    module = torch_offload.wrap(make_module(), config=config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(4):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all(_C.is_managed(parameter.grad) for parameter in module.parameters())
    assert len(searches) == 4


def test_parameters_frozen_at_first_are_hooked(config):
    """Nothing tells when they begin to train; their first gradient is paged when it is complete."""
    module = make_module().requires_grad_(False)
    torch_offload.wrap(module, config=config)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    for _ in range(10):
        module(torch.ones(1, 128))
    module.requires_grad_(True)
    module(torch.ones(1, 128)).sum().backward()
    assert all(_C.is_managed(parameter.grad) for parameter in module.parameters())


def test_conversions_are_noticed_late_in_a_run(config):
    """Parameters replaced long after the first searches."""
    module = torch_offload.wrap(make_module(), config=config)
    for _ in range(20):
        module(torch.ones(1, 128))
    module.to(torch.bfloat16)
    module(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
    assert all(_C.is_managed(parameter) for parameter in module.parameters())
    assert all(_C.is_managed(parameter.grad) for parameter in module.parameters())


@pytest.mark.parametrize("ram", ["8MiB", "1MiB"])
def test_states_from_a_file_are_those_of_their_parameters(config, tmp_path, ram):
    """Above and below the share that stays in memory while it is read: the next steps move them as states."""
    plain = make_module()
    optimizer = torch.optim.AdamW(plain.parameters())
    train(plain, optimizer, 2)
    torch.save({"model": plain.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    train(plain, optimizer, 2)

    paged = torch_offload.wrap(make_module(), config=config, ram=ram)
    resumed = torch.optim.AdamW(paged.parameters())
    content = torch.load(tmp_path / "checkpoint.pt")
    paged.load_state_dict(content["model"])
    resumed.load_state_dict(content["optimizer"])
    del content
    torch_offload.flush()
    before = torch_offload.report()
    train(paged, resumed, 2)
    after = torch_offload.report()
    assert after.host_peak_bytes <= after.budget_bytes
    if ram == "1MiB":
        assert before.written_bytes["other"] > 0
        states, others = (after.written_bytes[kind] - before.written_bytes[kind] for kind in ("state", "other"))
        assert states > 10 * others  # what a step makes and drops may leave as well
    assert PROCESS.session is not None
    assert_bitwise_equal([digest(weight) for weight in paged.parameters()], [digest(w) for w in plain.parameters()])


class RaisesInTheMiddle(torch.optim.SGD):
    """Updates half of its parameters, once."""

    is_broken = True

    @torch.no_grad()
    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        for position, parameter in enumerate(parameters):
            if self.is_broken and position == len(parameters) // 2:
                raise OSError("in the middle")
            parameter.add_(parameter.grad, alpha=-0.1)


def zeros_are_paged(parameter: torch.Tensor) -> bool:
    """What an optimizer makes of a parameter inside a step is paged from the start."""
    with torch.no_grad():
        return _C.is_managed(torch.zeros_like(parameter))


def test_a_step_that_raised_is_over(config):
    """Copies of parameters that an evaluation makes after it are ordinary; the next step is one again."""
    module = torch_offload.wrap(make_module(2), config=config)
    optimizer = RaisesInTheMiddle(module.parameters(), lr=0.1)
    module(torch.ones(2, 128)).sum().backward()
    with pytest.raises(OSError, match="in the middle"):
        optimizer.step()
    with torch.no_grad():
        module(torch.ones(2, 128))
    assert not zeros_are_paged(module[0].weight)
    seen = []
    with torch.no_grad():
        optimizer.is_broken = False
        optimizer.register_step_pre_hook(lambda *_: seen.append(zeros_are_paged(module[0].weight)))
        optimizer.step()
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    other.step(lambda: seen.append(zeros_are_paged(module[0].weight)) or torch.zeros(()))
    assert seen == [True, True]
    assert not zeros_are_paged(module[0].weight)


def test_a_closure_that_evaluates_does_not_end_the_step(config):
    """It calls the module in the middle of a step."""
    module = torch_offload.wrap(make_module(2), config=config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(2, 128)).square().mean()
        loss.backward()
        seen.append(zeros_are_paged(module[0].weight))
        return loss

    optimizer.step(closure)
    assert seen == [True]
    assert all(_C.is_managed(state["momentum_buffer"]) for state in optimizer.state.values())


def test_a_step_is_one_of_its_thread(config):
    """Another thread evaluates meanwhile: what it makes is ordinary."""
    module = torch_offload.wrap(make_module(2), config=config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2, 128)).sum().backward()
    seen = []

    def closure() -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(zeros_are_paged, module[0].weight).result())
        seen.append(zeros_are_paged(module[0].weight))
        return torch.zeros(())

    optimizer.step(closure)
    assert seen == [False, True]


@pytest.mark.parametrize("write", [torch.save, safetensors.torch.save_file], ids=["torch.save", "safetensors"])
def test_a_step_that_raised_in_the_middle_is_not_saved(config, tmp_path, write):
    """Until its optimizer has loaded a state, or the module is unwrapped. A step of another one changes nothing."""
    module = torch_offload.wrap(make_module(2), config=config)
    optimizer = RaisesInTheMiddle(module.parameters(), lr=0.1)
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    before = optimizer.state_dict()
    write(module.state_dict(), tmp_path / "before")
    module(torch.ones(2, 128)).sum().backward()
    with pytest.raises(OSError, match="in the middle"):
        optimizer.step()
    other.step()
    for _ in range(2):
        with pytest.raises(torch_offload.OffloadError, match="a step of RaisesInTheMiddle raised before its end"):
            write(module.state_dict(), tmp_path / "half")
    write({"other": torch.ones(3)}, tmp_path / "other")
    optimizer.load_state_dict(before)
    optimizer.is_broken = False
    optimizer.step()
    write(module.state_dict(), tmp_path / "after")
    optimizer.is_broken = True
    with pytest.raises(OSError, match="in the middle"):
        optimizer.step()
    write(torch_offload.unwrap(module).state_dict(), tmp_path / "unwrapped")
