"""Correlations against scipy, pandas and counting by hand; intervals and p-values against what they promise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from quotient_manifolds.statistics import COEFFICIENTS, Correlation, Kind, correlation, holm, tau_deviation

CHEAP: dict[str, Any] = {"resamples": 9, "permutations": 9}
TIED = [1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 2.5], [2.0, 1.0, 1.0, 3.0, 5.0, 4.0, 0.0]
ORACLES: dict[Kind, Callable[[Any, Any], float]] = {
    "kendall-b": lambda x, y: float(stats.kendalltau(x, y).statistic),
    "spearman": lambda x, y: float(stats.spearmanr(x, y).statistic),
    "pearson": lambda x, y: float(stats.pearsonr(x, y).statistic),
}
NUMBERS = st.integers(-4, 4) | st.floats(-4, 4, width=16)
every_kind = pytest.mark.parametrize("kind", COEFFICIENTS)


def columns(seed: int, models: int, count: int = 2, slope: float = 0.6) -> list[NDArray[np.float64]]:
    """`count` columns that all follow a common one."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=models)
    return [slope * common + rng.normal(size=models) for _ in range(count)]


# ---- values


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=12), st.sampled_from(COEFFICIENTS))
@example([(1e-300 * k, 1e200 * (k ^ 1)) for k in range(4)], "pearson")
def test_value_is_that_of_the_oracle(pairs: list[tuple[float, float]], kind: Kind) -> None:
    x, y = zip(*pairs, strict=True)
    found = correlation(x, y, kind, **CHEAP).value
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(ORACLES[kind](x, y), abs=1e-12)


@every_kind
def test_what_is_not_defined_is_none(kind: Kind) -> None:
    constant = correlation([1, 2, 3, 4, 5], [7, 7, 7, 7, 7], kind)
    assert (constant.value, constant.low, constant.high, constant.p_value) == (None, None, None, None)
    assert constant.models == 5
    few = correlation([1, 2, 3, 4], [1, 2, 3, 4], kind)
    assert (few.value, few.low, few.high, few.resamples) == (pytest.approx(1.0), None, None, 0)
    alone = correlation([1.0], [2.0], kind)
    assert (alone.value, alone.models) == (None, 1)
    assert correlation([], [], kind).value is None


