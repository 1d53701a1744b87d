"""The recorded zoos of transformers, and their tables, computed once more pair by pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from quotient_manifolds.compare import Comparison
from studies import mnist, sentiment
from studies.__main__ import recorded
from studies.common import signed
from studies.mnist.training import TARGET
from studies.mnist.zoo import FULL as MNIST
from studies.sentiment.zoo import FULL as SENTIMENT

RECORDS = Path(__file__).parents[2] / "notebooks" / "records"
ALONG = ("points", "noise", "shift", "learning_rate", "weight_decay")
INV = "inv (second order) worst-case sharpness, steps 15, radius 0.095"
ADAPTIVE = "adaptive worst-case sharpness, steps 15, radius 0.36"


@cache
def zoo(key: str) -> Comparison:
    return {"mnist": mnist, "sentiment": sentiment}[key].load(RECORDS).comparison


def agreement(
    comparison: Comparison,
    label: str,
    pairs: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
    gap: str = "error_gap",
) -> float:
    """tau-b over some pairs, from its definition."""
    values = list(zip(comparison.column(label), comparison.scores.to_dict("records"), strict=True))
    signs = np.array(
        [
            (np.sign(x - y), np.sign(a[gap] - b[gap]))
            for (x, a), (y, b) in itertools.combinations(values, 2)
            if pairs(a, b)
        ]
    )
    assert len(signs)
    return float((signs[:, 0] * signs[:, 1]).sum() / np.sqrt((signs**2).sum(axis=0).prod()))


def same_task(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a[each] == b[each] for each in ALONG[:3])


def psi(label: str) -> float:
    """The granulated coefficient, from its definition."""

    def apart_in(factor: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], bool]:
        return lambda a, b: [each for each in (*ALONG, "seed") if a[each] != b[each]] == [factor]

    return float(np.mean([agreement(zoo("mnist"), label, apart_in(factor)) for factor in ALONG]))


@pytest.mark.parametrize(("key", "recipes"), [("mnist", MNIST.recipes), ("sentiment", SENTIMENT.recipes)])
def test_every_model_of_the_design_is_recorded(key: str, recipes: Mapping[str, Any]) -> None:
    scores = zoo(key).scores
    assert set(scores.index) == set(recipes)
    assert zoo(key).failures.empty
    for name, recipe in recipes.items():
        assert {each: scores.loc[name, each] for each in vars(recipe)} == vars(recipe)


def test_every_vision_transformer_was_trained_to_the_same_loss() -> None:
    assert max(zoo("mnist").column("train_loss")) < TARGET
    scores = zoo("mnist").scores
    assert scores["error_gap"].tolist() == pytest.approx((scores["test_error"] - scores["train_error"]).tolist())


def test_what_is_measured_on_the_first_seed_alone_is_known_there() -> None:
    comparison = zoo("mnist")
    for label in comparison.labels:
        seeds = comparison.frame().dropna(subset=label)["seed"]
        assert (set(seeds), len(seeds)) in (({1.0}, 72), ({1.0, 2.0, 3.0}, 216)), label


# ---- the tables


def test_correlations_are_those_of_the_table() -> None:
    comparison = zoo("mnist")
    rows = {row[0]: row for row in recorded("mnist")["ranking"].to_numpy().tolist()}
    for name, label in (("inv", INV), ("adaptive", ADAPTIVE)):
        pooled = stats.kendalltau(comparison.column(label), comparison.column("error_gap")).statistic
        within, with_loss = (agreement(comparison, label, same_task, gap) for gap in ("error_gap", "loss_gap"))
        for place, value in ((1, pooled), (2, within), (3, psi(label)), (5, with_loss)):
            assert rows[name][place].startswith(signed(value))


def test_the_primary_comparison_is_the_one_of_the_spec() -> None:
    found = mnist.ranked(mnist.load(RECORDS)).psi_difference("inv", "adaptive")
    assert found is not None
    assert found.value == pytest.approx(abs(psi(INV)) - abs(psi(ADAPTIVE)), abs=1e-9)
    assert found.sign == 0  # inconclusive, as the page says
    assert recorded("mnist")["comparisons"].iloc[0, 1] == str(found)
    assert recorded("sentiment")["comparisons"].iloc[0, 1] == "+0.01 [−0.28, +0.26]"


def test_no_measure_of_berts_that_differ_by_seed_alone_is_significant() -> None:
    zoo = sentiment.ranked(sentiment.load(RECORDS), "seeds")
    taus = [zoo.tau(name, zoo.design.everywhere) for name in zoo.measures]
    assert len(taus) > 20
    assert all(tau is not None and tau.sign == 0 for tau in taus)
