"""Rounding to ternary: at one rate it loses less than the baselines, and takes what it was given."""

import itertools
import logging

import pytest
import torch
from support.bits import same_bits
from torch import Tensor

from torch_offload import ConfigError, UnsupportedModelError
from torch_offload.compression import gptq
from torch_offload.moe import operators, ternary

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.any_torch]

ROWS, COLUMNS = 128, 192


def second_moment(columns: int = COLUMNS, *, seed: int = 0) -> Tensor:
    """Of correlated inputs with a few channels that are much larger than the rest, as in language models."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.arange(1, columns + 1) ** -0.5
    channels = torch.exp(0.5 * torch.randn(columns, generator=generator))
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mixing.T * channels
    return inputs.T @ inputs / len(inputs)


def weight(rows: int = ROWS, columns: int = COLUMNS, *, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(exact: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """The part of the output's energy that is lost, in float64."""
    left, whole, moment = (exact - rounded).double(), exact.double(), hessian.double()
    return float((left @ moment * left).sum() / (whole @ moment * whole).sum())


def dense(terms: list[ternary.TernaryMatrix]) -> Tensor:
    return torch.stack([term.dense() for term in terms]).sum(0)


def bits_of(terms: list[ternary.TernaryMatrix], *, coder: str = "smallest") -> float:
    classes = ternary.COLUMN_CLASSES
    pages = [operators.encode(term.values, coder=coder, most_classes=classes) for term in terms]
    return sum(operators.extents(page)[0].coded_bytes for page in pages) * 8 / terms[0].values.numel()


@pytest.mark.parametrize("bits", [0.6, 0.8, 1.1])
def test_it_loses_less_than_rounding_to_nearest(bits):
    """Method: correlated inputs, the zeros of the nearest chosen for the same bits of the same coder."""
    exact, hessian = weight(), second_moment()
    terms = gptq.quantize(exact, hessian, bits=bits)
    nearest = [
        term
        for term in (ternary.nearest(exact, zeros=1 - share / 50) for share in range(1, 50))
        if bits_of([term]) <= bits_of(terms) + 0.02
    ]
    best = min(error(exact, term.dense(), hessian) for term in nearest)
    assert error(exact, dense(terms), hessian) < 0.5 * best


@pytest.mark.parametrize("seed", [1, 2])
def test_it_loses_less_than_qmoe_at_fewer_bits(seed):
    """Method: QMoE's own rounding and coder, and half the bits that they take."""
    exact, hessian = weight(384, seed=seed), second_moment()
    baseline = gptq.qmoe_quantize(exact, hessian)
    taken = baseline.coded_bytes * 8 / exact.numel()
    terms = gptq.quantize(exact, hessian, bits=0.5 * taken)
    assert bits_of(terms) <= 0.5 * taken
    assert error(exact, dense(terms), hessian) < 0.8 * error(exact, baseline.dense(), hessian)


@pytest.mark.parametrize("bits", [0.4, 0.8, 1.3, 2.0, 3.0])
def test_the_bits_given_are_used_and_no_more(bits):
    """Method: what the coder really writes, at most what was given and nearly all of it."""
    terms = gptq.quantize(weight(256), second_moment(), bits=bits)
    assert len(terms) == gptq.planes_for(bits)
    assert 0.96 * bits < bits_of(terms) <= bits


def test_more_bits_lose_less():
    exact, hessian = weight(), second_moment()
    errors = [error(exact, dense(gptq.quantize(exact, hessian, bits=bits)), hessian) for bits in (0.5, 0.9, 1.4, 2, 3)]
    assert all(later < 0.75 * earlier for earlier, later in itertools.pairwise(errors)), errors


def test_sweeps_and_feedback_help():
    """Method: the same rate without sweeps, and without knowing the inputs."""
    exact, hessian = weight(), second_moment()
    with_all = error(exact, dense(gptq.quantize(exact, hessian, bits=0.8)), hessian)
    without_sweeps = error(exact, dense(gptq.quantize(exact, hessian, bits=0.8, sweeps=0)), hessian)
    without_inputs = error(exact, dense(gptq.quantize(exact, None, bits=0.8)), hessian)
    assert with_all < 0.97 * without_sweeps
    assert without_sweeps < 0.9 * without_inputs


