"""Correlations against scipy, pandas and counting by hand; intervals and p-values against what they promise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from quotient_manifolds.statistics import (
    COEFFICIENTS,
    Agreement,
    Correlation,
    Kind,
    agreement,
    correlation,
    holm,
    tau_deviation,
)
from quotient_manifolds.statistics import partial_correlation as partial

CHEAP: dict[str, Any] = {"resamples": 9, "permutations": 9}
TIED = [1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 2.5], [2.0, 1.0, 1.0, 3.0, 5.0, 4.0, 0.0]
PARTIAL: tuple[Kind, ...] = ("kendall-b", "spearman", "pearson")


def count_pairs(x: Any, y: Any) -> tuple[int, int, int, int]:
    """Concordant minus discordant pairs; all pairs; those untied in x; those untied in y."""
    pairs = list(itertools.combinations(zip(map(float, x), map(float, y), strict=True), 2))
    score = sum(((a > c) - (a < c)) * ((b > d) - (b < d)) for (a, b), (c, d) in pairs)
    return score, len(pairs), sum(a != c for (a, _), (c, _) in pairs), sum(b != d for (_, b), (_, d) in pairs)


def tau_a(x: Any, y: Any) -> float:
    score, pairs, _, _ = count_pairs(x, y)
    return score / pairs


ORACLES: dict[Kind, Callable[[Any, Any], float]] = {
    "kendall-a": tau_a,
    "kendall-b": lambda x, y: float(stats.kendalltau(x, y).statistic),
    "spearman": lambda x, y: float(stats.spearmanr(x, y).statistic),
    "pearson": lambda x, y: float(stats.pearsonr(x, y).statistic),
}


def columns(seed: int, models: int, count: int = 2, slope: float = 0.6) -> list[NDArray[np.float64]]:
    """`count` columns that all follow a common one."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=models)
    return [slope * common + rng.normal(size=models) for _ in range(count)]


# ---- values


def test_tau_by_hand() -> None:
    # ten pairs, of which (1, 2) and (3, 4) are discordant: (8 - 2) / 10
    assert correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], **CHEAP).value == pytest.approx(0.6)
    assert correlation([1, 2, 3], [3, 2, 1], **CHEAP).value == -1
    # six pairs; 1 is tied in x, 2 in y; of the others 3 are concordant: 3/6 and 3/sqrt(5 * 4)
    x, y = [1, 1, 2, 3], [1, 2, 2, 2]
    assert correlation(x, y, "kendall-a", **CHEAP).value == pytest.approx(2 / 6)
    assert correlation(x, y, "kendall-b", **CHEAP).value == pytest.approx(2 / math.sqrt(5 * 3))


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_value_is_that_of_the_oracle(kind: Kind) -> None:
    for x, y in (TIED, columns(1, 30), columns(2, 2), [1e-300 * np.arange(4), [1e200, 3e200, 2e200, 5e200]]):
        assert correlation(x, y, kind, **CHEAP).value == pytest.approx(ORACLES[kind](x, y), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=12), st.sampled_from(COEFFICIENTS)
)
def test_value_with_any_ties(pairs: list[tuple[int, int]], kind: Kind) -> None:
    x, y = zip(*pairs, strict=True)
    found = correlation(x, y, kind, **CHEAP).value
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(ORACLES[kind](x, y), abs=1e-12)


def test_what_is_not_defined_is_none() -> None:
    for kind in COEFFICIENTS:
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


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"one length.*found {'x': 3, 'y': 2}"):
        correlation([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match=r"'y' must hold one finite number a model.*None or NaN"):
        correlation([1, 2, 3], [1, 2, math.inf])
    with pytest.raises(ValueError, match="'x' must hold one number a model"):
        correlation(["a", "b"], [1, 2])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"one of 'kendall-a', .*'pearson', found 'tau'"):
        correlation([1, 2], [1, 2], "tau")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="between 0 and 1, found 95"):
        correlation([1, 2], [1, 2], confidence=95)
    with pytest.raises(ValueError, match="found resamples=0"):
        correlation([1, 2], [1, 2], resamples=0)


def test_a_correlation_reads_as_value_and_interval() -> None:
    found = Correlation("kendall-b", -0.416, -0.7, 0.005, 0.1, 9, 0, 0.95, 99, 0, 99)
    assert str(found) == "−0.42 [−0.70, +0.01]"
    assert str(correlation([1, 2, 3], [1, 2, 3])) == "+1.00 no interval"
    assert str(correlation([1, 1, 1], [1, 2, 3])) == "undefined no interval"


