"""Labelled text from JSONL and CSV files, with errors that name the line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS = ("text", "text_pair", "label")


@dataclass(frozen=True)
class LabelledText:
    """One example of sequence classification: a text or a pair of texts, and the index of its class."""

    text: str
    text_pair: str | None
    label: int


def read_text_labels(file: str | Path, *, num_labels: int | None = None) -> list[LabelledText]:
    """The examples of a .jsonl or .csv file with the columns text, label and, for pairs, text_pair.

    Raises ValueError naming the file and the line: no examples, a missing column, a text that is no string, a label
    that is no integer or not in 0 ... num_labels - 1.
    """
    path = Path(file)
    readers = {".jsonl": _jsonl_records, ".csv": _csv_records}
    if path.suffix.lower() not in readers:
        raise ValueError(f"Expected data in a .jsonl or .csv file, found {path}.")
    if not path.is_file():
        raise ValueError(f"There is no data file {path}.")
    try:
        records = list(readers[path.suffix.lower()](path))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}.") from error
    if not records:
        raise ValueError(f"{path} is empty: expected lines with a text and a label.")
    return [_labelled_text(record, f"{path}, line {line}", num_labels) for line, record in records]


def _jsonl_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as stream:
        for line, content in enumerate(stream, start=1):
            if not content.strip():
                continue
            try:
                record = json.loads(content)
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: not valid JSON ({error}).") from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}, line {line}: expected an object with text and label, found {type(record).__name__}."
                )
            yield line, record


def _csv_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream)
        for record in reader:
            if None in record:  # where DictReader puts what is left over
                raise ValueError(f"{path}, line {reader.line_num}: more fields than columns; quote a text with commas.")
            label = record.get("label") or ""  # text, as everything in a CSV file, until it reads as an integer
            is_integer = re.fullmatch(r"\s*-?\d+\s*", label)
            yield reader.line_num, {**record, "label": int(label)} if is_integer else record


def _labelled_text(record: Mapping[str, Any], where: str, num_labels: int | None) -> LabelledText:
    for column in ("text", "label"):
        if record.get(column) is None:
            raise ValueError(f"{where}: no {column!r}; expected the columns text and label (text_pair too for pairs).")
    text, pair, label = (record.get(column) for column in COLUMNS)
    if not isinstance(text, str) or not isinstance(pair, str | None):
        raise ValueError(f"{where}: text and text_pair must be strings, found {text!r} and {pair!r}.")
    if not isinstance(label, int) or isinstance(label, bool):
        raise ValueError(f"{where}: the label must be an integer, found {label!r}.")
    if label < 0 or (num_labels is not None and label >= num_labels):
        allowed = "0 or more" if num_labels is None else f"in 0 ... {num_labels - 1}, the classes of the model"
        raise ValueError(f"{where}: the label must be {allowed}, found {label}.")
    return LabelledText(text, pair, label)