def test_matrices_are_rounded_together_as_alone():
    """Method: three matrices with rates of their own, at once and one by one; errors are what they are said to be."""
    weights = torch.stack([weight(seed=seed) for seed in range(3)])
    hessians = torch.stack([second_moment(seed=seed) for seed in range(3)])
    limits = [[1500], [2500], [4000]]
    together = gptq.quantize_all(weights, hessians, limits_bytes=limits)
    for position, rounding in enumerate(together):
        alone = slice(position, position + 1)
        (single,) = gptq.quantize_all(weights[alone], hessians[alone], limits_bytes=limits[alone])
        assert single.error == pytest.approx(rounding.error, rel=0.05)
        found = error(weights[position], dense(rounding.terms), hessians[position])
        assert found == pytest.approx(rounding.error, rel=0.01)
        assert rounding.coded_bytes <= limits[position][0]


def test_the_same_call_gives_the_same_values():
    first, second = (gptq.quantize(weight(), second_moment(), bits=1.6) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert same_bits(one.values, other.values)
        assert same_bits(one.row_scale, other.row_scale)
        assert same_bits(one.column_scale, other.column_scale)


def test_zeros_stay_zeros():
    """Method: a row, a column and a whole matrix of zeros, and inputs that never come."""
    exact = weight()
    exact[5] = 0
    exact[:, 7] = 0
    hessian = second_moment()
    hessian[9] = hessian[:, 9] = 0
    (term,) = gptq.quantize(exact, hessian, bits=0.8)
    assert not term.dense()[5].any()
    assert term.dense().isfinite().all()
    assert error(exact, term.dense(), hessian) < 0.4
    (nothing,) = gptq.quantize(torch.zeros(ROWS, COLUMNS), hessian, bits=0.8)
    assert not nothing.dense().any()
    assert gptq.quantize(exact, torch.zeros(COLUMNS, COLUMNS), bits=0.8)[0].dense().isfinite().all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 300), (300, 1), (33, 130)])
def test_any_shape(rows, columns):
    bits = 16.0 if columns == 1 else 8.0
    terms = gptq.quantize(weight(rows, columns), second_moment(columns), bits=bits, planes=1)
    assert terms[0].values.shape == (rows, columns)
    assert error(weight(rows, columns), dense(terms), second_moment(columns)) < 0.5


def test_a_hessian_without_a_factor_is_left_out(caplog):
    """Method: one of two has a negative eigenvalue; it is named, and the other is used."""
    hessians = torch.stack([second_moment(), -second_moment()])
    exact = torch.stack([weight(), weight()])
    with caplog.at_level(logging.WARNING):
        used, left_out = gptq.quantize_all(exact, hessians, limits_bytes=[[2500], [2500]])
    assert "1 of 2 Hessians" in caplog.text
    plain = gptq.quantize(weight(), None, bits=2500 * 8 / weight().numel())
    assert same_bits(left_out.terms[0].values, plain[0].values)
    assert not same_bits(used.terms[0].values, plain[0].values)


def test_what_cannot_be_is_refused():
    wrong = weight()
    wrong[3, 4] = float("nan")
    for refuse in (lambda: gptq.quantize(wrong, None, bits=0.8), lambda: gptq.qmoe_quantize(wrong, None)):
        with pytest.raises(UnsupportedModelError, match=r"1 of \d+ weights are not finite"):
            refuse()
    with pytest.raises(ConfigError, match=r"16 x 16 takes \d+ bytes at least"):
        gptq.quantize(weight(16, 16), None, bits=0.8)


def test_qmoe_is_what_it_says():
    """Method: its terms add up to it; a row without negative values has no -1; the extremes reach half-way to 0."""
    exact = weight()
    exact[2] = exact[2].abs()
    baseline = gptq.qmoe_quantize(exact, None)
    assert not (baseline.values[2] < 0).any()
    torch.testing.assert_close(dense(baseline.terms()), baseline.dense(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(baseline.most, exact.amax(1), rtol=0.01, atol=0)
    assert same_bits(baseline.values > 0, exact > baseline.most[:, None] / 2)
