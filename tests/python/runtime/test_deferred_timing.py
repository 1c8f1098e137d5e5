"""When recorded work runs, who sees it, what it keeps alive, and what happens if it cannot run."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.bare_training import PAGE_ELEMENTS, Run, adamw, assert_equal_bits, make_engine
from support.bits import same_bits
from support.paging import wait_until
from torch import Tensor, nn

from torch_offload import _C

pytestmark = pytest.mark.alone


def leave_step_pending(run: Run) -> None:
    """A gradient, everything sent away, and a step that is recorded and not ended."""
    run.optimizer = adamw(run.parameters)
    run.backward()
    run.evict()
    run.unended_step()


def test_nothing_is_read_for_a_step(scratch: Path) -> None:
    """A step over pages on SSD reads none of them; reading one weight then runs the work of that weight only."""
    run = Run(make_engine(scratch))
    run.optimizer = adamw(run.parameters)
    run.backward()
    run.unended_step()
    run.everything()
    run.evict()
    before = run.engine.statistics()["read_bytes"]
    run.unended_step()
    assert run.engine.statistics()["read_bytes"] == before
    assert all(run.engine.has_pending_work(p) for p in run.parameters if _C.is_managed(p))
    run.parameters[0].detach().clone()
    assert not run.engine.has_pending_work(run.parameters[0])
    assert not run.engine.has_pending_work(run.optimizer.state[run.parameters[0]]["exp_avg"])
    assert run.engine.has_pending_work(run.parameters[1])


@pytest.mark.parametrize("role", ["weight", "gradient", "state"])
def test_whoever_is_read_first(scratch: Path, role: str) -> None:
    """Reading any tensor of a recorded step gives the value after it."""

    def tensors(run: Run) -> list[Tensor]:
        by_role = {"weight": run.parameters, "gradient": run.gradients(), "state": run.states()}
        return [tensor.detach().clone() for tensor in by_role[role]]

    runs = (Run(), Run(make_engine(scratch)))
    for run in runs:
        run.optimizer = adamw(run.parameters)
        run.backward()
        run.evict()
        nn.utils.clip_grad_norm_(run.parameters, 0.5)
        run.unended_step()
    assert all(runs[1].engine.has_pending_work(p) for p in runs[1].parameters if _C.is_managed(p))
    assert_equal_bits(tensors(runs[1]), tensors(runs[0]))


def test_raw_access_runs_the_work(scratch: Path) -> None:
    """A numpy view made while work is outstanding shows the value after it."""
    plain, paged = Run(), Run(make_engine(scratch))
    for run in (plain, paged):
        leave_step_pending(run)
    assert paged.engine.has_pending_work(paged.parameters[0])
    shown = torch.from_numpy(paged.parameters[0].detach().numpy().copy())
    assert same_bits(shown, plain.parameters[0])
    assert paged.count("faults") > 0


def test_work_on_a_pinned_tensor_is_done_at_once(scratch: Path) -> None:
    """Somebody who holds the address of a weight sees a step when it is taken."""
    plain, paged = Run(), Run(make_engine(scratch))
    for run in (plain, paged):
        run.optimizer = adamw(run.parameters)
        run.backward()
        run.evict()
    with paged.engine.pin(paged.parameters[0]):
        view = paged.parameters[0].detach().numpy()
        plain.unended_step()
        paged.unended_step()
        assert same_bits(torch.from_numpy(view), plain.parameters[0])
        assert not paged.engine.has_pending_work(paged.parameters[0])
    assert paged.engine.has_pending_work(paged.parameters[1])
    assert_equal_bits(paged.everything(), plain.everything())


def test_step_without_room(scratch: Path) -> None:
    """A step that finds no room says so; what it could not do is done later, and once."""
    pages = 8
    page_bytes = PAGE_ELEMENTS * 4
    plain = [torch.rand(pages * PAGE_ELEMENTS) for _ in range(4)]
    paged = [tensor.clone() for tensor in plain]
    other = torch.zeros(pages * PAGE_ELEMENTS)
    engine = make_engine(scratch, budget_bytes=(2 * pages + 2) * page_bytes)  # an update of one page wants three
    for tensor in (*paged, other):
        engine.manage(tensor, kind="state", label="tensor")
        engine.evict(tensor)

    def step(tensors: list[Tensor]) -> None:
        torch._foreach_mul_([tensors[1]], 0.5)
        members = [[tensor] for tensor in tensors]
        counts = [torch.tensor(3.0)]
        options = {"weight_decay": 0.1, "amsgrad": False, "maximize": False}
        torch._fused_adamw_(*members, [], counts, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, **options)

    step(plain)
    with engine.pin(paged[0]), engine.pin(other), pytest.raises(MemoryError, match="in pages that have to stay"):
        step(paged)
    engine.flush()
    assert_equal_bits([tensor.clone() for tensor in paged], plain)


def test_pages_in_memory_are_updated_at_once(scratch: Path) -> None:
    """With room for everything nothing is put off once the states exist."""
    run = Run(make_engine(scratch, budget_bytes=16 << 20))
    run.optimizer = adamw(run.parameters)
    run.backward()
    run.unended_step()
    run.everything()
    at_once, all_pages = run.count("applied_at_once"), run.count("applied_pages")
    run.unended_step()
    assert run.count("applied_pages") - all_pages == run.count("applied_at_once") - at_once > 0
    assert not run.engine.has_pending_work(run.parameters[0])


@pytest.mark.parametrize("steps", [3, 70])
def test_work_that_nobody_reads(scratch: Path, steps: int) -> None:
    """Work piles up for weights that nobody reads, within bounds, and comes out right."""
    results = []
    for run in (Run(), Run(make_engine(scratch))):
        run.optimizer = adamw(run.parameters)
        run.backward()
        run.evict()
        for _ in range(steps):
            run.unended_step()
            run.evict()
        results.append(run.everything())
    assert (run.count("forced_chains") > 0) == (steps > 64)
    assert_equal_bits(results[1], results[0])


def test_prefetch_runs_the_work_beside_the_program(scratch: Path) -> None:
    """A prefetch has the work done by the engine's own thread, with the same bits."""
    plain, paged = Run(), Run(make_engine(scratch, budget_bytes=4 << 20))
    for run in (plain, paged):
        run.optimizer = adamw(run.parameters)
        for _ in range(2):
            run.backward()
            run.evict()
            nn.utils.clip_grad_norm_(run.parameters, 0.5)
            run.unended_step()
    weight = paged.parameters[0]

    def is_done() -> bool:
        paged.engine.prefetch(weight)
        return not paged.engine.has_pending_work(weight)

    wait_until(is_done, "a prefetch had applied the work of its weight")
    assert_equal_bits(paged.everything(), plain.everything())


