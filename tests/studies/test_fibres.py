"""The study of fibres: its record covers enough models, its page shows it, and some of its rows are redone here."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.fibres import Fibres
from studies.fibres.cases import names
from studies.fibres.study import row_of

ROOT = Path(__file__).parents[2]
TYPES = ("bert", "gpt2", "llama", "vit")
BY_HAND = ("attention by einsum", "gated network", "decoder with RMSNorm and a head")


@pytest.fixture(scope="module")
def record() -> Fibres:
    return Fibres.load(ROOT / "notebooks" / "records" / "fibres.json")


def test_the_record_covers_all_models_and_enough_of_them(record: Fibres) -> None:
    assert [row.name for row in record.rows] == names()
    counted = [row for row in record.rows if not row.failure]
    assert sum(row.kind != "by hand" for row in counted) >= 60
    assert sum(row.kind == "by hand" for row in counted) >= 12
    assert record.command == "make study NAME=fibres"


def test_the_page_names_every_model_that_misses_something(record: Fibres) -> None:
    text = (ROOT / "docs" / "fibres.md").read_text(encoding="utf-8").partition("The missing dimensions")[2]
    prose = " ".join(text.replace("’", "'").split())
    assert [row.name for row in record.rows if row.missing and row.name not in prose] == []


@pytest.mark.parametrize("name", [*TYPES, *BY_HAND])
def test_a_row_is_what_the_certificate_says_now(name: str, record: Fibres) -> None:
    pytest.importorskip("transformers")
    (stored,) = (row for row in record.rows if row.name == name)
    found = row_of(name)
    assert (found.failure, found.missing) == ("", 0)
    assert (found.dimension, found.near, found.found) == (stored.dimension, stored.near, stored.found)