# ---- intervals


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_interval_is_the_percentile_bootstrap_over_models(kind: Kind) -> None:
    x, y = columns(3, 14, slope=1.0)
    found = correlation(x, y, kind, resamples=3000, confidence=0.9, permutations=9)
    rng, values = np.random.default_rng(7), []
    for _ in range(3000):
        draw = rng.integers(14, size=14)
        if kind == "kendall-a":  # a model drawn twice makes no pair with itself
            score, _, untied, _ = count_pairs(x[draw], y[draw])
            values.append(score / untied)
        else:
            values.append(ORACLES[kind](x[draw], y[draw]))
    assert [found.low, found.high] == pytest.approx(np.quantile(values, [0.05, 0.95]).tolist(), abs=0.04)
    assert (found.models, found.confidence, found.resamples, found.undefined) == (14, 0.9, 3000, 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # of a bivariate normal distribution of correlation r = 0.7: 2 asin(r) / pi, 6 asin(r / 2) / pi, r
    [("kendall-a", 0.4936), ("kendall-b", 0.4936), ("spearman", 0.6829), ("pearson", 0.7)],
)
def test_interval_covers_the_truth_about_as_often_as_it_says(kind: Kind, expected: float) -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        x, noise = rng.normal(size=(2, 30))
        found = correlation(
            x, 0.7 * x + math.sqrt(1 - 0.49) * noise, kind, confidence=0.8, **CHEAP | {"resamples": 199}
        )
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= expected <= found.high
    assert 0.68 < covered / 200 < 0.9  # 0.8 promised; four standard errors are 0.11


def test_seed_decides() -> None:
    again = [correlation(*columns(5, 20), resamples=99, permutations=99, seed=seed) for seed in (1, 1, 2)]
    assert again[0] == again[1]
    assert again[0].low != again[2].low
    assert again[0].p_value != again[2].p_value
    assert again[0].value == again[2].value


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_resamples_without_a_coefficient_are_counted_and_do_not_decide(kind: Kind) -> None:
    # a resample without the last model, or with it alone, is constant in y: (5/6)^6 + (1/6)^6 of them
    found = correlation([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1], kind, resamples=2000, permutations=9)
    assert found.undefined / 2000 == pytest.approx((5 / 6) ** 6 + (1 / 6) ** 6, abs=0.04)
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < found.high <= 1 + 1e-12


# ---- p-values


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_p_value_counts_all_permutations_of_few_models(kind: Kind) -> None:
    x, y = (column[:6] for column in TIED)
    found = correlation(x, y, kind)
    values = np.array([ORACLES[kind](list(moved), y) for moved in itertools.permutations(x)])
    value, slack = ORACLES[kind](x, y), 1e-9
    tails = np.mean(values >= value - slack), np.mean(values <= value + slack)
    assert found.permutations == math.factorial(6)
    assert found.p_value == pytest.approx(min(1.0, 2 * min(tails)))


def test_p_value_without_ties_is_that_of_the_exact_test() -> None:
    x, y = columns(11, 7)
    assert correlation(x, y).p_value == pytest.approx(stats.kendalltau(x, y, method="exact").pvalue)
    x, y = columns(12, 40, slope=1.0)
    expected = stats.kendalltau(x, y, method="exact").pvalue
    assert expected < 0.2
    found = correlation(x, y, permutations=9999, resamples=9)
    assert (found.permutations, found.p_value) == (9999, pytest.approx(expected, abs=0.015))


def uniform(p_values: list[float | None]) -> bool:
    """Not told apart from uniform between 0 and 1, coarsely."""
    return bool(stats.kstest(np.array(p_values, dtype=float), "uniform").pvalue > 1e-3)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_p_value_is_uniform_where_nothing_is_related(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    draws = [rng.normal(size=(2, 15)) for _ in range(150)]
    assert uniform([correlation(x, y, kind, resamples=9, permutations=199).p_value for x, y in draws])
    related = [correlation(x, x + y, kind, resamples=9, permutations=199).p_value for x, y in draws]
    assert not uniform(related)


# ---- partial correlation


def kendall_partial(x: Any, y: Any, z: Any) -> float:
    """Kendall's formula."""
    xy, xz, yz = (stats.kendalltau(*pair).statistic for pair in ((x, y), (x, z), (y, z)))
    return float((xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2)))


def of_residuals(x: Any, y: Any, *z: Any) -> float:
    """Pearson's correlation of what least squares on z and a constant leave."""
    design = np.column_stack([np.ones(len(x)), *z])
    left = [column - design @ np.linalg.lstsq(design, column)[0] for column in (np.asarray(x), np.asarray(y))]
    return float(stats.pearsonr(*left).statistic)


def test_partial_tau_of_one_covariate_is_kendalls_formula() -> None:
    x, y, z = columns(21, 25, 3)
    assert partial(x, y, {"z": z}, **CHEAP).value == pytest.approx(kendall_partial(x, y, z))
    ties = np.round(z).tolist()
    assert partial(x, y, {"z": ties}, **CHEAP).value == pytest.approx(kendall_partial(x, y, ties))


