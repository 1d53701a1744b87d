"""Invariance: the record holds what the page claims, and a trial of the study runs and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from studies.__main__ import study
from studies.common import Record, load
from studies.fibres import FAST, names
from studies.invariance import MEASURES, METRICS, MOVES, changes_of


def check_complete(record: Record) -> None:
    for row in record["rows"]:
        assert [(each["metric"], each["measure"]) for each in row["changes"]] == [
            (metric, measure) for metric in METRICS for measure in MEASURES
        ]
        assert row["moved"] > 0


def test_the_record_covers_the_table_of_fibres_and_its_misses_are_explained() -> None:
    record = load("invariance")
    check_complete(record)
    assert [row["name"] for row in record["rows"]] == names()
    assert {scale for scale, _ in record["moves"]} == {0.3, 1.0, 3.0}
    missed = changes_of(record).query("missed")
    assert missed[["cast", "rounded", "cancels"]].any(axis=1).all()
    by_precision = missed.groupby("precision")["model"].nunique()
    assert by_precision["float64"] <= 4
    assert by_precision["float32"] <= 19
    ratios = sorted(max(row["adaptive"], 1 / row["adaptive"]) for row in record["rows"])
    assert ratios[9] > 1.05  # the random elements are far from the identity
    assert ratios[49] > 2


def test_a_trial_runs_and_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["invariance", "--fast", "--out", str(tmp_path), "--quiet"]
    done = CliRunner().invoke(study, arguments)
    assert done.exit_code == 0, done.output
    found = load("invariance", tmp_path)
    check_complete(found)
    assert [row["name"] for row in found["rows"]] == list(FAST)
    assert found["moves"] == [list(MOVES[-1])]
    assert not changes_of(found)["missed"].any()
    monkeypatch.setattr("studies.invariance.row_of", lambda *_: 1 / 0)
    again = CliRunner().invoke(study, arguments)
    assert (again.exit_code, again.output) == (0, "")
    assert load("invariance", tmp_path) == found
