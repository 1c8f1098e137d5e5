"""Operators over a frozen table that is larger than its budget: only pages of the rows that they read come in."""

from collections.abc import Callable
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


def make_table(operator: str) -> nn.Module:
    """A module with a table that the operator reads, as `weight`."""
    made = nn.EmbeddingBag(ROWS, WIDTH) if operator == "embedding_bag" else nn.Embedding(ROWS, WIDTH, padding_idx=2)
    return made.requires_grad_(False)


READERS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda table, rows: table(rows),
    "embedding_bag": lambda table, rows: table(rows),
    "index_select": lambda table, rows: table.weight.index_select(0, rows.flatten()),
}


def counted(scratch: str, operator: str, seed: int, count: int) -> tuple[bool, int, int, int]:
    """Read random rows; returns equality, pages read, distinct rows and the most memory in use."""
    import torch_offload

    torch.manual_seed(seed)
    table = make_table(operator)
    rows = torch.randint(0, ROWS, (2, count))
    expected = READERS[operator](table, rows)
    torch_offload.wrap(table, config=config_for(scratch))
    before = torch_offload.report()
    found = READERS[operator](table, rows)
    after = torch_offload.report()
    pages = (after.ssd_read_bytes - before.ssd_read_bytes) // (4 * PAGE_ELEMENTS)
    is_equal = found.numpy().tobytes() == expected.numpy().tobytes()  # in no memory of the budget
    return is_equal, pages, len(rows.unique()), after.host_peak_bytes


@pytest.mark.parametrize("count", [1, 7, 100])
@pytest.mark.parametrize("operator", READERS)
def test_reads_pages_of_its_rows(operator, count, scratch):
    """A table of sixteen times the budget, rows of more than it, too. Method: bits, the engine's counters."""
    is_equal, pages, distinct, peak_bytes = in_child(counted, str(scratch), operator, 1, count)
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