def test_partial_tau_of_several_covariates_is_a_fit_over_pairs() -> None:
    x, y, z, w = columns(22, 18, 4)
    pairs = np.array(list(itertools.permutations(range(18), 2)))
    signs = [np.sign(column[pairs[:, 0]] - column[pairs[:, 1]]) for column in (x, y, z, w)]
    assert partial(x, y, {"z": z, "w": w}, **CHEAP).value == pytest.approx(of_residuals(*signs))


def test_partial_pearson_and_spearman_are_correlations_of_residuals() -> None:
    x, y, z, w = columns(23, 25, 4)
    w = np.round(w)
    given = {"z": z, "w": w}
    assert partial(x, y, given, "pearson", **CHEAP).value == pytest.approx(of_residuals(x, y, z, w))
    ranks = [stats.rankdata(column) for column in (x, y, z, w)]
    assert partial(x, y, given, "spearman", **CHEAP).value == pytest.approx(of_residuals(*ranks))


@pytest.mark.parametrize("kind", PARTIAL)
def test_a_category_is_as_many_columns_as_it_has_other_values(kind: Kind) -> None:
    x, y = columns(24, 24)
    names = ["adam", "sgd", "lamb"] * 8
    coded = {name: [float(one == name) for one in names] for name in ("adam", "lamb")}  # another value left out
    one, two = (partial(x, y, given, kind, **CHEAP) for given in ({"optimizer": names}, coded))
    assert one.value == pytest.approx(two.value)
    assert one.value != pytest.approx(correlation(x, y, kind, **CHEAP).value)
    if kind == "pearson":
        assert one.value == pytest.approx(of_residuals(x, y, *coded.values()))
    if kind == "kendall-b":  # two values: the formula
        two_names = ["a", "b"] * 12
        found = partial(x, y, {"c": two_names}, **CHEAP).value
        assert found == pytest.approx(kendall_partial(x, y, [name == "b" for name in two_names]))


@pytest.mark.parametrize("kind", PARTIAL)
def test_nothing_given_or_told_twice_changes_nothing(kind: Kind) -> None:
    x, y, z = columns(25, 12, 3)
    plain = correlation(x, y, kind, resamples=50)
    assert partial(x, y, {}, kind, resamples=50).value == pytest.approx(plain.value)
    assert partial(x, y, {"constant": [3.0] * 12}, kind, resamples=50).value == pytest.approx(plain.value)
    once, twice = (partial(x, y, given, kind, resamples=50) for given in ({"z": z}, {"z": z, "again": z}))
    assert once.value == pytest.approx(twice.value)
    assert (once.low, once.high) == pytest.approx((twice.low, twice.high))


@pytest.mark.parametrize("kind", PARTIAL)
def test_partial_correlation_sees_through_a_common_cause(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=60)
    x, y = z + 0.3 * rng.normal(size=60), z + 0.3 * rng.normal(size=60)
    plain, given = correlation(x, y, kind, permutations=999), partial(x, y, {"z": z}, kind, permutations=999)
    assert plain.low is not None
    assert plain.low > 0.4
    assert plain.value is not None
    assert given.value is not None
    # Kendall's is the one that does not vanish for a common cause
    assert abs(given.value) < (0.5 * plain.value if kind == "kendall-b" else 0.25)
    assert plain.p_value == pytest.approx(0.002)
    assert given.p_value is not None
    assert given.p_value > 0.02


@pytest.mark.parametrize("kind", PARTIAL)
def test_partial_p_value_is_uniform_given_a_common_cause(kind: Kind) -> None:
    rng, found, plain = np.random.default_rng(4), [], []
    for _ in range(120):
        z, a, b = rng.normal(size=(3, 20))
        found.append(partial(z + a, z + b, {"z": z}, kind, resamples=9, permutations=99).p_value)
        plain.append(correlation(z + a, z + b, kind, resamples=9, permutations=99).p_value)
    assert uniform(found)
    assert not uniform(plain)


@pytest.mark.parametrize("kind", PARTIAL)
def test_partial_interval_covers_about_as_often_as_it_says(kind: Kind) -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(120):
        z, a, y = rng.normal(size=(3, 30))
        # y is independent of both, so that the coefficient is 0 for every kind
        found = partial(z + a, y, {"z": z}, kind, confidence=0.8, resamples=199, permutations=9)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
    assert 0.65 < covered / 120 < 0.92


