"""Kendall's tau over some pairs of models: against scipy, and against the definition, pair by pair."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from quotient_manifolds.compare import Comparison
from quotient_manifolds.statistics import correlation
from studies.zoos.catalogue import Catalogue, words
from studies.zoos.measuring import load_zoo
from studies.zoos.ranking import Design, Term, masked_tau

RECORDS = Path(__file__).parents[2] / "notebooks" / "records"
FACTORS = ("a", "b", "seed")


def invented(missing: int = 0) -> Design:
    """Two by three by two models of random measures and gaps; a few measures are missing."""
    draw = np.random.default_rng(3)
    models = list(itertools.product((0.0, 1.0), (0.0, 1.0, 2.0), (1.0, 2.0)))
    names = [f"m{place}" for place in range(len(models))]
    scores = pd.DataFrame(models, index=pd.Index(names, name="checkpoint"), columns=FACTORS)
    scores["gap"] = scores["a"] + draw.normal(size=len(models))
    m = [{"checkpoint": name, "label": "m", "mean": scores["b"][name] + draw.normal()} for name in names[missing:]]
    n = [{"checkpoint": name, "label": "n", "mean": draw.normal()} for name in names]
    measures, nothing = pd.DataFrame(index=pd.Index(["m", "n"])), pd.DataFrame()
    return Design(Comparison("s", "v", "c", measures, scores, pd.DataFrame(m + n), nothing, nothing), FACTORS)


@pytest.mark.parametrize("missing", [0, 3])
def test_all_pairs_give_the_tau_of_scipy(missing: int) -> None:
    design = invented(missing)
    found = design.tau("m", "gap", design.everywhere)
    x, y = (design.column(name)[missing:] for name in ("m", "gap"))
    assert found is not None
    assert found.value == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-12)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_a_model_that_counts_twice_is_one_that_is_there_twice() -> None:
    draw = np.random.default_rng(0)
    x, y, counts = draw.normal(size=8), draw.normal(size=8), draw.integers(0, 4, size=(5, 8))
    found = masked_tau(x, y, np.ones((8, 8), dtype=bool), counts.astype(float))
    again = [stats.kendalltau(np.repeat(x, row), np.repeat(y, row)).statistic for row in counts]
    np.testing.assert_allclose(found, again, atol=1e-12)


def test_along_a_factor_all_others_are_held() -> None:
    design = invented()
    for factor in FACTORS:
        others = [each for each in FACTORS if each != factor]
        pairs = design.along(factor)
        assert pairs.any()
        for i, j in zip(*np.nonzero(pairs), strict=True):
            one, two = (design.comparison.scores.iloc[place] for place in (i, j))
            assert one[factor] != two[factor]
            assert [one[name] for name in others] == [two[name] for name in others]
    # Every pair of a line, in both orders: (values - 1) times the models.
    assert [int(design.along(factor).sum()) for factor in FACTORS] == [12, 24, 12]


def test_granulated_is_the_mean_over_factors_of_agreement_pair_by_pair() -> None:
    design = invented()
    x, y, rows = design.column("m"), design.column("gap"), design.comparison.scores
    each = []
    for factor in ("a", "b"):
        others = [name for name in FACTORS if name != factor]
        signs = [
            np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])
            for i, j in itertools.combinations(range(len(rows)), 2)
            if all(rows.iloc[i][name] == rows.iloc[j][name] for name in others)
        ]
        each.append(np.mean(signs))
    found = design.granulated("m", "gap", ("a", "b"))
    assert found is not None
    assert found.value == pytest.approx(np.mean(each), abs=1e-12)


def test_within_strata_only_their_pairs_count() -> None:
    design = invented()
    x, y = design.column("m"), design.column("gap")
    scores = design.comparison.scores
    here = ((scores["a"] == 1.0) & (scores["b"] == 2.0)).to_numpy()
    assert here.sum() == 2
    found = design.tau("m", "gap", design.where(a=1.0, b=2.0))
    assert found is not None
    assert found.value == stats.kendalltau(x[here], y[here]).statistic
    assert not (design.within("a") & ~design.within()).any()
    pairs = design.within("a")
    assert all(one == two for (i, one), (j, two) in itertools.product(enumerate(scores["a"]), repeat=2) if pairs[i, j])


def test_partial_tau_is_that_of_the_library() -> None:
    design = invented()
    columns = {name: design.comparison.column(name) for name in ("m", "gap", "a", "b")}
    given = {"a": columns["a"], "b": columns["b"]}
    there = correlation(columns["m"], columns["gap"], given=given, resamples=10, permutations=9)
    found = design.partial("m", "gap", ("a", "b"))
    assert found is not None
    assert found.value == pytest.approx(there.value, abs=1e-9)


def test_differences_are_of_the_same_resamples() -> None:
    design = invented()
    term = Term("m", "gap", design.everywhere)
    found = design.estimate([term, term], lambda a, b: a - b)
    assert found is not None
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_what_has_no_value_is_undefined() -> None:
    design = invented()
    nothing = np.zeros_like(design.everywhere)
    assert design.tau("m", "gap", nothing) is None
    assert design.partial("m", "gap", ("gap",)) is None


# ---- the words


@pytest.mark.parametrize("key", [each.name for each in RECORDS.iterdir() if (each / "comparison.json.gz").exists()])
def test_words_and_radius_tell_every_measure(key: str) -> None:
    comparison = load_zoo(RECORDS / key).comparison
    told = [(words(each), each["radius"]) for _, each in comparison.measures.fillna({"radius": 0.0}).iterrows()]
    assert len(set(told)) == len(told)
    catalogue = Catalogue(comparison)
    assert sum(len(each) for each in catalogue.labels.values()) == len(told)
    for radii in catalogue.labels.values():
        assert list(radii) == sorted(radii, key=lambda radius: radius or 0)
    for name, radii in catalogue.labels.items():
        first = list(radii.values())[:3]
        assert catalogue.middle(name) == first[len(first) // 2]