def bags(scratch: str) -> list[str]:
    """Return which of many kinds of bags differ from plain torch, with their counts and weights' gradients."""
    import torch_offload

    torch.manual_seed(0)
    rows = torch.randint(0, ROWS, (40,))
    rows[7] = rows[8] = 9
    offsets = torch.tensor([0, 3, 3, 21])  # the second one is empty
    weights = torch.randn(40, requires_grad=True)
    options: dict[str, dict[str, Any]] = {
        "mean": {},
        "sum": {"mode": "sum"},
        "largest": {"mode": "max"},
        "weighted": {"mode": "sum", "per_sample_weights": weights.detach()},
        "weighted, with a graph": {"mode": "sum", "per_sample_weights": weights},
        "the last offset": {"offsets": torch.cat([offsets, torch.tensor([40])]), "include_last_offset": True},
        "padding that is asked for": {"padding_idx": 9},
        "padding that is not": {"padding_idx": int(next(row for row in range(ROWS) if row not in rows))},
        "padding from the end": {"padding_idx": 9 - ROWS, "mode": "sum"},
        "int32": {"input": rows.int(), "offsets": offsets.int()},
        "rows of bags": {"input": rows.view(8, 5), "offsets": None},
        "one row": {"input": rows[:1], "offsets": offsets[:1]},
        "no row": {"input": rows[:0], "offsets": offsets[:1]},
    }

    def of_type(dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
        return {key: value.to(dtype) if key == "per_sample_weights" else value for key, value in options.items()}

    def results(weight: torch.Tensor, asked: dict[str, Any]) -> list[torch.Tensor]:
        bags = nn.functional.embedding_bag(**{"input": rows, "weight": weight, "offsets": offsets} | asked)
        if not bags.requires_grad:
            return [bags]
        return [bags, *torch.autograd.grad(bags.sum(), weights)]

    tables = {"of_float": torch.randn(ROWS, WIDTH), "of_bfloat16": torch.randn(ROWS, WIDTH).to(torch.bfloat16)}
    module = nn.ParameterDict({kind: nn.Parameter(table, requires_grad=False) for kind, table in tables.items()})
    asked = {
        (kind, name): of_type(table.dtype, more) for kind, table in tables.items() for name, more in options.items()
    }
    expected = {case: results(module[case[0]], more) for case, more in asked.items()}
    torch_offload.wrap(module, config=config_for(scratch).replace(ram=4 * TABLE_BYTES))
    return [
        ", ".join(case)
        for case, more in asked.items()
        if not all(map(same_bits, results(module[case[0]], more), expected[case]))
    ]


def test_bags_are_those_of_plain_torch(scratch):
    """Of many kinds, also those that are not read by rows. Method: the bits of plain torch."""
    assert in_child(bags, str(scratch)) == []


def selections(scratch: str) -> list[str]:
    """Return which ways to select differ from plain torch."""
    import torch_offload

    torch.manual_seed(0)
    table = torch.randn(ROWS, WIDTH)
    rows = torch.randint(0, WIDTH, (9,))

    def into(select: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        out = torch.zeros(9, WIDTH)
        select(out)
        return out

    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "rows": lambda t: t.index_select(0, rows),
        "rows, counted from the end": lambda t: t.index_select(-2, rows.int()),
        "one": lambda t: t.index_select(0, torch.tensor(5)),
        "none": lambda t: t.index_select(0, rows[:0]),
        "columns": lambda t: t.index_select(1, rows),
        "of three dimensions": lambda t: t.view(ROWS, 4, WIDTH // 4).index_select(0, rows),
        "into a tensor": lambda t: into(lambda out: torch.index_select(t, 0, rows, out=out)),
        "embedded into a tensor": lambda t: into(lambda out: torch.ops.aten.embedding.out(t, rows, out=out)),
    }
    expected = {name: way(table) for name, way in ways.items()}
    module = nn.ParameterList([nn.Parameter(table, requires_grad=False)])
    torch_offload.wrap(module, config=config_for(scratch).replace(ram=4 * TABLE_BYTES))
    return [name for name, way in ways.items() if not same_bits(way(module[0]), expected[name])]


def test_selections_are_those_of_plain_torch(scratch):
    """Of rows, and of what is not read by rows. Method: the bits of plain torch."""
    assert in_child(selections, str(scratch)) == []


def errors(scratch: str, operator: str, row: int) -> tuple[str, str, bool]:
    """Return the error of plain torch, that of a paged table, and whether that gives the right rows afterwards."""
    import torch_offload

    torch.manual_seed(0)
    table = make_table(operator)
    good, bad = torch.tensor([[1, 2]]), torch.tensor([[1, row]])
    read = READERS[operator]
    expected = read(table, good)

    def error_of() -> str:
        try:
            read(table, bad)
        except (IndexError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "none"

    plain = error_of()
    torch_offload.wrap(table, config=config_for(scratch))
    return plain, error_of(), same_bits(read(table, good), expected)


@pytest.mark.parametrize("row", [-1, ROWS, 1 << 40])
@pytest.mark.parametrize("operator", READERS)
def test_row_that_is_not_there_is_torchs_error(operator, row, scratch):
    """Method: the message of plain torch, and rows that are there after it."""
    plain, paged, is_equal = in_child(errors, str(scratch), operator, row)
    assert plain == paged != "none"
    assert is_equal


def train(scratch: str | None, operator: str, steps: int) -> list[bytes]:
    """Train a table and read rows without gradients between the steps; None: plain torch."""
    torch.manual_seed(0)
    table = make_table(operator).requires_grad_()
    if scratch is not None:
        import torch_offload

        torch_offload.wrap(table, config=config_for(scratch).replace(ram=6 * TABLE_BYTES))
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.1)
    rows = torch.randint(0, ROWS, (2, 4))
    read = READERS[operator]
    found = []
    for _ in range(steps):
        read(table, rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(read(table, (rows + 1) % ROWS))
        with torch.inference_mode():
            found.append(read(table, rows).clone())
    found.append(table.weight.detach())
    return [tensor.numpy().tobytes() for tensor in found]


@pytest.mark.parametrize("operator", READERS)
def test_table_that_trains_is_updated_first(operator, scratch):
    """Rows are looked up while the update of the table is deferred. Method: the bits of plain torch, three steps."""
    expected = in_child(train, None, operator, 3)
    assert in_child(train, str(scratch), operator, 3) == expected


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
        "bags": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum").requires_grad_(False),
        "bags of largest": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="max").requires_grad_(False),
    }
    try:
        torch_offload.wrap(modules[kind](), config=config_for(scratch))
    except OutOfTierMemory as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [
        ("frozen", False),
        ("trained", True),
        ("tied", True),
        ("renormed", True),
        ("bags", False),
        ("bags of largest", True),
    ],
)
def test_only_a_table_that_is_read_by_rows_may_be_larger_than_the_budget(kind, is_refused, scratch):
    """Method: what `wrap` says to a table of sixteen times the budget."""
    message = in_child(refusal, str(scratch), kind)
    assert ("needed for" in message) is is_refused
