"""How well each model does: loss and error on its data and on test data, and what a file says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

Scores = dict[str, float | str | None]

NAME = "checkpoint"
GAPS = ("error_gap", "loss_gap")


def pooled(part: str, batches: Sequence[Mapping[str, float]]) -> Scores:
    """Loss and error over all examples of a part ("data" or "test"), from those of its batches."""
    examples = math.fsum(batch["examples"] for batch in batches)
    prefix = "test_" if part == "test" else ""
    return {
        f"{prefix}{what}": math.fsum(batch[what] * batch["examples"] for batch in batches) / examples
        for what in ("loss", "error")
    }


def with_gaps(scores: Scores) -> Scores:
    """error_gap and loss_gap: test minus data, where both are known."""
    gaps: Scores = {}
    for gap, what in zip(GAPS, ("error", "loss"), strict=True):
        here, there = scores.get(what), scores.get(f"test_{what}")
        if isinstance(here, float) and isinstance(there, float):
            gaps[gap] = there - here
    return scores | gaps


def measured_scores(*, test: bool) -> tuple[str, ...]:
    """The names of those that are measured."""
    return ("loss", "error", *(("test_loss", "test_error", *GAPS) if test else ()))


def check_named(name: str, known: Sequence[str], listed: Mapping[str, Scores], *, number: bool) -> None:
    """Raises ValueError for a name of no score, or of one that is text where a number is wanted."""
    if name not in known:
        raise ValueError(f"there is no score {name!r}; known are {', '.join(known)}")
    text = next((row[name] for row in listed.values() if isinstance(row.get(name), str)), None)
    if number and text is not None:
        raise ValueError(f"the score {name!r} must be a number to be compared with. Found {text!r}")


def read_scores(path: Path, checkpoints: Sequence[str], measured: Sequence[str]) -> dict[str, Scores]:
    """The rows of a CSV file by its column `checkpoint`; empty cells are None.

    Raises ValueError for a file that cannot be read as such, lacks a name or has it twice, names none of the
    checkpoints, has an infinite number, or a column that is called like one of `measured`.
    """
    frame = _table(path)
    for line, name in enumerate(frame[NAME], start=2):
        if not isinstance(name, str):
            raise ValueError(f"{path}, line {line}: the name of the checkpoint is missing")
    twice = frame[NAME][frame[NAME].duplicated()]
    if len(twice):
        raise ValueError(f"{path}, line {int(twice.index[0]) + 2}: {twice.iloc[0]} is named a second time")
    if not set(checkpoints) & set(frame[NAME]):
        raise ValueError(f"{path} names none of the checkpoints, which are called {checkpoints[0]}, and so on")
    if doubled := [name for name in frame.columns if name in measured]:
        raise ValueError(f"{path}: {doubled[0]} is measured here; give the column another name")
    records = frame.drop(columns=NAME).to_dict(orient="records")
    return {
        str(name): {str(key): _plain(value, f"{path}, line {line}: {key}") for key, value in record.items()}
        for line, (name, record) in enumerate(zip(frame[NAME], records, strict=True), start=2)
    }


def _table(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, dtype={NAME: str})
    except (OSError, ValueError) as error:
        raise ValueError(f"the scores {path} cannot be read as CSV: {' '.join(str(error).split())}") from error
    if NAME not in frame.columns:
        raise ValueError(f"{path} needs a column {NAME}. Found {', '.join(map(str, frame.columns))}")
    return frame


def _plain(value: object, where: str) -> float | str | None:
    if isinstance(value, (bool, int, float)):
        if math.isinf(value):
            raise ValueError(f"{where} must be finite. Found {value}")
        return None if math.isnan(value) else float(value)
    return None if value is None else str(value)
