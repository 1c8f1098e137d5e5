"""Coded matrices as tensors: what is coded comes back, products are those of the dequantized weight."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bits import same_bits, same_values
from torch import Tensor, nn

import torch_offload
from torch_offload import ConfigError, PageCorruptError
from torch_offload.moe import operators as coded

SHAPES = [(1, 1), (1, 257), (300, 1), (64, 64), (130, 67), (513, 255)]


def ternary(rows: int, columns: int, *, zeros: float = 0.8, seed: int = 0) -> Tensor:
    """Values with that share of zeros; the first row is all zero, the second has no minus."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8) * 2 - 1
    values[torch.rand(rows, columns, generator=generator) < zeros] = 0
    values[0] = 0
    if rows > 1:
        values[1].abs_()
    return values


class Weight:
    """A coded weight and its dequantized twin."""

    def __init__(self, rows: int, columns: int, *, coder: str = "smallest", seed: int = 0) -> None:
        self.values = ternary(rows, columns, seed=seed)
        self.page = coded.encode(self.values, coder=coder)
        generator = torch.Generator().manual_seed(seed + 1)
        self.row_scale = torch.rand(rows, generator=generator) + 0.5
        self.column_scale = torch.rand(columns, generator=generator) + 0.5

    @property
    def dense(self) -> Tensor:
        return self.row_scale[:, None].double() * self.values.double() * self.column_scale.double()

    def times(self, x: Tensor) -> Tensor:
        return coded.coded_linear(x, self.page, 0, self.row_scale, self.column_scale)


@pytest.mark.parametrize("coder", coded.CODERS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_what_is_coded_comes_back(rows, columns, coder):
    """Method: every shape with every coder; the page says what it holds."""
    values = ternary(rows, columns)
    page = coded.encode(values, coder=coder)
    assert same_bits(coded.decode(page), values)
    (extent,) = coded.extents(page)
    assert (extent.rows, extent.columns, extent.size_bytes) == (rows, columns, page.numel())
    assert page.numel() % 4096 == 0
    tiles = {"tun12": extent.tun12_tiles, "rans4": extent.rans4_tiles, "qmoe": extent.qmoe_tiles}
    used = {name for name, count in tiles.items() if count}
    assert used == {coder} if coder in tiles else used <= {"tun12", "rans4"}
    assert sum(tiles.values()) == -(-rows // 512)


def test_sparse_matrices_take_less_than_a_bit():
    """Method: 88.5 % zeros, QMoE's design point; everything counted."""
    page = coded.encode(ternary(1536, 2048, zeros=0.885))
    assert page.numel() * 8 / (1536 * 2048) < 0.665


@pytest.mark.parametrize("coder", ["tun12", "rans4", "smallest"])
def test_sorted_columns_change_nothing_but_the_bytes(coder):
    """Method: columns of unlike odds, forth and back; against the dense product whole x and scales that are powers of
    two, so that no bit may differ; against unsorted columns any x and scales; fewer bytes.
    """
    rows, columns = 600, 300
    generator = torch.Generator().manual_seed(5)
    zeros = torch.rand(columns, generator=generator)
    values = torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8) * 2 - 1
    values[torch.rand(rows, columns, generator=generator) < zeros] = 0
    plain, page = coded.encode(values, coder=coder), coded.encode(values, coder=coder, most_classes=4)
    assert coded.extents(page)[0].classes == 4
    assert coded.extents(page)[0].coded_bytes < 0.9 * coded.extents(plain)[0].coded_bytes
    assert same_bits(coded.decode(page), values)
    row_scale = 2.0 ** torch.randint(-3, 3, (rows,), generator=generator)
    column_scale = 2.0 ** torch.randint(-3, 3, (columns,), generator=generator)
    x = torch.randint(-8, 8, (5, columns), generator=generator).float().requires_grad_()
    g = torch.randint(-8, 8, (5, rows), generator=generator).float()
    product = coded.coded_linear(x, page, 0, row_scale, column_scale)
    (back,) = torch.autograd.grad(product, x, g)
    dense = row_scale[:, None] * values * column_scale
    assert same_values(product, x @ dense.T)
    assert same_values(back, g @ dense)
    x = torch.randn(5, columns, generator=generator).requires_grad_()
    g = torch.randn(5, rows, generator=generator)
    scales = torch.rand(rows, generator=generator), torch.rand(columns, generator=generator)
    products = [coded.coded_linear(x, each, 0, *scales) for each in (plain, page)]
    backs = [torch.autograd.grad(each, x, g)[0] for each in products]
    assert same_bits(*products)
    assert same_bits(*backs)


@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 200),
    tokens=st.integers(0, 9),
    coder=st.sampled_from(coded.CODERS),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_product_is_that_of_the_dequantized_weight(rows, columns, tokens, coder, seed):
    """Method: sums of integers are exact, so with scales of 1 and small whole x no value may differ, forth and back."""
    values = ternary(rows, columns, seed=seed)
    page = coded.encode(values, coder=coder)
    ones = torch.ones(rows), torch.ones(columns)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (tokens, columns), generator=generator).float().requires_grad_()
    y = coded.coded_linear(x, page, 0, *ones)
    assert same_values(y, x @ values.float().T)
    g = torch.randint(-8, 9, (tokens, rows), generator=generator).float()
    (back,) = torch.autograd.grad(y, x, g)
    assert same_values(back, g @ values.float())