def test_models_without_a_value_are_left_out_and_counted() -> None:
    x, y = [1.0, None, 2.0, 5.0, 4.0, 9.0, 7.0], [2.0, 3.0, math.nan, 7.0, 4.0, 5.0, 9.0]
    kept = correlation([1.0, 5.0, 4.0, 9.0, 7.0], [2.0, 7.0, 4.0, 5.0, 9.0])
    found = correlation(x, y)
    assert (found.models, found.left_out, kept.left_out) == (5, 2, 0)
    assert (found.value, found.low, found.p_value) == (kept.value, kept.low, kept.p_value)
    for z in ([1.0, 2.0, 3.0, 4.0, 5.5, 7.0, None], ["a", "b", "a", "b", "b", "a", None]):
        gaps = correlation(range(7), TIED[1], given={"z": z}, **CHEAP)
        assert (gaps.models, gaps.left_out) == (6, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: correlation([1, 2, 3], [1, 2]), r"one length.*Found {'x': 3, 'y': 2}"),
        (lambda: correlation([1, 2], [1, 2], given={"rate": [1]}), r"one length.*rate': 1"),
        (lambda: correlation([1, 2, 3], [1, 2, math.inf]), "'y' must hold one finite number a model, or None"),
        (lambda: correlation([1, 2], [1, 2], "tau"), r"one of 'kendall-b', .*'pearson'. Found 'tau'"),  # type: ignore[arg-type]
        (lambda: correlation([1, 2], [1, 2], "pearson", given={"z": [1, 2]}), "'kendall-b' if covariates"),
        (lambda: correlation([1, 2], [1, 2], confidence=95), "between 0 and 1. Found 95"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_correlation_reads_as_value_and_interval() -> None:
    found = Correlation("kendall-b", -0.416, -0.7, 0.005, 0.1, 9, 0, 0.95, 99, 0, 99)
    assert str(found) == "−0.42 [−0.70, +0.01]"
    assert str(correlation([1, 2, 3], [1, 2, 3])) == "+1.00 no interval"
    assert str(correlation([1, 1, 1], [1, 2, 3])) == "undefined no interval"


# ---- intervals


@every_kind
def test_interval_is_the_percentile_bootstrap_over_models(kind: Kind) -> None:
    x, y = columns(3, 14, slope=1.0)
    found = correlation(x, y, kind, resamples=3000, confidence=0.9, permutations=9)
    rng = np.random.default_rng(7)
    values = [ORACLES[kind](x[draw], y[draw]) for draw in rng.integers(14, size=(3000, 14))]
    assert [found.low, found.high] == pytest.approx(np.quantile(values, [0.05, 0.95]).tolist(), abs=0.04)
    assert (found.models, found.confidence, found.resamples, found.undefined) == (14, 0.9, 3000, 0)


# Of a bivariate normal distribution of correlation r = 0.7: 2 asin(r) / pi, 6 asin(r / 2) / pi, r.
TRUTH = {"kendall-b": 0.4936, "spearman": 0.6829, "pearson": 0.7, "partial": 0.0}


@pytest.mark.parametrize("kind", TRUTH)
def test_interval_covers_the_truth_about_as_often_as_it_says(kind: Any) -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        x, noise, z = rng.normal(size=(3, 30))
        how: Any = {"confidence": 0.8, "permutations": 9, "resamples": 199}
        if kind == "partial":  # y is independent of both
            found = correlation(z + x, noise, given={"z": z}, **how)
        else:
            found = correlation(x, 0.7 * x + math.sqrt(1 - 0.49) * noise, kind, **how)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= TRUTH[kind] <= found.high
    assert 0.68 < covered / 200 < 0.92  # 0.8 promised; four standard errors are 0.11


@every_kind
def test_resamples_without_a_coefficient_are_counted_and_do_not_decide(kind: Kind) -> None:
    # a resample without the last model, or with it alone, is constant in y: (5/6)^6 + (1/6)^6 of them
    found = correlation([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1], kind, resamples=2000, permutations=9)
    assert found.undefined / 2000 == pytest.approx((5 / 6) ** 6 + (1 / 6) ** 6, abs=0.04)
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < found.high <= 1 + 1e-12


# ---- p-values


def two_sided(values: NDArray[np.float64]) -> float:
    """Twice the smaller share of values at least as large, or as small, as the first."""
    return min(1.0, 2 * min(np.mean(sign * values >= sign * values[0] - 1e-9) for sign in (1, -1)))


@every_kind
def test_p_value_counts_all_permutations_of_few_models(kind: Kind) -> None:
    x, y = (column[:6] for column in TIED)
    found = correlation(x, y, kind)
    values = np.array([ORACLES[kind](list(moved), y) for moved in itertools.permutations(x)])
    assert found.permutations == math.factorial(6)
    assert found.p_value == pytest.approx(two_sided(values))


@pytest.mark.parametrize("kind", [*COEFFICIENTS, "partial"])
def test_p_value_is_uniform_where_nothing_is_related(kind: Any) -> None:
    found, related = [], []
    for z, a, b in np.random.default_rng(4).normal(size=(150, 3, 20)):
        if kind == "partial":  # a common cause
            found.append(correlation(z + a, z + b, given={"z": z}, resamples=9, permutations=99).p_value)
            related.append(correlation(z + a, z + b, resamples=9, permutations=99).p_value)
        else:
            found.append(correlation(a, b, kind, resamples=9, permutations=199).p_value)
            related.append(correlation(a, a + b, kind, resamples=9, permutations=199).p_value)
    fits = [stats.kstest(np.array(each, dtype=float), "uniform").pvalue > 1e-3 for each in (found, related)]
    assert fits == [True, False]


# ---- partial correlation


def kendall_partial(x: Any, y: Any, z: Any) -> float:
    """Kendall's formula."""
    xy, xz, yz = (stats.kendalltau(*pair).statistic for pair in ((x, y), (x, z), (y, z)))
    return float((xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2)))


def value(x: Any, y: Any, **covariates: Any) -> float | None:
    return correlation(x, y, given=covariates, **CHEAP).value


