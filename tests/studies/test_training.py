"""The study of training: how it chooses and compares, one small run, and what its record and page hold."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner

from studies.__main__ import recorded, study
from studies.common import load
from studies.training import figure
from studies.training import study as training
from studies.training.study import ADAMW, CANDIDATES, FAST, OURS, Plan
from studies.training.tables import chosen, curve, difference, frame, mean_of, width

ROOT = Path(__file__).parents[2]
INV = "QuotientAdam, inv"


def runs(losses: dict[float, list[float | None]], validation: dict[float, float] | None = None) -> pd.DataFrame:
    """Runs of AdamW by rate, a loss for each seed."""
    cell = {"optimizer": ADAMW, "rank": 2, "scale": 1.0, "steps": 10, "seeds": []}
    return frame(
        [
            {
                "cell": {**cell, "rate": rate},
                "outcomes": [{"validation": (validation or {}).get(rate, x), "test": x, "error": x} for x in each],
            }
            for rate, each in losses.items()
        ]
    )


def test_the_rate_is_chosen_by_other_sentences_than_those_it_is_tested_on() -> None:
    tried = runs({0.1: [0.3, 0.3], 1.0: [0.5, 0.6], 10.0: [None, 0.2]}, {0.1: 0.6, 1.0: 0.4})
    assert chosen(tried, ADAMW, 2).test.tolist() == [0.5, 0.6]
    assert chosen(tried, ADAMW, 2, seeds=1).test.tolist() == [0.5]


def test_the_width_is_where_straight_lines_cross_the_limit() -> None:
    """0.4 at the best rate and 0.8 a decade beside it: 2 % more, 0.008, are reached after 0.02 decades."""
    for last, good, expected in (
        (0.8, None, (pytest.approx(0.04), False)),
        (0.404, None, (pytest.approx(1.02), True)),
        (0.8, 0.3, (0.0, False)),
        (None, 0.5, (pytest.approx(0.25 + 0.1 / 9.6), False)),
    ):
        assert width(runs({0.1: [0.8], 1.0: [0.4], 10.0: [last]}), good) == expected


def test_means_are_paired_by_seed_with_students_interval() -> None:
    found = mean_of([1.0, 2.0, 3.0])
    assert (found.value, found.high - found.value) == (2.0, pytest.approx(4.302653 / math.sqrt(3)))  # t of 2, 97.5 %
    shifted = difference(runs({1.0: [0.3, 0.5, 0.9]}), runs({1.0: [0.2, 0.4, 0.8]}))
    assert shifted.low == pytest.approx(0.1)
    assert mean_of([-1.0, 1.0]).low < 0 < mean_of([-1.0, 1.0]).high
    assert (mean_of([math.inf, 1.0]).p, mean_of([math.inf, -math.inf]).p) == (0.0, 1.0)  # lost, and undefined
    assert str(mean_of(runs({1.0: [0.3, None]}).test)) == "not finite"


def require_all_of(record: dict[str, Any], plan: Plan) -> None:
    """The record has all that was planned."""
    assert record["plan"] == json.loads(json.dumps(asdict(plan)))
    cells = json.loads(json.dumps([each._asdict() for each in plan.cells()]))
    assert [each["cell"] for each in record["trained"]] == cells
    assert all(len(each["outcomes"]) == len(each["cell"]["seeds"]) for each in record["trained"])


def test_a_small_run_from_start_to_end(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peft", "pytorch_optimizer", "transformers"):
        pytest.importorskip(name)
    monkeypatch.setattr(training, "fetched", lambda: archive)
    command = ["training", "--fast", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(study, command)
    assert done.exit_code == 0, done.output
    record = load("training", tmp_path / "out")
    require_all_of(record, FAST)
    # A start elsewhere on the orbit is the same to ours, and another one to AdamW.
    trained = frame(record["trained"])
    for name, same in ((OURS, True), (ADAMW, False)):
        usual, moved = (curve(trained, name, 2, scale).test.iloc[0] for scale in (1.0, FAST.moved[0]))
        assert (abs(usual - moved) < 1e-4) == same


def test_pages_say_what_the_record_holds() -> None:
    record = load("training")
    require_all_of(record, Plan())
    trained, ranks = frame(record["trained"]), record["plan"]["ranks"]
    for name in (OURS, "LoRA-RITE"):  # starts on one orbit end alike where that is promised
        usual = chosen(trained, name, 16)
        for scale in record["plan"]["moved"]:
            moved = curve(trained, name, 16, scale)
            moved = moved[moved.rate == usual.rate.iloc[0]]
            assert (abs(moved.test.to_numpy() - usual.test.to_numpy()[: len(moved)]) < 0.005).all(), name
    told = [(row[0], row[2]) for row in recorded("training")["losses"].to_numpy() if row[5].endswith("*")]
    assert told == [(INV, "2"), (INV, "16"), ("preconditioned AdamW", "64"), (INV, "64")]
    drawn = figure(record)
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == list(CANDIDATES)
    pages = [" ".join((ROOT / "docs" / name).read_text("utf-8").split()) for name in ("usefulness.md", "training.md")]
    gap = difference(chosen(trained, OURS, 16), chosen(trained, ADAMW, 16))
    assert f"{gap} nats, inconclusive" in pages[0]
    assert gap.low < 0 < gap.high
    assert [chosen(trained, OURS, rank).rate.iloc[0] for rank in ranks] == [3.16e-3, 1e-3, 3.16e-4]
    assert "the best rate fell from 3e-3 at rank 2 to 3e-4 at rank 64" in pages[1]
    wide, usual = ([f"{width(curve(trained, name, rank))[0]:.1f}" for rank in ranks] for name in (OURS, ADAMW))
    said = f"over {min(wide)} to {max(wide)} decades of rates, with AdamW over {min(usual)} to {max(usual)}"
    assert said in pages[1]
