"""The recorded zoos of transformers, and what the page of results says of them, computed once more pair by pair."""

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
from studies.mnist.training import TARGET
from studies.mnist.zoo import FULL as MNIST
from studies.results.page import PAGE
from studies.results.records import Records
from studies.sentiment.zoo import FULL as SENTIMENT
from studies.zoos.study import load_record

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RECORDS = NOTEBOOKS / "records"
ALONG = ("points", "noise", "shift", "learning_rate", "weight_decay")
INV = "inv (second order) worst-case sharpness, steps 15, radius 0.095"
ADAPTIVE = "adaptive worst-case sharpness, steps 15, radius 0.36"


@cache
def zoo(key: str) -> Comparison:
    return load_record(RECORDS / key)[0]


@cache
def page() -> str:
    return " ".join((NOTEBOOKS / PAGE).read_text(encoding="utf-8").split())


def said(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def agreement(
    comparison: Comparison,
    label: str,
    pairs: Callable[[Mapping[str, Any], Mapping[str, Any]], bool],
    gap: str = "error_gap",
) -> float:
    """tau-b over some pairs, from its definition."""
    values = list(zip(comparison.column(label), [row.scores for row in comparison.rows], strict=True))
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


# ---- the records


@pytest.mark.parametrize(("key", "recipes"), [("mnist", MNIST.recipes), ("sentiment", SENTIMENT.recipes)])
def test_every_model_of_the_design_is_recorded(key: str, recipes: Mapping[str, Any]) -> None:
    if not (RECORDS / key / "comparison.json.gz").exists():
        pytest.skip("This zoo has no record.")
    rows = {row.checkpoint: row for row in zoo(key).rows}
    assert set(rows) == set(recipes)
    assert zoo(key).failures == ()
    for name, recipe in recipes.items():
        assert {each: rows[name].scores[each] for each in vars(recipe)} == vars(recipe)


def test_every_vision_transformer_was_trained_to_the_same_loss() -> None:
    assert max(zoo("mnist").column("train_loss")) < TARGET
    gaps = {row.checkpoint: row.scores for row in zoo("mnist").rows}
    assert all(each["error_gap"] == pytest.approx(each["test_error"] - each["train_error"]) for each in gaps.values())


def test_what_is_measured_on_the_first_seed_alone_is_known_there() -> None:
    comparison = zoo("mnist")
    for label in comparison.labels:
        known = {row.scores["seed"] for row in comparison.rows if row.values[label] is not None}
        count = sum(row.values[label] is not None for row in comparison.rows)
        assert (known, count) in (({1.0}, 72), ({1.0, 2.0, 3.0}, 216)), label


# ---- the page


def test_pooled_and_within_cells_are_those_of_the_page() -> None:
    comparison = zoo("mnist")
    gaps = comparison.column("error_gap")
    lines = (NOTEBOOKS / PAGE).read_text(encoding="utf-8").partition("| Pooled | Within cells |")[2].splitlines()
    for name, label in (("inv", INV), ("adaptive", ADAPTIVE)):
        pooled = stats.kendalltau(comparison.column(label), gaps).statistic
        within = agreement(comparison, label, same_task)
        row = next(line for line in lines if line.startswith(f"| {name} | "))
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[2].startswith(said(pooled))
        assert cells[3].startswith(said(within))
        assert cells[4].startswith(said(psi(label)))
        with_loss = agreement(comparison, label, same_task, gap="loss_gap")
        assert cells[6].startswith(said(with_loss))


def test_the_primary_comparison_is_the_one_of_the_spec() -> None:
    records = Records.load(RECORDS)
    assert records.mnist is not None
    found = records.mnist.difference("inv", "adaptive")
    expected = abs(psi(INV)) - abs(psi(ADAPTIVE))
    assert found is not None
    assert found.value == pytest.approx(expected, abs=1e-9)
    assert f"both at their middle radius, is {found}" in page()
    assert said(psi(INV)) in page()


def test_the_page_begins_with_what_was_found() -> None:
    text = (NOTEBOOKS / PAGE).read_text(encoding="utf-8")
    section = text.partition("## In short\n")[2].partition("\n## ")[0]
    assert section.count("\n- ") == (11 if (RECORDS / "sentiment" / "comparison.json.gz").exists() else 7)
    assert "None" not in text