def test_scales_are_applied():
    """Method: against float64, a thousandth of a per mille."""
    weight = Weight(130, 67)
    x = torch.randn(5, 67, dtype=torch.float32)
    expected = x.double() @ weight.dense.T
    torch.testing.assert_close(weight.times(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "planes"), [(torch.float32, 4), (torch.bfloat16, 3), (torch.float16, 3)])
def test_sums_are_as_near_as_their_tokens(dtype, planes):
    """Method: against float64, to what rounding can cost.

    Half a unit for each weight that is not zero, a unit being 2^(2 - 8 planes) of the power of two above the token's
    largest value; what scales round tokens by; one rounding of the sum, one by the scale and one to the dtype.
    """
    weight = Weight(130, 67)
    x = torch.randn(5, 67).to(dtype)
    scaled = x.double() * weight.column_scale.double()
    above = 2.0 ** (scaled.abs().amax(dim=1).log2().floor() + 1)
    halves = (above * 2.0 ** (1 - 8 * planes))[:, None] * weight.values.abs().sum(dim=1)
    rounded = scaled.abs() @ weight.values.abs().double().T * 2.0**-24
    expected = x.double() @ weight.dense.T
    bound = (halves + rounded) * weight.row_scale
    bound = bound + (expected.abs() + bound) * (torch.finfo(dtype).eps / 2 + 2.0**-22)
    assert ((weight.times(x).double() - expected).abs() <= bound).all()


def test_a_token_that_is_not_finite_has_no_sums():
    """Method: an infinity and a not-a-number, forth and back; the tokens beside them are as without them."""
    weight = Weight(130, 67)
    x = torch.randn(3, 67)
    odd = x.clone()
    odd[0, 5], odd[2, 66] = float("inf"), float("nan")
    product = weight.times(odd.requires_grad_())
    assert product[[0, 2]].isnan().all()
    assert same_bits(product[1], weight.times(x)[1])
    (back,) = torch.autograd.grad(product, odd, torch.full((3, 130), float("inf")))
    assert back.isnan().all()


