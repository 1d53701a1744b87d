"""Tell how well each model does: loss and error on its data and on test data, and what a file says of it."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    }


def with_gaps(scores: Scores) -> Scores:
    """Add error_gap and loss_gap: test minus data, where both are known."""
    gaps: Scores = {}
    for gap, what in zip(GAPS, ("error", "loss"), strict=True):
        here, there = scores.get(what), scores.get(f"test_{what}")
        if isinstance(here, float) and isinstance(there, float):
            gaps[gap] = there - here
    return scores | gaps


def measured_scores(*, test: bool) -> tuple[str, ...]:
    """Return the names of the scores that are measured."""
    return ("loss", "error", *(("test_loss", "test_error", *GAPS) if test else ()))


def check_named(name: str, known: Sequence[str], listed: Mapping[str, Scores], *, number: bool) -> None:
    """Raise ValueError for a name of no score, or of one that is text where a number is wanted."""
    if name not in known:
        raise ValueError(f"there is no score {name!r}; known are {', '.join(known)}")
    text = next((row[name] for row in listed.values() if isinstance(row.get(name), str)), None)
    if number and text is not None:
        raise ValueError(f"the score {name!r} must be a number to be compared with. Found {text!r}")


def unmatched(names: Sequence[str], scores: Mapping[str, Scores]) -> list[str]:
    """Return sentences on checkpoints without scores and, where there are such, on scores of no checkpoint."""
    lacking = [name for name in names if name not in scores]
    if not scores or not lacking:
        return []
    others = [name for name in scores if name not in names]
    said = [f"Without a row of scores, so in no correlation with them: {_some(lacking)}."]
    return [*said, f"Rows of scores that name no checkpoint: {_some(others)}."] if others else said


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_scores(
    path: Path, checkpoints: Sequence[str], measured: Sequence[str], measures: Sequence[str] = ()
) -> dict[str, Scores]:
    """Read the rows of a CSV file by its column `checkpoint`; empty cells, NA, null and the like are None in others.

    Raises ValueError for a file that cannot be read so, lacks a name or has it twice, names none of the checkpoints,
    has a number that is infinite or too large, or a column that is called like one of `measured`, or like one of
    `measures`, which would take its place.
    """
    frame = _table(path)
    for line, name in enumerate(frame[NAME], start=2):
        if not name:
            raise ValueError(f"{path}, line {line}: the name of the checkpoint is missing")
    twice = frame[NAME][frame[NAME].duplicated()]
    if len(twice):
        raise ValueError(f"{path}, line {int(twice.index[0]) + 2}: {twice.iloc[0]} is named a second time")
    if not set(checkpoints) & set(frame[NAME]):
        raise ValueError(f"{path} names none of the checkpoints, which are called {checkpoints[0]}, and so on")
    if doubled := [name for name in frame.columns if name in (*measured, *measures)]:
        raise ValueError(f"{path}: {doubled[0]} is measured here; give the column another name")
    records = frame.drop(columns=NAME).to_dict(orient="records")
    return {
        str(name): {str(key): _plain(value, f"{path}, line {line}: {key}") for key, value in record.items()}
        for line, (name, record) in enumerate(zip(frame[NAME], records, strict=True), start=2)
    }


def _table(path: Path) -> pd.DataFrame:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with more cells than there are columns
            names = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0].tolist()
            if len(set(names)) < len(names):
                raise ValueError(f"the column {next(name for name in names if names.count(name) > 1)!r} is there twice")
            # A checkpoint may be called NA, null or 007.
            missing = {place: list(MISSING) for place, name in enumerate(names) if name != NAME}
            kinds = {place: str for place, name in enumerate(names) if name == NAME}
            frame = pd.read_csv(
                path,
                header=None,
                skiprows=1,
                names=range(len(names)),
                dtype=kinds,
                index_col=False,
                keep_default_na=False,
                na_values=missing,
            )
    except pd.errors.ParserWarning as error:
        raise ValueError(f"the scores {path} have a row with more cells than there are columns") from error
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"the scores {path} cannot be read as CSV: {' '.join(str(error).split())}") from error
    if NAME not in names:
        raise ValueError(f"{path} needs a column {NAME}. Found {', '.join(names)}")
    frame.columns = pd.Index(names)
    return frame


def _plain(value: object, where: str) -> float | str | None:
    if isinstance(value, (bool, int, float)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isinf(number):
            raise ValueError(f"{where} must be finite. Found {str(value)[:40]}")
        return None if math.isnan(number) else number
    if value is None:
        return None
    if re.fullmatch(r"[-+]?[0-9]{19,}", str(value)):
        raise ValueError(f"{where} must be a number with fewer digits. Found {str(value)[:40]}")
    return str(value)
