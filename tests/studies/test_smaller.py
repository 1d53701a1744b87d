"""The studies of ascents, optimizers and fibres: what they count, and their records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from studies import ascents, audit, fibres
from studies.__main__ import study as command
from studies.common import load
from studies.fibres import names, row_of

ROOT = Path(__file__).parents[2]


def words_of(page: str) -> str:
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").replace("’", "'").split())


@pytest.mark.parametrize("study", [ascents, audit, fibres], ids=lambda study: study.__name__)
def test_a_short_run_has_the_tables_of_the_record_and_can_be_read_again(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.fibres.FAST", ("gated network",))
    if study is audit:
        for name in ("peft", "pytorch_optimizer", "transformers"):
            pytest.importorskip(name)
    name = study.__name__.removeprefix("studies.")
    done = CliRunner().invoke(command, [name, "--fast", "--out", str(tmp_path), "--quiet"])
    assert (done.exit_code, done.output) == (0, "")
    found, record = load(name, tmp_path), load(name)
    assert found["command"] == f"make study NAME={name} ARGS=--fast"
    shown, recorded = study.tables(found), study.tables(record)
    assert {name: [*each.columns] for name, each in shown.items()} == {
        name: [*each.columns] for name, each in recorded.items()
    }
    check = {ascents: check_ascents, audit: check_audit, fibres: check_fibres}[study]
    check(found, record, tmp_path)


def check_ascents(found: dict[str, Any], record: dict[str, Any], out: Path) -> None:
    cases = pd.DataFrame(found["cases"])
    assert all(case["passes"] == [59, 60] for case in (*found["cases"], *record["cases"]))
    assert len(cases) == 2 * 2 * len(ascents.RADII)
    assert set(cases.geometry) == {geometry.name for geometry in ascents.RADII}
    assert (cases[["matched", "released"]] > 0).all(axis=None)
    assert (cases.released_norm <= 1 + 1e-6).all()
    median, low, high = ascents.median_ratio(pd.DataFrame({"released": np.arange(1.0, 22), "matched": 1.0}))
    assert median == 11
    assert 4 < low < median < high < 18  # binomial(21, 1/2) puts about 5 of them outside either bound


def check_audit(found: dict[str, Any], record: dict[str, Any], out: Path) -> None:
    assert [(row["optimizer"], row["note"]) for row in found["rows"]] == [
        (row["optimizer"], row["note"]) for row in record["rows"]
    ]
    assert found["pairs"] == record["pairs"]
    for row in (*found["rows"], *record["rows"]):
        assert not row.get("failure")
        assert math.isfinite(row["loss"])
        ours = row["optimizer"] in ("QuotientSGD", "QuotientAdam", "SAM over QuotientAdam")
        assert not ours or max(row["drifts"]) < 1e-9
        assert row["optimizer"] != "AdamW" or row["drifts"][0] > 0.01
    below = sum(max(row["drifts"]) < 1e-9 for row in record["rows"])
    assert f"Of {len(record['rows'])} optimizers, {below} have a drift below 1e-9" in words_of("optimizers.md")


def check_fibres(found: dict[str, Any], record: dict[str, Any], out: Path) -> None:
    assert [row["name"] for row in found["rows"]] == ["gated network"]
    assert [row["name"] for row in record["rows"]] == names()
    counted = [row["kind"] for row in record["rows"] if not row["failure"]]
    assert len(counted) - counted.count("by hand") >= 60
    assert counted.count("by hand") >= 12
    prose = words_of("fibres.md").partition("The missing dimensions")[2]
    assert [row["name"] for row in record["rows"] if row["missing"] and row["name"] not in prose] == []


@pytest.mark.parametrize("name", ["llama", "attention by einsum", "decoder with RMSNorm and a head"])
def test_a_row_is_what_the_certificate_says_now(name: str) -> None:
    pytest.importorskip("transformers")
    (stored,) = (row for row in load("fibres")["rows"] if row["name"] == name)
    found = json.loads(json.dumps(row_of(name)))
    assert (found["failure"], found["missing"]) == ("", 0)
    assert [found[each] for each in ("dimension", "near", "found")] == [
        stored[each] for each in ("dimension", "near", "found")
    ]