@pytest.mark.filterwarnings("ignore:Input #")  # they are float32, in which these differences are exact
def test_gradients_are_those_of_finite_differences():
    """Method: the product is linear in x: differences between whole numbers are exact in float32, in both orders."""
    page = coded.encode(ternary(40, 30))
    ones = torch.ones(40), torch.ones(30)
    x = torch.randint(-4, 5, (3, 30)).float().requires_grad_()
    g = torch.randint(-4, 5, (3, 40)).float().requires_grad_()
    exact = {"eps": 1.0, "atol": 0.0, "rtol": 0.0}
    assert torch.autograd.gradcheck(lambda x: coded.coded_linear(x, page, 0, *ones), (x,), **exact)
    assert torch.autograd.gradgradcheck(lambda x: coded.coded_linear(x, page, 0, *ones), (x,), (g,), **exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_does_not_depend_on_its_company(dtype):
    """Method: 600 tokens at once, more than are multiplied by one decoding, and one by one."""
    weight = Weight(200, 150)
    x = torch.randn(600, 150).to(dtype).requires_grad_()
    together = weight.times(x)
    alone = torch.cat([weight.times(row[None]) for row in x])
    assert together.dtype == dtype
    assert same_bits(together, alone)
    (back,) = torch.autograd.grad(together, x, torch.ones_like(together))
    one = x[7:8].detach().requires_grad_()
    (back_alone,) = torch.autograd.grad(weight.times(one), one, torch.ones(1, 200, dtype=dtype))
    assert same_bits(back[7:8], back_alone)


def test_threads_change_nothing():
    """Method: 1500 rows are several tiles; one thread and two."""
    weight = Weight(1500, 300)
    x = torch.randn(9, 300).requires_grad_()
    results = []
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            y = weight.times(x)
            results.append((y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


def test_threads_share_the_work():
    """Method: time on the processor that other threads than the caller take; a plain loop leaves them none."""
    weight = Weight(8192, 1024)
    x = torch.randn(8, 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        weight.times(x)
        own, all_threads = time.thread_time(), time.process_time()
        for _ in range(20):
            weight.times(x)
        own, all_threads = time.thread_time() - own, time.process_time() - all_threads
    finally:
        torch.set_num_threads(before)
    assert all_threads - own > 0.3 * all_threads


def test_any_shape_of_tokens():
    weight = Weight(20, 10)
    assert weight.times(torch.randn(10)).shape == (20,)
    assert weight.times(torch.randn(2, 3, 10)).shape == (2, 3, 20)
    assert weight.times(torch.randn(0, 10)).shape == (0, 20)
    transposed = torch.randn(10, 4).T
    assert same_bits(weight.times(transposed), weight.times(transposed.contiguous()))


def test_a_page_holds_several_matrices():
    first, second = Weight(20, 10), Weight(10, 20, seed=3)
    page = torch.cat([first.page, second.page])
    x = torch.randn(4, 10)
    hidden = coded.coded_linear(x, page, 0, first.row_scale, first.column_scale)
    assert same_bits(hidden, first.times(x))
    assert same_bits(coded.coded_linear(hidden, page, 1, second.row_scale, second.column_scale), second.times(hidden))
    assert [extent.offset_bytes for extent in coded.extents(page)] == [0, first.page.numel()]


def test_torch_compile_and_fake_tensors():
    """Method: torch's own check of an operator's schema, fake kernel and autograd; a graph without breaks."""
    weight = Weight(20, 10)
    x = torch.randn(4, 10, requires_grad=True)
    args = (x, weight.page, 0, weight.row_scale, weight.column_scale)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.torch_offload.coded_linear, args, test_utils=checks)
    compiled = torch.compile(lambda x: weight.times(x) * 2, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), weight.times(x) * 2)


@pytest.mark.parametrize("offset", [0, 9, 20, 30, 60, 500])
def test_a_changed_byte_is_found(offset):
    weight = Weight(64, 64)
    weight.page[offset] ^= 0x10
    with pytest.raises(PageCorruptError):
        weight.times(torch.randn(1, 64))
    with pytest.raises(PageCorruptError):
        coded.decode(weight.page)
    with pytest.raises(PageCorruptError):
        coded.extents(weight.page)


def test_wrong_calls_are_named():
    weight = Weight(20, 10)
    with pytest.raises(ValueError, match="10 elements in its last dimension"):
        weight.times(torch.randn(3, 11))
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        weight.times(torch.randn(3, 10).double())
    with pytest.raises(TypeError, match="uint8"):
        coded.decode(torch.zeros(4096))
    with pytest.raises(IndexError, match="none of number 1"):
        coded.decode(weight.page, 1)
    with pytest.raises(ValueError, match="row_scale must have 20"):
        coded.coded_linear(torch.randn(3, 10), weight.page, 0, torch.ones(19), torch.ones(10))
    with pytest.raises(PageCorruptError, match="no bytes"):
        coded.decode(weight.page[:0])
    with pytest.raises(PageCorruptError):
        coded.decode(weight.page[:100])
    with pytest.raises(ValueError, match="coder is"):
        coded.encode(weight.values, coder="zip")
    with pytest.raises(ConfigError):
        coded.encode(weight.values * 2)
    with pytest.raises(ConfigError):
        coded.encode(weight.values[:0])
    with pytest.raises(ConfigError):
        coded.encode(weight.values, classes=[0, 10])
    with pytest.raises(RuntimeError, match="frozen"):
        coded.coded_linear(torch.randn(3, 10), weight.page, 0, weight.row_scale.requires_grad_(), torch.ones(10))


class Coded(nn.Module):
    """A chain of coded layers as buffers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(count))
        for index in range(count):
            weight = Weight(1024, 1024, seed=index)
            self.register_buffer(f"page_{index}", weight.page)
            self.register_buffer(f"rows_{index}", weight.row_scale / 16)
            self.register_buffer(f"columns_{index}", weight.column_scale)

    def forward(self, x: Tensor) -> Tensor:
        for index, scale in enumerate(self.scale):
            page, rows, columns = (self.get_buffer(f"{name}_{index}") for name in ("page", "rows", "columns"))
            x = x + scale * torch.tanh(coded.coded_linear(x, page, 0, rows, columns))
        return x


def test_pages_are_paged(config):
    """Method: 20 coded layers in a third of their bytes, forward and backward; each page is written once at most."""
    model = Coded(20)
    x = torch.randn(1, 1024)

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        return y.detach().clone(), model.scale.grad.clone()

    expected = step()
    coded_bytes = sum(buffer.nbytes for name, buffer in model.named_buffers() if name.startswith("page"))
    stored_bytes = sum(-(-tensor.nbytes // 4096) * 4096 for tensor in model.state_dict().values())
    model.zero_grad()
    torch_offload.wrap(model, config=config.replace(ram=coded_bytes // 3))
    first, second = step(), step()
    for found in (first, second):
        assert same_bits(found[0], expected[0])
        assert same_bits(found[1], expected[1])
    report = torch_offload.report()
    assert coded_bytes < report.ssd_read_bytes
    assert 0 < report.ssd_written_bytes <= stored_bytes
    assert report.host_peak_bytes <= report.budget_bytes < coded_bytes
    torch_offload.unwrap(model)
