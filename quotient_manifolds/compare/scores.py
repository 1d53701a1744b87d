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


def read_scores(path: Path) -> dict[str, Scores]:
    """The rows of a CSV file by its column `checkpoint`; empty cells are None.

    Raises ValueError for a file that cannot be read as such, or names a checkpoint twice.
    """
    try:
        frame = pd.read_csv(path, dtype={NAME: str})
    except (OSError, ValueError) as error:
        raise ValueError(f"The scores {path} cannot be read as CSV: {' '.join(str(error).split())}") from error
    if NAME not in frame.columns:
        raise ValueError(f"{path} needs a column {NAME}. Found {', '.join(map(str, frame.columns))}")
    twice = frame[NAME][frame[NAME].duplicated()]
    if len(twice):
        raise ValueError(f"{path}, line {int(twice.index[0]) + 2}: {twice.iloc[0]} is named a second time")
    records = frame.drop(columns=NAME).to_dict(orient="records")
    return {
        str(name): {str(key): _plain(value) for key, value in record.items()}
        for name, record in zip(frame[NAME], records, strict=True)
    }


def _plain(value: object) -> float | str | None:
    if isinstance(value, (bool, int, float)):
        return None if math.isnan(value) else float(value)
    return None if value is None else str(value)
