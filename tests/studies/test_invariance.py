"""The study of invariance: its record covers all models, its page shows it, and a trial of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from studies.__main__ import study
from studies.fibres.cases import FAST, names
from studies.invariance import MEASURES, METRICS, MOVES, TARGETS, Invariance, Row, tables

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def record() -> Invariance:
    return Invariance.load(ROOT / "notebooks" / "records" / "invariance.json")


def check_complete(row: Row) -> None:
    assert row.changes is not None
    assert set(row.changes) == set(TARGETS)
    for by_metric in row.changes.values():
        assert set(by_metric) == set(METRICS)
        assert all(set(values) | set(row.absent or {}) == set(MEASURES) for values in by_metric.values())


def test_the_record_covers_the_table_of_fibres_and_moves_of_all_sizes(record: Invariance) -> None:
    assert [row.name for row in record.rows] == names()
    assert {scale for scale, _ in record.moves} == {0.3, 1.0, 3.0}
    assert record.command == "make study NAME=invariance"
    for row in record.rows:
        if not row.failure:
            check_complete(row)
            assert row.moved > 0


def test_measures_agree_and_where_they_do_not_it_is_rounding(record: Invariance) -> None:
    for row in record.rows:
        assert not row.failure
        assert row.misses("float64") == row.cast, row.name
        assert {*row.misses("float32")} == {*row.stored_apart, *row.cancelling}, row.name
    (misses,) = (table for table in tables(record) if table.name == "misses")
    assert not [row for row in misses.rows if "unexplained" in row[2]]
    assert sum(not row.misses("float64") for row in record.rows) >= 95
    assert sum(not row.misses("float32") for row in record.rows) >= 80


def test_the_moves_are_no_small_ones(record: Invariance) -> None:
    ratios = sorted(max(row.adaptive, 1 / row.adaptive) for row in record.rows)
    assert ratios[len(ratios) // 10] > 1.05
    assert ratios[len(ratios) // 2] > 2


def test_a_trial_runs_and_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    arguments = ["invariance", "--fast", "--out", str(tmp_path)]
    done = CliRunner().invoke(study, arguments)
    assert done.exit_code == 0, done.output
    found = Invariance.load(tmp_path / "invariance.json")
    assert [row.name for row in found.rows] == list(FAST)
    assert found.moves == MOVES[-1:]
    for row in found.rows:
        check_complete(row)
        assert not row.misses("float64")
        assert not row.misses("float32")
    monkeypatch.setattr("studies.invariance.row_of", lambda *_: None)  # calling it would fail
    again = CliRunner().invoke(study, [*arguments, "--quiet"])
    assert (again.exit_code, again.output) == (0, "")
    assert Invariance.load(tmp_path / "invariance.json") == found
