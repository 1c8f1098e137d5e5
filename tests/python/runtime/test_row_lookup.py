"""`embedding` over a frozen table that is larger than its budget: only pages of the rows that it reads come in."""

from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.isolation import in_child
from torch import nn

from torch_offload import Config, OutOfTierMemory

ROWS, WIDTH = 4096, 1024
PAGE_ELEMENTS = 4096  # four rows
BUDGET_BYTES = 1 << 20
TABLE_BYTES = 4 * ROWS * WIDTH

pytestmark = pytest.mark.any_torch


def config_for(scratch: str) -> Config:
    return Config(ram=BUDGET_BYTES, ssd=scratch, min_paged_bytes=0, page_elements=PAGE_ELEMENTS)


def counted(scratch: str, seed: int, count: int) -> tuple[bool, int, int, int]:
    """Look up random rows; returns equality, pages read, distinct rows and the most memory in use."""
    import torch_offload

    torch.manual_seed(seed)
    table = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
    rows = torch.randint(0, ROWS, (2, count))
    expected = table(rows)
    torch_offload.wrap(table, config=config_for(scratch))
    before = torch_offload.report()
    found = table(rows)
    after = torch_offload.report()
    pages = (after.ssd_read_bytes - before.ssd_read_bytes) // (4 * PAGE_ELEMENTS)
    is_equal = found.numpy().tobytes() == expected.numpy().tobytes()  # in no memory of the budget
    return is_equal, pages, len(rows.unique()), after.host_peak_bytes


@pytest.mark.parametrize("count", [1, 7, 100])
def test_reads_pages_of_its_rows(count, scratch):
    """A table of sixteen times the budget, rows of more than it, too. Method: bits, the engine's counters."""
    is_equal, pages, distinct, peak_bytes = in_child(counted, str(scratch), 1, count)
    assert is_equal
    assert 0 < pages <= 2 * distinct
    assert peak_bytes <= BUDGET_BYTES


def views(scratch: str) -> list[str]:
    """Return which of many ways to ask a table differ from plain torch."""
    import torch_offload

    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH)
    wide = torch.randn(ROWS, WIDTH).to(torch.bfloat16)
    rows = torch.randint(0, ROWS, (3, 5))
    asked = {
        "twice the same": (lambda t: t, torch.tensor([7, 7, 0, ROWS - 1])),
        "three dimensions": (lambda t: t, rows[None]),
        "none": (lambda t: t, rows[:0]),
        "one": (lambda t: t, torch.tensor(5)),
        "int32": (lambda t: t, rows.int()),
        "every other": (lambda t: t, rows[:, ::2]),
        "in falling order": (lambda t: t, torch.arange(ROWS - 1, ROWS - 300, -7)),
        "some columns": (lambda t: t[:, 3:700], rows),
        "rows from 100 on": (lambda t: t[100:], rows % (ROWS - 100)),
        "every other row": (lambda t: t[::2], rows // 2),
        "columns as rows": (lambda t: t.T, rows % WIDTH),
        "one column": (lambda t: t[:, 9:10], rows),
    }
    tables = {"of_float": table, "of_bfloat16": wide}
    expected = {
        (kind, name): nn.functional.embedding(indices, view(weight))
        for kind, weight in tables.items()
        for name, (view, indices) in asked.items()
    }
    module = nn.ParameterDict({kind: nn.Parameter(weight, requires_grad=False) for kind, weight in tables.items()})
    config = config_for(scratch).replace(ram=4 * TABLE_BYTES)  # a view that has no rows needs all of it
    torch_offload.wrap(module, config=config)
    return [
        f"{kind}, {name}"
        for kind in tables
        for name, (view, indices) in asked.items()
        if not same_bits(nn.functional.embedding(indices, view(module[kind])), expected[kind, name])
    ]


def test_rows_are_those_of_plain_torch(scratch):
    """Indices and tables of many shapes. Method: the bits of plain torch."""
    assert in_child(views, str(scratch)) == []


def errors(scratch: str, row: int) -> tuple[str, str, bool]:
    """Return the error of plain torch, that of a paged table, and whether that gives the right rows afterwards."""
    import torch_offload

    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
    good, bad = torch.tensor([1, 2]), torch.tensor([1, row])
    expected = table(good)

    def error_of() -> str:
        try:
            table(bad)
        except IndexError as error:
            return str(error)
        return "none"

    plain = error_of()
    torch_offload.wrap(table, config=config_for(scratch))
    return plain, error_of(), same_bits(table(good), expected)


@pytest.mark.parametrize("row", [-1, ROWS, 1 << 40])
def test_row_that_is_not_there_is_torchs_error(row, scratch):
    """Method: the message of plain torch, and rows that are there after it."""
    plain, paged, is_equal = in_child(errors, str(scratch), row)
    assert plain == paged != "none"
    assert is_equal


def train(scratch: str | None, steps: int) -> list[Any]:
    """Train a table and look rows up without gradients between the steps; None: plain torch."""
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, WIDTH, padding_idx=2)
    if scratch is not None:
        import torch_offload

        torch_offload.wrap(table, config=config_for(scratch).replace(ram=6 * TABLE_BYTES))
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.1)
    rows = torch.randint(0, ROWS, (8,))
    found = []
    for _ in range(steps):
        table(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(table((rows + 1) % ROWS))
        with torch.inference_mode():
            found.append(torch.empty(8, WIDTH).copy_(table(rows)))
    found.append(table.weight.detach())
    return [tensor.numpy().copy() for tensor in found]


def test_table_that_trains_is_updated_first(scratch):
    """Rows are looked up while the update of the table is deferred. Method: the bits of plain torch, three steps."""
    expected = in_child(train, None, 3)
    found = in_child(train, str(scratch), 3)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(expected, found, strict=True))


def refusal(scratch: str, kind: str) -> str:
    """Return why such a module is refused, or nothing."""
    import torch_offload

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH)
            self.head = nn.Linear(WIDTH, ROWS, bias=False)
            self.head.weight = self.table.weight

    modules = {
        "frozen": lambda: nn.Embedding(ROWS, WIDTH).requires_grad_(False),
        "trained": lambda: nn.Embedding(ROWS, WIDTH),
        "tied": lambda: Tied().requires_grad_(False),
        "renormed": lambda: nn.Embedding(ROWS, WIDTH, max_norm=1.0).requires_grad_(False),
    }
    try:
        torch_offload.wrap(modules[kind](), config=config_for(scratch))
    except OutOfTierMemory as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "is_refused"), [("frozen", False), ("trained", True), ("tied", True), ("renormed", True)]
)
def test_only_a_table_that_is_read_by_rows_may_be_larger_than_the_budget(kind, is_refused, scratch):
    """Method: what `wrap` says to a table of sixteen times the budget."""
    message = in_child(refusal, str(scratch), kind)
    assert ("needed for" in message) is is_refused
