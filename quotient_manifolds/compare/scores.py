"""Compute and read what measures are compared with: loss and error of each model, and what a file says of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

Scores = dict[str, float | str | None]

NAME = "checkpoint"
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-nan", "NULL", "null", "None")  # no score
GAPS = ("error_gap", "loss_gap")


def pooled(part: str, batches: Sequence[Mapping[str, float]]) -> Scores:
    """Return loss and error over all examples of a part ("data" or "test"), from those of its batches."""
    examples = math.fsum(batch["examples"] for batch in batches)
    prefix = "test_" if part == "test" else ""
    return {
        f"{prefix}{what}": math.fsum(batch[what] * batch["examples"] for batch in batches) / examples
        for what in ("loss", "error")
        if what in batches[0]
    }


def with_gaps(scores: Scores) -> Scores:
    """Add error_gap and loss_gap: test minus data, where both are known."""
    gaps: Scores = {}
    for gap, what in zip(GAPS, ("error", "loss"), strict=True):
        here, there = scores.get(what), scores.get(f"test_{what}")
        if isinstance(here, float) and isinstance(there, float):
            gaps[gap] = there - here
    return scores | gaps


def measured_scores(*, test: bool, error: bool = True) -> tuple[str, ...]:
    """Return the names of the scores that are measured; error: whether the loss is of labels, which have one."""
    names = ("loss", "error", *(("test_loss", "test_error", *GAPS) if test else ()))
    return tuple(name for name in names if error or "error" not in name)


def default_targets(scores: pd.DataFrame, given: Sequence[str]) -> list[str]:
    """Return what measures are compared with by default: the gaps, else every score that is a number and varies."""
    if gaps := [gap for gap in GAPS if gap in scores]:
        return gaps
    numbers = scores.select_dtypes("number")
    return [name for name in numbers if name not in given and numbers[name].nunique() > 1]


def check_named(key: str, name: str, known: Sequence[str], listed: Mapping[str, Scores], *, number: bool) -> None:
    """Raise ValueError for a name of no score, or of one that is text where a number is wanted."""
    if name not in known:
        raise ValueError(f"{key} must name scores: {', '.join(known)}. Found {name!r}")
    text = next((row[name] for row in listed.values() if isinstance(row.get(name), str)), None)
    if number and text is not None:
        raise ValueError(f"{key} must name scores that are numbers. Found {name!r}, which is {text!r} somewhere")


def unmatched(names: Sequence[str], scores: Mapping[str, Scores]) -> list[str]:
    """Return sentences on checkpoints without scores and, where there are such, on scores of no checkpoint."""
    lacking = [name for name in names if name not in scores]
    if not scores or not lacking:
        return []
    others = [name for name in scores if name not in names]
    said = [f"Without a row of scores, so in no correlation with them: {listing(lacking)}."]
    return [*said, f"Rows of scores that name no checkpoint: {listing(others)}."] if others else said


def listing(names: Sequence[str], most: int = 5) -> str:
    """Return the names in one line, the first of them where they are many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def read_scores(path: Path, checkpoints: Sequence[str], taken: Sequence[str]) -> dict[str, Scores]:
    """Read the rows of a CSV file by its column `checkpoint`; empty cells, NA, null and the like are None in others.

    Raises ValueError for a file that cannot be read so, lacks a name or has it twice, names none of the checkpoints,
    has an infinite number, or a column that is called like one of `taken`, which would take its place.
    """
    frame = _table(path)
    if NAME not in frame:
        raise ValueError(f"{path} must have a column {NAME}. Found {', '.join(frame.columns)}")
    names = frame.pop(NAME)
    if not names.all():
        raise ValueError(
            f"{path} must name a checkpoint in each row. Found an empty name in line {(names == '').argmax() + 2}"
        )
    if names.duplicated().any():
        raise ValueError(
            f"{path} must have one row for each checkpoint. Found {names[names.duplicated()].iloc[0]} twice"
        )
    if not set(checkpoints) & set(names):
        raise ValueError(
            f"{path} must name checkpoints, such as {checkpoints[0]}. Found {names.iloc[0] if len(names) else 'none'}"
        )
    if doubled := [name for name in frame if name in taken]:
        raise ValueError(f"{path} must not have a column of a name that is measured. Found {doubled[0]}; rename it")
    infinite = [name for name in frame.select_dtypes("number") if frame[name].abs().eq(math.inf).any()]
    if infinite:
        raise ValueError(f"{path} must hold finite numbers. Found an infinite one in {infinite[0]}")
    return {
        str(name): {str(key): _plain(row[key]) for key in frame}
        for name, (_, row) in zip(names, frame.iterrows(), strict=True)
    }


def _table(path: Path) -> pd.DataFrame:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with more cells than there are columns
            columns = pd.read_csv(path, nrows=0, dtype=str).columns
            missing: dict[Any, Any] = {name: list(MISSING) for name in columns if name != NAME}
            # A checkpoint may be called NA, null or 007.
            return pd.read_csv(path, dtype={NAME: str}, index_col=False, keep_default_na=False, na_values=missing)
    except (OSError, ValueError, OverflowError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} must be readable as CSV: {' '.join(str(error).split())}") from error


def _plain(value: Any) -> float | str | None:
    if isinstance(value, str):
        return value
    return None if value is None or math.isnan(value) else float(value)
