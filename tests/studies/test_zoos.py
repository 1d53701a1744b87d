"""Zoos of transformers: taus over pairs against scipy and the definition, and the recorded zoos with their tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from studies import mnist, sentiment
from studies.__main__ import recorded
from studies.common import RECORDS, signed
from studies.mnist import FULL as MNIST
from studies.mnist import TARGET
from studies.sentiment import FULL as SENTIMENT
from studies.zoos.ranks import Design, Ranked, masked_tau, words
from studies.zoos.zoo import Zoo

ALONG = ("points", "noise", "shift", "learning_rate", "weight_decay")
INV = "inv (second order) worst-case sharpness, steps 15, radius 0.095"
ADAPTIVE = "adaptive worst-case sharpness, steps 15, radius 0.36"
Pairing = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


@cache
def zoo(study: ModuleType) -> Zoo:
    return study.load(RECORDS)


def invented(missing: int = 0) -> Design:
    """Two by three by two models of random measures and gaps; a few measures are missing."""
    draw = np.random.default_rng(3)
    cells = itertools.product((0.0, 1.0), (0.0, 1.0, 2.0), (1.0, 2.0))
    frame = pd.DataFrame(cells, columns=["a", "b", "seed"])
    frame["error_gap"] = frame["a"] + draw.normal(size=12)
    frame["m"] = frame["b"] - frame["a"] + draw.normal(size=12)
    frame.loc[: missing - 1, "m"] = np.nan
    return Design(frame.assign(n=draw.normal(size=12)), ("a", "b", "seed"), ("a", "b"), ("a",))


def agreement(frame: pd.DataFrame, measure: str, pairs: Pairing, gap: str = "error_gap") -> float:
    """tau-b over some pairs, from its definition."""
    rows = frame.to_dict("records")
    signs = np.array(
        [
            (np.sign(a[measure] - b[measure]), np.sign(a[gap] - b[gap]))
            for a, b in itertools.combinations(rows, 2)
            if pairs(a, b)
        ]
    )
    return float((signs[:, 0] * signs[:, 1]).sum() / np.sqrt((signs**2).sum(axis=0).prod()))


def psi(frame: pd.DataFrame, measure: str, factors: tuple[str, ...], along: tuple[str, ...]) -> float:
    """The granulated coefficient, from its definition."""

    def apart(factor: str) -> Pairing:
        return lambda a, b: [each for each in factors if a[each] != b[each]] == [factor]

    return float(np.mean([agreement(frame, measure, apart(factor)) for factor in along]))


@pytest.mark.parametrize("missing", [0, 3])
def test_all_pairs_give_the_tau_of_scipy(missing: int) -> None:
    design = invented(missing)
    found = design.tau("m", design.same())
    known = design.frame[missing:]
    assert found is not None
    assert found.value == pytest.approx(stats.kendalltau(known["m"], known["error_gap"]).statistic, abs=1e-12)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_a_model_that_counts_twice_is_one_that_is_there_twice() -> None:
    draw = np.random.default_rng(0)
    x, y, counts = draw.normal(size=8), draw.normal(size=8), draw.integers(0, 4, size=(5, 8))
    found = masked_tau(x, y, np.ones((8, 8), dtype=bool), counts.astype(float))
    again = [stats.kendalltau(np.repeat(x, row), np.repeat(y, row)).statistic for row in counts]
    np.testing.assert_allclose(found, again, atol=1e-12)


def test_taus_over_pairs_are_those_of_the_definition_and_differences_are_of_the_same_resamples() -> None:
    design = invented()
    frame = design.frame
    pairs: dict[str, tuple[Any, Pairing]] = {
        "one stratum": (design.within, lambda x, y: x["a"] == y["a"]),
        "one value": (design.where("b", 2.0), lambda x, y: x["b"] == y["b"] == 2.0),
        "one factor": (design.apart("b"), lambda x, y: x["b"] != y["b"] and (x["a"], x["seed"]) == (y["a"], y["seed"])),
    }
    for name, (mask, pairing) in pairs.items():
        found = design.tau("m", mask)
        assert found is not None
        assert found.value == pytest.approx(agreement(frame, "m", pairing), abs=1e-12), name
    granulated, difference = design.psi("m"), design.tau_difference("m", "m", design.within)
    assert granulated is not None
    assert granulated.value == pytest.approx(psi(frame, "m", design.factors, design.along), abs=1e-12)
    assert difference is not None
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)
    assert design.tau("m", np.zeros_like(design.same())) is None


# ---- the records


@pytest.mark.parametrize(("study", "recipes"), [(mnist, MNIST.recipes), (sentiment, SENTIMENT.recipes)])
def test_every_model_of_the_design_is_recorded_and_words_tell_every_measure(study: ModuleType, recipes: Any) -> None:
    comparison = zoo(study).comparison
    assert set(comparison.scores.index) == set(recipes)
    assert comparison.failures.empty
    for name, recipe in recipes.items():
        assert comparison.scores.loc[name, [*vars(recipe)]].to_dict() == vars(recipe)
    told = [(words(each), each["radius"]) for _, each in comparison.measures.fillna({"radius": 0}).iterrows()]
    assert len(set(told)) == len(told)
    for radii in Ranked(comparison, (), (), ()).labels.values():
        assert list(radii) == sorted(radii)


def test_every_vision_transformer_was_trained_to_the_same_loss_and_measured_as_its_seed_says() -> None:
    frame = zoo(mnist).comparison.frame()
    assert frame["train_loss"].max() < TARGET
    np.testing.assert_allclose(frame["error_gap"], frame["test_error"] - frame["train_error"])
    for label in zoo(mnist).comparison.labels:
        seeds = set(frame["seed"][frame[label].notna()])
        assert (seeds, frame[label].count()) in (({1.0}, 72), ({1.0, 2.0, 3.0}, 216)), label


def test_correlations_are_those_of_the_table() -> None:
    frame, rows = zoo(mnist).comparison.frame(), recorded("mnist")["ranking"].set_index("Measure")
    expected = {
        "Pooled": stats.kendalltau(frame[INV], frame["error_gap"]).statistic,
        "Within cells": agreement(frame, INV, lambda a, b: all(a[each] == b[each] for each in ALONG[:3])),
        "Granulated": psi(frame, INV, (*ALONG, "seed"), ALONG),
    }
    for column, value in expected.items():
        assert rows.loc["inv", column].startswith(signed(value))
    primary = mnist.ranked(zoo(mnist)).design.psi_difference("inv", "adaptive")
    assert primary is not None
    expected_difference = abs(expected["Granulated"]) - abs(psi(frame, ADAPTIVE, (*ALONG, "seed"), ALONG))
    assert primary.value == pytest.approx(expected_difference, abs=1e-9)
    assert primary.sign == 0  # inconclusive, as the page says


def test_no_measure_of_berts_that_differ_by_seed_alone_is_significant() -> None:
    seeds = sentiment.ranked(zoo(sentiment), "seeds")
    taus = [seeds.design.tau(name, seeds.design.same()) for name in seeds.measures]
    assert len(taus) > 20
    assert all(tau is not None and tau.sign == 0 for tau in taus)
