"""Runs of a study of fine-tuned zoos in its fast form, and what holds for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from quotient_manifolds.compare import Comparison, Store, read_spec
from studies.__main__ import study
from studies.zoos.study import load_record


def silent(what: str, finished: int, total: int) -> None:
    """Report progress to nobody."""


def run(name: str, folder: Path, said: str) -> Path:
    done = CliRunner().invoke(study, [name, "--fast", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    assert said in done.output
    return folder


def check_written(name: str, out: Path) -> None:
    """Four models and a spec that compare reads, a page and a report."""
    assert [each.name for each in read_spec(out / "zoo.yaml").checkpoints] == [f"{name}-{i:02}" for i in range(4)]
    assert "its numbers mean nothing" in (out / "study.html").read_text(encoding="utf-8")
    made = {each.name for each in out.iterdir()}
    assert made >= {"study.html", "report.html", "comparison.json", "models.csv", "units.csv", "store.sqlite"}


def check_second_run(name: str, out: Path, trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained, measured or written again."""

    def state() -> object:
        files = [*out.glob("models/*/*"), *out.glob("*.npz"), *out.glob("*.jsonl")]
        with Store(out / "store.sqlite") as store:
            results = store.results()
        return {file: file.stat().st_ctime_ns for file in files}, results, load_record(out / "record")

    before = state()
    monkeypatch.setattr(trainer, None)  # calling it would fail
    done = CliRunner().invoke(study, [name, "--fast", "--out", str(out), "--quiet"])
    assert (done.exit_code, done.output) == (0, "")
    assert state() == before


def check_mended(weights: Path, mend: Callable[[], object]) -> None:
    """A model with one changed bit is made again, though by its date it is as it was."""
    whole, before = weights.read_bytes(), weights.stat()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    mend()
    assert weights.read_bytes() == whole


def check_record(out: Path, units: int) -> Comparison:
    """The record is the comparison, and says of every measure how many units were measured in how long."""
    comparison, costs = load_record(out / "record")
    assert comparison == Comparison.load(out)
    assert [(each.measure, each.units) for each in costs] == [(each, units) for each in comparison.labels]
    assert all(each.seconds > 0 for each in costs)
    assert (out / "record" / "zoo.yaml").read_text() == (out / "zoo.yaml").read_text()
    return comparison
