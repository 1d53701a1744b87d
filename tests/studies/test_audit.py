"""The study of optimizers: its record holds what it claims, and the page shows the record."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from studies.audit import AuditStudy, run

ROOT = Path(__file__).parents[2]
QUOTIENT = ("QuotientSGD", "QuotientAdam", "SAM over QuotientAdam")


@pytest.fixture(scope="module")
def record() -> AuditStudy:
    return AuditStudy.load(ROOT / "notebooks" / "records" / "audit.json")


def test_our_optimizers_do_not_see_the_factors_and_adamw_does(record: AuditStudy) -> None:
    rows = {row.optimizer: row for row in record.rows}
    assert all(max(rows[name].drifts) < 1e-9 for name in QUOTIENT)
    assert rows["AdamW"].drift > 0.01
    assert all(len(row.drifts) == record.moves for row in record.rows if not row.failure)
    assert record.command == "make study NAME=audit"


def test_the_page_counts_as_the_record_does(record: AuditStudy) -> None:
    measured = [row for row in record.rows if not row.failure]
    below = sum(max(row.drifts) < 1e-9 for row in measured)
    text = " ".join((ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8").split())
    assert f"Of {len(measured)} optimizers, {below} have a drift below 1e-9" in text


def test_a_record_survives_json(record: AuditStudy, tmp_path: Path) -> None:
    record.save(tmp_path / "audit.json")
    assert AuditStudy.load(tmp_path / "audit.json") == record


def test_a_short_study_has_a_row_for_every_optimizer_of_the_record(record: AuditStudy, tmp_path: Path) -> None:
    for name in ("peft", "pytorch_optimizer", "transformers"):
        pytest.importorskip(name)
    found = run(tmp_path, fast=True, command="", progress=lambda what, done, total: None)
    assert [(row.optimizer, row.note) for row in found.rows] == [(row.optimizer, row.note) for row in record.rows]
    assert found.pairs == record.pairs
    for row in found.rows:
        assert row.failure or (math.isfinite(row.drift) and math.isfinite(row.loss or math.nan))
        assert row.optimizer not in QUOTIENT or row.drift < 1e-9
