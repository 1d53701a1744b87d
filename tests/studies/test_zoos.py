"""What the studies of zoos share: finding measures by what they are, the page, the record, and what is committed."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from quotient_manifolds.compare import ComparedModel, Comparison, MeanValue, Ranking
from quotient_manifolds.geometry import Euclidean, Quotient
from quotient_manifolds.report import Table, render
from quotient_manifolds.statistics import correlation, partial_correlation
from studies.bert import BERT
from studies.vit import VIT
from studies.zoos.figures import tau_line
from studies.zoos.measures import METRICS, PLAIN, ZooMeasures
from studies.zoos.page import Cost, ZooPage
from studies.zoos.study import load_record, write_record

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "notebooks" / "records"
PAGES = {"vit": VIT, "bert": BERT}

both = pytest.mark.parametrize("key", PAGES)


def invented_numbers(key: str) -> Comparison:
    """Everything the study measures, with numbers drawn at random."""
    comparison, _ = load_record(RECORDS / key)
    draw = np.random.default_rng(0)
    rows = []
    for k in range(12 if key == "vit" else 40):
        scores = {"error": 0.0, "test_error": 0.5, "test_loss": 1.0, "learning_rate": float(k), "start": "abc"[k % 3]}
        gaps = {"error_gap": draw.random(), "loss_gap": draw.random()}
        values = {name: MeanValue(draw.random(), None) for name in comparison.labels}
        rows.append(ComparedModel(f"m{k}", {**scores, **gaps}, values))
    empty = replace(comparison, rows=tuple(rows), rankings=(), agreement=None, failures=(), command="redo")
    few: dict[str, int] = {"resamples": 20, "permutations": 9}
    rankings = []
    for name, gap in itertools.product(comparison.labels, ("error_gap", "loss_gap")):
        x, y = empty.column(name), empty.column(gap)
        for given in PAGES[key].given:
            partial = partial_correlation(x, y, {given: empty.column(given)}, **few)
            rankings.append(Ranking(name, gap, (given,), partial))
        rankings.append(Ranking(name, gap, (), correlation(x, y, **few)))
    return replace(empty, rankings=tuple(rankings))


@pytest.fixture(scope="module")
def invented() -> dict[str, Comparison]:
    return {key: invented_numbers(key) for key in PAGES}


# ---- measures by what they are


@both
def test_a_measure_is_found_by_geometry_and_radius(invented: dict[str, Comparison], key: str) -> None:
    measures = ZooMeasures(invented[key])
    for name, geometry in PLAIN.items():
        middle = measures.middle(name)
        assert measures.places[name] == measures.label(geometry, middle)
        assert middle == sorted(measures.radii(geometry))[len(measures.radii(geometry)) // 2]
    assert set(measures.places) >= {f"{metric}{part}" for metric in METRICS for part in (" first", " adaptive norm")}
    assert len(set(measures.places.values())) == len(measures.places)
    assert list(measures.family) == sorted(measures.family)
    assert measures.family[0.0] == measures.places["inv"]
    assert measures.family[1.0] == measures.places["mix"]
    assert measures.label(Quotient("inv"), 12.0) is None
    assert measures.label(Quotient("inv"), None, "gradient norm") == "inv (second order) gradient norm"
    assert measures.tau(None, "error_gap") is None


# ---- the page


@both
def test_every_measure_is_on_the_page(invented: dict[str, Comparison], key: str) -> None:
    page: ZooPage = PAGES[key]
    made = page.page(invented[key], (Cost("something", 2, 3.0),))
    assert [section.name for section in made.sections] == [
        *("zoo", "ranking", "ablation", "family", "relaxation", "radius", "cost", "redo")
    ]
    tables = {block.name: block for section in made.sections for block in section.blocks if isinstance(block, Table)}
    measures = ZooMeasures(invented[key])
    lengths = {name: len(each.rows) for name, each in tables.items()}
    assert lengths["ranking-table"] == len(page.main_labels(measures))
    assert lengths["ablation-table"] == 7
    assert lengths["family-table"] == len(measures.family) == {"vit": 9, "bert": 5}[key]
    assert lengths["relaxation-table"] == 1 + len(measures.relaxations) == {"vit": 5, "bert": 4}[key]
    assert lengths["radius-table"] == {"vit": 12, "bert": 10}[key]
    cells = {cell for each in tables.values() for row in each.rows for cell in row}
    taus = {name: str(measures.tau(name, "error_gap")) for name in invented[key].labels}
    assert len(set(taus.values())) == len(taus)  # so that none stands for another
    assert [name for name, tau in taus.items() if tau not in cells] == []
    html = render(made)
    assert "mean nothing" not in html
    assert html.count("<svg") == 1 + 1 + 1 + 1 + (4 if key == "vit" else 3)
    assert not re.search(r'(?:src|href)="(?!#)', html)  # nothing outside


def test_the_page_says_the_power_of_the_radius_and_bears_what_failed(invented: dict[str, Comparison]) -> None:
    changed = invented["vit"]
    measures = ZooMeasures(changed)

    def with_values(label: str | None, value: float | None) -> Comparison:
        assert label is not None
        found = None if value is None else MeanValue(value, None)
        return replace(changed, rows=tuple(replace(row, values={**row.values, label: found}) for row in changed.rows))

    for radius, value in ((0.0125, 2.0), (0.05, 8.0), (0.2, 128.0)):
        changed = with_values(measures.label(Euclidean(), radius), value)
    changed = with_values(measures.label(Quotient("mix"), 0.4), None)
    html = render(VIT.page(changed, ()))
    assert "euclidean 1.00, 2.00; adaptive" in html  # quadrupled, then sixteenfold, for a radius four times as large


def test_taus_are_those_of_scipy(invented: dict[str, Comparison]) -> None:
    comparison = invented["vit"]
    measures = ZooMeasures(comparison)
    label = measures.places["mix"]
    (row,) = VIT.tau_table(measures, "t", "", {"chosen": label}).rows
    for text, gap in zip(row[1:3], ("error_gap", "loss_gap"), strict=True):
        expected = stats.kendalltau(comparison.column(label), comparison.column(gap)).statistic
        assert text.startswith(f"{expected:+.2f}".replace("-", "−"))
    found = measures.tau(label, "error_gap", ["start"])
    assert found is not None
    assert row[4] == str(found)


def test_the_line_of_tau_says_every_point(invented: dict[str, Comparison]) -> None:
    measures = ZooMeasures(invented["vit"])
    (figure,) = tau_line(measures, measures.family, x_label="t", name="line")
    for t, label in measures.family.items():
        assert f"{t:g}, gap in error: {measures.tau(label, 'error_gap')}" in figure.svg
    few = {0.0: measures.family[0.0], 9.0: "no such measure"}
    assert list(tau_line(measures, few, x_label="t", name="one")) == []


# ---- the record


def test_a_record_is_the_same_bytes_for_the_same_numbers(invented: dict[str, Comparison], tmp_path: Path) -> None:
    costs = (Cost("one, with a comma", 3, 1.5),)
    for name in ("a", "b"):
        write_record(tmp_path / name, invented["vit"], costs)
    for file in ("comparison.json.gz", "costs.csv"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert load_record(tmp_path / "a") == (invented["vit"], costs)


@both
def test_the_committed_record_is_whole_and_its_taus_are_its_values(key: str) -> None:
    folder = RECORDS / key
    comparison, costs = load_record(folder)
    measures = ZooMeasures(comparison)
    assert len(comparison.rows) >= {"vit": 48, "bert": 24}[key]
    assert comparison.known[0] + len(comparison.failures) == comparison.known[1]  # what is missing is accounted for
    assert all("normalised logits" in (failure.what or "") for failure in comparison.failures)
    assert len(comparison.failures) == 0 or key == "bert"
    spec = ROOT / "notebooks" / "studies" / key / "zoo.yaml"
    assert (folder / "zoo.yaml").read_text(encoding="utf-8") == spec.read_text(encoding="utf-8")
    assert [each.measure for each in costs] == list(comparison.labels)
    for name in comparison.labels:
        pairs = zip(comparison.column(name), comparison.column("error_gap"), strict=True)
        known = [(value, gap) for value, gap in pairs if value is not None]
        found = measures.tau(name, "error_gap")
        assert found is not None
        assert found.models == len(known)
        assert found.value == pytest.approx(stats.kendalltau(*zip(*known, strict=True)).statistic)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2e6