def test_many_readers(scratch: Path) -> None:
    """Threads that meet at the same pages run their work once."""
    plain, paged = Run(), Run(make_engine(scratch, budget_bytes=4 << 20))
    for run in (plain, paged):
        run.optimizer = adamw(run.parameters)
        run.backward()
        run.evict()
        nn.utils.clip_grad_norm_(run.parameters, 0.5)
        run.unended_step()
    expected = plain.everything()
    with ThreadPoolExecutor(4) as pool:
        for values in pool.map(lambda _: paged.everything(), range(8)):
            assert_equal_bits(values, expected)
    managed = sum(_C.is_managed(p) for p in paged.parameters)
    assert paged.count("recorded_elements") == 2 * managed


def test_flush_leaves_nothing_outstanding(scratch: Path) -> None:
    """After a flush every recorded operator has run on every page."""
    run = Run(make_engine(scratch))
    leave_step_pending(run)
    run.engine.flush()
    managed = [p for p in run.parameters if _C.is_managed(p)]
    assert not any(run.engine.has_pending_work(p) for p in managed)
    pages = sum(-(-p.numel() // PAGE_ELEMENTS) for p in managed)
    assert run.count("applied_pages") == pages


def test_dropped_gradients_go_when_their_work_is_done(scratch: Path) -> None:
    """A gradient set to None lives as long as the recorded step needs it, and no longer."""
    run = Run(make_engine(scratch))
    leave_step_pending(run)
    run.engine.flush()
    run.evict()
    with_gradients = run.count("stored_bytes")
    gradient_bytes = sum(g.nbytes for g in run.gradients() if _C.is_managed(g))
    run.unended_step()
    run.optimizer.zero_grad()
    assert run.count("stored_bytes") == with_gradients
    run.engine.flush()
    run.evict()
    wait_until(lambda: run.count("stored_bytes") <= with_gradients - gradient_bytes, "the gradients were gone")


def test_deleted_weights_take_their_work_along(scratch: Path) -> None:
    """Work whose results nobody can see any more is discarded with its tensors."""
    engine = make_engine(scratch)
    run = Run(engine)
    run.optimizer = adamw(run.parameters)
    run.backward()
    run.unended_step()
    run.evict()
    run.unended_step()
    applied = run.count("applied_pages")
    del run
    gc.collect()
    assert engine.managed_count() == 0
    # The I/O thread may own the segment that it wrote last a little longer than the one that waited for the page.
    wait_until(lambda: engine.statistics()["stored_bytes"] == 0, "nothing was stored")
    engine.flush()
    assert engine.statistics()["applied_pages"] == applied


def test_unmanage_applies_what_is_recorded(scratch: Path) -> None:
    """A tensor that leaves the engine has the value after its recorded work, and is ordinary memory."""
    plain, paged = Run(), Run(make_engine(scratch))
    for run in (plain, paged):
        leave_step_pending(run)
    for parameter in paged.parameters:
        if _C.is_managed(parameter):
            paged.engine.unmanage(parameter)
    assert not any(_C.is_managed(p) for p in paged.parameters)
    assert_equal_bits(paged.everything(), plain.everything())


@contextmanager
def flushed_denormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_recorded_work_keeps_the_rounding_of_its_thread(scratch: Path) -> None:
    """Denormals are flushed, or not, as on the thread that called the operator, whoever runs it."""
    weights = torch.full((PAGE_ELEMENTS * 2,), 2e-38)
    engine = make_engine(scratch)
    engine.manage(weights, kind="parameter", label="weights")
    engine.evict(weights)
    with flushed_denormals():
        torch._foreach_mul_([weights], 0.25)
    assert engine.has_pending_work(weights)
    assert weights.sum().item() == 0.0
    engine.evict(weights)
    weights.fill_(2e-38)
    engine.evict(weights)
    torch._foreach_mul_([weights], 0.25)
    with flushed_denormals():
        kept = weights.view(torch.int32).clone()
    assert bool((kept != 0).all())
