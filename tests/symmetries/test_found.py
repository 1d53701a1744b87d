"""What is found in the 99 models of the record of fibres is what the record holds, and all of it is verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quotient_manifolds.symmetries import propose_symmetries, verify_symmetries
from studies.invariance import Subject

RECORD = Path(__file__).parents[2] / "notebooks" / "records" / "fibres.json"
ROWS = {row["name"]: sum(row["found"].values()) for row in json.loads(RECORD.read_text(encoding="utf-8"))["rows"]}


@pytest.mark.parametrize("name", ROWS)
def test_the_symmetries_of_the_record_are_found_and_verified(name: str) -> None:
    subject = Subject.of(name)
    frozen = {name for name, w in subject.model.named_parameters() if not w.requires_grad}
    found = propose_symmetries(subject.model, subject.batch)
    found = found.without([each.name for each in found.reparameterizations if frozen.intersection(each.names)])
    assert sum(found.families.values()) == ROWS[name]
    assert verify_symmetries(subject.model, subject.batch, found).failed == {}
