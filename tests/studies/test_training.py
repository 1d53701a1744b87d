"""The study of training: how it chooses and compares, one small run, and what its record and page hold."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from studies.__main__ import recorded, study
from studies.training import figure
from studies.training import study as training
from studies.training.adapters import Cell, Trained, share_of_rate
from studies.training.choices import (
    LEARNT,
    chosen,
    curve,
    difference,
    interval,
    least,
    losses_of,
    mean_of,
    told_apart,
    width,
)
from studies.training.optimizers import ADAMW, CANDIDATES, OURS
from studies.training.outcome import Outcome
from studies.training.study import Plan, Training

ROOT = Path(__file__).parents[2]
INV = "QuotientAdam, inv"


def cell(rate: float, *losses: float | None, validation: float | None = None) -> Trained:
    found = tuple(Outcome(loss if validation is None else validation, loss, loss and 0.5) for loss in losses)
    return Trained(Cell("AdamW", 2, 1.0, rate, 10, tuple(range(len(losses)))), found)


def test_the_rate_is_chosen_by_other_sentences_than_those_it_is_tested_on() -> None:
    cells = [cell(0.1, 0.3, validation=0.6), cell(1.0, 0.5, validation=0.4), cell(10.0, None)]
    assert chosen(cells, "AdamW", 2).cell.rate == 1.0


def test_the_width_is_where_straight_lines_cross_the_limit() -> None:
    """0.4 at the best rate and 0.8 a decade beside it: 2 % more, 0.008, are reached after 0.02 decades."""
    assert width([cell(0.1, 0.8), cell(1.0, 0.4), cell(10.0, 0.8)]) == (pytest.approx(0.04), False)
    assert width([cell(0.1, 0.8), cell(1.0, 0.4), cell(10.0, 0.404)]) == (pytest.approx(1.02), True)
    assert width([cell(0.1, 0.8), cell(1.0, 0.4), cell(10.0, 0.8)], 0.3) == (0.0, False)
    assert width([cell(0.1, 0.8), cell(1.0, 0.4), cell(10.0, None)], 0.5)[0] == pytest.approx(0.25 + 0.1 / 9.6)


def test_means_are_paired_by_seed_with_students_interval() -> None:
    found = mean_of([1.0, 2.0, 3.0])
    assert (found.value, found.high - found.value) == (2.0, pytest.approx(4.302653 / math.sqrt(3)))  # t of 2, 97.5 %
    shifted = difference(cell(1.0, 0.3, 0.5, 0.9).outcomes, cell(1.0, 0.2, 0.4, 0.8).outcomes)
    assert shifted.low == pytest.approx(0.1)
    assert shifted.decided
    assert not mean_of([-1.0, 1.0]).decided
    assert mean_of(losses_of(cell(1.0, 0.3, None).outcomes)).value == math.inf


def test_holm_stops_at_the_first_that_is_not_told() -> None:
    """Limits 0.05 / 3, 0.05 / 2, 0.05: 0.03 is above its own, and 0.04, which is below, comes after it."""
    gaps = {name: replace(mean_of([1.0]), p=p) for name, p in {"a": 0.04, "b": 0.01, "c": 0.03}.items()}
    assert told_apart(gaps) == {"b"}
    assert told_apart({"lost": mean_of([math.inf, 1.0]), "undefined": mean_of([math.inf, -math.inf])}) == {"lost"}


def test_an_optimizer_that_does_not_train_has_no_width() -> None:
    """Guessing has 0.693 nats: within 2 % of a loss that is hardly below it every rate would be good."""
    cells = tuple(cell(rate, 0.683, 0.684) for rate in (0.1, 1.0))
    assert width(cells) == (1.0, True)
    assert least(cells, ADAMW, 2) > LEARNT


def test_the_learning_rate_rises_and_falls() -> None:
    shares = [share_of_rate(step, 100) for step in range(100)]
    assert max(shares) == shares[10] == 1
    assert np.allclose(np.diff(shares[:11]), 1 / 11)
    assert np.allclose(np.diff(shares[10:]), -1 / 90)
    assert shares[-1] > 0


def failing(*arguments: object) -> None:
    raise AssertionError(f"was called again with {arguments}")


def test_a_small_run_from_start_to_end(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peft", "pytorch_optimizer", "transformers", "mlxtend"):
        pytest.importorskip(name)
    monkeypatch.setattr(training, "fetched", lambda: archive)
    out = tmp_path / "out"
    done = CliRunner().invoke(study, ["training", "--fast", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = Training.load(out / "training.json")
    plan = Plan.fast()
    assert found.plan == plan
    assert [each.cell for each in found.trained] == plan.cells()
    assert [each.ball for each in found.flattened] == plan.balls()
    assert len(found.timed) == len(CANDIDATES) * len(plan.ranks)
    # A start elsewhere on the orbit is the same to ours, and another one to AdamW.
    for name, same in ((OURS, True), (ADAMW, False)):
        (usual,), (moved,) = curve(found.trained, name, 2), curve(found.trained, name, 2, plan.moved[0])
        assert (abs(losses_of(usual.outcomes)[0] - losses_of(moved.outcomes)[0]) < 1e-4) == same
    for each in found.mixed:
        (ours,) = (score for score in each.scores if score.method == "merge_adapters")
        assert ours.moved == pytest.approx(ours.loss, abs=1e-5)
    monkeypatch.setattr(training, "measure_costs", failing)
    monkeypatch.setattr(training, "train_cell", failing)
    again = CliRunner().invoke(study, ["training", "--fast", "--out", str(out), "--quiet"])
    assert (again.exit_code, again.output) == (0, "")
    assert Training.load(out / "training.json") == found


@pytest.fixture(scope="module")
def record() -> Training:
    return Training.load(ROOT / "notebooks" / "records" / "training.json")


def test_the_record_is_of_the_whole_plan(record: Training) -> None:
    plan = Plan()
    assert record.plan == plan
    assert [each.cell for each in record.trained] == plan.cells()
    assert [each.ball for each in record.flattened] == plan.balls()
    assert [each.merge.seed for each in record.mixed] == list(plan.seeds)
    assert {(each.cell.optimizer, each.cell.rank) for each in record.timed} == {
        (name, rank) for rank in plan.ranks for name in CANDIDATES
    }
    assert all(len(each.outcomes) == len(each.cell.seeds) for each in (*record.trained, *record.timed))
    assert record.command == "make study NAME=training"


def test_starts_on_one_orbit_end_alike_where_that_is_promised(record: Training) -> None:
    for name in (OURS, "LoRA-RITE"):
        best = chosen(record.trained, name, 16)
        for scale in record.plan.moved:
            moved = next(each for each in curve(record.trained, name, 16, scale) if each.cell.rate == best.cell.rate)
            ends = zip(losses_of(best.outcomes), losses_of(moved.outcomes), strict=False)
            assert all(abs(a - b) < 0.005 for a, b in ends), name


def test_the_figure_shows_the_record_and_the_page_what_is_significant(record: Training) -> None:
    drawn = figure(record).alt
    assert all(name in drawn for name in CANDIDATES)
    significant = [(row[0], row[2]) for row in recorded("training")["losses"].to_numpy() if row[5].endswith("*")]
    ranks = [str(rank) for rank in record.plan.ranks]
    assert significant == [(INV, ranks[0]), (INV, ranks[1]), ("preconditioned AdamW", ranks[2]), (INV, ranks[2])]
    gap = difference(*(chosen(record.trained, name, 16).outcomes for name in (OURS, ADAMW)))
    text = (ROOT / "docs" / "usefulness.md").read_text(encoding="utf-8")
    assert f"{interval(gap)} nats, inconclusive" in text
    assert not gap.decided


def test_numbers_typed_in_the_guide_are_those_of_the_record(record: Training) -> None:
    text = " ".join((ROOT / "docs" / "training.md").read_text(encoding="utf-8").split())
    rates = [chosen(record.trained, OURS, rank).cell.rate for rank in record.plan.ranks]
    assert rates == [3.16e-3, 1e-3, 3.16e-4]
    assert "the best rate fell from 3e-3 at rank 2 to 3e-4 at rank 64" in text
    widths = {
        name: [width(curve(record.trained, name, rank))[0] for rank in record.plan.ranks] for name in (OURS, ADAMW)
    }
    low, high = (f"{edge(widths[OURS]):.1f}" for edge in (min, max))
    usual = [f"{edge(widths[ADAMW]):.1f}" for edge in (min, max)]
    assert f"over {low} to {high} decades of rates, with AdamW over {usual[0]} to {usual[1]}" in text
