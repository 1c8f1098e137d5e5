"""Coded matrices on a GPU: T and its sums have the bits of their definition; a page is read from the host only once."""

import pytest
import torch
from support.bits import digest, same_bits
from support.exact_sums import product
from torch import Tensor

from torch_offload import ConfigError, PageCorruptError
from torch_offload.moe import operators as coded

CODERS = ("tun12", "rans4", "smallest")
SHAPES = [(1, 1), (1, 257), (300, 1), (64, 64), (130, 67), (513, 1255), (2048, 1408)]
TOKENS = (1, 2, 3, 8, 9, 64, 200)


def ternary(rows: int, columns: int, *, zeros: float = 0.885, seed: int = 0) -> Tensor:
    """Values with that share of zeros; the first row is all zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8) * 2 - 1
    values[torch.rand(rows, columns, generator=generator) < zeros] = 0
    values[0] = 0
    return values


def classes_of(columns: int) -> list[int]:
    return [0, columns // 3, columns - 1] if columns > 9 else [0]


def scales(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(rows, generator=generator) + 0.5, torch.rand(columns, generator=generator) + 0.5


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("zeros", [0.5, 0.885, 0.99])
def test_t_comes_back(device, coder, rows, columns, zeros):
    values = ternary(rows, columns, zeros=zeros, seed=rows)
    page = coded.encode(values, classes=classes_of(columns), coder=coder)
    assert same_bits(coded.decode(page.to(device)).cpu(), values)


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_bits_of_the_definition(device, coder, rows, columns, tokens, dtype):
    """Method: forward and backward, several classes, odd shapes, counts around what groups of tokens hold."""
    values = ternary(rows, columns, seed=columns)
    page = coded.encode(values, classes=classes_of(columns), coder=coder)
    check_products(page.to(device), values, *tokens_of(tokens, rows, columns, dtype))


def tokens_of(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs of a product and of its backward, some far greater than others."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator)
    x[:, 0] *= 1000
    return x.to(dtype), torch.randn(tokens, rows, generator=generator).to(dtype)


def check_products(page: Tensor, values: Tensor, x: Tensor, g: Tensor) -> None:
    row_scale, column_scale = scales(*values.shape)
    inputs = x.to(page.device).requires_grad_()
    y = coded.coded_linear(inputs, page, 0, row_scale.to(page.device), column_scale.to(page.device))
    (back,) = torch.autograd.grad(y, inputs, g.to(page.device))
    assert digest(y.detach().cpu()) == digest(product(x, values, column_scale, row_scale))
    assert digest(back.cpu()) == digest(product(g, values.T, row_scale, column_scale))


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_sorted_columns(device, coder, tokens):
    """Method: columns of unlike odds in four classes; T and both products."""
    rows, columns = 600, 1300
    values = ternary(rows, columns, zeros=0.3)
    values[:, torch.rand(columns) < 0.5] *= (torch.rand(rows, 1) < 0.1).to(torch.int8)
    page = coded.encode(values, coder=coder, most_classes=4)
    assert coded.extents(page)[0].classes == 4
    assert same_bits(coded.decode(page.to(device)).cpu(), values)
    check_products(page.to(device), values, *tokens_of(tokens, rows, columns, torch.float32))


@pytest.mark.parametrize("coder", CODERS)
def test_a_token_does_not_depend_on_others(device, coder):
    """Method: the same tokens alone, among eight and among many, which other kernels multiply; one is not finite."""
    values = ternary(513, 1255)
    page = coded.encode(values, coder=coder).to(device)
    args = (page, 0, *(s.to(device) for s in scales(513, 1255)))
    x = torch.randn(300, 1255, device=device)
    x[1, 7] = torch.inf
    all_of_them = coded.coded_linear(x, *args)
    assert bool(all_of_them[1].isnan().all())
    assert bool(all_of_them[2:].isfinite().all())
    for count in (1, 8, 70, 129):
        assert same_bits(coded.coded_linear(x[:count], *args), all_of_them[:count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_types(device, dtype):
    values = ternary(200, 300)
    check_products(coded.encode(values).to(device), values, *tokens_of(5, 200, 300, dtype))


def test_no_tokens(device):
    page = coded.encode(ternary(20, 30)).to(device)
    empty = torch.empty(0, 30, device=device)
    assert coded.coded_linear(empty, page, 0, *(s.to(device) for s in scales(20, 30))).shape == (0, 20)


def test_only_the_first_use_of_a_page_waits(device):
    """Method: torch raises where an operator waits for the GPU, on another stream too."""
    page = coded.encode(ternary(300, 400)).to(device)
    args = (page, 0, *(s.to(device) for s in scales(300, 400)))
    x = torch.randn(4, 400, device=device)
    first = coded.coded_linear(x, *args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = coded.coded_linear(x, *args)
        with torch.cuda.stream(torch.cuda.Stream()):
            elsewhere = coded.coded_linear(x, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert same_bits(again, first)
    assert same_bits(elsewhere, first)


def test_it_is_captured_in_a_graph(device):
    page = coded.encode(ternary(300, 400)).to(device)
    args = (page, 0, *(s.to(device) for s in scales(300, 400)))
    x = torch.randn(4, 400, device=device)
    expected = coded.coded_linear(x, *args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = coded.coded_linear(x, *args)
    graph.replay()
    assert same_bits(y, expected)


def test_a_page_that_is_written_is_read_again(device):
    """Method: the same memory holds another matrix, of an inference tensor too, which has no version; then its storage
    is gone and another one may lie where it was."""
    first, second = ternary(40, 50, seed=1), ternary(40, 50, seed=2)
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            page = coded.encode(first).to(device)
            assert page.is_inference() == is_inference
            assert same_bits(coded.decode(page).cpu(), first)
            page.copy_(coded.encode(second))
            assert same_bits(coded.decode(page).cpu(), second)
    for seed in range(3, 80):
        values = ternary(40, 50, seed=seed)
        page = None
        page = coded.encode(values).to(device)
        assert same_bits(coded.decode(page).cpu(), values)


def test_both_matrices_of_a_page(device):
    first, second = ternary(40, 50, seed=1), ternary(50, 40, seed=2)
    page = torch.cat([coded.encode(first), coded.encode(second, coder="rans4")]).to(device)
    assert same_bits(coded.decode(page, 0).cpu(), first)
    assert same_bits(coded.decode(page, 1).cpu(), second)
    with pytest.raises(IndexError, match="none of number 2"):
        coded.decode(page, 2)


def test_what_is_refused(device):
    """Method: a flipped bit, the baseline's coder, a page that begins on an odd byte, tensors in two places."""
    page = coded.encode(ternary(20, 30))
    damaged = page.clone()
    damaged[300] ^= 1
    with pytest.raises(PageCorruptError):
        coded.decode(damaged.to(device))
    with pytest.raises(ConfigError, match="QMoE"):
        coded.decode(coded.encode(ternary(20, 30), coder="qmoe").to(device))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), page]).to(device)[1:]
    with pytest.raises(ValueError, match="multiple of 16"):
        coded.decode(shifted)
    with pytest.raises(ValueError, match="on one device"):
        coded.coded_linear(torch.randn(2, 30, device=device), page.to(device), 0, *scales(20, 30))
    with pytest.raises(ValueError, match="on one device"):
        coded.coded_linear(torch.randn(2, 30, device=device), page, 0, *(s.to(device) for s in scales(20, 30)))