def test_partial_tau_of_one_covariate_is_kendalls_formula() -> None:
    x, y, z = columns(21, 24, 3)
    names = ["a", "b"] * 12
    assert value(x, y, z=z) == pytest.approx(kendall_partial(x, y, z))
    assert value(x, y, z=z.round()) == pytest.approx(kendall_partial(x, y, z.round()))
    assert value(x, y, z=names) == pytest.approx(kendall_partial(x, y, [name == "b" for name in names]))


def test_partial_tau_of_several_covariates_is_a_fit_over_pairs() -> None:
    x, y, z, w = columns(22, 18, 4)
    pairs = np.array(list(itertools.permutations(range(18), 2)))
    signs = [np.sign(column[pairs[:, 0]] - column[pairs[:, 1]]) for column in (x, y, z, w)]
    design = np.column_stack([np.ones(len(pairs)), *signs[2:]])
    left = [column - design @ np.linalg.lstsq(design, column)[0] for column in signs[:2]]
    assert value(x, y, z=z, w=w) == pytest.approx(stats.pearsonr(*left).statistic)


def test_a_category_is_as_many_columns_as_it_has_other_values() -> None:
    x, y = columns(24, 24)
    names = ["adam", "sgd", "lamb"] * 8
    coded = {name: [float(one == name) for one in names] for name in ("adam", "lamb")}  # another value left out
    assert value(x, y, optimizer=names) == pytest.approx(value(x, y, **coded))
    assert value(x, y, optimizer=names) != pytest.approx(value(x, y))


def test_a_covariate_that_is_constant_or_given_twice_changes_nothing() -> None:
    x, y, z = columns(25, 12, 3)
    plain, constant = (correlation(x, y, given=more, resamples=50) for more in ({}, {"x": [3.0] * 12}))
    assert (plain.value, plain.low) == pytest.approx((constant.value, constant.low))
    once, twice = (correlation(x, y, given=more, resamples=50) for more in ({"z": z}, {"z": z, "again": z}))
    assert (once.value, once.low, once.high) == pytest.approx((twice.value, twice.low, twice.high))


def test_partial_p_value_permutes_residuals_and_adds_the_fit() -> None:
    x, y, z = (column.round(1) for column in columns(29, 6, 3, slope=2.0))
    found = correlation(x, y, given={"z": z}, resamples=9)
    x, y, z = (stats.rankdata(column) for column in (x, y, z))
    slope, start = np.polyfit(z, y, 1)
    fit = slope * z + start
    made = [(fit + np.array(moved)).round(8) for moved in itertools.permutations(y - fit)]
    values = np.array([kendall_partial(x, again, z) for again in made])
    assert (found.value, found.permutations) == (pytest.approx(values[0]), 720)
    assert found.p_value == pytest.approx(two_sided(values), abs=3 / 720)


def test_what_partial_correlation_does_not_define_is_none() -> None:
    x, y, z = columns(26, 6, 3)
    assert value(x, y, again=x) is None
    assert value([1.0] * 6, y, z=z) is None
    # 6 models and 4 covariates leave no degree of freedom, 3 leave one
    many = dict(zip("abcd", columns(27, 6, 4), strict=True))
    assert value(x, y, **many) is None
    many.pop("d")
    assert value(x, y, **many) is not None
    assert value(x, y, optimizer=list("abcdab")) is not None
    assert value(x, y, optimizer=list("abcdea")) is None


# ---- many correlations, few models


@given(st.lists(st.none() | st.floats(0, 1), max_size=8))
def test_holm_rejects_step_by_step(p_values: list[float | None]) -> None:
    """Corrected values below a level are those that Holm's procedure rejects: p_(k) < alpha / (m - k) so far."""
    corrected = holm(p_values)
    known = sorted(p for p in p_values if p is not None)
    assert [p is None for p in corrected] == [p is None for p in p_values]
    for alpha in (0.01, 0.05, 0.5):
        rejected = 0
        while rejected < len(known) and known[rejected] * (len(known) - rejected) < alpha:
            rejected += 1
        assert sum(p is not None and p < alpha for p in corrected) == rejected


@pytest.mark.parametrize("models", [2, 4, 6])
def test_tau_of_unrelated_models_deviates_as_stated(models: int) -> None:
    taus = [stats.kendalltau(range(models), order).statistic for order in itertools.permutations(range(models))]
    assert math.sqrt(np.mean(np.square(taus))) == pytest.approx(tau_deviation(models))
