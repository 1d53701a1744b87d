"""The studies of ascents, optimizers, fibres and invariance: what they count, and what their records hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from studies import ascents, audit, fibres, invariance, peers
from studies.__main__ import study
from studies.common import load
from studies.fibres import FAST, names, row_of
from studies.invariance import MEASURES, METRICS, MOVES, changes_of

ROOT = Path(__file__).parents[2]


def words_of(page: str) -> str:
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").replace("’", "'").split())


@pytest.mark.parametrize("module", [ascents, audit, fibres, invariance], ids=lambda module: module.__name__)
def test_a_short_run_has_the_tables_of_the_record_and_can_be_read_again(module: Any, tmp_path: Path) -> None:
    name = module.__name__.removeprefix("studies.")
    done = CliRunner().invoke(study, [name, "--fast", "--out", str(tmp_path), "--quiet"])
    assert (done.exit_code, done.output) == (0, "")
    found, record = load(name, tmp_path), load(name)
    assert found["command"] == f"make study NAME={name} ARGS=--fast"
    shown, recorded = module.tables(found), module.tables(record)
    assert {name: [*each.columns] for name, each in shown.items()} == {
        name: [*each.columns] for name, each in recorded.items()
    }
    checks = {ascents: check_ascents, audit: check_audit, fibres: check_fibres, invariance: check_invariance}
    checks[module](found, record)


def check_ascents(found: dict[str, Any], record: dict[str, Any]) -> None:
    cases = pd.DataFrame(found["cases"])
    assert all(case["passes"] == [59, 60] for case in (*found["cases"], *record["cases"]))
    assert len(cases) == 2 * len(ascents.RADII)
    assert set(cases.geometry) == {geometry.name for geometry in ascents.RADII}
    assert (cases[["matched", "released"]] > 0).all(axis=None)
    assert (cases.released_norm <= 1 + 1e-6).all()
    median, low, high = ascents.median_ratio(pd.DataFrame({"released": np.arange(1.0, 22), "matched": 1.0}))
    assert median == 11
    assert 4 < low < median < high < 18  # binomial(21, 1/2) puts about 5 of them outside either bound


def check_audit(found: dict[str, Any], record: dict[str, Any]) -> None:
    assert [(row["optimizer"], row["note"]) for row in found["rows"]] == [
        (row["optimizer"], row["note"]) for row in record["rows"][::6]
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


def check_fibres(found: dict[str, Any], record: dict[str, Any]) -> None:
    assert [row["name"] for row in found["rows"]] == [*FAST]
    assert [row["name"] for row in record["rows"]] == names()
    counted = [row["kind"] for row in record["rows"] if not row["failure"]]
    assert len(counted) - counted.count("by hand") >= 60
    assert counted.count("by hand") >= 12
    prose = words_of("fibres.md").partition("The missing dimensions")[2]
    assert [row["name"] for row in record["rows"] if row["missing"] and row["name"] not in prose] == []


def check_invariance(found: dict[str, Any], record: dict[str, Any]) -> None:
    whole = [row for row in (*found["rows"], *record["rows"]) if row["changes"]]
    for row in whole:
        assert [(each["metric"], each["measure"]) for each in row["changes"]] == [
            (metric, measure) for metric in METRICS for measure in MEASURES
        ]
        assert row["moved"] > 0
    assert [row["name"] for row in found["rows"]] == list(invariance.FAST)
    assert found["moves"] == [list(MOVES[-1])]
    assert not changes_of(found)["missed"].any()
    # What the page says of the record.
    assert [row["name"] for row in record["rows"]] == names()
    assert all(row["changes"] for row in record["rows"])
    assert {scale for scale, _ in record["moves"]} == {0.3, 1.0, 3.0}
    missed = changes_of(record).query("missed")
    unexplained = missed[~missed[["cast", "rounded", "cancels"]].any(axis=1)]
    assert list(zip(unexplained["model"], unexplained["precision"], strict=True)) == [("openai-gpt", "float64")]
    assert unexplained["change"].max() < 4e-9
    by_precision = missed.groupby("precision")["model"].nunique()
    assert (by_precision["float64"], by_precision["float32"]) == (3, 4)
    ratios = sorted(max(row["adaptive"], 1 / row["adaptive"]) for row in record["rows"] if row["changes"])
    assert ratios[9] > 1.05  # the random elements are far from the identity
    assert ratios[49] > 2


@pytest.mark.parametrize("name", ["attention by einsum", "decoder with RMSNorm and a head"])
def test_a_row_is_what_the_certificate_says_now(name: str) -> None:
    pytest.importorskip("transformers")
    (stored,) = (row for row in load("fibres")["rows"] if row["name"] == name)
    found = json.loads(json.dumps(row_of(name)))
    assert (found["failure"], found["missing"]) == ("", 0)
    assert [found[each] for each in ("dimension", "near", "found")] == [
        stored[each] for each in ("dimension", "near", "found")
    ]


def test_a_library_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "PEERS", {"no-such-library": "1.0"})
    with pytest.raises(
        ImportError, match=r"needs no-such-library, which is not installed: pip install no-such-library==1"
    ):
        peers.run(tmp_path)
