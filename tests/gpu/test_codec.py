"""Coded matrices on a GPU: T and the sums are those of the CPU, bit for bit; a page is read from the host only once."""

import pytest
import torch
from support.bits import digest, same_bits
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


@pytest.fixture
def precise():
    """Whatever a test sets, the next one has sums in float32."""
    yield
    torch.set_float32_matmul_precision("highest")


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
def test_products_have_the_bits_of_the_cpu(device, coder, rows, columns, tokens):
    """Method: forward and backward, several classes, odd shapes, counts around what a group of tokens holds."""
    page = coded.encode(ternary(rows, columns, seed=columns), classes=classes_of(columns), coder=coder)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, columns, generator=generator)
    g = torch.randn(tokens, rows, generator=generator)
    assert products(page, x, g, torch.device("cpu")) == products(page, x, g, device)


def products(page: Tensor, x: Tensor, g: Tensor, place: torch.device) -> list[str]:
    """Digests of both products of a page, forward and backward."""
    args = [t.to(place) for t in (page, *scales(g.shape[1], x.shape[1]))]
    inputs = x.to(place).requires_grad_()
    y = coded.coded_linear(inputs, args[0], 0, *args[1:])
    (back,) = torch.autograd.grad(y, inputs, g.to(place))
    return [digest(y.cpu()), digest(back.cpu())]


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.usefixtures("precise")
def test_sorted_columns(device, coder, tokens):
    """Method: columns of unlike odds in four classes; T, both products, and the one on tensor cores."""
    rows, columns = 600, 300
    values = ternary(rows, columns, zeros=0.3)
    values[:, torch.rand(columns) < 0.5] *= (torch.rand(rows, 1) < 0.1).to(torch.int8)
    page = coded.encode(values, coder=coder, most_classes=4)
    assert coded.extents(page)[0].classes == 4
    assert same_bits(coded.decode(page.to(device)).cpu(), values)
    x, g = torch.randn(tokens, columns), torch.randn(tokens, rows)
    assert products(page, x, g, torch.device("cpu")) == products(page, x, g, device)
    torch.set_float32_matmul_precision("high")
    row_scale, column_scale = scales(rows, columns)
    y = coded.coded_linear(x.to(device), page.to(device), 0, row_scale.to(device), column_scale.to(device))
    weight = row_scale[:, None].double() * values.double() * column_scale.double()
    error = (y.cpu().double() - x.double() @ weight.T).abs()
    assert bool((error <= x.double().abs() @ weight.abs().T / 2**14 + 1e-30).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types(device, dtype):
    page = coded.encode(ternary(200, 300))
    x = torch.randn(5, 300).to(dtype)
    here = coded.coded_linear(x, page, 0, *scales(200, 300))
    there = coded.coded_linear(x.to(device), page.to(device), 0, *(s.to(device) for s in scales(200, 300)))
    assert there.dtype == dtype
    assert same_bits(there.cpu(), here)


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("tokens", [8, 13, 64, 200])
@pytest.mark.usefixtures("precise")
def test_tensor_cores_are_near(device, coder, tokens):
    """Method: against float64, to 2^-14 of the sum of magnitudes; a token does not depend on how many come with it."""
    rows, columns = 513, 1255
    values = ternary(rows, columns)
    page = coded.encode(values, coder=coder).to(device)
    row_scale, column_scale = scales(rows, columns)
    x = torch.randn(tokens, columns)
    torch.set_float32_matmul_precision("high")
    args = (page, 0, row_scale.to(device), column_scale.to(device))
    y = coded.coded_linear(x.to(device), *args)
    weight = row_scale[:, None].double() * values.double() * column_scale.double()
    error = (y.cpu().double() - x.double() @ weight.T).abs()
    assert bool((error <= x.double().abs() @ weight.abs().T / 2**14 + 1e-30).all())
    assert same_bits(coded.coded_linear(x[:8].to(device), *args), y[:8])


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