@pytest.mark.parametrize("kind", PARTIAL)
def test_partial_p_value_permutes_residuals_and_adds_the_fit(kind: Kind) -> None:
    x, y, z = (column.round(1) for column in columns(29, 6, 3, slope=2.0))
    found = partial(x, y, {"z": z}, kind, resamples=9)
    x, y, z = (x, y, z) if kind == "pearson" else (stats.rankdata(column) for column in (x, y, z))
    slope, start = np.polyfit(z, y, 1)
    fit = slope * z + start
    made = [(fit + np.array(moved)).round(8) for moved in itertools.permutations(y - fit)]
    if kind == "kendall-b":
        values = np.array([kendall_partial(x, again, z) for again in made])
    elif kind == "spearman":
        values = np.array([of_residuals(x, stats.rankdata(again), z) for again in made])
    else:
        values = np.array([of_residuals(x, again, z) for again in made])
    tails = [np.mean(sign * values >= sign * values[0] - 1e-9) for sign in (1, -1)]
    assert (found.value, found.permutations) == (pytest.approx(values[0]), 720)
    assert found.p_value == pytest.approx(min(1.0, 2 * min(tails)), abs=3 / 720)


def test_what_partial_correlation_does_not_define_is_none() -> None:
    x, y, z = columns(26, 6, 3)
    for kind in PARTIAL:
        assert partial(x, y, {"x again": x}, kind).value is None
        assert partial([1.0] * 6, y, {"z": z}, kind).value is None
        # 6 models and 4 covariates leave no degree of freedom, 3 leave one
        many = dict(zip("abcd", columns(27, 6, 4), strict=True))
        assert partial(x, y, many, kind).value is None
        many.pop("d")
        assert partial(x, y, many, kind, **CHEAP).value is not None
        assert partial(x, y, {"optimizer": list("abcdab")}, kind, **CHEAP).value is not None
        assert partial(x, y, {"optimizer": list("abcdea")}, kind, **CHEAP).value is None
    gaps = partial(x, y, {"z": [*z[:5], None]}, **CHEAP)
    assert (gaps.models, gaps.left_out) == (5, 1)
    gaps = partial(x, y, {"z": ["a", "b", "a", "b", "b", None]}, **CHEAP)
    assert (gaps.models, gaps.left_out) == (5, 1)


def test_partial_correlation_refuses_in_one_sentence() -> None:
    x, y = columns(28, 6)
    with pytest.raises(ValueError, match="one of 'kendall-b', 'spearman', 'pearson', found 'kendall-a'"):
        partial(x, y, {"z": x}, "kendall-a")
    with pytest.raises(ValueError, match="'optimizer' must hold numbers or text, not both"):
        partial(x, y, {"optimizer": ["a", 1, 2, 3, 4, 5]})
    with pytest.raises(ValueError, match="may not be called 'x' or 'y'"):
        partial(x, y, {"x": x})
    with pytest.raises(ValueError, match=r"one length.*'rate': 2"):
        partial(x, y, {"rate": [1, 2]})


# ---- agreement


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_agreement_is_pandas_matrix_with_gaps_left_out_by_pair(kind: Kind) -> None:
    rng = np.random.default_rng(1)
    frame = pd.DataFrame(rng.normal(size=(14, 4)).round(1), columns=list("abcd"))
    frame.loc[[2, 5], "a"] = np.nan
    frame.loc[5:8, "c"] = np.nan
    found = agreement({name: frame[name].tolist() for name in frame}, kind)
    method: Any = {"kendall-b": "kendall", "kendall-a": tau_a}.get(kind, kind)
    expected = frame.corr(method=method).to_numpy()
    off = ~np.eye(4, dtype=bool)
    assert np.array(found.values, dtype=float)[off] == pytest.approx(expected[off])
    assert (found.names, found.total, found.kind) == (("a", "b", "c", "d"), 14, kind)
    present = frame.notna().to_numpy().astype(int)
    assert np.array(found.models).tolist() == (present.T @ present).tolist()


def test_agreement_of_what_failed_everywhere_is_not_defined() -> None:
    found = agreement({"a": [1.0, 2.0, 3.0], "failed": [None, None, None], "same": [1.0, 1.0, 1.0]})
    assert found.values == ((pytest.approx(1.0), None, None), (None, None, None), (None, None, None))
    assert found.models[0] == (3, 0, 3)
    assert agreement({}) == Agreement("kendall-b", (), (), (), 0)
    with pytest.raises(ValueError, match=r"one length.*'b': 1"):
        agreement({"a": [1.0, 2.0], "b": [1.0]})


# Many correlations, few models.


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


def test_holm_of_a_known_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.7, 0.7]) == [1.0, 1.0]


@pytest.mark.parametrize("models", [2, 4, 6])
def test_tau_of_unrelated_models_strays_as_said(models: int) -> None:
    taus = [tau_a(range(models), order) for order in itertools.permutations(range(models))]
    assert math.sqrt(np.mean(np.square(taus))) == pytest.approx(tau_deviation(models))
    with pytest.raises(ValueError, match="at least 2 models"):
        tau_deviation(1)
