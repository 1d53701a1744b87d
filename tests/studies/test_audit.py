"""The study of optimizers: its record holds what it claims, and the page shows the record."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from studies.audit import AuditStudy, audit_page, drift_table, study_audit

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


def test_the_page_shows_the_record(record: AuditStudy) -> None:
    assert (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8") == audit_page(record)
    assert len(drift_table(record).rows) == len(record.rows)


def test_a_record_survives_json(record: AuditStudy, tmp_path: Path) -> None:
    record.save(tmp_path / "audit.json")
    assert AuditStudy.load(tmp_path / "audit.json") == record


def test_a_short_study_has_a_row_for_every_optimizer_of_the_record(record: AuditStudy) -> None:
    for name in ("peft", "pytorch_optimizer", "transformers"):
        pytest.importorskip(name)
    found = study_audit(fast=True)
    assert [(row.optimizer, row.note) for row in found.rows] == [(row.optimizer, row.note) for row in record.rows]
    assert found.pairs == record.pairs
    for row in found.rows:
        assert row.failure or (math.isfinite(row.drift) and math.isfinite(row.loss or math.nan))
        assert row.optimizer not in QUOTIENT or row.drift < 1e-9
